"""Who owns a block of KV memory, drawn once.

                allocate                    release (last reference)
        FREE ─────────────► USED ──────────────────────────────────────► FREE    not registered
         ▲                  ▲  │ ──────────────────────────────────────► CACHED  registered
         │ evict (LRU),     │  │                                           │
         │ forget           │  └──► LEASED: promised to a reader, no reference left; ends like a release
         └──────────────────┼──────────────────────────────────────────────┘
                            └─ match / acquire
        QUARANTINED: a read may still land here; never handed out, whatever else happens to it.

A block has three independent counts: references (sequences here), leases (tickets given out) and
quarantines (reads under way into it). Its state is the first that holds of: quarantined, used, leased,
cached, free. A block returns to the free list or the cache when all three counts are zero.

The guard's generation rises whenever the contents stop being promised: when a block becomes free (also by
eviction) and again when it is handed out, always before anything may write to it.
"""

import enum
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from weir.errors import ResourceExhausted
from weir.kvcache.prefix import PrefixIndex

MAX_PENDING_CHANGES = 1 << 16


class Guard(Protocol):
    """The table a remote reader proves its read against."""

    def generation(self, block: int) -> int:
        """The generation that ``block``'s contents are promised under now."""
        ...

    def invalidate(self, block: int) -> None:
        """Void every promise about ``block``: generation += 1, then checksum = 0."""
        ...


class BlockState(enum.Enum):
    """States exclude each other; their counts add up to the pool."""

    FREE = "free"
    USED = "used"
    CACHED = "cached"
    LEASED = "leased"
    QUARANTINED = "quarantined"


class OutOfBlocks(ResourceExhausted):
    """``wanted`` blocks were asked for; ``available`` of ``total`` are free or evictable; none was taken."""

    def __init__(self, wanted: int, available: int, total: int) -> None:
        super().__init__(f"{wanted} KV blocks wanted, {available} of {total} available")
        self.wanted = wanted
        self.available = available
        self.total = total


@dataclass(frozen=True, slots=True)
class KvChanges:
    """What the prefix cache gained and lost since the last drain, netted (a hash is in one list at most).

    ``overflowed``: too many changes were pending and were dropped; take a snapshot of the index instead.
    """

    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]
    overflowed: bool


