"""The in-memory twin: same promises as between processes, and faults on demand."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
import torch

from tests.unit.transfer.tickets import FINGERPRINT, LAYOUT, READER, SOURCE, make_ticket
from weir.clock import ManualClock
from weir.errors import KvReadVoid, TransferUnavailable
from weir.ids import RequestKey, WorkerKey
from weir.kvcache.blocks import BlockManager
from weir.kvcache.pool import KvPool
from weir.transfer.local import Faults, LocalFabric, LocalTransfer
from weir.transfer.plan import Completion
from weir.transfer.ticket import Ticket


class Pair:
    """An owner with six filled, sealed blocks, and a reader connected to it."""

    def __init__(self) -> None:
        self.fabric = LocalFabric()
        self.clock = ManualClock()
        self.owner = self.worker(SOURCE)
        self.reader = self.worker(READER)
        self.manager = BlockManager(8, LAYOUT.block_size, self.owner.pool.guard)
        self.blocks = self.manager.allocate(6)
        for block in self.blocks:
            self.owner.pool.data[block] = float(block + 1)
        self.owner.pool.seal(self.blocks)

    def worker(self, key: WorkerKey) -> LocalTransfer:
        pool = KvPool(LAYOUT, 8, torch.float32)
        return LocalTransfer(self.fabric, pool, key, FINGERPRINT, clock=self.clock, max_descriptor_bytes=1 << 20)

    def ticket(self, blocks: list[int]) -> Ticket:
        return make_ticket([(block, self.manager.generation(block)) for block in blocks])

    def read(
        self, ticket: Ticket, own: list[int], timeout_s: float = 5.0, notify: bool = False
    ) -> "asyncio.Task[object]":
        pairs = list(zip(ticket.blocks, own, strict=True))
        return asyncio.ensure_future(self.reader.read(ticket, pairs, timeout_s=timeout_s, notify=notify))

    def own(self, block: int) -> float:
        """The value that fills the reader's block, which must be one value."""
        values = set(self.reader.pool.data[block].flatten().tolist())
        assert len(values) == 1, values
        return float(values.pop())


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    await made.reader.connect(made.owner.descriptor())
    yield made
    assert made.reader.outstanding() == 0
    await made.reader.close()
    await made.owner.close()


async def void_of(read: "asyncio.Task[object]") -> str:
    with pytest.raises(KvReadVoid) as void:
        await read
    return void.value.reason


async def test_blocks_arrive_and_the_owner_is_told(pair: Pair) -> None:
    ticket = pair.ticket([3, 4, 0])
    report = await pair.reader.read(ticket, list(zip(ticket.blocks, [5, 6, 1], strict=True)), timeout_s=1, notify=True)
    assert [pair.own(block) for block in (5, 6, 1, 0)] == [4.0, 5.0, 1.0, 0.0]
    assert (report.blocks, report.bytes, report.descriptors) == (3, 3 * LAYOUT.block_bytes, 2)
    assert report.transport == "local"
    assert await anext(pair.owner.notifications()) == Completion(5, RequestKey("r-1", 1))


async def test_a_cached_block_serves_many_tickets(pair: Pair) -> None:
    for own in range(3):
        await pair.read(pair.ticket([2]), [own])
        assert pair.own(own) == 3.0


async def test_a_reused_block_voids_the_read(pair: Pair) -> None:
    ticket = pair.ticket([1, 2])
    pair.manager.release(pair.blocks)
    assert await void_of(pair.read(ticket, [1, 2])) == "generation"


def tear(pair: Pair) -> None:
    pair.manager.release([2])
    pair.manager.allocate(1)


def flip(pair: Pair) -> None:
    pair.reader.pool.block_view(1)[7] ^= 16


@pytest.mark.parametrize(("fault", "reason"), [(tear, "generation"), (flip, "checksum")])
async def test_a_fault_after_the_data_landed_is_found(pair: Pair, fault: Callable[[Pair], None], reason: str) -> None:
    pair.fabric.faults.on_data = lambda _: fault(pair)
    assert await void_of(pair.read(pair.ticket([1, 2]), [0, 1], notify=True)) == reason
    pair.fabric.faults = Faults()
    await pair.read(pair.ticket([1]), [0], notify=True)
    assert pair.owner._completions.qsize() == 1, "only a proven read notifies"


