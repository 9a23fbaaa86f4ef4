"""The controller as a process, on a real nats-server, with a worker's administration service beside it."""

import asyncio
import contextlib
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from weir.clock import ManualClock, SystemClock
from weir.config import NatsConfig
from weir.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable, WeirError
from weir.events.memory import MemoryRegistry, MemoryServer
from weir.events.nats_link import NatsLink
from weir.events.nats_registry import NatsRegistry
from weir.events.nats_server import EmbeddedNats
from weir.lifecycle import Role
from weir.rpc.channel import channel, wait_ready
from weir.rpc.server import RpcServer
from weir.rpc.status import from_rpc_error
from weir.rpc.v1 import common_pb2, controller_pb2, controller_pb2_grpc, worker_pb2, worker_pb2_grpc
from weir.rpc.v1.events_pb2 import WorkerRecord
from weir.services.controller.ledger import RoleLedger
from weir.services.controller.servicer import SERVICE_NAME, ControllerServicer
from weir.services.controller.workers import RoleAnswer
from weir.telemetry.metrics import ControllerMetrics

TTL_S = 2.0


@dataclass
class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """A worker's SetRole with its epoch rule, and a registry record that follows."""

    registry: NatsRegistry
    record: WorkerRecord
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    drains_ms: list[float] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def SetRole(self, request: worker_pb2.SetRoleRequest, context: Any) -> worker_pb2.SetRoleResponse:
        if request.expected_epoch != self.record.role_epoch:
            raise FailedPrecondition(f"stale epoch {request.expected_epoch}, now {self.record.role_epoch}")
        self.drains_ms.append(request.drain_timeout_ms)
        self.asked.set()
        await self.hold.wait()
        self.record.role = request.role
        self.record.role_epoch += 1
        with contextlib.suppress(Unavailable):  # the next renewal tells it
            await self.registry.put(self.record)
        return worker_pb2.SetRoleResponse(role=request.role, role_epoch=self.record.role_epoch, took_ms=12.5)


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path / "nats")
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def worker(nats: EmbeddedNats) -> AsyncIterator[FakeWorker]:
    config = NatsConfig(url=nats.url, registry_ttl_s=TTL_S, reconnect_min_ms=20, reconnect_max_ms=100)
    link = await NatsLink.connect(config, name="worker")
    registry = await NatsRegistry.open(link, SystemClock())
    server = RpcServer(name="worker", bind="127.0.0.1:0")
    made = FakeWorker(
        registry, WorkerRecord(worker_id="w-1", incarnation=3, role=common_pb2.ROLE_PREFILL, role_epoch=1)
    )
    made.hold.set()

    def register(grpc_server: grpc.aio.Server) -> Sequence[str]:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(made, grpc_server)
        return ("weir.rpc.v1.WorkerService",)

    await server.start(register)
    made.record.address = server.address

    async def renew() -> None:
        while True:
            try:
                await registry.put(made.record)
            except Unavailable:
                pass
            await asyncio.sleep(TTL_S / 8)

    renewing = asyncio.create_task(renew())
    yield made
    renewing.cancel()
    await asyncio.gather(renewing, return_exceptions=True)
    await server.stop(0)
    await registry.close()
    await link.close()


@asynccontextmanager
async def controller(nats: EmbeddedNats, *flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "weir.services.controller", "--nats", nats.url, "--bind", "127.0.0.1:0"),
        *("--nats-registry-ttl-s", str(TTL_S), "--nats-reconnect-max-ms", "100", *flags),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()
        assert line[:2] == ["READY", "controller"], line
        yield process, line[2]
        process.send_signal(signal.SIGTERM)
        rest = await asyncio.wait_for(process.stdout.read(), 30)
        assert (await process.wait(), rest) == (0, b"")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def members_until(
    stub: controller_pb2_grpc.ControllerServiceStub, wanted: Any, timeout_s: float = 20.0
) -> controller_pb2.ListMembersResponse:
    async with asyncio.timeout(timeout_s):
        while True:
            answer: controller_pb2.ListMembersResponse = await stub.ListMembers(controller_pb2.ListMembersRequest())
            if wanted(answer):
                return answer
            await asyncio.sleep(0.02)


