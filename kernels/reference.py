"""Every kernel again in plain torch: same names, same signatures, same effects, no triton.

The launchers' docstrings are the contracts of these too. Written to be read; accumulation is in fp32.
"""

from itertools import pairwise

import torch


def _cached(pool: torch.Tensor, layer: int, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of positions [0, length) of one sequence, each fp32 [kv_heads, length, head_dim]."""
    block_size = pool.shape[4]
    blocks = pool[table[: -(-length // block_size)].long(), layer].float()  # [block, 2, head, token, dim]
    key, value = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length].unbind(0)
    return key, value


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """query [n, heads, dim]; key, value [kv_heads, length, dim]; query i sees positions below visible[i]."""
    group = query.shape[1] // key.shape[0]
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    logits = torch.einsum("nhd,hld->hnl", query.float(), key) * scale
    hidden = torch.arange(key.shape[1], device=key.device)[None, :] >= visible[:, None]
    weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hnl,hld->nhd", weights, value)


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
    """See weir.kernels.paged_decode; `splits` makes no difference here."""
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    for seq, length in enumerate(seq_lens.tolist()):
        if length == 0:
            out[seq] = 0
            continue
        key, value = _cached(pool, layer, block_tables[seq], length)
        out[seq] = _attend(query[seq, None], key, value, seq_lens[seq, None], scale)[0].to(out.dtype)
    return out


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
    """See weir.kernels.prefill_attention."""
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    bounds = cu_seqlens.tolist()
    for seq, (first, end) in enumerate(pairwise(bounds)):
        assert end - first <= max_query_len, f"{end - first} new tokens, at most {max_query_len}"
        if first == end:
            continue
        length = int(seq_lens[seq])
        key, value = _cached(pool, layer, block_tables[seq], length)
        visible = torch.arange(length - (end - first), length, device=query.device) + 1
        out[first:end] = _attend(query[first:end], key, value, visible, scale).to(out.dtype)
    return out


def kv_store(key: torch.Tensor, value: torch.Tensor, pool: torch.Tensor, layer: int, slots: torch.Tensor) -> None:
    """See weir.kernels.kv_store."""
    block_size = pool.shape[4]
    kept = slots >= 0
    blocks, offsets = slots[kept] // block_size, slots[kept] % block_size
    pool[blocks, layer, 0, :, offsets] = key[kept].to(pool.dtype)
    pool[blocks, layer, 1, :, offsets] = value[kept].to(pool.dtype)


def gather_blocks(pool: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> torch.Tensor:
    """See weir.kernels.kv_blocks."""
    return staging.copy_(pool[block_ids.long()])


def scatter_blocks(staging: torch.Tensor, pool: torch.Tensor, block_ids: torch.Tensor) -> None:
    """See weir.kernels.kv_blocks."""
    pool[block_ids.long()] = staging


def rms_norm(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See weir.kernels.rms_norm."""
    x = hidden if residual is None else residual.add_(hidden)
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(hidden.dtype)
    result = (normed.float() * weight.float()).to(hidden.dtype)
    return result.contiguous() if out is None else out.copy_(result)


def rope(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """See weir.kernels.rope."""
    half = cos.shape[1]
    c, s = cos[positions.long()].float()[:, None], sin[positions.long()].float()[:, None]
    for heads in (query, key):
        a, b = heads[..., :half].float(), heads[..., half : 2 * half].float()
        turned = torch.cat((a * c - b * s, b * c + a * s), -1)
        heads[..., : 2 * half] = turned.to(heads.dtype)


def silu_mul(gate: torch.Tensor, up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """See weir.kernels.silu_mul."""
    activated = torch.nn.functional.silu(gate.float()).to(gate.dtype)
    result = (activated.float() * up.float()).to(gate.dtype)
    return result.contiguous() if out is None else out.copy_(result)
