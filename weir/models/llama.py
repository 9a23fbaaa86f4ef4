"""The Llama family: one forward pass over a Batch, reading and writing the paged KV pool."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from weir.engine.batch import Batch
from weir.models.attention import AttentionBackend, StepAttention
from weir.models.config import ModelConfig
from weir.models.layers import Norm
from weir.models.linear import Linear
from weir.models.moe import FeedForward
from weir.models.rope import Rotary, Rotation


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The weights of one layer; ``qkv`` is the three projections joined, in that order."""

    input_norm: Norm
    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    output: Linear
    post_norm: Norm
    feed_forward: FeedForward


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Everything a model computes with. ``embedding`` is [vocab, hidden]."""

    embedding: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    head: Linear


class Model:
    """A decoder-only transformer ready to run. Built by ``weir.models.build.load_model``."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        rotary: Rotary,
        attention: AttentionBackend,
        weights_digest: str,
    ) -> None:
        self.config = config
        self.weights_digest = weights_digest
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self.weights = weights
        self._rotary = rotary
        self.attention = attention

    @torch.inference_mode()
    def forward(self, batch: Batch, pool: Tensor, between: Callable[[], None] = lambda: None) -> Tensor:
        """One step: writes K and V of every new token into ``pool``; float32 logits [len(logit_rows), vocab].

        ``between`` is called before each layer; what it raises ends the step, whose K and V may be written again.

        ``pool`` is [blocks, layers, 2, kv_heads, block_size, head_dim] of the model's dtype and device.
        """
        assert pool.dtype == self.dtype
        token_ids = torch.tensor(batch.token_ids, device=self.device)
        positions = torch.tensor(batch.positions, device=self.device)
        attend = self.attention.step(batch, pool)
        return self.compute(token_ids, positions, attend, _last_rows(batch, self.device), between)

    def compute(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: StepAttention,
        last_rows: Tensor | None,
        between: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """The step on tensors alone: [T] ids and positions; logits of ``last_rows``, or of all tokens if None."""
        rotation = self._rotary.step(positions)
        hidden = F.embedding(token_ids, self.weights.embedding)
        final = len(self.weights.layers) - 1
        for number, layer in enumerate(self.weights.layers):
            between()
            attended = self._attend(layer, number, hidden, rotation, attend)
            if number == final and last_rows is not None:
                # Nothing after the last attention is needed but for the tokens whose logits are.
                attended, hidden = attended.index_select(0, last_rows), hidden.index_select(0, last_rows)
            hidden = layer.output.plus(attended, hidden)
            hidden = layer.feed_forward(layer.post_norm(hidden), hidden)
        return self.weights.head(self.weights.norm(hidden)).float()

    def _attend(
        self, layer: DecoderLayer, number: int, hidden: Tensor, rotation: Rotation, attend: StepAttention
    ) -> Tensor:
        heads, kv_heads, head_dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        qkv = layer.qkv(layer.input_norm(hidden)).view(hidden.shape[0], heads + 2 * kv_heads, head_dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.q_norm is None or layer.k_norm is None:
            q, k = rotation.joined(qk, heads)
        else:
            q, k = rotation.pair(layer.q_norm(qk[:, :heads]), layer.k_norm(qk[:, heads:]))
        return attend(number, q, k, v)


def _last_rows(batch: Batch, device: torch.device) -> Tensor | None:
    """Token rows whose logits are wanted; None when that is every row in order."""
    if batch.num_tokens == batch.num_decodes and len(batch.logit_rows) == batch.num_tokens:
        return None
    ends: list[int] = []
    total = 0
    for length in batch.query_lens:
        total += length
        ends.append(total - 1)
    return torch.tensor([ends[row] for row in batch.logit_rows], dtype=torch.int64, device=device)
