"""From a model folder to a Model that is ready to run."""

from pathlib import Path

import torch
from torch import Tensor

from weir.errors import InvalidArgument, ModelError
from weir.models.backend import Backend, cpu_backend
from weir.models.config import ModelConfig, load_config
from weir.models.layers import Norm
from weir.models.linear import joined_bias
from weir.models.llama import DecoderLayer, Model, ModelWeights
from weir.models.loader import Weights
from weir.models.moe import DenseMlp, FeedForward, MixtureOfExperts, SharedExpert
from weir.models.shapes import expert_names, expert_prefix

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(folder: Path, *, dtype: str = "float32", device: str = "cpu") -> Model:
    """Load a Hugging Face folder. Every tensor is checked before any is used.

    Raises ModelError naming file, tensor or key, and what was expected; InvalidArgument for a device that is
    not there.
    """
    config = load_config(folder)
    if dtype not in DTYPES:
        raise ModelError(str(folder), "dtype", f"found {dtype!r}, supported: {', '.join(DTYPES)}")
    place = torch.device(device)
    with torch.inference_mode():
        weights = Weights(folder, config, DTYPES[dtype], place)
        return assemble(config, weights, _backend(config, DTYPES[dtype], place))


def assemble(config: ModelConfig, weights: Weights, backend: Backend) -> Model:
    """A model out of checked weights and a back end of the same device."""
    return _Builder(config, weights, backend).model()


def model_fingerprint_fields(model: Model) -> dict[str, str | int]:
    """The fields of transfer.fingerprint.Fingerprint that the model determines."""
    config = model.config
    dtype = str(model.dtype).removeprefix("torch.")
    return {
        "weights": model.weights_digest,
        "architecture": config.architecture,
        "dtype": dtype,
        "kv_dtype": dtype,
        "layers": config.num_layers,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope": config.rope.canonical(),
    }


def _backend(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Backend:
    if device.type == "cpu":
        return cpu_backend(config, dtype)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise InvalidArgument("device", str(device), "must be cpu, or cuda on a machine where torch finds a GPU")
    from weir.models.cuda import cuda_backend  # Triton is not everywhere

    return cuda_backend(config, device)


class _Builder:
    """Names of tensors meet layers here and nowhere else."""

    def __init__(self, config: ModelConfig, weights: Weights, backend: Backend) -> None:
        self._config = config
        self._weights = weights
        self._backend = backend
        self._linears = backend.linears

    def model(self) -> Model:
        config, weights = self._config, self._weights
        embedding = weights.tensor("model.embed_tokens.weight")
        head = embedding if config.tie_embeddings else weights.tensor("lm_head.weight")
        parts = ModelWeights(
            embedding=embedding,
            layers=tuple(self._layer(number) for number in range(config.num_layers)),
            norm=self._norm("model.norm"),
            head=self._linears.linear(head, None),
        )
        return Model(config, parts, self._backend.rotary, self._backend.attention, weights.digest())

    def _layer(self, number: int) -> DecoderLayer:
        at = f"model.layers.{number}."
        attention = at + "self_attn."
        names = [attention + part for part in ("q_proj", "k_proj", "v_proj")]
        qkv = torch.cat([self._weights.tensor(name + ".weight") for name in names])
        qk_norm = self._config.qk_norm
        return DecoderLayer(
            input_norm=self._norm(at + "input_layernorm"),
            qkv=self._linears.linear(qkv, joined_bias(*(self._bias(name) for name in names))),
            q_norm=self._norm(attention + "q_norm") if qk_norm else None,
            k_norm=self._norm(attention + "k_norm") if qk_norm else None,
            output=self._linears.linear(
                self._weights.tensor(attention + "o_proj.weight"), self._bias(attention + "o_proj")
            ),
            post_norm=self._norm(at + "post_attention_layernorm"),
            feed_forward=self._feed_forward(number),
        )

    def _feed_forward(self, layer: int) -> FeedForward:
        moe, dense = self._config.moe, ("gate_proj", "up_proj", "down_proj")
        if moe is None or layer not in moe.sparse_layers:
            return self._mlp(f"model.layers.{layer}.mlp.", dense)
        at = expert_prefix(self._config, layer)
        names = expert_names(self._config)
        experts = [self._mlp(f"{at}experts.{expert}.", names) for expert in range(moe.num_experts)]
        shared = None
        if moe.shared_intermediate_size:
            gate = self._weights.tensor(at + "shared_expert_gate.weight")
            shared = SharedExpert(self._mlp(at + "shared_expert.", dense), gate)
        router = self._weights.tensor(at + "gate.weight")
        return MixtureOfExperts(router, experts, moe.experts_per_token, moe.norm_topk, shared)

    def _mlp(self, prefix: str, names: tuple[str, str, str]) -> DenseMlp:
        gate, up, down = (prefix + name for name in names)
        gated = self._linears.gated(
            self._weights.tensor(gate + ".weight"),
            self._weights.tensor(up + ".weight"),
            self._bias(gate),
            self._bias(up),
        )
        return DenseMlp(gated, self._linears.linear(self._weights.tensor(down + ".weight"), self._bias(down)))

    def _norm(self, name: str) -> Norm:
        return self._backend.norm(self._weights.tensor(name + ".weight"), self._config.rms_norm_eps)

    def _bias(self, name: str) -> Tensor | None:
        return self._weights.optional(name + ".bias")
