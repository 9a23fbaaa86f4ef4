"""Clusters of real processes, and the question whether anything is left of them."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from weir.cli.cluster import Cluster, ClusterSpec
from weir.cli.paths import model_dir

MODEL_NAME = "smollm2-135m-instruct"
TAG = "WEIR_TEST_TAG"


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The converted demo model; its package is part of the test requirements."""
    return model_dir("demo")


def tagged_processes(tag: str) -> list[str]:
    """Command lines of processes that carry the tag in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.pid != os.getpid() and process.environ().get(TAG) == tag
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue
    return found


@pytest.fixture
def tag() -> Iterator[str]:
    """A mark for child processes; none that carries it is left afterwards."""
    value = uuid.uuid4().hex
    yield value
    assert tagged_processes(value) == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One prefill and one decode worker."""
    spec = ClusterSpec(demo_model, MODEL_NAME, tmp_path_factory.mktemp("pair"), chat_template="chatml")
    async with Cluster(spec) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mixed(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One mixed worker."""
    spec = ClusterSpec(
        demo_model, MODEL_NAME, tmp_path_factory.mktemp("mixed"), prefill=0, decode=0, mixed=1, chat_template="chatml"
    )
    async with Cluster(spec) as cluster:
        yield cluster
