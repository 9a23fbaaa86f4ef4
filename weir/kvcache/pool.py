"""The memory behind the blocks: one KV tensor and, beside it, the guard table; both readable by peers.

The CPU pool is an anonymous mapping in huge pages: reads over shared memory into small pages are four times
slower. Its pages are made at the start, so that no request waits for the kernel to find and clear them and the
process's size does not grow with use. The guard table is in host memory even when the pool is on a GPU.
"""

import contextlib
import mmap
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from weir.errors import InvalidArgument
from weir.kvcache.layout import KvLayout
from weir.transfer.ticket import GUARD_ENTRY_BYTES, GuardEntry

UNSEALED = 0
_HUGE_PAGE_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap
_GENERATION = 0
_CHECKSUM = 1


def block_checksum(contents: memoryview) -> int:
    """xxh3_64 of ``contents``; 0 stands for "not sealed" and is mapped to 1."""
    return int(xxhash.xxh3_64_intdigest(contents)) or 1


class GuardTable:
    """Per block ``{generation: u64, checksum: u64}``, little endian; implements ``blocks.Guard``.

    Each word is written with one aligned store, so a remote reader sees old or new, never a mixture.
    """

    def __init__(self, num_blocks: int) -> None:
        self._mapping = _anonymous_mapping(num_blocks * GUARD_ENTRY_BYTES, populate=True)
        self.array: npt.NDArray[np.uint64] = np.frombuffer(
            self._mapping, dtype=np.dtype("<u8"), count=num_blocks * 2
        ).reshape(num_blocks, 2)
        self.num_blocks = num_blocks

    @property
    def base(self) -> int:
        """Address of the first entry."""
        return int(self.array.ctypes.data)

    @property
    def nbytes(self) -> int:
        """Size of the table."""
        return int(self.array.nbytes)

    def generation(self, block: int) -> int:
        return int(self.array[block, _GENERATION])

    def checksum(self, block: int) -> int:
        """The sealed block's checksum, or 0."""
        return int(self.array[block, _CHECKSUM])

    def invalidate(self, block: int) -> None:
        # The generation first: a reader that still finds the old checksum must not find the old generation.
        self.array[block, _GENERATION] += np.uint64(1)
        self.array[block, _CHECKSUM] = UNSEALED

    def seal(self, block: int, checksum: int) -> None:
        """Publish the checksum of ``block``'s final bytes."""
        assert checksum != UNSEALED
        self.array[block, _CHECKSUM] = checksum

    def entries(self, blocks: Iterable[int]) -> list[GuardEntry]:
        """The rows of ``blocks``, in order."""
        return [GuardEntry(self.generation(block), self.checksum(block)) for block in blocks]


class KvPool:
    """``data``: [num_blocks, layers, 2, kv_heads, block_size, head_dim] of ``dtype`` on ``device``.

    ``checksums``: whether blocks are sealed with a checksum and arriving ones verified. Default: on for CPU
    pools, off for others, where it would need a copy to the host per block (the seam is ``block_view``);
    asking for it there raises InvalidArgument. Both ends of a hand-over must agree. Generations are always
    on. ``populate``: make a CPU pool's pages now; otherwise each is made when it is first touched.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        checksums: bool | None = None,
        populate: bool = True,
    ) -> None:
        assert dtype.itemsize == layout.dtype_bytes, (dtype, layout.dtype_bytes)
        assert num_blocks >= 1, num_blocks
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        on_cpu = self.device.type == "cpu"
        if checksums and not on_cpu:
            raise InvalidArgument("checksums", checksums, f"not available for a pool on {self.device}")
        self.checksums_enabled = on_cpu if checksums is None else checksums
        self.guard = GuardTable(num_blocks)
        self._bytes: memoryview | None = None
        if on_cpu:
            self._bytes = memoryview(_anonymous_mapping(num_blocks * layout.block_bytes, populate=populate))
            flat = torch.frombuffer(
                self._bytes, dtype=dtype, count=num_blocks * layout.block_bytes // layout.dtype_bytes
            )
            self.data = flat.view(layout.shape(num_blocks))
        else:
            self.data = torch.zeros(layout.shape(num_blocks), dtype=dtype, device=self.device)

    @property
    def base(self) -> int:
        """Address of block 0 in this process (device address for a GPU pool)."""
        return self.data.data_ptr()

    @property
    def nbytes(self) -> int:
        """Size of the KV tensor."""
        return self.num_blocks * self.layout.block_bytes

    def block_view(self, block: int) -> memoryview:
        """The writable bytes of ``block``, without a copy. CPU pools only."""
        assert self._bytes is not None, f"no host view of a pool on {self.device}"
        assert 0 <= block < self.num_blocks, block
        start = block * self.layout.block_bytes
        return self._bytes[start : start + self.layout.block_bytes]

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        """Checksums of the blocks' bytes as they are now; CPU pools only."""
        return [block_checksum(self.block_view(block)) for block in blocks]

    def seal(self, blocks: Iterable[int]) -> None:
        """Publish checksums of blocks whose bytes are final; skips sealed ones. No-op with checksums off.

        May run on another thread than the block manager's as long as the blocks stay referenced or leased
        meanwhile, so that nothing invalidates them.
        """
        if not self.checksums_enabled:
            return
        for block in blocks:
            if self.guard.checksum(block) == UNSEALED:
                self.guard.seal(block, block_checksum(self.block_view(block)))


def _anonymous_mapping(size: int, *, populate: bool) -> mmap.mmap:
    """Page-aligned zeros, private to the process, in huge pages where the kernel grants them."""
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE_PAGE_BYTES:
        _advise(mapping, getattr(mmap, "MADV_HUGEPAGE", None))
    if populate:
        _advise(mapping, _MADV_POPULATE_WRITE)
    return mapping


def _advise(mapping: mmap.mmap, advice: int | None) -> None:
    """Tell the kernel, if it understands: without it the memory is slower, not wrong."""
    if advice is not None:
        with contextlib.suppress(OSError):
            mapping.madvise(advice)
