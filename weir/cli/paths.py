"""Where the command line keeps things on the user's machine."""

from __future__ import annotations

from pathlib import Path

from weir.config.folders import cache_root
from weir.errors import InvalidArgument

__all__ = ["DEFAULT_GRPC_PORT", "DEFAULT_HTTP_PORT", "cache_root", "model_dir"]

DEFAULT_GRPC_PORT = 7600
DEFAULT_HTTP_PORT = 8000


def model_dir(name: str) -> Path:
    """The folder of a model given on the command line; ``demo`` is the demo model, converted once."""
    if name == "demo":
        from weir.models.demo import demo_model_dir  # numpy and gguf load only when asked for

        return demo_model_dir(cache_root())
    path = Path(name).expanduser()
    if not (path / "config.json").is_file():
        raise InvalidArgument("--model", name, "must be 'demo' or a folder with a config.json")
    return path.resolve()
