"""Runs one step of a model against one KV pool: the engine's only door to tensors."""

from collections.abc import Callable

from torch import Tensor

from weir.engine.batch import Batch
from weir.models.llama import Model


class ModelRunner:
    """A model with the pool it reads and writes. Not safe for use from two threads at once."""

    def __init__(self, model: Model, pool: Tensor) -> None:
        config = model.config
        expected = (config.num_layers, 2, config.num_kv_heads, pool.shape[4], config.head_dim)
        assert pool.shape[1:] == expected, (pool.shape, expected)
        assert pool.dtype == model.dtype
        assert pool.is_contiguous()
        self.model = model
        self.pool = pool
        self.check: Callable[[], None] = _go_on
        self._graphs = None
        # Experts are chosen by reading counts back from the device, which cannot be captured.
        if model.device.type == "cuda" and config.moe is None:
            from weir.models.decode_graphs import DecodeGraphs  # Triton is not everywhere

            self._graphs = DecodeGraphs(model, pool)

    def run(self, batch: Batch) -> Tensor:
        """Write the new tokens' KV into the pool; float32 logits [len(batch.logit_rows), vocab]."""
        if self._graphs is not None:
            logits = self._graphs.run(batch)
            if logits is not None:
                return logits
        prefills = batch.num_tokens > batch.num_decodes
        return self.model.forward(batch, self.pool, self.check if prefills else _go_on)


def _go_on() -> None:
    """Nothing is given up."""
