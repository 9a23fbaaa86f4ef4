"""How the tests are dealt out to the processes that run them side by side (``make test``)."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

TOGETHER = ("tests/e2e/containers/", "tests/e2e/faults/")
"""Folders whose files share what is dear to make: images, a cluster."""


class ByPlace(LoadScopeScheduling):  # type: ignore[misc]
    """A file is run by one process, and so are the folders named above."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((folder for folder in TOGETHER if file.startswith(folder)), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByPlace:
    """See xdist's hooks."""
    return ByPlace(config, log)
