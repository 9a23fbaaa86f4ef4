"""The seam for attention over the paged pool, and its CPU back end.

The pool is [blocks, layers, 2 (K, V), kv_heads, block_size, head_dim], contiguous. Seen as rows of
``block_size * head_dim`` numbers, row ((block * layers + layer) * 2 + kv) * kv_heads + head holds one block of
one head; seen as rows of ``head_dim``, one token of one head. All indices are of these rows and are made once
per step for layer 0; for layer l they stay, and the rows start ``l * 2 * kv_heads`` (times block_size for token
rows) later.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from weir.engine.batch import Batch
from weir.models.config import ModelConfig
from weir.models.linear import product

# Sequences decode together as one rectangle when padding the shorter ones wastes little and the
# rectangle's K and V of one layer still fit a core's share of the last-level cache.
_LEAST_FILL = 0.5
_GROUP_BYTES = 8 << 20
# Tiles of prefill queries; below _TILED_FROM new tokens a tile does not pay.
_TILE_BYTES, _TILE_LEAST, _TILE_MOST = 3 << 19, 32, 128
_TILED_FROM = 16


class StepAttention(Protocol):
    """Attention of one step. ``q`` [T, heads, head_dim], ``k``/``v`` [T, kv_heads, head_dim], rotated."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write ``k`` and ``v`` of ``layer`` into the pool, then attend; gives [T, heads * head_dim]."""
        ...


class AttentionBackend(Protocol):
    """Prepares a step: everything that does not depend on the layer is computed here, once."""

    name: str

    def step(self, batch: Batch, pool: Tensor) -> StepAttention: ...


class CpuAttention:
    """Gathers each sequence's blocks of a layer and calls dense kernels; any dtype.

    ``tiles`` allows oneDNN's products for prefill in float32 (``linear.packing_works`` says whether it may).
    """

    name = "cpu"

    def __init__(self, config: ModelConfig, tiles: bool) -> None:
        self._config = config
        self._tiles = tiles and not any(config.windows)

    def step(self, batch: Batch, pool: Tensor) -> StepAttention:
        assert pool.is_contiguous()
        assert pool.shape[1:4] == (self._config.num_layers, 2, self._config.num_kv_heads), pool.shape
        geometry = _Geometry(pool.shape[1], pool.shape[3], pool.shape[4], pool.shape[5])
        windows = sorted({window or 0 for window in self._config.windows})
        parts: list[_Part] = []
        for rows in _groups(batch, pool.element_size() * 2 * geometry.kv_heads * geometry.head_dim):
            parts.append(_DecodePart(batch, rows, pool, geometry, windows))
        start = batch.num_decodes
        for sequence in range(batch.num_decodes, batch.num_sequences):
            tiled = self._tiles and pool.dtype == torch.float32 and batch.query_lens[sequence] >= _TILED_FROM
            kind = _TiledPrefill if tiled else _MaskedPrefill
            parts.append(kind(batch, sequence, start, geometry, windows, pool.dtype))
            start += batch.query_lens[sequence]
        assert start == batch.num_tokens
        return _CpuStep(pool, geometry, parts, torch.tensor(batch.slots), self._config)


@dataclass(frozen=True, slots=True)
class _Geometry:
    layers: int
    kv_heads: int
    block_size: int
    head_dim: int

    @property
    def block_floats(self) -> int:
        """Numbers in one block of one head of K or V."""
        return self.block_size * self.head_dim

    def block_rows(self, tables: Tensor) -> Tensor:
        """[B, n] blocks -> [2, B, kv_heads, n] block rows of layer 0."""
        kv = torch.arange(2)[:, None, None, None] * self.kv_heads
        head = torch.arange(self.kv_heads)[None, None, :, None]
        return tables[None, :, None, :] * (self.layers * 2 * self.kv_heads) + kv + head

    def token_rows(self, slots: Tensor) -> Tensor:
        """[T] slots -> [2, T, kv_heads] token rows of layer 0."""
        block, offset = slots // self.block_size, slots % self.block_size
        row = block * (self.layers * 2 * self.kv_heads * self.block_size) + offset
        kv = torch.arange(2)[:, None, None] * self.kv_heads
        head = torch.arange(self.kv_heads)[None, None, :]
        return row[None, :, None] + (kv + head) * self.block_size


@dataclass(frozen=True, slots=True)
class _LayerRows:
    """The pool from one layer's first row on, as block rows and as token rows."""

    blocks: Tensor
    tokens: Tensor


