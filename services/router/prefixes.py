"""Which worker has which KV blocks in its cache, from what workers announce, and how much of a prompt that is. Pure.

A block's hash covers everything before it, and caches keep a block's parents longer than the block, so a worker
that has block i of a prompt has nearly always those before it: depths are found by bisection. A wrong guess costs
time, never correctness: the worker itself looks what it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from weir.ids import WorkerKey
from weir.kvcache.prefix import block_hashes, chain_seed

MAX_HASHED_BLOCKS = 1_024
"""Blocks of a prompt that are looked up; what lies behind them counts as not cached."""


class PromptKeys:
    """The block hashes of one prompt, made when first asked for and kept for its life."""

    __slots__ = ("_hashes", "_prompt", "_salt")

    def __init__(self, prompt: Sequence[int], tenant_salt: bytes) -> None:
        self._prompt = prompt
        self._salt = tenant_salt
        self._hashes: dict[tuple[bytes, int], list[bytes]] = {}

    def hashes(self, fingerprint: bytes, block_size: int) -> list[bytes]:
        """Of the blocks that a cache can give: the last prompt token is always computed."""
        key = (fingerprint, block_size)
        found = self._hashes.get(key)
        if found is None:
            end = min(len(self._prompt) - 1, MAX_HASHED_BLOCKS * block_size)
            seed = chain_seed(fingerprint, self._salt)
            found = block_hashes(self._prompt[:end], block_size, seed) if block_size and end > 0 else []
            self._hashes[key] = found
        return found


class PrefixMap:
    """At most ``max_blocks`` (worker, hash) pairs; the worker that has most loses its oldest first."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._holders: dict[bytes, WorkerKey | dict[WorkerKey, None]] = {}
        """Most blocks are in one cache only: those do without a dictionary of their own."""
        self._blocks: dict[WorkerKey, dict[bytes, None]] = {}
        self._size = 0
        self.evicted = 0

    def __len__(self) -> int:
        """Pairs known."""
        return self._size

    def stored(self, worker: WorkerKey, hashes: Iterable[bytes]) -> None:
        """``worker`` can be given prompts that begin with these."""
        if self._max_blocks <= 0:
            return
        blocks = self._blocks.setdefault(worker, {})
        for block_hash in hashes:
            if block_hash not in blocks:
                blocks[block_hash] = None
                self._hold(worker, block_hash)
        if not blocks:
            del self._blocks[worker]
        while self._size > self._max_blocks:
            self._evict()

    def removed(self, worker: WorkerKey, hashes: Iterable[bytes]) -> None:
        """``worker`` has these no more."""
        blocks = self._blocks.get(worker)
        if blocks is None:
            return
        for block_hash in hashes:
            if block_hash in blocks:
                self._drop(worker, blocks, block_hash)
        if not blocks:
            self._blocks.pop(worker, None)

    def forget(self, worker: WorkerKey) -> None:
        """Nothing is known of ``worker`` any more: it left, or some of its announcements were lost."""
        blocks = self._blocks.pop(worker, {})
        for block_hash in list(blocks):
            self._drop(worker, blocks, block_hash)

    def depth(self, worker: WorkerKey, hashes: Sequence[bytes], near: int = 0) -> int:
        """How many of the first blocks of a prompt ``worker`` has. ``near`` is a guess: prompts share beginnings."""
        blocks = self._blocks.get(worker)
        if blocks is None or not hashes or hashes[0] not in blocks:
            return 0
        low, high = 1, len(hashes)
        if 0 < near < high and hashes[near - 1] in blocks:
            if hashes[near] not in blocks:
                return near
            low = near + 1
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def holders(self, hashes: Sequence[bytes], limit: int) -> list[WorkerKey]:
        """Up to ``limit`` workers that have the beginning of a prompt, those that have most of it first."""
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in self._holders:
                low = middle
            else:
                high = middle - 1
        found: dict[WorkerKey, None] = {}
        while low > 0 and len(found) < limit:
            found.update(dict.fromkeys(islice(self._holders_of(hashes[low - 1]), limit - len(found))))
            low //= 2
        return list(found)

    def check_integrity(self) -> None:
        """Assert that both directions agree and the bound holds."""
        pairs = {(worker, block) for worker, blocks in self._blocks.items() for block in blocks}
        assert pairs == {(worker, block) for block in self._holders for worker in self._holders_of(block)}
        assert len(pairs) == self._size <= max(self._max_blocks, 0)

    def _evict(self) -> None:
        """A tenth of the blocks of the worker that has most, so that the search for it is rare."""
        worker = max(self._blocks, key=lambda key: len(self._blocks[key]))
        blocks = self._blocks[worker]
        oldest = list(islice(blocks, max(1, min(len(blocks) // 10, self._size - self._max_blocks + len(blocks) // 20))))
        self.evicted += len(oldest)
        self.removed(worker, oldest)

    def _drop(self, worker: WorkerKey, blocks: dict[bytes, None], block_hash: bytes) -> None:
        del blocks[block_hash]
        held = self._holders[block_hash]
        if isinstance(held, WorkerKey):
            assert held == worker, "both directions agree"
            del self._holders[block_hash]
        else:
            del held[worker]
            if len(held) == 1:
                self._holders[block_hash] = next(iter(held))
        self._size -= 1

    def _hold(self, worker: WorkerKey, block_hash: bytes) -> None:
        held = self._holders.get(block_hash)
        if held is None:
            self._holders[block_hash] = worker
        elif isinstance(held, WorkerKey):
            self._holders[block_hash] = {held: None, worker: None}
        else:
            held[worker] = None
        self._size += 1

    def _holders_of(self, block_hash: bytes) -> Iterable[WorkerKey]:
        held = self._holders.get(block_hash, ())
        return (held,) if isinstance(held, WorkerKey) else held
