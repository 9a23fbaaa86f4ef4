"""A cluster's processes against NATS in a container."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import docker
import pytest
from testcontainers.community.nats import NatsContainer

from tests.e2e.conftest import MODEL_NAME
from tests.e2e.containers.images import build_nats
from tests.e2e.quiet import assert_quiet
from tests.e2e.test_serving import ANSWER_IDS, QUESTION
from weir.cli.cluster import Cluster, ClusterSpec
from weir.client import AsyncClient, Delta

pytestmark = [pytest.mark.docker, pytest.mark.timeout(240)]


def taken_port() -> int:
    """A free port; published by number, since a port that the engine chooses changes at a restart."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_processes_use_nats_in_a_container_and_outlive_its_restart(
    engine: docker.DockerClient, demo_model: Path, tmp_path: Path
) -> None:
    nats = NatsContainer(build_nats(engine), jetstream=True).with_bind_ports(4222, taken_port())
    with nats:
        spec = ClusterSpec(demo_model, MODEL_NAME, tmp_path, nats_url=nats.nats_uri(), chat_template="chatml")
        async with Cluster(spec) as cluster:
            assert cluster.nats is None, "no embedded server"
            async with AsyncClient(cluster.router_address) as client:
                answer = await client.complete_chat(QUESTION, temperature=0.0, max_tokens=64)
                assert answer.token_ids == ANSWER_IDS
                ids: list[int] = []
                async for event in client.chat(QUESTION, temperature=0.0, max_tokens=64):
                    if isinstance(event, Delta):
                        ids += event.token_ids
                        if len(ids) == 3:
                            await asyncio.to_thread(nats.get_wrapped_container().restart, timeout=1)
                assert tuple(ids) == ANSWER_IDS, "the server went away and came back under it"
                await cluster.wait_connected()
                answer = await client.complete_chat(QUESTION, temperature=0.0, max_tokens=64)
                assert answer.token_ids == ANSWER_IDS
            await assert_quiet(cluster)
