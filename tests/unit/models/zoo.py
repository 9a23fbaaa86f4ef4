"""Tiny random models of every architecture, made by transformers from a printed seed."""

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 307
MODEL_SEED = 20261
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE: dict[str, Any] = {"moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 2}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# name -> (transformers config class, what differs from _SIZES)
ZOO: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-multi-query-tied": ("LlamaConfig", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama3-rope": ("LlamaConfig", {"rope_scaling": _LLAMA3, "head_dim": 32}),
    "llama-linear-rope": ("LlamaConfig", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", {"sliding_window": 21}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": ("Qwen2MoeConfig", {**_MOE, "shared_expert_intermediate_size": 80}),
    "qwen2-moe-mixed": (
        "Qwen2MoeConfig",
        {**_MOE, "shared_expert_intermediate_size": 80, "mlp_only_layers": [0], "norm_topk_prob": True},
    ),
    "qwen3-moe": ("Qwen3MoeConfig", {**_MOE, "head_dim": 32, "norm_topk_prob": True}),
    "qwen3-moe-sparse-step": ("Qwen3MoeConfig", {**_MOE, "head_dim": 32, "decoder_sparse_step": 2}),
}


def make(name: str, folder: Path, seed: int = MODEL_SEED, **saving: Any) -> Any:
    """Save the model ``name`` into ``folder`` and return it. Prints the seed."""
    print(f"model {name} seed {seed}")
    config_class, changes = ZOO[name]
    config = getattr(transformers, config_class)(**{**_SIZES, **changes})
    generator = torch.Generator().manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for tensor_name, tensor in sorted(model.state_dict().items()):
            tensor.copy_(_values(tensor_name, tensor, generator))
    model.save_pretrained(folder, **saving)
    return model


def _values(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Wide enough that attention, experts and logits are decided clearly, not by rounding."""
    noise = torch.randn(tensor.shape, generator=generator)
    if "norm" in name:
        return 1.0 + 0.2 * noise
    if name.endswith("bias"):
        return 0.3 * noise
    if "embed_tokens" in name or "lm_head" in name:
        return noise
    scale: float = 1.7 / tensor.shape[-1] ** 0.5
    return noise * scale


def greedy(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """transformers' own answer, never stopping early."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        eos_token_id=None,
    )
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer
