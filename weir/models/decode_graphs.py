"""Decode steps captured as CUDA graphs, one for each of a few batch sizes; smaller batches are padded.

At small batches a GPU is done with a kernel before Python has started the next: a replayed graph starts all of
them at once. Padding rows have length 0 and slot -1, which the kernels skip.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from weir.engine.batch import Batch
from weir.models.cuda import CudaAttention, pad_table
from weir.models.llama import Model

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """The tensors a captured step reads: ids, positions, slots int64 [B]; tables int32 [B, n]; lens int32 [B]."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    seq_lens: Tensor

    @classmethod
    def empty(cls, size: int, max_blocks: int, device: torch.device) -> "DecodeInputs":
        """Padding in every row."""
        return cls(
            token_ids=torch.zeros(size, dtype=torch.int64, device=device),
            positions=torch.zeros(size, dtype=torch.int64, device=device),
            slots=torch.full((size,), -1, dtype=torch.int64, device=device),
            block_tables=torch.zeros((size, max_blocks), dtype=torch.int32, device=device),
            seq_lens=torch.zeros(size, dtype=torch.int32, device=device),
        )

    def fill(self, batch: Batch) -> None:
        """Write ``batch`` in place, padding behind it. The batch must fit."""
        size, width = self.block_tables.shape
        spare = size - batch.num_tokens
        assert spare >= 0
        assert all(len(table) <= width for table in batch.block_tables)
        self.token_ids.copy_(torch.tensor(batch.token_ids + [0] * spare))
        self.positions.copy_(torch.tensor(batch.positions + [0] * spare))
        self.slots.copy_(torch.tensor(batch.slots + [-1] * spare))
        self.seq_lens.copy_(torch.tensor(batch.context_lens + [0] * spare, dtype=torch.int32))
        rows = [pad_table(table, width) for table in batch.block_tables] + [[0] * width] * spare
        self.block_tables.copy_(torch.tensor(rows, dtype=torch.int32))


def is_plain_decode(batch: Batch) -> bool:
    """One new token for every sequence and logits for all: what a graph can serve."""
    return 0 < batch.num_tokens == batch.num_decodes == len(batch.logit_rows)


def graph_size(batch_size: int) -> int | None:
    """The smallest captured size that holds ``batch_size``; None when none does."""
    return next((size for size in BATCH_SIZES if size >= batch_size), None)


class DecodeGraphs:
    """Captures a size when it is first met, then replays it. One pool, one thread."""

    def __init__(self, model: Model, pool: Tensor) -> None:
        assert isinstance(model.attention, CudaAttention)
        self._model = model
        self._attention = model.attention
        self._pool = pool
        self._max_blocks = -(-model.config.max_position // pool.shape[4])
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, DecodeInputs, Tensor]] = {}

    def run(self, batch: Batch) -> Tensor | None:
        """Logits [batch, vocab], the caller's own; None when no graph serves this batch."""
        size = graph_size(batch.num_tokens) if is_plain_decode(batch) else None
        if size is None:
            return None
        if size not in self._captured:
            self._captured[size] = self._capture(size)
        graph, inputs, logits = self._captured[size]
        inputs.fill(batch)
        graph.replay()
        return logits[: batch.num_tokens].clone()

    def compute(self, inputs: DecodeInputs) -> Tensor:
        """The step that is captured; logits [B, vocab], those of padding rows without meaning."""
        attend = self._attention.with_index(self._pool, inputs.slots, inputs.block_tables, inputs.seq_lens, None)
        return self._model.compute(inputs.token_ids, inputs.positions, attend, None)

    @torch.inference_mode()
    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, DecodeInputs, Tensor]:
        inputs = DecodeInputs.empty(size, self._max_blocks, self._model.device)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.compute(inputs)  # compiles kernels and lets cuBLAS choose, neither of which can be captured
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self.compute(inputs)
        return graph, inputs, logits
