"""How the tests are dealt out to the processes that run them side by side (``make test``)."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent
TOGETHER = (ROOT / "e2e" / "containers", ROOT / "e2e" / "faults")
"""Folders whose files share what is dear to make: images, a cluster."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file is run by one process, and so are the folders named above."""
    for item in items:
        place = next((folder for folder in TOGETHER if folder in item.path.parents), item.path)
        item.add_marker(pytest.mark.xdist_group(str(place.relative_to(ROOT))))