class _Part(Protocol):
    """A share of the step's tokens that one dense call serves."""

    def __call__(self, pool: _LayerRows, window: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Writes its rows of ``out`` [T, heads, head_dim]."""
        ...


class _CpuStep:
    def __init__(
        self, pool: Tensor, geometry: _Geometry, parts: Sequence[_Part], slots: Tensor, config: ModelConfig
    ) -> None:
        self._blocks = pool.view(-1, geometry.block_floats)
        self._tokens = pool.view(-1, geometry.head_dim)
        self._geometry = geometry
        self._parts = parts
        self._keys, self._values = geometry.token_rows(slots).reshape(2, -1)
        self._windows = config.windows

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = layer * 2 * self._geometry.kv_heads
        rows = _LayerRows(self._blocks[first:], self._tokens[first * self._geometry.block_size :])
        rows.tokens.index_copy_(0, self._keys, k.reshape(-1, k.shape[-1]))
        rows.tokens.index_copy_(0, self._values, v.reshape(-1, v.shape[-1]))
        out = torch.empty_like(q)
        for part in self._parts:
            part(rows, self._windows[layer] or 0, q, k, v, out)
        return out.view(q.shape[0], -1)


class _DecodePart:
    """Sequences with one new token each, padded to the longest.

    Query heads that share a KV head are the rows of one product, so K is read once for all of them. V is not
    gathered: embedding_bag sums its rows, weighted, where they lie.
    """

    def __init__(self, batch: Batch, rows: list[int], pool: Tensor, geometry: _Geometry, windows: list[int]) -> None:
        self._geometry = geometry
        self._size = len(rows)
        counts = [_blocks(batch, row, geometry.block_size) for row in rows]
        blocks = max(counts)
        # A shorter sequence repeats its first block, which is its own and written.
        padded = [
            batch.block_tables[row][:n] + batch.block_tables[row][:1] * (blocks - n)
            for row, n in zip(rows, counts, strict=True)
        ]
        keys, values = geometry.block_rows(torch.tensor(padded))
        self._keys = keys.reshape(-1)
        self._length = blocks * geometry.block_size
        # A whole batch in order needs no index: the usual case when lengths are alike.
        self._whole = rows == list(range(batch.num_tokens))
        self._rows = torch.tensor(rows)
        lens = torch.tensor([batch.context_lens[row] for row in rows])[:, None]
        self._hidden = {window: self._hide(lens, window) for window in windows}
        self._values = self._value_rows(values, lens, self._index_type(pool))

    def _hide(self, lens: Tensor, window: int) -> Tensor:
        """[B, 1, length]: where the sequence's last token does not see the key."""
        keys = torch.arange(self._length)[None, :]
        hidden = keys >= lens
        if window:
            hidden |= keys < lens - window
        return hidden[:, None, :]

    def _index_type(self, pool: Tensor) -> torch.dtype:
        return torch.int32 if pool.numel() // self._geometry.head_dim < 1 << 31 else torch.int64

    def _value_rows(self, values: Tensor, lens: Tensor, index_type: torch.dtype) -> Tensor:
        """[B * kv_heads, length] token rows. Slots past the end point at the first token: they get weight 0,
        but nobody wrote them, and 0 * NaN is NaN."""
        geometry = self._geometry
        offsets = torch.arange(geometry.block_size)
        tokens = (values[..., None] * geometry.block_size + offsets).reshape(self._size, geometry.kv_heads, -1)
        past = torch.arange(self._length)[None, None, :] >= lens[:, :, None]
        tokens = torch.where(past, tokens[:, :, :1], tokens)
        return tokens.reshape(-1, self._length).to(index_type)

    def __call__(self, pool: _LayerRows, window: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        geometry, size, length = self._geometry, self._size, self._length
        query = q if self._whole else q.index_select(0, self._rows)
        heads = query.shape[1]
        grouped = query.reshape(size * geometry.kv_heads, -1, geometry.head_dim).float()
        keys = pool.blocks.index_select(0, self._keys).view(-1, length, geometry.head_dim).float()
        scores = torch.bmm(grouped.mul(geometry.head_dim**-0.5), keys.transpose(1, 2))
        scores.view(size, heads, length).masked_fill_(self._hidden[window], float("-inf"))
        weights = torch.softmax(scores, -1).to(q.dtype).view(size * heads, length)
        attended = F.embedding_bag(self._bags(heads), pool.tokens, per_sample_weights=weights, mode="sum")
        attended = attended.view(size, heads, geometry.head_dim)
        if self._whole:
            out.copy_(attended)
        else:
            out.index_copy_(0, self._rows, attended)

    def _bags(self, heads: int) -> Tensor:
        """The value rows of each query head, [B * heads, length]; the same in every layer."""
        if self._values.shape[0] != self._size * heads:
            group = self._size * heads // self._values.shape[0]
            self._values = self._values.repeat_interleave(group, 0)
        return self._values


class _PrefillPart:
    """One sequence's chunk of new tokens over its cached prefix (which may be empty)."""

    def __init__(
        self, batch: Batch, sequence: int, start: int, geometry: _Geometry, windows: list[int], dtype: torch.dtype
    ) -> None:
        self._geometry = geometry
        self._span = slice(start, start + batch.query_lens[sequence])
        self._context = batch.context_lens[sequence]
        self._prefix = self._context - batch.query_lens[sequence]
        assert self._prefix >= 0
        blocks = batch.block_tables[sequence][: _blocks(batch, sequence, geometry.block_size)]
        self._index = geometry.block_rows(torch.tensor([blocks])).reshape(-1)

    def __call__(self, pool: _LayerRows, window: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        if self._prefix:
            keys, values = self._gather(pool.blocks)
        else:
            keys, values = k[self._span].transpose(0, 1), v[self._span].transpose(0, 1)
        self._attend(window, q[self._span], keys, values, out[self._span])

    def _attend(self, window: int, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """``q`` and ``out`` [T, heads, head_dim], ``keys`` and ``values`` [kv_heads, context, head_dim]."""
        raise NotImplementedError

    def _gather(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        geometry = self._geometry
        shape = (2, geometry.kv_heads, -1, geometry.head_dim)
        both = blocks.index_select(0, self._index).view(shape)[:, :, : self._context]
        return both[0], both[1]


class _MaskedPrefill(_PrefillPart):
    """torch's attention with a whole mask: any dtype, any window; twice the work where half is hidden."""

    def __init__(
        self, batch: Batch, sequence: int, start: int, geometry: _Geometry, windows: list[int], dtype: torch.dtype
    ) -> None:
        super().__init__(batch, sequence, start, geometry, windows, dtype)
        self._masks = {window: self._mask(batch.query_lens[sequence], window, dtype) for window in windows}

    def _mask(self, queries: int, window: int, dtype: torch.dtype) -> Tensor | None:
        """[queries, context] with 0 where seen; None when plain causal masking says the same."""
        if not self._prefix and (not window or window >= self._context):
            return None
        position = torch.arange(self._prefix, self._context)[:, None]
        keys = torch.arange(self._context)[None, :]
        hidden = keys > position
        if window:
            hidden |= keys <= position - window
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))

    def _attend(self, window: int, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        mask, query = self._masks[window], q.transpose(0, 1)[None]
        gqa = query.shape[1] != keys.shape[0]
        attended = F.scaled_dot_product_attention(
            query, keys[None], values[None], attn_mask=mask, is_causal=mask is None, enable_gqa=gqa
        )
        out.copy_(attended[0].transpose(0, 1))


class _TiledPrefill(_PrefillPart):
    """Tiles of queries against all keys they can see, as three steps: product, softmax, product.

    oneDNN's products run at twice the rate of those inside torch's attention on some CPUs (measured 240
    against 108 GF/s), and the hidden half above the diagonal is never computed, prefix or not.
    """

    def _attend(self, window: int, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        assert not window
        queries, heads, head_dim = q.shape
        group = heads // keys.shape[0]
        tile = _tile(self._context, group, queries)
        grouped = q.view(queries, -1, group, head_dim).transpose(0, 1).mul(head_dim**-0.5)
        keys, values = keys.contiguous(), values.contiguous()
        hidden = torch.full((tile, tile), float("-inf")).triu_(1).repeat_interleave(group, 0)
        results = out.view(queries, -1, group, head_dim)
        for start in range(0, queries, tile):
            count = min(tile, queries - start)
            seen = self._prefix + start + count
            for head in range(keys.shape[0]):
                rows = grouped[head, start : start + count].reshape(count * group, head_dim)
                scores = product(rows, keys[head, :seen])
                scores[:, seen - count :] += hidden[: count * group, :count]
                attended = product(torch.softmax(scores, -1), values[head, :seen].t())
                results[start : start + count, head] = attended.view(count, group, head_dim)


def _tile(context: int, group: int, queries: int) -> int:
    """Queries a tile: its scores should stay in the second-level cache, its products not get too thin."""
    fitting = _TILE_BYTES // (4 * context * group)
    return min(queries, max(_TILE_LEAST, min(_TILE_MOST, fitting)))


def _blocks(batch: Batch, sequence: int, block_size: int) -> int:
    return -(-batch.context_lens[sequence] // block_size)


def _groups(batch: Batch, bytes_per_token: int) -> list[list[int]]:
    """Decode rows in rectangles: longest first, closed when a row is much shorter or the bytes are reached.

    Rows of one group come out in ascending order.
    """
    order = sorted(range(batch.num_decodes), key=lambda row: -batch.context_lens[row])
    groups: list[list[int]] = []
    longest = 0
    for row in order:
        tokens = batch.context_lens[row]
        full = bool(groups) and (len(groups[-1]) + 1) * longest * bytes_per_token > _GROUP_BYTES
        if not groups or full or tokens < _LEAST_FILL * longest:
            groups.append([])
            longest = tokens
        groups[-1].append(row)
    return [sorted(group) for group in groups]
