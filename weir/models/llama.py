"""The Llama family: one forward pass over a Batch, reading and writing the paged KV pool."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from weir.engine.batch import Batch
from weir.models.attention import AttentionBackend, StepAttention
from weir.models.config import ModelConfig
from weir.models.layers import RmsNorm
from weir.models.linear import Linear
from weir.models.moe import FeedForward
from weir.models.rope import RotaryTable, rotate


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The weights of one layer; ``qkv`` is the three projections joined, in that order."""

    input_norm: RmsNorm
    qkv: Linear
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None
    output: Linear
    post_norm: RmsNorm
    feed_forward: FeedForward


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Everything a model computes with. ``embedding`` is [vocab, hidden]."""

    embedding: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: RmsNorm
    head: Linear


class Model:
    """A decoder-only transformer ready to run. Built by ``weir.models.build.load_model``."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        rope: RotaryTable,
        attention: AttentionBackend,
        weights_digest: str,
    ) -> None:
        self.config = config
        self.weights_digest = weights_digest
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self.weights = weights
        self._rope = rope
        self._attention = attention

    @torch.inference_mode()
    def forward(self, batch: Batch, pool: Tensor) -> Tensor:
        """One step: writes K and V of every new token into ``pool``; float32 logits [len(logit_rows), vocab].

        ``pool`` is [blocks, layers, 2, kv_heads, block_size, head_dim] of the model's dtype and device.
        """
        assert pool.dtype == self.dtype
        attend = self._attention.step(batch, pool)
        cos, sin = self._rope.rows(torch.tensor(batch.positions, device=self.device))
        cos, sin = cos[:, None, :].to(self.dtype), sin[:, None, :].to(self.dtype)
        hidden = F.embedding(torch.tensor(batch.token_ids, device=self.device), self.weights.embedding)
        last_rows = _last_rows(batch, self.device)
        final = len(self.weights.layers) - 1
        for number, layer in enumerate(self.weights.layers):
            attended = self._attend(layer, number, hidden, cos, sin, attend)
            if number == final and last_rows is not None:
                # Nothing after the last attention is needed but for the tokens whose logits are.
                attended, hidden = attended.index_select(0, last_rows), hidden.index_select(0, last_rows)
            hidden = layer.output.plus(attended, hidden)
            hidden = layer.feed_forward(layer.post_norm(hidden), hidden)
        return self.weights.head(self.weights.norm(hidden)).float()

    def _attend(
        self, layer: DecoderLayer, number: int, hidden: Tensor, cos: Tensor, sin: Tensor, attend: StepAttention
    ) -> Tensor:
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = layer.qkv(layer.input_norm(hidden)).view(hidden.shape[0], heads + 2 * kv_heads, config.head_dim)
        v = qkv[:, heads + kv_heads :]
        if layer.q_norm is None or layer.k_norm is None:
            turned = rotate(qkv[:, : heads + kv_heads], cos, sin)
            return attend(number, turned[:, :heads], turned[:, heads:], v)
        q = rotate(layer.q_norm(qkv[:, :heads]), cos, sin)
        k = rotate(layer.k_norm(qkv[:, heads : heads + kv_heads]), cos, sin)
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
