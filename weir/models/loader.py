"""Weights of a model folder as torch tensors, mapped from the files and checked before the first is used."""

import logging
from pathlib import Path

import torch
from safetensors import safe_open

from weir.errors import ModelError
from weir.models.config import ModelConfig
from weir.models.safetensors_file import TensorEntry, check_shapes, read_folder, weights_digest
from weir.models.shapes import expected_shapes

logger = logging.getLogger(__name__)


class Weights:
    """The tensors of one folder, by Hugging Face name, cast to ``dtype`` on ``device``.

    Opening checks that every tensor the model needs is there with the expected shape, and that no file is
    truncated; it raises ModelError otherwise. Tensors stay mapped from the file when no cast is needed.
    """

    def __init__(self, folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.folder = folder
        self.dtype = dtype
        self.device = device
        self._entries = read_folder(folder)
        unused = check_shapes(self._entries, expected_shapes(config), folder)
        if unused:
            shown = ", ".join(unused[:5]) + (", ..." if len(unused) > 5 else "")
            logger.warning("%s: %d tensors are not used: %s", folder, len(unused), shown)
        self._files = {path: _open(path) for path in {entry.file for entry in self._entries.values()}}

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor ``name``; read-only, it may be mapped from the file."""
        entry = self._entries[name]
        return _read(self._files[entry.file], entry).to(device=self.device, dtype=self.dtype)

    def optional(self, name: str) -> torch.Tensor | None:
        """The tensor, or None when the folder has none of that name."""
        return self.tensor(name) if name in self._entries else None

    def digest(self) -> str:
        """See safetensors_file.weights_digest."""
        return weights_digest(self._entries)


def _open(path: Path) -> safe_open:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except Exception as error:  # safetensors raises its own class, not exported in every version
        raise ModelError(str(path), None, f"expected a readable safetensors file: {error}") from error


def _read(file: safe_open, entry: TensorEntry) -> torch.Tensor:
    try:
        tensor: torch.Tensor = file.get_tensor(entry.name)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ModelError(str(entry.file), entry.name, f"cannot be read: {error}") from error
    return tensor
