"""GGUF files of the Llama family, read as a Hugging Face config and Hugging Face tensors. numpy only, no torch.

llama.cpp stores three things its own way, all undone here: names; expert weights stacked in one tensor; and,
for ``llama`` only, the rows of q and k interleaved so that a rotated pair is adjacent.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from weir.errors import ModelError

Array = npt.NDArray[np.float32]

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_EXPERTS = {
    "ffn_gate_exps": ("gate_proj", "w1"),
    "ffn_up_exps": ("up_proj", "w3"),
    "ffn_down_exps": ("down_proj", "w2"),
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# What Meta trained Llama 3.1 and later with; a GGUF keeps only the resulting table of divisors.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One Hugging Face tensor to be made: ``expert`` picks a slice of a stacked source."""

    name: str
    source: Any
    shape: tuple[int, ...]
    expert: int | None
    interleaved_heads: int


class GgufModel:
    """One GGUF file. Raises ModelError when it is not GGUF, truncated, or of another architecture."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = gguf.GGUFReader(str(path))
        except FileNotFoundError:
            raise ModelError(str(path), None, "file is missing") from None
        except Exception as error:  # the reader raises whatever numpy does on a short or foreign file
            raise ModelError(str(path), None, f"expected a readable GGUF file: {error}") from error
        self._sources = {tensor.name: tensor for tensor in self._reader.tensors}
        kind = self.field("general.architecture")
        if kind not in _ARCHITECTURES:
            raise ModelError(
                str(path), "general.architecture", f"found {kind!r}, supported: {', '.join(_ARCHITECTURES)}"
            )
        self.kind = str(kind)
        self.experts = int(self.field(f"{kind}.expert_count", 0))
        self.architecture = _ARCHITECTURES[self.kind]
        if self.kind == "llama" and self.experts:
            self.architecture = "MixtralForCausalLM"

    def field(self, key: str, default: Any = None) -> Any:
        """A metadata value; ``default`` when absent."""
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def config(self) -> dict[str, Any]:
        """The model's config.json. Floats are rounded to the shortest text that is the same float32."""
        heads, hidden = self._need("attention.head_count"), self._need("embedding_length")
        vocab = self._source("token_embd.weight").shape[1]
        config = {
            "architectures": [self.architecture],
            "model_type": _MODEL_TYPES[self.architecture],
            "hidden_act": "silu",
            "vocab_size": int(vocab),
            "hidden_size": hidden,
            "intermediate_size": self._need("feed_forward_length"),
            "num_hidden_layers": self._need("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._own("attention.head_count_kv", heads),
            "head_dim": self._own("attention.key_length", hidden // heads),
            "max_position_embeddings": self._need("context_length"),
            "rms_norm_eps": _short(self._need("attention.layer_norm_rms_epsilon")),
            "rope_theta": _short(self._own("rope.freq_base", 10000.0)),
            "rope_scaling": self._rope_scaling(),
            "tie_word_embeddings": "output.weight" not in self._sources,
            "attention_bias": self.kind == "llama" and "blk.0.attn_q.bias" in self._sources,
            "torch_dtype": "float32",
            "bos_token_id": self.field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._stop_ids(),
        }
        return config | (self._experts_config() if self.experts else {})

    def plans(self) -> list[TensorPlan]:
        """The Hugging Face tensors in file order, not yet read."""
        return [plan for tensor in self._reader.tensors for plan in self._plan(tensor)]

    def read(self, plan: TensorPlan) -> Array:
        """The tensor as float32, C-contiguous, of ``plan.shape``."""
        source = plan.source
        data = source.data if plan.expert is None else source.data[plan.expert]
        try:
            values = gguf.quants.dequantize(data, source.tensor_type)
        except NotImplementedError as error:
            raise ModelError(str(self.path), source.name, f"type {source.tensor_type.name} cannot be read") from error
        values = values.reshape(plan.shape)
        if plan.interleaved_heads:
            values = _undo_interleave(values, plan.interleaved_heads)
        return np.ascontiguousarray(values, dtype=np.float32)

    def _own(self, key: str, default: Any) -> Any:
        return self.field(f"{self.kind}.{key}", default)

    def _need(self, key: str) -> Any:
        value = self._own(key, None)
        if value is None:
            raise ModelError(str(self.path), f"{self.kind}.{key}", "required metadata is missing")
        return value

    def _source(self, name: str) -> Any:
        if name not in self._sources:
            raise ModelError(str(self.path), name, "tensor is missing")
        return self._sources[name]

    def _stop_ids(self) -> list[int]:
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        return sorted({int(value) for value in map(self.field, keys) if value is not None})

    def _experts_config(self) -> dict[str, Any]:
        used = self._need("expert_used_count")
        if self.kind == "llama":
            return {"num_local_experts": self.experts, "num_experts_per_tok": used, "sliding_window": None}
        shared = self._sources.get("blk.0.ffn_gate_shexp.weight")
        return {
            "num_experts": self.experts,
            "num_experts_per_tok": used,
            "moe_intermediate_size": int(self._source("blk.0.ffn_gate_exps.weight").shape[1]),
            "norm_topk_prob": self.kind == "qwen3moe",
            **({"shared_expert_intermediate_size": int(shared.shape[1])} if shared is not None else {}),
        }

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind = self._own("rope.scaling.type", "none")
        if "rope_freqs.weight" in self._sources:
            return self._llama3_scaling()
        if kind == "none":
            return None
        if kind != "linear":
            raise ModelError(str(self.path), f"{self.kind}.rope.scaling.type", f"found {kind!r}, supported: linear")
        return {"rope_type": "linear", "factor": _short(self._need("rope.scaling.factor"))}

    def _llama3_scaling(self) -> dict[str, Any]:
        """Find the factor behind a table of divisors, and check that it explains the whole table."""
        source = self._source("rope_freqs.weight")
        divisors = gguf.quants.dequantize(source.data, source.tensor_type).reshape(-1)
        theta = float(self._own("rope.freq_base", 10000.0))
        factor = float(divisors.max())
        inverse = 1.0 / theta ** (np.arange(divisors.size) / divisors.size)
        turns = _LLAMA3_ORIGINAL * inverse / (2 * np.pi)
        smooth = np.clip((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
        if not np.allclose(1.0 / ((1 - smooth) / factor + smooth), divisors, rtol=1e-4):
            raise ModelError(str(self.path), "rope_freqs.weight", "divisors are not those of llama3 rope scaling")
        return {
            "rope_type": "llama3",
            "factor": _short(factor),
            "low_freq_factor": _LLAMA3_LOW,
            "high_freq_factor": _LLAMA3_HIGH,
            "original_max_position_embeddings": _LLAMA3_ORIGINAL,
        }

    def _plan(self, tensor: Any) -> Iterator[TensorPlan]:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        stem, _, suffix = tensor.name.rpartition(".")
        if tensor.name == "rope_freqs.weight":
            return
        if stem in _TOP:
            yield TensorPlan(f"{_TOP[stem]}.{suffix}", tensor, shape, None, 0)
            return
        match = _BLOCK_NAME.fullmatch(tensor.name)
        if match is None:
            raise ModelError(str(self.path), tensor.name, f"unknown tensor for architecture {self.kind}")
        layer, part, suffix = match.groups()
        prefix = f"model.layers.{layer}."
        mixtral = self.architecture == "MixtralForCausalLM"
        if part in _EXPERTS:
            where = f"{prefix}block_sparse_moe" if mixtral else f"{prefix}mlp"
            for expert in range(shape[0]):
                yield TensorPlan(
                    f"{where}.experts.{expert}.{_EXPERTS[part][mixtral]}.weight", tensor, shape[1:], expert, 0
                )
        elif part == "ffn_gate_inp":
            yield TensorPlan(
                prefix + ("block_sparse_moe" if mixtral else "mlp") + ".gate.weight", tensor, shape, None, 0
            )
        elif part in _BLOCK:
            shape = (1, *shape) if part == "ffn_gate_inp_shexp" and len(shape) == 1 else shape
            yield TensorPlan(f"{prefix}{_BLOCK[part]}.{suffix}", tensor, shape, None, self._interleaved(part))
        else:
            raise ModelError(str(self.path), tensor.name, f"unknown tensor for architecture {self.kind}")

    def _interleaved(self, part: str) -> int:
        if self.kind != "llama" or part not in ("attn_q", "attn_k"):
            return 0
        heads = int(self._need("attention.head_count"))
        return heads if part == "attn_q" else int(self._own("attention.head_count_kv", heads))


def _undo_interleave(values: Array, heads: int) -> Array:
    """Rows (head, pair, half) back to (head, half, pair)."""
    rows = values.shape[0]
    return values.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)


def _short(value: float) -> float:
    return float(str(np.float32(value)))
