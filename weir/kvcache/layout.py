"""Where each KV byte of a pool lies: ``pool[block, layer, kv, head, token, head_dim]``, contiguous.

A block is one span, so it is one transfer descriptor, and a run of adjacent blocks is still one. Heads are
contiguous within (layer, kv), so that another TP degree reads ``layers * 2`` spans of a block.
"""

from dataclasses import dataclass

LAYOUT_VERSION = 1
KEY = 0
VALUE = 1


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The sizes that fix the layout; all >= 1. ``dtype_bytes`` is the size of one element."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype_bytes: int

    def __post_init__(self) -> None:
        assert min(self.layers, self.kv_heads, self.head_dim, self.block_size, self.dtype_bytes) >= 1, self

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one layer's K or V in one block: the smallest contiguous unit."""
        return self.block_size * self.head_dim * self.dtype_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all layers, K and V."""
        return self.layers * 2 * self.kv_heads * self.head_bytes

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token."""
        return self.block_bytes // self.block_size

    def shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        """[num_blocks, layers, 2, kv_heads, block_size, head_dim]."""
        return (num_blocks, self.layers, 2, self.kv_heads, self.block_size, self.head_dim)

    def offset(self, block: int, layer: int = 0, kv: int = KEY, head: int = 0) -> int:
        """Bytes from the pool's base to the first token of ``head`` of ``layer``'s K (0) or V (1)."""
        assert block >= 0, block
        assert 0 <= layer < self.layers, layer
        assert kv in (KEY, VALUE), kv
        assert 0 <= head < self.kv_heads, head
        return block * self.block_bytes + ((layer * 2 + kv) * self.kv_heads + head) * self.head_bytes

    def head_slices(self, first: int, end: int) -> list[tuple[int, int]]:
        """(offset in the block, length) of heads [first, end), ascending; one span when it is all heads."""
        assert 0 <= first < end <= self.kv_heads, (first, end)
        if end - first == self.kv_heads:
            return [(0, self.block_bytes)]
        length = (end - first) * self.head_bytes
        return [(self.offset(0, layer, kv, first), length) for layer in range(self.layers) for kv in (KEY, VALUE)]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens take."""
        return -(-num_tokens // self.block_size)
