"""config.json in, ModelConfig or an error that names file, key and what is supported out."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weir.errors import ModelError
from weir.models.config import RopeConfig, load_config, parse_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "eos_token_id": [2, 3],
}
QWEN3_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def parse(**changes: Any) -> Any:
    return parse_config(LLAMA | changes, "config.json")


def test_defaults_and_derived_values() -> None:
    config = parse()
    assert (config.head_dim, config.group_size, config.windows) == (16, 2, (None, None, None))
    assert config.eos_token_ids == (2, 3)
    assert config.kv_bytes_per_token(4) == 3 * 2 * 2 * 16 * 4
    assert config.rope == RopeConfig(5000.0)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm) == (False, False, False, False)


def test_rope_is_read_from_both_generations_of_transformers() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = parse(rope_scaling={"type": "llama3", **scaling})
    new = parse(rope_theta=None, rope_parameters={"rope_type": "llama3", "rope_theta": 5000.0, **scaling})
    assert old.rope == new.rope == RopeConfig(5000.0, "llama3", 8.0, 1.0, 4.0, 64)
    assert old.rope.canonical() == "llama3 theta=5000.0 factor=8.0 low=1.0 high=4.0 original=64"


def test_windows_of_mistral_and_qwen() -> None:
    mistral, qwen = {"architectures": ["MistralForCausalLM"]}, {"architectures": ["Qwen2ForCausalLM"]}
    assert parse(**mistral, sliding_window=None).windows == (None,) * 3
    assert parse(**mistral, sliding_window=64).windows == (64,) * 3
    assert parse(**qwen, sliding_window=64, max_window_layers=2).windows == (None,) * 3
    on = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    assert parse(**qwen, **on).windows == (None, None, 64)


def test_biases_and_norms_by_architecture() -> None:
    qwen2, qwen3 = parse(architectures=["Qwen2ForCausalLM"]), parse(architectures=["Qwen3ForCausalLM"])
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm) == (False, False, True)
    llama = parse(attention_bias=True)
    assert (llama.qkv_bias, llama.output_bias) == (True, True)


def test_sparse_layers_follow_step_and_exceptions() -> None:
    config = parse_config(QWEN3_MOE | {"decoder_sparse_step": 2, "num_hidden_layers": 6, "mlp_only_layers": [3]}, "c")
    assert config.moe is not None
    assert config.moe.sparse_layers == {1, 5}


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures", "LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": None}, "architectures", "supported is one of"),
        ({"hidden_act": "gelu"}, "hidden_act", "found 'gelu', supported is 'silu'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.rope_type", "supported: default, linear, llama3"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor", "required key is missing"),
        ({"rope_scaling": 3}, "rope_scaling", "expected an object, found 3"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "must divide num_attention_heads = 4, is 3"),
        ({"vocab_size": None}, "vocab_size", "required key is missing"),
        ({"vocab_size": "many"}, "vocab_size", "expected a number, found 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers", "expected a whole number >= 1, found 0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config", "not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "supported is 1.0"),
    ],
)
def test_errors_name_file_key_and_expectation(changes: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse(**changes)
    assert (caught.value.file, caught.value.tensor) == ("config.json", key)
    assert words in caught.value.expectation


def test_stop_ids_of_the_generation_config_win(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert load_config(tmp_path).eos_token_ids == (7,)


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_unreadable_config(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError) as caught:
        load_config(tmp_path)
    assert caught.value.file == str(tmp_path / "config.json")


def test_the_control_plane_can_import_it_without_torch() -> None:
    code = "import sys, weir.models.config, weir.models.demo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
