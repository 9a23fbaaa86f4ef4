"""The controller process in mode auto on a real nats-server: from traffic events to a worker's SetRole."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.integration.test_controller import TTL_S, controller
from weir.clock import SystemClock
from weir.config import NatsConfig
from weir.events.nats_bus import NatsBus
from weir.events.nats_link import NatsLink
from weir.events.nats_registry import NatsRegistry
from weir.events.nats_server import EmbeddedNats
from weir.events.subjects import DECISION, load_subject, request_subject
from weir.lifecycle import RequestState
from weir.rpc.channel import channel
from weir.rpc.convert import state_to_pb
from weir.rpc.server import RpcServer
from weir.rpc.v1 import common_pb2, controller_pb2, controller_pb2_grpc, events_pb2, worker_pb2, worker_pb2_grpc

FAST = (
    *("--interval-s", "0.1", "--window-s", "3", "--confirm-s", "0.5", "--cooldown-s", "1", "--pending-s", "5"),
    *("--slo-ttft-ms", "2000", "--slo-tpot-ms", "50", "--no-mixed-fallback"),
)


@dataclass
class Workers(worker_pb2_grpc.WorkerServiceServicer):
    """One server that answers for the worker whose epoch fits: all records name its address."""

    registry: NatsRegistry
    bus: NatsBus
    address: str = ""
    records: dict[str, events_pb2.WorkerRecord] = field(default_factory=dict)
    asked: list[tuple[int, int]] = field(default_factory=list)
    heed: bool = True
    requests: int = 0

    def add(self, worker_id: str, role: common_pb2.Role, epoch: int) -> None:
        self.records[worker_id] = events_pb2.WorkerRecord(
            worker_id=worker_id, incarnation=1, role=role, role_epoch=epoch, address=self.address, max_running=32
        )

    async def SetRole(self, request: worker_pb2.SetRoleRequest, context: Any) -> worker_pb2.SetRoleResponse:
        self.asked.append((request.role, request.expected_epoch))
        if not self.heed:
            await asyncio.sleep(3_600)
        record = next(r for r in self.records.values() if r.role_epoch == request.expected_epoch)
        record.role, record.role_epoch = request.role, record.role_epoch + 100
        await self.registry.put(record)
        return worker_pb2.SetRoleResponse(role=record.role, role_epoch=record.role_epoch, took_ms=20.0)

    async def live(self) -> None:
        """Renew, report, and have requests of 6,000 prompt tokens: one prefill worker is not enough."""
        while True:
            for worker_id, record in self.records.items():
                await self.registry.put(record)
                report = events_pb2.LoadEvent(
                    origin=events_pb2.EventOrigin(publisher_id=worker_id, incarnation=1),
                    load=common_pb2.WorkerLoad(running=4, decode_step_ms=30.0, prefill_tokens_per_s=10_000),
                )
                await self.bus.publish(load_subject(worker_id), report.SerializeToString())
            self.requests += 1
            for state in (RequestState.ADMITTED, RequestState.PREFILLED, RequestState.DECODING, RequestState.FINISHED):
                event = events_pb2.LifecycleEvent(
                    request_id=f"r-{self.requests}", attempt=1, state=state_to_pb(state), prompt_tokens=6_000,
                    completion_tokens=50,
                )  # fmt: skip
                await self.bus.publish(request_subject(state), event.SerializeToString(), durable=True)
            await asyncio.sleep(0.25)


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path / "nats")
    await server.start()
    yield server
    await server.stop()


@asynccontextmanager
async def fleet(nats: EmbeddedNats) -> AsyncIterator[Workers]:
    link = await NatsLink.connect(NatsConfig(url=nats.url, registry_ttl_s=TTL_S), name="fleet")
    made = Workers(await NatsRegistry.open(link, SystemClock()), await NatsBus.open(link))
    server = RpcServer(name="worker", bind="127.0.0.1:0")

    def register(grpc_server: grpc.aio.Server) -> tuple[str]:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(made, grpc_server)
        return ("weir.rpc.v1.WorkerService",)

    await server.start(register)
    made.address = server.address
    made.add("p", common_pb2.ROLE_PREFILL, 1)
    for number, worker_id in enumerate("abc"):
        made.add(worker_id, common_pb2.ROLE_DECODE, number + 2)
    living = asyncio.create_task(made.live())
    yield made
    living.cancel()
    await asyncio.gather(living, return_exceptions=True)
    await server.stop(0)
    await made.bus.close()
    await made.registry.close()
    await link.close()


async def decided(stub: controller_pb2_grpc.ControllerServiceStub, count: int) -> controller_pb2.ListDecisionsResponse:
    async with asyncio.timeout(60):
        while True:
            answer: controller_pb2.ListDecisionsResponse = await stub.ListDecisions(
                controller_pb2.ListDecisionsRequest()
            )
            if len(answer.decisions) >= count:
                return answer
            await asyncio.sleep(0.05)


async def test_traffic_makes_the_controller_flip_workers(nats: EmbeddedNats) -> None:
    async with fleet(nats) as workers, controller(nats, "--mode", "auto", *FAST) as (_, address):
        heard: list[events_pb2.DecisionEvent] = []
        await workers.bus.subscribe(
            DECISION, lambda event: heard.append(events_pb2.DecisionEvent.FromString(event.payload))
        )
        async with channel(address) as opened:
            stub = controller_pb2_grpc.ControllerServiceStub(opened)
            answer = await decided(stub, 2)
        assert answer.mode == "auto"
        assert [d.action for d in answer.decisions[:2]] == [events_pb2.BALANCE_ACTION_FLIP] * 2
        assert workers.asked == [(common_pb2.ROLE_PREFILL, 2), (common_pb2.ROLE_PREFILL, 3)]
        assert {w for w, r in workers.records.items() if r.role == common_pb2.ROLE_PREFILL} == {"p", "a", "b"}
        assert answer.decisions[0].inputs["isl_mean"] == 6_000
        numbers = [event.origin.sequence for event in heard]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "all are told, in order"
        assert answer.decisions[0] in heard


async def test_a_dry_run_and_advice_touch_no_worker(nats: EmbeddedNats) -> None:
    async with fleet(nats) as workers:
        for flags in (("--mode", "advise"), ("--mode", "auto", "--dry-run")):
            async with controller(nats, *flags, *FAST) as (_, address), channel(address) as opened:
                answer = await decided(controller_pb2_grpc.ControllerServiceStub(opened), 1)
                assert (answer.mode, answer.pending) == ("advise", 0)
                assert answer.decisions[0].dry_run
                assert answer.decisions[0].action == events_pb2.BALANCE_ACTION_FLIP
        assert workers.asked == []


async def test_a_worker_that_never_answers_is_given_up(nats: EmbeddedNats) -> None:
    async with fleet(nats) as workers:
        workers.heed = False
        flags = ("--mode", "auto", *FAST, "--pending-s", "1", "--role-change-timeout-s", "5")
        async with controller(nats, *flags) as (_, address), channel(address) as opened:
            answer = await decided(controller_pb2_grpc.ControllerServiceStub(opened), 2)
            assert answer.decisions[1].cancels == answer.decisions[0].number
            assert "not seen within" in answer.decisions[1].reason


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--mode", "sometimes"), "must be one of off, advise, auto"),
        (("--mode", "auto", "--busy", "0.4", "--spare", "0.5"), "must lie below busy"),
        (("--mode", "auto", "--min-workers", "9", "--max-workers", "3"), "max_workers = 3"),
        (("--max-workers", "-1"), "must lie in"),
        (("--mode", "auto", "--slo-ttft-ms", "5"), "overhead_s"),
        (("--profile-path", "/nonexistent/profile.json"), "profile '/nonexistent/profile.json' not found"),
    ],
)
async def test_contradictions_are_refused_before_anything_starts(flags: tuple[str, ...], words: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "weir.services.controller", *flags), stderr=asyncio.subprocess.PIPE
    )
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, len(err.splitlines())) == (2, 1)
    assert words in err.decode()