class BlockManager:
    """Hands out the blocks of one pool. Every operation is O(1) per block; single-threaded.

    Owns the counts, the free list, the LRU of cached blocks and ``prefix``; never touches block contents.
    Without ``prefix`` nothing is cached: ``match`` finds nothing and ``register`` returns False.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        guard: Guard,
        prefix: PrefixIndex | None = None,
        max_pending_changes: int = MAX_PENDING_CHANGES,
    ) -> None:
        assert num_blocks >= 1, num_blocks
        assert block_size >= 1, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._guard = guard
        self._prefix = prefix
        self._refs = [0] * num_blocks
        self._leases = [0] * num_blocks
        self._quarantines = [0] * num_blocks
        # Lowest ids on top, so that a fresh pool hands out adjacent blocks (one transfer descriptor).
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._state = [BlockState.FREE] * num_blocks
        self._counts = dict.fromkeys(BlockState, 0)
        self._counts[BlockState.FREE] = num_blocks
        self._changes: dict[bytes, bool] = {}
        self._max_changes = max_pending_changes
        self._overflowed = False

    # -- handing out ------------------------------------------------------------------------------------

    def num_available(self) -> int:
        """Blocks that ``allocate`` could give now: free and cached."""
        return len(self._free) + len(self._cached)

    def allocate(self, n: int) -> list[int]:
        """``n`` blocks with one reference each; free ones first, then the least recently used cached ones.

        All or nothing: raises OutOfBlocks and changes nothing. Guards are invalidated before it returns.
        """
        assert n >= 0, n
        if n > self.num_available():
            raise OutOfBlocks(n, self.num_available(), self.num_blocks)
        blocks = [self._take_one() for _ in range(n)]
        for block in blocks:
            self._guard.invalidate(block)
            self._refs[block] = 1
            self._enter(block, BlockState.USED)
        return blocks

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known prefix of ``hashes``, in order, with one reference more each."""
        blocks = self._lookup(hashes)
        self.acquire(blocks)
        return blocks

    def matched_length(self, hashes: Sequence[bytes]) -> int:
        """How many blocks ``match`` would find; takes nothing and leaves the LRU order as it is."""
        return len(self._lookup(hashes))

    # -- references, leases, quarantines ----------------------------------------------------------------

    def acquire(self, blocks: Iterable[int]) -> None:
        """One reference more on each; the blocks must not be free."""
        for block in blocks:
            assert self._state[block] is not BlockState.FREE, f"block {block} is free"
            self._refs[block] += 1
            self._settle(block)

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less on each. Pass a sequence's blocks in order: its tail is evicted first."""
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} has no reference to release"
            self._refs[block] -= 1
            self._settle(block)

    def lease(self, blocks: Iterable[int]) -> None:
        """One lease more on each: contents stay as they are until ``unlease``. Free blocks are refused."""
        for block in blocks:
            assert self._state[block] is not BlockState.FREE, f"block {block} is free"
            assert not self._quarantines[block], f"block {block} is still being read into"
            self._leases[block] += 1
            self._settle(block)

    def unlease(self, blocks: Sequence[int]) -> None:
        """One lease less on each, in the order in which the blocks were leased."""
        for block in reversed(blocks):
            assert self._leases[block] > 0, f"block {block} has no lease to end"
            self._leases[block] -= 1
            self._settle(block)

    def quarantine(self, blocks: Iterable[int]) -> None:
        """A read into each begins. The blocks must be referenced, unleased and not in the prefix cache."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} is read into without a reference"
            assert not self._leases[block], f"block {block} is leased to a reader"
            assert not self._is_registered(block), f"block {block} is in the prefix cache"
            self._quarantines[block] += 1
            self._settle(block)

    def unquarantine(self, blocks: Sequence[int]) -> None:
        """A read into each has ended: no byte can land any more."""
        for block in reversed(blocks):
            assert self._quarantines[block] > 0, f"block {block} is not quarantined"
            self._quarantines[block] -= 1
            self._settle(block)

    # -- prefix cache -----------------------------------------------------------------------------------

    def register(self, block: int, block_hash: bytes) -> bool:
        """``block`` is full and final: let ``match`` find it. False if another block holds this hash."""
        assert self._state[block] is not BlockState.FREE, f"block {block} is free"
        assert not self._quarantines[block], f"block {block} is still being read into"
        if self._prefix is None:
            return False
        known = self._is_registered(block)
        if not self._prefix.put(block_hash, block):
            return False
        if not known:
            self._note_change(block_hash, stored=True)
        return True

    def forget(self, block: int) -> None:
        """Drop ``block`` from the prefix cache; a cached block becomes free. Harmless if not registered."""
        if self._drop_hash(block) and self._state[block] is BlockState.CACHED:
            del self._cached[block]
            self._to_free(block)

    def known_hashes(self, limit: int) -> list[bytes]:
        """Up to ``limit`` hashes in the prefix cache now, for whoever missed changes."""
        return [] if self._prefix is None else list(islice(self._prefix, limit))

    def drain_changes(self) -> KvChanges:
        """Changes of the prefix cache since the last call, for the event ``weir.v1.kv.<worker>``."""
        stored = tuple(name for name, present in self._changes.items() if present)
        removed = tuple(name for name, present in self._changes.items() if not present)
        changes = KvChanges(stored, removed, self._overflowed)
        self._changes.clear()
        self._overflowed = False
        return changes

    # -- looking ----------------------------------------------------------------------------------------

    def state(self, block: int) -> BlockState:
        """The state of ``block``."""
        return self._state[block]

    def counts(self) -> dict[BlockState, int]:
        """Blocks in each state; the sum is ``num_blocks``."""
        return dict(self._counts)

    def generation(self, block: int) -> int:
        """The generation to promise ``block``'s contents under."""
        return self._guard.generation(block)

    def check_integrity(self) -> None:
        """Recompute everything from the counts; AssertionError names the first block that is wrong."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is twice in the free list"
        tally = dict.fromkeys(BlockState, 0)
        for block in range(self.num_blocks):
            expected = self._derive(block)
            found = self._state[block]
            detail = (
                f"block {block}: state {found.value}, expected {expected.value} "
                f"(refs {self._refs[block]}, leases {self._leases[block]}, "
                f"quarantines {self._quarantines[block]}, registered {self._is_registered(block)})"
            )
            assert min(self._refs[block], self._leases[block], self._quarantines[block]) >= 0, detail
            assert found is expected, detail
            assert (block in free) == (found is BlockState.FREE), f"{detail}: free list disagrees"
            assert (block in cached) == (found is BlockState.CACHED), f"{detail}: LRU disagrees"
            tally[found] += 1
        assert tally == self._counts, f"counted {tally}, kept {self._counts}"
        assert sum(self._counts.values()) == self.num_blocks, self._counts

    # -- inside -----------------------------------------------------------------------------------------

    def _lookup(self, hashes: Sequence[bytes]) -> list[int]:
        blocks: list[int] = []
        if self._prefix is None:
            return blocks
        for block_hash in hashes:
            block = self._prefix.block_of(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _take_one(self) -> int:
        if self._free:
            return self._free.pop()
        block, _ = self._cached.popitem(last=False)
        self._drop_hash(block)
        return block

    def _is_registered(self, block: int) -> bool:
        return self._prefix is not None and self._prefix.hash_of(block) is not None

    def _derive(self, block: int) -> BlockState:
        if self._quarantines[block]:
            return BlockState.QUARANTINED
        if self._refs[block]:
            return BlockState.USED
        if self._leases[block]:
            return BlockState.LEASED
        return BlockState.CACHED if self._is_registered(block) else BlockState.FREE

    def _settle(self, block: int) -> None:
        """Move ``block`` to the state its counts call for."""
        before, after = self._state[block], self._derive(block)
        if before is after:
            return
        if before is BlockState.CACHED:
            del self._cached[block]
        if after is BlockState.FREE:
            self._to_free(block)
            return
        if after is BlockState.CACHED:
            self._cached[block] = None
        self._enter(block, after)

    def _to_free(self, block: int) -> None:
        self._guard.invalidate(block)
        self._free.append(block)
        self._enter(block, BlockState.FREE)

    def _enter(self, block: int, state: BlockState) -> None:
        self._counts[self._state[block]] -= 1
        self._counts[state] += 1
        self._state[block] = state

    def _drop_hash(self, block: int) -> bool:
        block_hash = self._prefix.remove(block) if self._prefix is not None else None
        if block_hash is None:
            return False
        self._note_change(block_hash, stored=False)
        return True

    def _note_change(self, block_hash: bytes, *, stored: bool) -> None:
        if self._overflowed:
            return
        self._changes.pop(block_hash, None)
        self._changes[block_hash] = stored
        if len(self._changes) > self._max_changes:
            self._changes.clear()
            self._overflowed = True
