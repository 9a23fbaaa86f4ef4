"""compose.security.yaml over compose.yaml: the same answer over TLS for who has a token, and a refusal without."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from tests.e2e.containers.composed import Composed
from tests.e2e.containers.images import Images
from tests.e2e.test_serving import ANSWER_IDS, QUESTION
from tests.integration.certificates import ALICE, Certificates, make_certificates
from weir.client import AsyncClient, Security
from weir.errors import Unauthenticated, Unavailable, WeirError

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

CONTAINERS_GROUP = 10001
READY_TIMEOUT_S = 120.0
POLL_S = 0.2


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    if os.geteuid() != 0:
        pytest.skip("giving files to the containers' group needs root")
    return make_certificates(tmp_path / "tls", CONTAINERS_GROUP)


@pytest.fixture
def locked(engine: docker.DockerClient, images: Images, certificates: Certificates) -> Iterator[Composed]:
    """Running, one prefill and one decode worker."""
    project = Composed.of(engine, f"weirlock{uuid.uuid4().hex[:8]}", images, "compose.security.yaml")
    project = dataclasses.replace(project, environ={**project.environ, "WEIR_TLS_DIR": str(certificates.folder)})
    try:
        project.up(prefill=1, decode=1)
        yield project
    finally:
        project.down()


async def answered(project: Composed, client: AsyncClient) -> tuple[int, ...]:
    """The answer, once the cluster is up."""
    last: WeirError | None = None
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            while True:
                try:
                    return (await client.complete_chat(QUESTION, temperature=0.0, max_tokens=64)).token_ids
                except WeirError as error:
                    last = error
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"no answer: {last}\n{project.logs()}") from None


async def test_a_locked_cluster(locked: Composed, certificates: Certificates) -> None:
    trusted = Security(ca_file=certificates.path("ca.pem"))
    async with AsyncClient(locked.router_address, token=ALICE, security=trusted) as client:
        assert await answered(locked, client) == ANSWER_IDS
    async with AsyncClient(locked.router_address, security=trusted) as client:
        with pytest.raises(Unauthenticated):
            await client.complete_chat(QUESTION, max_tokens=1)
    async with AsyncClient(locked.router_address, token=ALICE) as client:
        with pytest.raises(Unavailable):
            await client.complete_chat(QUESTION, max_tokens=1)
    router = (await asyncio.to_thread(locked.containers, "router"))[0]
    done = await asyncio.to_thread(router.exec_run, ["python3", "-m", "weir.cli.main", "health", "127.0.0.1:7600"])
    assert done.exit_code == 0, done.output.decode()
