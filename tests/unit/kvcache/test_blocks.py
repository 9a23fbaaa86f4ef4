"""Block ownership: examples, then random use against a naive model."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weir.kvcache.blocks import BlockManager, BlockState, KvChanges, OutOfBlocks
from weir.kvcache.prefix import HASH_BYTES, PrefixIndex


def name(number: int) -> bytes:
    return number.to_bytes(HASH_BYTES, "big")


class FakeGuard:
    """Generations in a list."""

    def __init__(self, num_blocks: int) -> None:
        self.generations = [0] * num_blocks

    def generation(self, block: int) -> int:
        return self.generations[block]

    def invalidate(self, block: int) -> None:
        self.generations[block] += 1


def make(num_blocks: int = 4, max_changes: int = 100) -> tuple[BlockManager, FakeGuard]:
    guard = FakeGuard(num_blocks)
    return BlockManager(num_blocks, 16, guard, PrefixIndex(), max_changes), guard


def counts(manager: BlockManager) -> tuple[int, int, int, int, int]:
    """free, used, cached, leased, quarantined."""
    found = manager.counts()
    return tuple(found[state] for state in BlockState)  # type: ignore[return-value]


def test_a_fresh_pool_hands_out_adjacent_blocks() -> None:
    manager, _ = make(8)
    assert manager.allocate(3) == [0, 1, 2]
    assert manager.allocate(0) == []
    manager.check_integrity()


def test_allocation_is_all_or_nothing() -> None:
    manager, guard = make()
    manager.allocate(2)
    with pytest.raises(OutOfBlocks) as out:
        manager.allocate(3)
    assert (out.value.wanted, out.value.available, out.value.total) == (3, 2, 4)
    assert counts(manager) == (2, 2, 0, 0, 0)
    assert guard.generations == [1, 1, 0, 0]


def test_generations_rise_when_freed_and_when_handed_out() -> None:
    manager, guard = make(1)
    manager.allocate(1)
    assert guard.generations == [1]
    manager.release([0])
    assert guard.generations == [2]
    manager.allocate(1)
    assert guard.generations == [3]


def test_a_cached_block_keeps_its_generation_until_it_is_evicted() -> None:
    manager, guard = make(2)
    blocks = manager.allocate(2)
    assert manager.register(blocks[0], name(1))
    manager.release(blocks)
    assert counts(manager) == (1, 0, 1, 0, 0)
    assert manager.match([name(1), name(2)]) == [0]
    manager.release([0])
    assert guard.generations[0] == 1
    assert manager.allocate(2) == [1, 0]
    assert guard.generations[0] == 2
    assert manager.match([name(1)]) == []


def test_the_least_recently_used_block_goes_first_and_a_tail_before_its_head() -> None:
    manager, _ = make(4)
    first = manager.allocate(2)
    second = manager.allocate(2)
    for number, block in enumerate(first + second):
        manager.register(block, name(number))
    manager.release(first)
    manager.release(second)
    manager.release(manager.match([name(0), name(1)]))
    assert manager.allocate(4) == [3, 2, 1, 0]


def test_a_prefix_ends_at_the_first_unknown_hash() -> None:
    manager, _ = make(4)
    blocks = manager.allocate(3)
    for number in (0, 2):
        manager.register(blocks[number], name(number))
    hashes = [name(0), name(1), name(2)]
    assert manager.matched_length(hashes) == 1
    assert manager.match(hashes) == [0]


def test_the_first_to_register_a_hash_keeps_it() -> None:
    manager, _ = make(2)
    first, second = manager.allocate(2)
    assert manager.register(first, name(1))
    assert manager.register(first, name(1))
    assert not manager.register(second, name(1))
    manager.release([first, second])
    assert counts(manager) == (1, 0, 1, 0, 0)


def test_forget_frees_a_cached_block_and_spares_a_used_one() -> None:
    manager, guard = make(2)
    first, second = manager.allocate(2)
    manager.register(first, name(1))
    manager.register(second, name(2))
    manager.release([first])
    manager.forget(first)
    manager.forget(second)
    manager.forget(second)
    assert counts(manager) == (1, 1, 0, 0, 0)
    assert guard.generations == [2, 1]
    manager.check_integrity()


def test_a_lease_outlives_the_sequence() -> None:
    manager, guard = make(1)
    manager.allocate(1)
    manager.lease([0])
    assert counts(manager) == (0, 1, 0, 0, 0)
    manager.release([0])
    assert counts(manager) == (0, 0, 0, 1, 0)
    assert guard.generations == [1]
    with pytest.raises(OutOfBlocks):
        manager.allocate(1)
    manager.lease([0])
    manager.unlease([0])
    manager.unlease([0])
    assert counts(manager) == (1, 0, 0, 0, 0)
    assert guard.generations == [2]


def test_an_aborted_sequence_does_not_free_what_a_read_can_still_land_on() -> None:
    manager, _ = make(1)
    manager.allocate(1)
    manager.quarantine([0])
    assert counts(manager) == (0, 0, 0, 0, 1)
    manager.release([0])
    assert counts(manager) == (0, 0, 0, 0, 1)
    with pytest.raises(OutOfBlocks):
        manager.allocate(1)
    manager.unquarantine([0])
    assert counts(manager) == (1, 0, 0, 0, 0)


def test_misuse_is_an_assertion() -> None:
    manager, _ = make(2)
    for misuse in (manager.release, manager.unlease, manager.unquarantine, manager.lease, manager.quarantine):
        with pytest.raises(AssertionError, match="block 0"):
            misuse([0])
    manager.allocate(1)
    manager.quarantine([0])
    with pytest.raises(AssertionError, match="still being read into"):
        manager.register(0, name(1))
    with pytest.raises(AssertionError, match="still being read into"):
        manager.lease([0])


def test_without_an_index_nothing_is_cached() -> None:
    manager = BlockManager(2, 16, FakeGuard(2))
    blocks = manager.allocate(1)
    assert not manager.register(blocks[0], name(1))
    assert manager.match([name(1)]) == []
    manager.release(blocks)
    assert manager.counts()[BlockState.FREE] == 2


def test_changes_are_netted_and_bounded() -> None:
    manager, _ = make(4, max_changes=2)
    blocks = manager.allocate(3)
    manager.register(blocks[0], name(0))
    manager.register(blocks[1], name(1))
    manager.forget(blocks[0])
    assert manager.drain_changes() == KvChanges((name(1),), (name(0),), False)
    assert manager.drain_changes() == KvChanges((), (), False)
    for block in (0, 2):
        manager.register(blocks[block], name(block))
    manager.forget(blocks[1])
    assert manager.drain_changes() == KvChanges((), (), True)
    manager.forget(blocks[2])
    assert manager.drain_changes() == KvChanges((), (name(2),), False)


def test_check_integrity_names_the_block() -> None:
    manager, _ = make(3)
    manager.allocate(2)
    manager._refs[1] = 0
    with pytest.raises(AssertionError, match="block 1"):
        manager.check_integrity()


class BlockMachine(RuleBasedStateMachine):
    """Random use. The model: three counters per block, a hash per block, and what was promised to whom."""

    NUM_BLOCKS = 6

    def __init__(self) -> None:
        super().__init__()
        self.manager, self.guard = make(self.NUM_BLOCKS)
        self.sequences: list[list[int]] = []
        self.leases: list[list[tuple[int, int]]] = []
        self.reads: list[list[int]] = []
        self.hashes: dict[int, bytes] = {}
        self.next_hash = 0

    def refs(self) -> Counter[int]:
        return Counter(block for blocks in self.sequences for block in blocks)

    def leased(self) -> Counter[int]:
        return Counter(block for lease in self.leases for block, _ in lease)

    def read_into(self) -> Counter[int]:
        return Counter(block for blocks in self.reads for block in blocks)

    def expected(self, block: int) -> BlockState:
        if self.read_into()[block]:
            return BlockState.QUARANTINED
        if self.refs()[block]:
            return BlockState.USED
        if self.leased()[block]:
            return BlockState.LEASED
        return BlockState.CACHED if block in self.hashes else BlockState.FREE

    @rule(n=st.integers(1, 4))
    def allocate(self, n: int) -> None:
        available = [b for b in range(self.NUM_BLOCKS) if self.expected(b) in {BlockState.FREE, BlockState.CACHED}]
        before = list(self.guard.generations)
        if n > len(available):
            with pytest.raises(OutOfBlocks):
                self.manager.allocate(n)
            assert self.guard.generations == before
            return
        blocks = self.manager.allocate(n)
        assert len(set(blocks)) == n
        assert set(blocks) <= set(available)
        free = [b for b in available if b not in self.hashes]
        assert sum(b in self.hashes for b in blocks) == max(0, n - len(free)), "evicted while others were free"
        for block in blocks:
            assert self.guard.generations[block] > before[block]
            self.hashes.pop(block, None)
        self.sequences.append(blocks)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        self.manager.release(self.sequences.pop(index))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        blocks = list(data.draw(st.sampled_from(self.sequences)))
        self.manager.acquire(blocks)
        self.sequences.append(blocks)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.sequences))))
        if self.read_into()[block] or block in self.hashes:
            return
        duplicate = bool(self.hashes) and data.draw(st.booleans())
        block_hash = data.draw(st.sampled_from(sorted(self.hashes.values()))) if duplicate else self.mint()
        assert self.manager.register(block, block_hash) is not duplicate
        if not duplicate:
            self.hashes[block] = block_hash

    def mint(self) -> bytes:
        self.next_hash += 1
        return name(self.next_hash)

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def forget(self, block: int) -> None:
        self.manager.forget(block)
        self.hashes.pop(block, None)

    @precondition(lambda self: self.hashes)
    @rule(data=st.data())
    def match(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.hashes)), unique=True, min_size=1))
        found = self.manager.match([*(self.hashes[b] for b in blocks), name(10**6)])
        assert found == blocks
        self.sequences.append(found)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.sequences))
        if not any(self.read_into()[b] for b in blocks):
            self.manager.lease(blocks)
            self.leases.append([(b, self.guard.generations[b]) for b in blocks])

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def unlease(self, data: st.DataObject) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.manager.unlease([b for b, _ in lease])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def begin_read(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.sequences))
        if not any(self.leased()[b] or b in self.hashes for b in blocks):
            self.manager.quarantine(blocks)
            self.reads.append(list(blocks))

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def end_read(self, data: st.DataObject) -> None:
        self.manager.unquarantine(self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1))))

    @invariant()
    def states_agree_and_add_up(self) -> None:
        expected = [self.expected(b) for b in range(self.NUM_BLOCKS)]
        assert [self.manager.state(b) for b in range(self.NUM_BLOCKS)] == expected
        assert self.manager.counts() == {state: expected.count(state) for state in BlockState}
        self.manager.check_integrity()

    @invariant()
    def a_promise_holds_while_it_is_leased(self) -> None:
        for lease in self.leases:
            for block, generation in lease:
                assert self.guard.generations[block] == generation


BlockMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlockMachine = BlockMachine.TestCase
