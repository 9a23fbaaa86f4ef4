"""A GGUF file turned into a Hugging Face folder, once. No torch: the command line calls it."""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weir.errors import ModelError
from weir.models.config import parse_config
from weir.models.gguf_tokenizer import write_tokenizer
from weir.models.gguf_weights import GgufModel, TensorPlan
from weir.models.shapes import expected_shapes

_ALIGNMENT = 64


def convert_gguf(gguf_path: Path, out_dir: Path) -> Path:
    """Make ``out_dir`` from ``gguf_path`` unless it is there: config.json, model.safetensors (float32), tokenizer.

    ``out_dir`` appears whole or not at all (written beside it, then renamed), and processes that convert at
    once wait for the first. Raises ModelError naming file and tensor. Returns ``out_dir``.
    """
    if (out_dir / "config.json").is_file():
        return out_dir
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with _locked(out_dir.with_name(out_dir.name + ".lock")):
        if (out_dir / "config.json").is_file():
            return out_dir
        partial = Path(tempfile.mkdtemp(prefix=out_dir.name + ".", suffix=".partial", dir=out_dir.parent))
        try:
            _write(GgufModel(gguf_path), partial)
            os.chmod(partial, 0o755)
            partial.rename(out_dir)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return out_dir


def file_digest(path: Path) -> str:
    """First 8 hex digits over the size and the first and last MiB of a file: a name for a cache folder."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=4)
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        file.seek(max(0, size - (1 << 20)))
        digest.update(file.read())
    return digest.hexdigest()


def _write(model: GgufModel, folder: Path) -> None:
    config = model.config()
    plans = model.plans()
    _check(model, config, plans)
    _write_safetensors(model, plans, folder / "model.safetensors")
    write_tokenizer(model.path, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _check(model: GgufModel, config: dict[str, Any], plans: list[TensorPlan]) -> None:
    """Every tensor the model needs comes out of the file with its shape."""
    found = {plan.name: plan.shape for plan in plans}
    for name, shape in expected_shapes(parse_config(config, str(model.path))).items():
        if name not in found:
            raise ModelError(str(model.path), name, f"tensor is missing; expected shape {list(shape)}")
        if found[name] != shape:
            raise ModelError(str(model.path), name, f"expected shape {list(shape)}, found {list(found[name])}")


def _write_safetensors(model: GgufModel, plans: list[TensorPlan], path: Path) -> None:
    """One tensor in memory at a time; safetensors' own writer wants them all."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for plan in plans:
        size = 4
        for extent in plan.shape:
            size *= extent
        header[plan.name] = {"dtype": "F32", "shape": list(plan.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for plan in plans:
            model.read(plan).tofile(file)
        assert file.tell() == 8 + len(text) + offset


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
