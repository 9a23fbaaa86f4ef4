"""GGUF files as llama.cpp's converter writes them, made from tiny models of transformers."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

KINDS = {
    "llama": "llama",
    "llama3-rope": "llama",
    "llama-linear-rope": "llama",
    "llama-multi-query-tied": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2-moe": "qwen2moe",
    "qwen3-moe": "qwen3moe",
}
_NAMES = (
    ("model.embed_tokens", "token_embd"),
    ("lm_head", "output"),
    ("model.norm", "output_norm"),
    ("model.layers.", "blk."),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("block_sparse_moe", "mlp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate.", "ffn_gate_inp."),
)
_EXPERT = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
_EXPERT |= {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}


def write(path: Path, kind: str, config: Any, tensors: dict[str, Any], quantise: Any = None) -> None:
    """``tensors`` by Hugging Face name; ``quantise`` is a GGMLQuantizationType for the embedding."""
    writer = gguf.GGUFWriter(str(path), kind)
    _metadata(writer, config)
    for name, values in _renamed(kind, config, tensors).items():
        if quantise is not None and name == "token_embd.weight":
            writer.add_tensor(name, gguf.quants.quantize(values, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _metadata(writer: Any, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.rope_parameters["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)


def _renamed(kind: str, config: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    stacks: dict[str, list[Any]] = {}
    for name in sorted(tensors, key=_expert_order):
        values = np.asarray(tensors[name], dtype=np.float32)
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = _interleave(values, heads)
        for old, new in _NAMES:
            name = name.replace(old, new)
        if ".experts." in name:
            block, _, rest = name.partition(".mlp.experts.")
            stacks.setdefault(f"{block}.{_EXPERT[rest.split('.')[1]]}.weight", []).append(values)
        else:
            out[name] = values[0] if "inp_shexp" in name else np.ascontiguousarray(values)
    return out | {name: np.stack(parts) for name, parts in stacks.items()}


def _expert_order(name: str) -> tuple[int, str]:
    _, _, rest = name.partition(".experts.")
    return (int(rest.split(".")[0]) if rest else -1, name)


def _interleave(values: Any, heads: int) -> Any:
    """llama.cpp's own permutation (convert_hf_to_gguf.py, LlamaModel.permute)."""
    shape = (heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return values.reshape(shape).swapaxes(1, 2).reshape(values.shape)
