"""Which tensors a model folder must hold, by Hugging Face name and shape. Imports no torch."""

from weir.models.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def expected_shapes(config: ModelConfig) -> Shapes:
    """Every tensor the model needs; Linear weights are [out, in]."""
    shapes: Shapes = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (config.hidden_size,)
        shapes[prefix + "post_attention_layernorm.weight"] = (config.hidden_size,)
        shapes.update(_attention(config, prefix + "self_attn."))
        shapes.update(_feed_forward(config, layer, prefix))
    return shapes


def expert_prefix(config: ModelConfig, layer: int) -> str:
    """Where a sparse layer's router and experts live."""
    return f"model.layers.{layer}.{'block_sparse_moe' if config.architecture.startswith('Mixtral') else 'mlp'}."


def expert_names(config: ModelConfig) -> tuple[str, str, str]:
    """The names of an expert's gate, up and down projection."""
    return ("w1", "w3", "w2") if config.architecture.startswith("Mixtral") else ("gate_proj", "up_proj", "down_proj")


def _attention(config: ModelConfig, prefix: str) -> Shapes:
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: Shapes = {}
    for name, out in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        shapes[f"{prefix}{name}.weight"] = (out, config.hidden_size)
        if config.qkv_bias:
            shapes[f"{prefix}{name}.bias"] = (out,)
    shapes[prefix + "o_proj.weight"] = (config.hidden_size, q)
    if config.output_bias:
        shapes[prefix + "o_proj.bias"] = (config.hidden_size,)
    if config.qk_norm:
        shapes[prefix + "q_norm.weight"] = shapes[prefix + "k_norm.weight"] = (config.head_dim,)
    return shapes


def _feed_forward(config: ModelConfig, layer: int, prefix: str) -> Shapes:
    moe, hidden = config.moe, config.hidden_size
    if moe is None or layer not in moe.sparse_layers:
        dense = ("gate_proj", "up_proj", "down_proj")
        return _mlp(prefix + "mlp.", dense, hidden, config.intermediate_size, config.mlp_bias)
    at = expert_prefix(config, layer)
    shapes: Shapes = {at + "gate.weight": (moe.num_experts, hidden)}
    for expert in range(moe.num_experts):
        shapes.update(_mlp(f"{at}experts.{expert}.", expert_names(config), hidden, moe.intermediate_size, False))
    if moe.shared_intermediate_size:
        names = ("gate_proj", "up_proj", "down_proj")
        shapes.update(_mlp(at + "shared_expert.", names, hidden, moe.shared_intermediate_size, False))
        shapes[at + "shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _mlp(prefix: str, names: tuple[str, str, str], hidden: int, width: int, bias: bool) -> Shapes:
    gate, up, down = names
    shapes: Shapes = {}
    for name, out, into in ((gate, width, hidden), (up, width, hidden), (down, hidden, width)):
        shapes[f"{prefix}{name}.weight"] = (out, into)
        if bias:
            shapes[f"{prefix}{name}.bias"] = (out,)
    return shapes
