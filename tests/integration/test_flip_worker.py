"""A role change is told only when the worker can do the new work; one that cannot keeps its role."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.integration.worker_rig import Bench, RunningWorker, running_worker
from weir.lifecycle import Role
from weir.rpc.v1 import common_pb2, worker_pb2


async def refused(worker: RunningWorker, **fields: Any) -> tuple[grpc.StatusCode, str]:
    """How SetRole is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.admin.SetRole(worker_pb2.SetRoleRequest(**fields))
    return caught.value.code(), caught.value.details() or ""


async def test_blocks_that_do_not_add_up_keep_the_role(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    async with running_worker(bench, Role.PREFILL, "p") as worker:

        def broken() -> None:
            raise AssertionError("7 blocks are nowhere")

        with monkeypatch.context() as patched:
            patched.setattr(worker.host.parts.blocks, "check_integrity", broken)
            code, _ = await refused(worker, role=common_pb2.ROLE_DECODE, expected_epoch=1)
        assert code is grpc.StatusCode.INTERNAL
        record = bench.events.records["p"]
        assert (record.role, record.role_epoch) == (common_pb2.ROLE_PREFILL, 1)
        state = await worker.state()
        assert (state.role, state.role_epoch, state.draining) == (common_pb2.ROLE_PREFILL, 1, False)
        answer = await worker.admin.SetRole(worker_pb2.SetRoleRequest(role=common_pb2.ROLE_DECODE, expected_epoch=1))
        assert (answer.role, answer.role_epoch) == (common_pb2.ROLE_DECODE, 2)


async def test_of_two_changes_at_once_one_is_refused_and_old_epochs_always() -> None:
    async with running_worker(Bench(), Role.PREFILL, "p") as worker:
        asked = [
            worker.admin.SetRole(worker_pb2.SetRoleRequest(role=role, expected_epoch=1))
            for role in (common_pb2.ROLE_DECODE, common_pb2.ROLE_MIXED)
        ]
        ended = await asyncio.gather(*asked, return_exceptions=True)
        failures = [one for one in ended if isinstance(one, grpc.aio.AioRpcError)]
        assert [failure.code() for failure in failures] == [grpc.StatusCode.FAILED_PRECONDITION]
        assert (await worker.state()).role_epoch == 2
        for epoch in (0, 1, 3):
            code, details = await refused(worker, role=common_pb2.ROLE_PREFILL, expected_epoch=epoch)
            assert (code, details) == (
                grpc.StatusCode.FAILED_PRECONDITION,
                f"role epoch is 2, the caller saw {epoch}",
            )


async def test_a_hundred_flips_of_an_idle_worker_leave_nothing_behind() -> None:
    async with running_worker(Bench(), Role.PREFILL, "p") as worker:
        roles = (common_pb2.ROLE_DECODE, common_pb2.ROLE_MIXED, common_pb2.ROLE_PREFILL)
        before = await worker.state()
        for epoch in range(1, 101):
            request = worker_pb2.SetRoleRequest(role=roles[epoch % 3], expected_epoch=epoch)
            assert (await worker.admin.SetRole(request)).role_epoch == epoch + 1
        after = await worker.state()
        assert (after.tasks, after.open_files) == (before.tasks, before.open_files)
        assert after.load.blocks.free + after.load.blocks.cached == after.load.blocks.total
