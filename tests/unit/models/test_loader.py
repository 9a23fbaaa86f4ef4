"""Folders that load, and every way in which one must not."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.models import zoo
from tests.unit.models.driver import Sequence, generate, make_pool, step_batch
from weir.errors import ModelError
from weir.models.build import load_model, model_fingerprint_fields
from weir.models.llama import Model
from weir.models.safetensors_file import read_folder, weights_digest

PROMPT = [5, 200, 17, 3, 99]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    zoo.make("llama", tmp_path)
    return tmp_path


def _edit(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


def _refusal(folder: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    return caught.value


def _greedy(model: Model) -> list[int]:
    return generate(model, make_pool(model, 2), [Sequence(PROMPT, [1, 0])], 8)[0]


def test_sharded_and_single_folders_agree(tmp_path: Path) -> None:
    reference = zoo.make("llama", tmp_path / "single")
    zoo.make("llama", tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 1
    single, sharded = load_model(tmp_path / "single"), load_model(tmp_path / "sharded")
    assert _greedy(single) == _greedy(sharded) == zoo.greedy(reference, PROMPT, 8)
    assert single.weights_digest == sharded.weights_digest


def test_the_digest_changes_with_a_weight_and_with_precision(folder: Path) -> None:
    before = weights_digest(read_folder(folder))
    assert before == weights_digest(read_folder(folder))
    norm = load_file(folder / "model.safetensors")["model.norm.weight"]
    _edit(folder, **{"model.norm.weight": norm + 0.5})
    after = weights_digest(read_folder(folder))
    _edit(folder, **{"model.norm.weight": (norm + 0.5).bfloat16()})
    assert len({before, after, weights_digest(read_folder(folder))}) == 3


def test_fingerprint_fields(folder: Path) -> None:
    model = load_model(folder)
    assert model_fingerprint_fields(model) == {
        "weights": model.weights_digest,
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "kv_dtype": "float32",
        "layers": 2,
        "kv_heads": 2,
        "head_dim": 16,
        "rope": "default theta=10000.0",
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_load_as_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    reference: Any = zoo.make("llama", tmp_path).to(dtype)
    reference.save_pretrained(tmp_path)
    assert _greedy(load_model(tmp_path)) == zoo.greedy(reference.float(), PROMPT, 8)


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_half_precision_runs_close_to_float32(folder: Path, half: str) -> None:
    logits = []
    for dtype in ("float32", half):
        model = load_model(folder, dtype=dtype)
        pool = make_pool(model, 2)
        sequence = Sequence(PROMPT, [1, 0])
        logits.append(model.forward(step_batch([sequence], 100)[0], pool))
        sequence.computed, sequence.output = len(PROMPT), [7]
        logits.append(model.forward(step_batch([sequence], 100)[0], pool))
    for exact, rounded in ((logits[0], logits[2]), (logits[1], logits[3])):
        assert torch.nn.functional.cosine_similarity(exact, rounded).item() > 0.995


def test_unknown_dtype(folder: Path) -> None:
    with pytest.raises(ModelError, match="found 'int4', supported: float32, bfloat16, float16"):
        load_model(folder, dtype="int4")


def test_missing_tensor(folder: Path) -> None:
    _edit(folder, **{"model.layers.1.mlp.up_proj.weight": None})
    error = _refusal(folder)
    assert error.tensor == "model.layers.1.mlp.up_proj.weight"
    assert error.expectation == "tensor is missing; expected shape [112, 64]"


def test_wrong_shape(folder: Path) -> None:
    _edit(folder, **{"lm_head.weight": torch.zeros(306, 64)})
    error = _refusal(folder)
    assert (error.file, error.tensor) == (str(folder / "model.safetensors"), "lm_head.weight")
    assert error.expectation == "expected shape [307, 64], found [306, 64]"


def test_wrong_dtype(folder: Path) -> None:
    _edit(folder, **{"model.norm.weight": torch.zeros(64, dtype=torch.int8)})
    assert _refusal(folder).expectation == "expected one of F32, F16, BF16, found I8"


def test_missing_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    error = _refusal(folder)
    assert (error.file, error.expectation) == (str(folder / "model.safetensors"), "file is missing")


def test_missing_shard(tmp_path: Path) -> None:
    zoo.make("llama", tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    error = _refusal(tmp_path)
    assert (error.file, error.expectation) == (str(shard), "file is missing")


def test_shard_without_a_promised_tensor(tmp_path: Path) -> None:
    zoo.make("llama", tmp_path, max_shard_size="100KB")
    index = tmp_path / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    first, last = sorted(set(raw["weight_map"].values()))[:: len(set(raw["weight_map"].values())) - 1]
    name = next(name for name, shard in raw["weight_map"].items() if shard == first)
    raw["weight_map"][name] = last
    index.write_text(json.dumps(raw))
    error = _refusal(tmp_path)
    assert (error.file, error.tensor) == (str(tmp_path / last), name)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": 3}'])
def test_broken_index(tmp_path: Path, text: str) -> None:
    zoo.make("llama", tmp_path, max_shard_size="100KB")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    error = _refusal(tmp_path)
    assert (error.file, error.tensor) == (str(index), "weight_map")


@pytest.mark.parametrize("keep", [-1, -4000, 1000, 100, 8, 3, 0])
def test_truncated_file(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    error = _refusal(folder)
    assert error.file == str(path)
    assert "truncated" in error.expectation


@pytest.mark.parametrize("at", [0, 4, 9])
def test_corrupt_header(folder: Path, at: int) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)
    assert _refusal(folder).file == str(path)


def test_extra_tensors_are_reported_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra, inv_freq = torch.zeros(3), "model.layers.0.self_attn.rotary_emb.inv_freq"
    _edit(folder, **{"vision.patch": extra, inv_freq: torch.zeros(8)})
    with caplog.at_level(logging.WARNING, "weir.models.loader"):
        load_model(folder)
    assert [record.getMessage() for record in caplog.records] == [f"{folder}: 1 tensors are not used: vision.patch"]
