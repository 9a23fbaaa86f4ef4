"""Decode attention: one query token per sequence over its paged KV."""

from functools import cache

import torch
import triton
import triton.language as tl

from weir.kernels.checks import output_like
from weir.kernels.layout import check_attention, pool_layout
from weir.kernels.paged_tile import LOG2_E, attend, kv_tile_tokens, next_power_of_2

SPLITS_MAX = 32
GROUP_MAX = 64
# A split shorter than this costs more in the combine step than it wins in parallel reads.
SPLIT_TOKENS_MIN = 256
# Two levels of loads (table, then K and V) share the stages: five keep two K and V tiles in flight.
STAGES = 5


@triton.jit(do_not_specialize=["layer"])  # type: ignore[untyped-decorator]
def paged_decode_kernel(
    query: tl.tensor,
    pool: tl.tensor,
    block_tables: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,  # [batch, head, dim] when SPLITS == 1, else fp32 [batch, head, split, dim]
    log_sums: tl.tensor,  # fp32 [batch, head, split], in log2 units; unused when SPLITS == 1
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
    BLOCK_G: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """One program: the query heads of one KV head of one sequence, over one split of its positions."""
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)

    members = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + members
    row_mask = (members[:, None] < GROUP) & (dims[None, :] < HEAD_DIM)
    query_rows = query + seq * query_stride + heads[:, None] * query_head_stride + dims[None, :]
    q = tl.load(query_rows, mask=row_mask, other=0.0)

    seq_len = tl.load(seq_lens + seq)
    tiles = tl.cdiv(tl.cdiv(seq_len, BLOCK_N), SPLITS)
    lo = tl.minimum(split * tiles * BLOCK_N, seq_len)
    hi = tl.minimum(lo + tiles * BLOCK_N, seq_len)
    whole = lo + (hi - lo) // BLOCK_N * BLOCK_N

    key_base = pool + layer * layer_stride + kv_head * head_stride
    value_base = key_base + kv_stride
    table = block_tables + seq * table_stride
    visible = tl.zeros([BLOCK_G], tl.int32) + seq_len
    # fmt: off
    acc, row_max, row_sum = attend(
        q, key_base, value_base, table, lo, whole, hi, visible, logit_scale,
        block_stride, BLOCK_G, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N)
    # fmt: on

    # An empty split leaves zeros and a log sum of -inf, which weigh nothing in the combine step.
    row_sum = tl.where(row_sum > 0.0, row_sum, 1.0)
    acc = acc / row_sum[:, None]
    rows = (seq * HEADS + heads) * SPLITS + split
    tl.store(out + rows[:, None] * HEAD_DIM + dims[None, :], acc, mask=row_mask)
    if SPLITS > 1:
        tl.store(log_sums + rows, row_max + tl.log2(row_sum), mask=members < GROUP)


@triton.jit  # type: ignore[untyped-decorator]
def combine_splits_kernel(
    partial: tl.tensor,  # fp32 [batch * head, split, dim]
    log_sums: tl.tensor,  # fp32 [batch * head, split]
    out: tl.tensor,  # [batch * head, dim]
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """One program: weigh the splits of one head of one sequence by their softmax sums."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, BLOCK_D)
    log_sum = tl.load(log_sums + row * SPLITS + splits)
    largest = tl.max(log_sum, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(log_sum - largest)
    offsets = (row * SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :]
    values = tl.load(partial + offsets, mask=dims[None, :] < HEAD_DIM, other=0.0)
    total = tl.sum(weights, 0)
    result = tl.sum(values * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + row * HEAD_DIM + dims, result, mask=dims < HEAD_DIM)


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def choose_splits(batch: int, kv_heads: int, context_max: int, multiprocessors: int) -> int:
    """Into how many parts to split each sequence so that two programs per multiprocessor have work.

    Depends on shapes only, never on the lengths themselves, so that a captured CUDA graph stays valid.
    Returns a power of two in 1..SPLITS_MAX.
    """
    wanted = 2 * multiprocessors // max(1, batch * kv_heads)
    useful = min(wanted, context_max // SPLIT_TOKENS_MIN, SPLITS_MAX)
    return next_power_of_2(useful + 1) // 2 if useful > 1 else 1


def paged_decode(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Attention of one query token per sequence over that sequence's KV. Returns [batch, heads, head_dim].

    query         [batch, heads, head_dim], fp32/fp16/bf16; token and head strides are free (a view of QKV
                  will do).
    pool          the KV pool (see weir.kernels.layout); its dtype may differ from the query's.
    layer         which layer of the pool to read.
    block_tables  int32 [batch, max_blocks]: entry i holds positions [i * block_size, (i + 1) * block_size).
                  Entries past a sequence's end are not read.
    seq_lens      int32 [batch]: positions to attend to, the query's own included: its K and V must be stored
                  already. 0 gives a row of zeros (padding of a captured graph).
    scale         factor on the logits, usually head_dim ** -0.5.
    out           contiguous, of the query's shape and dtype, written and returned; allocated if None.
    splits        parts to split each sequence into (power of two <= 32); chosen from the shapes if None.

    heads must be a multiple of kv_heads, at most 64 query heads to a KV head. Block ids are not checked.
    Never waits for the device, so it can be captured in a CUDA graph.
    """
    layout = pool_layout(pool, layer)
    check_attention(query, layout, block_tables, seq_lens)
    batch, heads, head_dim = query.shape
    assert block_tables.shape[0] == batch, f"{block_tables.shape[0]} block tables for {batch} sequences"
    group = heads // layout.kv_heads
    assert group <= GROUP_MAX, f"{group} query heads to a KV head, at most {GROUP_MAX}"
    out = output_like(query, out)
    if batch == 0:
        return out
    if splits is None:
        context_max = block_tables.shape[1] * layout.block_size
        splits = choose_splits(batch, layout.kv_heads, context_max, _multiprocessors(query.device))
    assert splits in (1, 2, 4, 8, 16, SPLITS_MAX), f"splits {splits} is not a power of two in 1..32"

    partial, log_sums = out, out
    if splits > 1:
        partial = torch.empty((batch, heads, splits, head_dim), dtype=torch.float32, device=query.device)
        log_sums = torch.empty((batch, heads, splits), dtype=torch.float32, device=query.device)
    element_bytes = max(query.element_size(), pool.element_size())
    block_d = next_power_of_2(head_dim)
    # fmt: off
    paged_decode_kernel[(batch, layout.kv_heads, splits)](
        query, pool, block_tables, seq_lens, partial, log_sums, layer, scale * LOG2_E,
        query.stride(0), query.stride(1), block_tables.stride(0),
        layout.block_stride, layout.layer_stride, layout.kv_stride, layout.head_stride,
        HEADS=heads, GROUP=group, BLOCK_G=max(16, next_power_of_2(group)),
        BLOCK_SIZE=layout.block_size, HEAD_DIM=head_dim, BLOCK_D=block_d,
        BLOCK_N=kv_tile_tokens(head_dim, element_bytes, 64), SPLITS=splits,
        num_warps=4, num_stages=STAGES)
    # fmt: on
    if splits > 1:
        combine_splits_kernel[(batch * heads,)](
            partial, log_sums, out, HEAD_DIM=head_dim, BLOCK_D=block_d, SPLITS=splits, num_warps=4
        )
    return out
