"""The GPU back end: Weir's Triton kernels behind the same seams as the CPU's, and decode as CUDA graphs.

Nothing here asks where its tensors are, so that Triton's interpreter can run it on the CPU in tests.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from weir.engine.batch import Batch
from weir.errors import InvalidArgument
from weir.kernels.kv_store import kv_store
from weir.kernels.paged_decode import paged_decode
from weir.kernels.prefill_attention import prefill_attention
from weir.kernels.rms_norm import rms_norm
from weir.kernels.rope import rope
from weir.kernels.silu_mul import silu_mul
from weir.models.attention import StepAttention
from weir.models.backend import Backend
from weir.models.config import ModelConfig
from weir.models.linear import GatedLinear, Linear, TorchLinear, joined_bias
from weir.models.rope import Rotation, rotary_tables


def cuda_backend(config: ModelConfig, device: torch.device) -> Backend:
    """Raises InvalidArgument for what the kernels do not know: sliding windows below the model's context."""
    narrow = [window for window in config.windows if window is not None and window < config.max_position]
    if narrow:
        raise InvalidArgument("device", str(device), f"a sliding window ({narrow[0]} tokens) needs device cpu")
    return Backend(
        linears=CudaLinears(),
        norm=CudaNorm,
        rotary=CudaRotary(config, device),
        attention=CudaAttention(config, device),
    )


class CudaLinears:
    """cuBLAS for products, one kernel for silu(gate) * up."""

    name = "cuda"

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return TorchLinear(weight, bias)

    def gated(self, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None) -> GatedLinear:
        return CudaGated(torch.cat((gate, up)), joined_bias(gate_bias, up_bias))


class CudaGated:
    """Gate and up as one product."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self._weight, self._bias).chunk(2, dim=-1)
        return silu_mul(gate, up)


class CudaNorm:
    """Weir's RMSNorm kernel."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self._weight, self._eps)


class CudaRotary:
    """Weir's RoPE kernel, in place."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        cos, sin = rotary_tables(config.rope, config.head_dim, config.max_position)
        self._cos = cos.contiguous().to(device)
        self._sin = sin.contiguous().to(device)

    def step(self, positions: Tensor) -> Rotation:
        return _CudaRotation(positions, self._cos, self._sin)


@dataclass(frozen=True, slots=True)
class _CudaRotation:
    positions: Tensor
    cos: Tensor
    sin: Tensor

    def joined(self, qk: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        return self.pair(qk[:, :heads], qk[:, heads:])

    def pair(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        rope(q, k, self.positions, self.cos, self.sin)
        return q, k


@dataclass(frozen=True, slots=True)
class PrefillIndex:
    """The sequences of a step with more than one new token, as the prefill kernel wants them."""

    block_tables: Tensor
    cu_seqlens: Tensor
    seq_lens: Tensor
    max_query_len: int


class CudaAttention:
    """Paged kernels that read the pool in place."""

    name = "cuda"

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._device = device
        self._scale = config.head_dim**-0.5

    def step(self, batch: Batch, pool: Tensor) -> StepAttention:
        decodes = batch.num_decodes
        lens = self._ints(batch.context_lens)
        prefill = None
        if decodes < batch.num_sequences:
            queries = batch.query_lens[decodes:]
            starts = [sum(queries[:n]) for n in range(len(queries) + 1)]
            tables = self._tables(batch.block_tables[decodes:])
            prefill = PrefillIndex(tables, self._ints(starts), lens[decodes:], max(queries))
        slots = torch.tensor(batch.slots, dtype=torch.int64, device=self._device)
        return self.with_index(pool, slots, self._tables(batch.block_tables[:decodes]), lens[:decodes], prefill)

    def with_index(
        self, pool: Tensor, slots: Tensor, block_tables: Tensor, seq_lens: Tensor, prefill: PrefillIndex | None
    ) -> StepAttention:
        """A step whose index tensors the caller owns: what a CUDA graph is captured with."""
        return _CudaStep(pool, self._scale, slots, block_tables, seq_lens, prefill)

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)

    def _tables(self, tables: list[list[int]]) -> Tensor:
        width = max((len(table) for table in tables), default=1)
        return self._ints([entry for table in tables for entry in pad_table(table, width)]).view(len(tables), width)


@dataclass(frozen=True, slots=True)
class _CudaStep:
    pool: Tensor
    scale: float
    slots: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    prefill: PrefillIndex | None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv_store(k, v, self.pool, layer, self.slots)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decodes = self.seq_lens.shape[0]
        if decodes:
            paged_decode(
                q[:decodes], self.pool, layer, self.block_tables, self.seq_lens, scale=self.scale, out=out[:decodes]
            )
        if self.prefill is not None:
            prefill_attention(
                q[decodes:],
                self.pool,
                layer,
                self.prefill.block_tables,
                self.prefill.cu_seqlens,
                self.prefill.seq_lens,
                max_query_len=self.prefill.max_query_len,
                scale=self.scale,
                out=out[decodes:],
            )
        return out.view(q.shape[0], -1)


def pad_table(table: list[int], width: int) -> list[int]:
    """``table`` with zeros up to ``width``; the kernels do not read past a sequence's end."""
    return table + [0] * (width - len(table))
