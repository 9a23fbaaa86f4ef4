"""Where things are kept on the user's machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_root(environ: Mapping[str, str] | None = None) -> Path:
    """``$WEIR_CACHE``, else ``$XDG_CACHE_HOME/weir``, else ``~/.cache/weir``; not created here."""
    variables = os.environ if environ is None else environ
    own = variables.get("WEIR_CACHE")
    if own:
        return Path(own)
    base = variables.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "weir"


def profile_path(fingerprint: str, device: str, threads: int) -> Path:
    """Where the profile of a model (hex digest of its fingerprint) is kept for the workers of this machine."""
    return cache_root() / "profiles" / f"{fingerprint}-{device}-{threads}.json"
