"""Safetensors headers: what is in a model folder, checked before any byte of weight is used. No torch.

A file is: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, data.
"""

import hashlib
import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weir.errors import ModelError

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
FLOAT_DTYPES = ("F32", "F16", "BF16")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 << 20
SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: its bytes are [start, end) from the beginning of the file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_folder(folder: Path) -> dict[str, TensorEntry]:
    """All tensors of a folder, single or sharded. Raises ModelError for a missing or corrupt file."""
    index = folder / INDEX
    if (folder / SINGLE).is_file() or not index.is_file():
        return read_header(folder / SINGLE)
    try:
        places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(places.values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(str(index), "weight_map", f"expected an object of tensor names to files: {error!r}") from error
    entries: dict[str, TensorEntry] = {}
    for shard in shards:
        found = read_header(folder / shard)
        for name in (name for name, where in places.items() if where == shard and name not in found):
            raise ModelError(str(folder / shard), name, f"tensor is missing; {INDEX} says it is in this file")
        entries.update(found)
    return entries


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one file, with every offset checked against the file's size."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise ModelError(str(path), None, f"truncated or not safetensors: {size} bytes, header of {length}")
            raw = json.loads(file.read(length))
    except FileNotFoundError:
        raise ModelError(str(path), None, "file is missing") from None
    except (OSError, ValueError) as error:
        raise ModelError(str(path), None, f"expected a safetensors header: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(str(path), None, "expected a safetensors header (a JSON object)")
    raw.pop("__metadata__", None)
    return {name: _entry(path, name, fields, 8 + length, size) for name, fields in raw.items()}


def check_shapes(
    entries: Mapping[str, TensorEntry], expected: Mapping[str, tuple[int, ...]], folder: Path
) -> list[str]:
    """Raise ModelError for the first tensor that is missing or wrong; return the names nobody asked for."""
    for name, shape in expected.items():
        entry = entries.get(name)
        if entry is None:
            raise ModelError(str(folder), name, f"tensor is missing; expected shape {list(shape)}")
        if entry.shape != shape:
            raise ModelError(str(entry.file), name, f"expected shape {list(shape)}, found {list(entry.shape)}")
        if entry.dtype not in FLOAT_DTYPES:
            raise ModelError(str(entry.file), name, f"expected one of {', '.join(FLOAT_DTYPES)}, found {entry.dtype}")
    return sorted(name for name in entries if name not in expected and not name.endswith("rotary_emb.inv_freq"))


def weights_digest(entries: Mapping[str, TensorEntry]) -> str:
    """32 hex digits over every tensor's name, dtype, shape and up to 12 KiB of its bytes.

    The bytes are three samples of 4 KiB (start, middle, end), so two folders that differ only elsewhere
    inside a tensor look equal; a fine-tune, another precision or another quantisation never does. How
    the tensors are spread over files does not matter.
    """
    digest = hashlib.blake2b(digest_size=16)
    by_file: dict[Path, list[TensorEntry]] = {}
    for name in sorted(entries):
        by_file.setdefault(entries[name].file, []).append(entries[name])
    samples: dict[str, bytes] = {}
    for path, group in by_file.items():
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for entry in group:
                last = max(entry.start, entry.end - SAMPLE_BYTES)
                middle = (entry.start + last) // 2
                spans = (entry.start, middle, last)
                samples[entry.name] = b"".join(data[at : min(at + SAMPLE_BYTES, entry.end)] for at in spans)
    for name in sorted(entries):
        entry = entries[name]
        digest.update(f"{name} {entry.dtype} {entry.shape}\n".encode())
        digest.update(samples[name])
    return digest.hexdigest()


def _entry(path: Path, name: str, fields: object, base: int, size: int) -> TensorEntry:
    try:
        assert isinstance(fields, dict)
        dtype, shape = str(fields["dtype"]), tuple(int(n) for n in fields["shape"])
        start, end = (int(n) for n in fields["data_offsets"])
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise ModelError(str(path), name, "expected dtype, shape and data_offsets in the header") from error
    if dtype not in DTYPE_BYTES:
        raise ModelError(str(path), name, f"unknown dtype {dtype}; known: {', '.join(DTYPE_BYTES)}")
    need = math.prod(shape) * DTYPE_BYTES[dtype]
    if start < 0 or end - start != need:
        raise ModelError(str(path), name, f"expected {need} bytes for {dtype} {list(shape)}, found {end - start}")
    if base + end > size:
        raise ModelError(str(path), name, f"file is truncated: tensor ends at byte {base + end} of {size}")
    return TensorEntry(path, name, dtype, shape, base + start, base + end)
