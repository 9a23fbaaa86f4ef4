"""One cluster for all tests of a module; each test puts back what it broke."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.faults import recovery
from tests.e2e.faults.tiny import NAME, TinyLlama
from tests.e2e.quiet import assert_quiet
from weir.cli.cluster import Cluster, ClusterSpec
from weir.client import AsyncClient

WORKER_FLAGS = ("--num-blocks", "1024", "--max-batch-tokens", "64", "--session-grace-s", "0.5")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Seen when this folder is named on the command line."""
    parser.addoption("--recovery-times", type=Path, help="add what each fault cost its client to this JSON file")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what was asked for."""
    path = session.config.getoption("--recovery-times", None)
    if path is not None:
        recovery.write(path)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    """The model that the clusters serve."""
    return TinyLlama(tmp_path_factory.mktemp("tiny"))


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def squad(tiny: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Two prefill workers, two decode workers, two routers."""
    folder = tmp_path_factory.mktemp("squad")
    spec = ClusterSpec(tiny.folder, NAME, folder, prefill=2, decode=2, routers=2, worker_flags=WORKER_FLAGS)
    async with Cluster(spec) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="package")
async def client(squad: Cluster) -> AsyncIterator[AsyncClient]:
    """A client of the squad; nothing is left in the squad after it."""
    async with AsyncClient(squad.router_address) as client:
        yield client
    await assert_quiet(squad)
