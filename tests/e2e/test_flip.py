"""Roles change in place under load: nothing is lost, every token is as without flips, and idle flips take no time."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from tests.e2e.conftest import MODEL_NAME
from tests.e2e.faults.tiny import NAME, VOCAB, TinyLlama
from tests.e2e.quiet import assert_quiet
from weir.cli.bench_flip import FlipReport, flip_under_load
from weir.cli.cluster import Cluster, ClusterSpec
from weir.cli.workers import worker_state
from weir.errors import FailedPrecondition
from weir.rpc.channel import channel
from weir.rpc.status import from_rpc_error
from weir.rpc.v1 import common_pb2, worker_pb2, worker_pb2_grpc

IDLE_FLIP_MS = 1_000


def check(report: FlipReport, flips: int) -> None:
    """Nothing lost, nothing wrong, all flips made."""
    assert (report.lost, report.wrong) == ([], []), f"seed {report.seed}"
    assert report.flips == flips
    assert sum(report.attempts.values()) == report.requests
    assert max(report.idle_flip_ms) <= IDLE_FLIP_MS


@pytest.mark.filterwarnings("ignore::FutureWarning")
async def test_many_flips_under_load_lose_nothing(tmp_path: Path) -> None:
    tiny = TinyLlama(tmp_path / "model")
    spec = ClusterSpec(tiny.folder, NAME, tmp_path / "logs", mixed=1)
    async with Cluster(spec) as cluster:
        report = await flip_under_load(cluster, flips=60, clients=4, seed=17, token_ids=(3, VOCAB))
        print(report)
        check(report, 60)
        await assert_quiet(cluster)


async def test_flips_of_the_demo_cluster_lose_nothing(demo_model: Path, tmp_path: Path) -> None:
    spec = ClusterSpec(demo_model, MODEL_NAME, tmp_path, mixed=1)
    async with Cluster(spec) as cluster:
        report = await flip_under_load(cluster, flips=20, clients=3, seed=5)
        print(report)
        check(report, 20)
        await assert_quiet(cluster)
        await _refuses_stale_epochs(cluster)


async def _refuses_stale_epochs(cluster: Cluster) -> None:
    address = next(iter(cluster.worker_addresses.values()))
    before = await worker_state(address)
    request = worker_pb2.SetRoleRequest(role=common_pb2.ROLE_MIXED, expected_epoch=before.role_epoch - 1)
    async with channel(address) as link:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker_pb2_grpc.WorkerServiceStub(link).SetRole(request)
    assert isinstance(from_rpc_error(caught.value), FailedPrecondition)
    after = await worker_state(address)
    assert (after.role, after.role_epoch, after.draining) == (before.role, before.role_epoch, False)