async def test_an_unsealed_block_is_void(pair: Pair) -> None:
    pair.owner.pool.guard.array[1, 1] = 0
    assert await void_of(pair.read(pair.ticket([1]), [0])) == "checksum"


async def test_a_dead_owner_and_a_lapsed_lease(pair: Pair) -> None:
    ticket = pair.ticket([1])
    pair.clock.advance(11)
    assert await void_of(pair.read(ticket, [0])) == "lease_expired"
    pair.clock = ManualClock()
    pair.reader._clock = pair.clock
    pair.fabric.kill(SOURCE)
    assert await void_of(pair.read(ticket, [0])) == "transport"


async def test_a_slow_read_ends_by_its_time(pair: Pair) -> None:
    pair.fabric.faults.before_data_s = lambda _: 60.0
    assert await void_of(pair.read(pair.ticket([1]), [0], timeout_s=0.01)) == "timeout"
    assert pair.own(0) == 0.0


async def test_cancelling_the_caller_waits_until_no_byte_can_land(pair: Pair) -> None:
    pair.fabric.faults.before_data_s = lambda _: 0.02
    read = pair.read(pair.ticket([1]), [0])
    await asyncio.sleep(0)
    read.cancel()
    await asyncio.sleep(0)
    read.cancel()
    await asyncio.sleep(0)
    assert not read.done()
    assert pair.reader.outstanding() == 1
    with pytest.raises(asyncio.CancelledError):
        await read
    assert pair.own(0) == 2.0, "the read went on to its end"


async def test_a_replaced_or_disconnected_owner_ends_its_reads(pair: Pair) -> None:
    pair.fabric.faults.before_data_s = lambda _: 60.0
    first = pair.read(pair.ticket([1]), [0])
    await asyncio.sleep(0)
    reborn = pair.worker(WorkerKey(SOURCE.worker_id, 99))
    await pair.reader.connect(reborn.descriptor())
    assert await void_of(first) == "transport"
    assert await void_of(pair.read(pair.ticket([1]), [0])) == "wrong_incarnation"
    with pytest.raises(TransferUnavailable, match="replaced"):
        await pair.reader.connect(pair.owner.descriptor())
    await pair.reader.disconnect(reborn.worker)
    assert await void_of(pair.read(pair.ticket([1]), [0])) == "transport"
    await reborn.close()


async def test_a_closed_transfer_refuses(pair: Pair) -> None:
    pair.fabric.faults.before_data_s = lambda _: 60.0
    read = pair.read(pair.ticket([1]), [0])
    await asyncio.sleep(0)
    await pair.reader.close()
    assert await void_of(read) == "transport"
    with pytest.raises(TransferUnavailable):
        await pair.read(pair.ticket([1]), [0])
    assert [done async for done in pair.reader.notifications()] == []


@pytest.mark.parametrize("seed", range(5))
async def test_churn_never_yields_foreign_contents(pair: Pair, seed: int) -> None:
    """The owner reuses its blocks at random while they are read: every read is exact or void."""
    rng = random.Random(seed)
    pool, manager = pair.owner.pool, pair.manager
    manager.release(pair.blocks)
    faults = pair.fabric.faults
    faults.per_run_s = faults.before_guard_s = lambda _: rng.choice([0.0, 1e-4, 1e-3])
    outcomes = Counter[str]()
    for value in range(60):
        blocks = manager.allocate(4)
        for block in blocks:
            pool.data[block] = float(value)
        pool.seal(blocks)
        read = pair.read(pair.ticket(blocks), [0, 2, 4, 6])
        await asyncio.sleep(rng.choice([0.0, 1e-4, 1e-3, 5e-3]))
        manager.release(blocks)
        for block in (other := manager.allocate(8)):
            pool.data[block] = -1.0
        pool.seal(other)
        manager.release(other)
        try:
            await read
        except KvReadVoid as void:
            outcomes[void.reason] += 1
        else:
            assert [pair.own(block) for block in (0, 2, 4, 6)] == [float(value)] * 4
            outcomes["exact"] += 1
    assert outcomes["exact"] > 0, (seed, outcomes)
    assert outcomes["generation"] > 0, (seed, outcomes)
    assert set(outcomes) <= {"exact", "generation", "checksum"}, (seed, outcomes)