async def refused(stub: controller_pb2_grpc.ControllerServiceStub, **fields: Any) -> WeirError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.SetWorkerRole(controller_pb2.SetWorkerRoleRequest(**fields))
    return from_rpc_error(caught.value)


async def test_roles_change_through_the_controller(nats: EmbeddedNats, worker: FakeWorker) -> None:
    async with controller(nats) as (_, address), channel(address) as opened:
        await wait_ready(address, SERVICE_NAME, timeout_s=10)
        stub = controller_pb2_grpc.ControllerServiceStub(opened)
        answer = await members_until(stub, lambda answer: len(answer.members) == 1)
        assert (answer.members[0], answer.stale, answer.role_changes) == (worker.record, False, 0)
        changed = await stub.SetWorkerRole(
            controller_pb2.SetWorkerRoleRequest(
                worker_id="w-1", role=common_pb2.ROLE_DECODE, expected_epoch=1, drain_timeout_ms=250
            )
        )
        assert (changed.role, changed.role_epoch, changed.took_ms) == (common_pb2.ROLE_DECODE, 2, 12.5)
        assert worker.drains_ms == [250]
        answer = await members_until(stub, lambda answer: answer.members[0].role_epoch == 2)
        assert (answer.members[0].role, answer.role_changes) == (common_pb2.ROLE_DECODE, 1)
        stale = await refused(stub, worker_id="w-1", role=common_pb2.ROLE_MIXED, expected_epoch=1)
        assert (type(stale), str(stale)) == (
            FailedPrecondition,
            "stale epoch: w-1 is at role epoch 2, 1 was expected",
        )
        ahead = await refused(stub, worker_id="w-1", role=common_pb2.ROLE_MIXED, expected_epoch=9)
        assert (type(ahead), str(ahead)) == (FailedPrecondition, "stale epoch 9, now 2")
        unknown = await refused(stub, worker_id="w-2", role=common_pb2.ROLE_MIXED)
        assert (type(unknown), str(unknown)) == (NotFound, "worker 'w-2' not found; known: w-1")
        for field_name, fields in (("role", {}), ("drain_timeout_ms", {"role": 1, "drain_timeout_ms": -1.0})):
            bad = await refused(stub, worker_id="w-1", **fields)
            assert isinstance(bad, InvalidArgument)
            assert bad.field == field_name
        assert (await members_until(stub, lambda answer: True)).role_changes == 1


async def test_one_change_at_a_time_and_a_caller_that_leaves_changes_nothing(
    nats: EmbeddedNats, worker: FakeWorker
) -> None:
    async with controller(nats) as (_, address), channel(address) as opened:
        stub = controller_pb2_grpc.ControllerServiceStub(opened)
        await members_until(stub, lambda answer: len(answer.members) == 1)
        worker.hold.clear()
        leaving = stub.SetWorkerRole(controller_pb2.SetWorkerRoleRequest(worker_id="w-1", role=common_pb2.ROLE_DECODE))
        await asyncio.wait_for(worker.asked.wait(), 20)
        leaving.cancel()
        busy = await refused(stub, worker_id="w-1", role=common_pb2.ROLE_MIXED)
        assert (type(busy), str(busy)) == (FailedPrecondition, "w-1 is being changed to decode")
        worker.hold.set()
        answer = await members_until(stub, lambda answer: answer.role_changes == 1)
        assert answer.members[0].worker_id == "w-1"


