"""Where the recorded data lies beside the repository; a test that needs an absent file skips and names it."""

from __future__ import annotations

from pathlib import Path

import pytest

TRACES = Path(__file__).resolve().parents[4] / "shared" / "traces"


def shared(*names: str) -> Path:
    """The folder of recorded data, in which all ``names`` exist."""
    for name in names:
        if not (TRACES / name).is_file():
            pytest.skip(f"{name} is not in ../shared/traces")
    return TRACES
