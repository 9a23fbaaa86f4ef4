"""Prefill attention: packed new tokens, causal over the cached prefix and themselves, read from paged KV."""

import torch
import triton
import triton.language as tl

from weir.kernels.checks import check_ints, output_like
from weir.kernels.layout import check_attention, pool_layout
from weir.kernels.paged_tile import LOG2_E, attend, kv_tile_tokens, next_power_of_2

# Two levels of loads (table, then K and V) share the stages: three make all of them asynchronous.
STAGES = 3
# By bytes per element: (rows, warps) for head_dim up to 128 and above, as large as compiles with next to no spills.
QUERY_TILES = {2: ((128, 8), (64, 4)), 4: ((32, 4), (16, 8))}


@triton.jit(do_not_specialize=["layer"])  # type: ignore[untyped-decorator]
def prefill_attention_kernel(
    query: tl.tensor,
    pool: tl.tensor,
    block_tables: tl.tensor,
    cu_seqlens: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,  # contiguous [total_q, head, dim]
    layer: tl.tensor,
    logit_scale: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    layer_stride: tl.tensor,
    kv_stride: tl.tensor,
    head_stride: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """One program: BLOCK_M rows of one KV head of one sequence.

    A row is one query head of one token, heads innermost, so that a K or V tile read once serves every head
    of the group whatever its size, and short chunks still fill the tile.
    """
    # The last tiles see the most positions: start them first, so that they do not trail behind.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    first_token = tl.load(cu_seqlens + seq).to(tl.int64)
    query_len = tl.load(cu_seqlens + seq + 1) - first_token.to(tl.int32)
    seq_len = tl.load(seq_lens + seq)
    prefix = seq_len - query_len
    if tile * BLOCK_M >= query_len * GROUP:
        return

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    tokens = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    row_mask = (tokens[:, None] < query_len) & (dims[None, :] < HEAD_DIM)
    query_rows = query + (first_token + tokens) * query_stride + heads * query_head_stride
    q = tl.load(query_rows[:, None] + dims[None, :], mask=row_mask, other=0.0)

    # [0, whole) is seen by every row; [whole, hi) holds the diagonal and the end of the sequence.
    last_token = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, query_len - 1)
    hi = prefix + last_token + 1
    whole = (prefix + tile * BLOCK_M // GROUP + 1) // BLOCK_N * BLOCK_N
    visible = prefix + tokens + 1

    key_base = pool + layer * layer_stride + kv_head * head_stride
    value_base = key_base + kv_stride
    table = block_tables + seq * table_stride
    # fmt: off
    acc, _, row_sum = attend(
        q, key_base, value_base, table, 0, whole, hi, visible, logit_scale,
        block_stride, BLOCK_M, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N)
    # fmt: on

    out_rows = out + ((first_token + tokens) * HEADS + heads) * HEAD_DIM
    tl.store(out_rows[:, None] + dims[None, :], acc / row_sum[:, None], mask=row_mask)


def query_tile(rows: int, head_dim: int, element_bytes: int) -> tuple[int, int]:
    """(rows, warps) of a query tile: what leaves the accumulator in registers, less for short chunks."""
    fit, warps = QUERY_TILES[element_bytes][head_dim > 128]
    tile = max(16, min(fit, next_power_of_2(rows)))
    return tile, warps if tile == fit else 4


def prefill_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_query_len: int,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of packed new tokens over prefix and themselves. Returns [total_q, heads, head_dim].

    query          [total_q, heads, head_dim], fp32/fp16/bf16, the sequences' new tokens one after another;
                   token and head strides are free.
    pool, layer    the KV pool (see weir.kernels.layout) and the layer to read; K and V of the new tokens must
                   be stored already. The pool's dtype may differ from the query's.
    block_tables   int32 [batch, max_blocks]: entry i holds positions [i * block_size, (i + 1) * block_size).
    cu_seqlens     int32 [batch + 1], rising from 0 to total_q: sequence s owns query rows
                   [cu_seqlens[s], cu_seqlens[s + 1]); it may own none.
    seq_lens       int32 [batch]: positions of each sequence, prefix and new tokens; new token j of n is at
                   position seq_lens - n + j and sees the positions up to its own.
    max_query_len  at least the longest sequence's number of new tokens; an int, so that nothing waits
                   for the device.
    scale          factor on the logits, usually head_dim ** -0.5.
    out            contiguous, of the query's shape and dtype, written and returned; allocated if None. Rows
                   past cu_seqlens[-1] are left as they are.

    heads must be a multiple of kv_heads. Sequences of one new token are welcome (mixed batches).
    """
    layout = pool_layout(pool, layer)
    check_attention(query, layout, block_tables, seq_lens)
    batch, (_, heads, head_dim) = block_tables.shape[0], query.shape
    check_ints("cu_seqlens", cu_seqlens, (batch + 1,), torch.int32)
    assert max_query_len >= 0, f"max_query_len {max_query_len} is negative"
    out = output_like(query, out)
    group = heads // layout.kv_heads
    rows = max_query_len * group
    if batch == 0 or rows == 0:
        return out
    block_m, warps = query_tile(rows, head_dim, query.element_size())
    element_bytes = max(query.element_size(), pool.element_size())
    # fmt: off
    prefill_attention_kernel[(triton.cdiv(rows, block_m), layout.kv_heads, batch)](
        query, pool, block_tables, cu_seqlens, seq_lens, out, layer, scale * LOG2_E,
        query.stride(0), query.stride(1), block_tables.stride(0),
        layout.block_stride, layout.layer_stride, layout.kv_stride, layout.head_stride,
        HEADS=heads, GROUP=group, BLOCK_M=block_m, BLOCK_SIZE=layout.block_size, HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(head_dim), BLOCK_N=kv_tile_tokens(head_dim, element_bytes, 64),
        num_warps=warps, num_stages=STAGES)
    # fmt: on
    return out