async def test_members_outlive_a_restart_of_nats(nats: EmbeddedNats, worker: FakeWorker) -> None:
    async with controller(nats, "--metrics-bind", "127.0.0.1:0") as (_, address), channel(address) as opened:
        stub = controller_pb2_grpc.ControllerServiceStub(opened)
        await members_until(stub, lambda answer: len(answer.members) == 1)
        await nats.kill()
        answer = await members_until(stub, lambda answer: answer.stale)
        assert [member.worker_id for member in answer.members] == ["w-1"]
        await nats.start()
        answer = await members_until(stub, lambda answer: not answer.stale)
        assert [member.worker_id for member in answer.members] == ["w-1"]
        changed = await stub.SetWorkerRole(
            controller_pb2.SetWorkerRoleRequest(worker_id="w-1", role=common_pb2.ROLE_MIXED)
        )
        assert changed.role_epoch == 2
        await members_until(stub, lambda answer: answer.members[0].role == common_pb2.ROLE_MIXED)


async def test_a_worker_that_dies_leaves_the_members(nats: EmbeddedNats, worker: FakeWorker) -> None:
    async with controller(nats) as (_, address), channel(address) as opened:
        stub = controller_pb2_grpc.ControllerServiceStub(opened)
        await worker.registry.put(WorkerRecord(worker_id="dies", incarnation=1))
        await members_until(stub, lambda answer: len(answer.members) == 2)
        answer = await members_until(stub, lambda answer: len(answer.members) == 1)
        assert answer.members[0].worker_id == "w-1"


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--bnid", "x"], 2, "did you mean --bind?"),
        (["--bind", "nowhere"], 2, "controller.bind = 'nowhere': must be host:port (from --bind)"),
        (["--config", "/nonexistent.toml"], 2, "configuration file '/nonexistent.toml' not found"),
        (["--nats", "nats://127.0.0.1:1", "--nats-connect-timeout-s", "0.2"], 1, "nats://127.0.0.1:1 not reached"),
    ],
)
async def test_what_cannot_start_says_why(flags: list[str], status: int, words: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "weir.services.controller", *flags), stderr=asyncio.subprocess.PIPE
    )
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, len(err.splitlines())) == (status, 1)
    assert words in err.decode()


class SilentWorkers:
    """A WorkerPort whose workers are gone."""

    async def set_role(self, address: str, role: Role, **_: Any) -> RoleAnswer:
        raise Unavailable(f"{address} is gone")


async def test_a_failed_change_is_closed_and_counted() -> None:
    server = MemoryServer()
    registry = MemoryRegistry(server, ManualClock())
    await registry.watch(lambda change: None)
    await registry.put(WorkerRecord(worker_id="w", address="a:1", role_epoch=4))
    ledger, metrics = RoleLedger(5), ControllerMetrics()
    servicer = ControllerServicer(
        registry=registry,
        ledger=ledger,
        workers=SilentWorkers(),
        clock=ManualClock(),
        metrics=metrics,
        role_change_timeout_s=1,
    )
    context: Any = None
    for _ in range(2):
        with pytest.raises(Unavailable, match="a:1 is gone"):
            await servicer.SetWorkerRole(
                controller_pb2.SetWorkerRoleRequest(worker_id="w", role=common_pb2.ROLE_DECODE), context
            )
    await servicer.drain()
    assert (ledger.under_way, ledger.made, list(ledger.done)) == (0, 0, [])
    assert metrics.registry.get_sample_value("weir_role_changes_total", {"outcome": "failed"}) == 2


async def test_metrics_are_served(nats: EmbeddedNats, worker: FakeWorker, free_port: int) -> None:
    async with controller(nats, "--metrics-bind", f"127.0.0.1:{free_port}") as (_, address), channel(address) as opened:
        stub = controller_pb2_grpc.ControllerServiceStub(opened)
        await members_until(stub, lambda answer: len(answer.members) == 1)

        def fetch() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics", timeout=10) as answer:
                return str(answer.read().decode())

        text = await asyncio.to_thread(fetch)
        assert 'weir_members{role="prefill"} 1.0' in text
        assert "weir_registry_stale 0.0" in text


@pytest.fixture
async def free_port() -> int:
    server = RpcServer(name="probe", bind="127.0.0.1:0")
    port = await server.start(lambda grpc_server: ())
    await server.stop(0)
    return port
