"""What a model is, read from a Hugging Face folder's config.json. Imports no torch: the router reads it too."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weir.errors import ModelError

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
)
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary settings. ``factor`` is 1 for ``default``; the last three matter for ``llama3`` only."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0

    def canonical(self) -> str:
        """Text that is equal exactly when two models rotate alike (a field of the KV fingerprint)."""
        text = f"{self.kind} theta={self.theta!r}"
        if self.kind != "default":
            text += f" factor={self.factor!r}"
        if self.kind == "llama3":
            text += f" low={self.low_freq_factor!r} high={self.high_freq_factor!r}"
            text += f" original={self.original_max_position}"
        return text


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixture of experts: each token goes to ``experts_per_token`` of ``num_experts``.

    ``shared_intermediate_size`` is 0 without a shared expert. ``norm_topk`` divides the chosen weights
    by their sum. ``sparse_layers`` are the layers with experts; the others keep a dense MLP.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int
    norm_topk: bool
    sparse_layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer of the Llama family. Sizes in elements, positions in tokens.

    ``qkv_bias``/``output_bias``/``mlp_bias`` say which projections carry a bias; ``qk_norm`` that each head
    of q and k is RMS-normalised before rotation (Qwen3). ``windows`` has one entry per layer: None, or the
    number of last tokens (itself included) that a token sees.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    windows: tuple[int | None, ...]
    moe: MoeConfig | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of K and V of all layers for one token."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * dtype_bytes


def load_config(folder: Path) -> ModelConfig:
    """Read ``folder``/config.json (and the stop ids of generation_config.json).

    Raises ModelError naming the file, the key and what is supported.
    """
    path = folder / "config.json"
    raw = _read_json(path)
    generation = folder / "generation_config.json"
    eos = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    return parse_config(raw, str(path), eos)


def parse_config(raw: Mapping[str, Any], file: str, generation_eos: int | list[int] | None = None) -> ModelConfig:
    """A config.json's dictionary as ModelConfig; ``file`` is only for messages."""
    keys = _Keys(raw, file)
    architecture = _architecture(keys)
    _refuse_unsupported(keys)
    layers, heads = keys.positive("num_hidden_layers"), keys.positive("num_attention_heads")
    hidden = keys.positive("hidden_size")
    kv_heads = keys.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        raise keys.error("num_key_value_heads", f"must divide num_attention_heads = {heads}, is {kv_heads}")
    head_dim = keys.positive("head_dim", hidden // heads)
    max_position = keys.positive("max_position_embeddings")
    attention_bias = bool(raw.get("attention_bias", False))
    qwen2 = architecture in ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM")
    moe = _moe(keys, architecture, layers)
    all_sparse = moe is not None and len(moe.sparse_layers) == layers
    return ModelConfig(
        architecture=architecture,
        vocab_size=keys.positive("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.positive("intermediate_size", 1 if all_sparse else None),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(keys.number("rms_norm_eps")),
        max_position=max_position,
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=bool(raw.get("qkv_bias", True)) if qwen2 else attention_bias,
        output_bias=not qwen2 and attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        rope=_rope(keys, max_position),
        windows=_windows(keys, architecture, layers),
        moe=moe,
        eos_token_ids=_ids(generation_eos if generation_eos is not None else raw.get("eos_token_id")),
        bos_token_id=raw.get("bos_token_id"),
    )


class _Keys:
    """A config dictionary with errors that name the file and the key."""

    def __init__(self, raw: Mapping[str, Any], file: str) -> None:
        self.raw = raw
        self.file = file

    def error(self, key: str, expectation: str) -> ModelError:
        return ModelError(self.file, key, expectation)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(key, "required key is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, f"expected a number, found {value!r}")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value) or value < 1:
            raise self.error(key, f"expected a whole number >= 1, found {value!r}")
        return int(value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(str(path), None, "file is missing; expected a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise ModelError(str(path), None, f"expected readable JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(str(path), None, "expected a JSON object")
    return raw


def _architecture(keys: _Keys) -> str:
    named = keys.raw.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in ARCHITECTURES:
        raise keys.error("architectures", f"found {named!r}, supported is one of {', '.join(ARCHITECTURES)}")
    return str(named[0])


def _refuse_unsupported(keys: _Keys) -> None:
    activation = keys.raw.get("hidden_act", "silu")
    if activation != "silu":
        raise keys.error("hidden_act", f"found {activation!r}, supported is 'silu'")
    if keys.raw.get("quantization_config"):
        raise keys.error("quantization_config", "quantised safetensors are not supported; use fp32, fp16 or bf16")


def _rope(keys: _Keys, max_position: int) -> RopeConfig:
    """transformers 4 writes rope_theta and rope_scaling, transformers 5 one rope_parameters."""
    merged: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = keys.raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise keys.error(key, f"expected an object, found {value!r}")
        merged.update(value or {})
    kind = merged.get("rope_type", merged.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise keys.error("rope_scaling.rope_type", f"found {kind!r}, supported: {', '.join(ROPE_TYPES)}")
    if float(keys.raw.get("partial_rotary_factor") or merged.get("partial_rotary_factor") or 1.0) != 1.0:
        raise keys.error("partial_rotary_factor", "supported is 1.0")
    part = _Keys(merged, keys.file)
    theta = float(part.number("rope_theta", keys.number("rope_theta", 10000.0)))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, float(part.number("factor")))
    return RopeConfig(
        theta,
        kind,
        float(part.number("factor")),
        float(part.number("low_freq_factor")),
        float(part.number("high_freq_factor")),
        part.positive("original_max_position_embeddings", max_position),
    )


def _windows(keys: _Keys, architecture: str, layers: int) -> tuple[int | None, ...]:
    """Sliding windows by layer. Qwen uses them only when told to, and from ``max_window_layers`` on."""
    raw, unlimited = keys.raw, (None,) * layers
    if architecture == "LlamaForCausalLM" or not raw.get("sliding_window"):
        return unlimited
    if architecture.startswith("Qwen") and not raw.get("use_sliding_window", False):
        return unlimited
    window = keys.positive("sliding_window")
    kinds = raw.get("layer_types")
    if kinds is not None:
        if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
            raise keys.error("layer_types", f"expected {layers} of 'full_attention' or 'sliding_attention'")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = int(raw.get("max_window_layers", 0)) if architecture.startswith("Qwen") else 0
    return tuple(window if layer >= first else None for layer in range(layers))


def _moe(keys: _Keys, architecture: str, layers: int) -> MoeConfig | None:
    if architecture == "MixtralForCausalLM":
        experts, width = keys.positive("num_local_experts"), keys.positive("intermediate_size")
        return MoeConfig(experts, keys.positive("num_experts_per_tok"), width, 0, True, frozenset(range(layers)))
    if architecture not in ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"):
        return None
    step, dense = keys.positive("decoder_sparse_step", 1), set(keys.raw.get("mlp_only_layers") or ())
    shared = architecture == "Qwen2MoeForCausalLM"
    return MoeConfig(
        num_experts=keys.positive("num_experts" if "num_experts" in keys.raw else "num_local_experts"),
        experts_per_token=keys.positive("num_experts_per_tok"),
        intermediate_size=keys.positive("moe_intermediate_size"),
        shared_intermediate_size=keys.positive("shared_expert_intermediate_size") if shared else 0,
        norm_topk=bool(keys.raw.get("norm_topk_prob", False)),
        sparse_layers=frozenset(n for n in range(layers) if n not in dense and (n + 1) % step == 0),
    )


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
