"""GGUF files give back the very tensors and settings they were made from."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.unit.models import gguf_maker, zoo
from weir.errors import ModelError
from weir.models import convert
from weir.models.config import load_config, parse_config
from weir.models.gguf_weights import GgufModel


def _no_tokenizer(path: Path, folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


@pytest.fixture(autouse=True)
def without_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "write_tokenizer", _no_tokenizer)


def _make(name: str, tmp_path: Path, **changes: Any) -> tuple[Path, dict[str, Any], Any]:
    model = zoo.make(name, tmp_path / "hf")
    tensors: dict[str, Any] = load_file(tmp_path / "hf" / "model.safetensors")
    extra = changes.pop("extra", {})
    path = tmp_path / "model.gguf"
    gguf_maker.write(path, gguf_maker.KINDS[name], model.config, tensors | extra, **changes)
    return path, tensors, model.config


def _llama3_divisors(theta: float, half: int) -> Any:
    """The table that llama.cpp stores for factor 8, frequencies 1 and 4, 8,192 positions."""
    divisors = []
    for n in range(half):
        wavelength = 2 * np.pi * theta ** (n / half)
        smooth = min(max((8192 / wavelength - 1) / 3, 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / 8 + smooth))
    return np.array(divisors, dtype=np.float32)


@pytest.mark.parametrize("name", [name for name in gguf_maker.KINDS if name != "llama3-rope"])
def test_conversion_restores_the_original_folder(name: str, tmp_path: Path) -> None:
    path, tensors, _ = _make(name, tmp_path)
    folder = convert.convert_gguf(path, tmp_path / "out")
    converted = load_file(folder / "model.safetensors")
    assert converted.keys() == tensors.keys()
    for key, values in tensors.items():
        np.testing.assert_array_equal(converted[key], values, err_msg=key)
    original, restored = load_config(tmp_path / "hf"), load_config(folder)
    for field in ("architecture", "head_dim", "num_kv_heads", "qkv_bias", "qk_norm", "tie_embeddings", "rope", "moe"):
        assert getattr(restored, field) == getattr(original, field), field
    assert restored.eos_token_ids == (2, 5)


def test_llama3_scaling_is_found_in_its_table_of_divisors(tmp_path: Path) -> None:
    path, _, _ = _make("llama3-rope", tmp_path, extra={"rope_freqs.weight": _llama3_divisors(10000.0, 16)})
    rope = parse_config(GgufModel(path).config(), "gguf").rope
    assert rope.canonical() == "llama3 theta=10000.0 factor=8.0 low=1.0 high=4.0 original=8192"


def test_a_foreign_table_of_divisors_is_refused(tmp_path: Path) -> None:
    path, _, _ = _make("llama3-rope", tmp_path, extra={"rope_freqs.weight": np.linspace(1, 5, 16)})
    with pytest.raises(ModelError, match="divisors are not those of llama3"):
        GgufModel(path).config()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantised_tensors_come_back_close(kind: str, tmp_path: Path) -> None:
    quantise = gguf.GGMLQuantizationType[kind]
    path, tensors, _ = _make("llama", tmp_path, quantise=quantise)
    model = GgufModel(path)
    plan = next(plan for plan in model.plans() if plan.name == "model.embed_tokens.weight")
    original, read = tensors[plan.name], model.read(plan)
    assert read.dtype == np.float32
    assert float(np.abs(read - original).max()) < {"Q8_0": 0.03, "Q4_1": 0.3, "F16": 0.002, "BF16": 0.02}[kind]


def test_missing_tensor_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    model = zoo.make("llama", tmp_path / "hf")
    tensors: dict[str, Any] = load_file(tmp_path / "hf" / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    path = tmp_path / "model.gguf"
    gguf_maker.write(path, "llama", model.config, tensors)
    with pytest.raises(ModelError) as caught:
        convert.convert_gguf(path, tmp_path / "cache" / "out")
    assert (caught.value.file, caught.value.tensor) == (str(path), "model.layers.1.mlp.up_proj.weight")
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == ["out.lock"]


def test_unknown_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"general.architecture: found 'mamba', supported: llama, qwen2"):
        GgufModel(tmp_path / "m.gguf")


@pytest.mark.parametrize("keep", [0, 3, 40, 900, -100])
def test_truncated_or_foreign_file(tmp_path: Path, keep: int) -> None:
    path, _, _ = _make("llama", tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError) as caught:
        convert.convert_gguf(path, tmp_path / "out")
    assert caught.value.file == str(path)
    assert not (tmp_path / "out").exists()


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="file is missing"):
        GgufModel(tmp_path / "none.gguf")


def test_two_converters_at_once_make_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, _ = _make("llama", tmp_path)
    written: list[Path] = []

    def tokenizer(source: Path, folder: Path) -> None:
        written.append(folder)
        _no_tokenizer(source, folder)

    monkeypatch.setattr(convert, "write_tokenizer", tokenizer)
    with ThreadPoolExecutor(4) as threads:
        folders = set(threads.map(lambda _: convert.convert_gguf(path, tmp_path / "cache" / "out"), range(4)))
    assert folders == {tmp_path / "cache" / "out"}
    assert len(written) == 1
    assert sorted(entry.name for entry in (tmp_path / "cache").iterdir()) == ["out", "out.lock"]


def test_a_folder_that_is_there_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, _ = _make("llama", tmp_path)
    folder = convert.convert_gguf(path, tmp_path / "out")
    monkeypatch.setattr(convert, "GgufModel", None)
    assert convert.convert_gguf(path, tmp_path / "out") == folder
