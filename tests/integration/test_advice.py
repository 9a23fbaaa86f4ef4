"""The balance loop and a router on one bus: what the controller advises, the router does, shows and counts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.integration.scripted_worker import MODEL
from tests.integration.test_router import PROMPT, Cluster, folder
from weir.balance.decide import BalanceController
from weir.balance.decision import BalanceLimits
from weir.balance.observe import Speed
from weir.balance.sizing import Slo
from weir.cli.decisions import what_of
from weir.events.memory import MemoryRegistry
from weir.events.subjects import DECISION, load_subject, request_subject
from weir.lifecycle import RequestState, Role
from weir.rpc.convert import state_to_pb
from weir.rpc.v1 import common_pb2, events_pb2, router_pb2, router_pb2_grpc
from weir.services.controller.actuators import RecordingActuator
from weir.services.controller.loop import BalanceLoop
from weir.services.controller.senses import Senses
from weir.services.controller.speed import SpeedBook
from weir.services.controller.telling import DecisionLog
from weir.services.router.journal import ROUTED
from weir.telemetry.metrics import ControllerMetrics

__all__ = ["folder"]

SPEED = Speed(prefill_tokens_per_s=10_000, step_base_s=0.02, step_per_sequence_s=1e-4, max_batch=64)
"""Prompts of 6,000 tokens keep one worker busy at 1.7 a second."""
LIMITS = BalanceLimits(slo=Slo(ttft_s=2.0, tpot_s=0.2), mixed=False, local_share=1.0)


class Known(SpeedBook):
    """Knows what workers can do without having seen them."""

    def speed(self, records: Iterable[events_pb2.WorkerRecord], prompt_tokens: float) -> Speed | None:
        return SPEED


class Controlled:
    """A router, and a balance loop that ticks when told."""

    def __init__(self, cluster: Cluster, limits: BalanceLimits, *, dry_run: bool = False) -> None:
        self.cluster = cluster
        self.sequence = 0
        self.requests = 0
        self.registry = MemoryRegistry(cluster.nats, cluster.clock)
        self.loop = BalanceLoop(
            BalanceController(limits),
            Senses(Known(), window_s=1),
            registry=self.registry,
            bus=cluster.bus,
            clock=cluster.clock,
            actuator=RecordingActuator(),
            decisions=DecisionLog(50),
            metrics=ControllerMetrics(),
            origin=self.origin,
            interval_s=1e6,
            dry_run=dry_run,
        )

    async def open(self) -> None:
        await self.registry.watch(lambda change: None)
        await self.loop.open()

    def origin(self) -> events_pb2.EventOrigin:
        self.sequence += 1
        unix_s = self.cluster.clock.unix_s()
        return events_pb2.EventOrigin(publisher_id="c", incarnation=1, sequence=self.sequence, unix_s=unix_s)

    async def tick(self, *, prompts: int, isl: int) -> events_pb2.DecisionEvent:
        """A burst of ``prompts`` by word of another router, a report of each worker, a decision."""
        for worker in self.cluster.workers:
            origin = events_pb2.EventOrigin(publisher_id=worker.key.worker_id, incarnation=worker.key.incarnation)
            report = events_pb2.LoadEvent(origin=origin, load=common_pb2.WorkerLoad(running=1))
            await self.cluster.bus.publish(load_subject(worker.key.worker_id), report.SerializeToString())
        for _ in range(prompts):
            self.requests += 1
            event = events_pb2.LifecycleEvent(
                request_id=f"x-{self.requests}", attempt=1, state=state_to_pb(RequestState.ADMITTED), prompt_tokens=isl
            )
            await self.cluster.bus.publish(request_subject(RequestState.ADMITTED), event.SerializeToString())
        await self.loop.tick()
        latest = self.loop.decisions.latest
        assert latest is not None
        return latest

    async def ask(self) -> str:
        """A request's end: "" or the code; the trailing retry-after is kept."""
        self.retry_after_ms = 0.0
        async with grpc.aio.insecure_channel(self.cluster.server.address) as channel:
            request = router_pb2.GenerateRequest(model=MODEL)
            request.sampling.max_tokens = 4
            request.tokens.token_ids.extend(PROMPT)
            try:
                async for _ in router_pb2_grpc.RouterServiceStub(channel).Generate(request):
                    pass
            except grpc.aio.AioRpcError as error:
                trailing: Any = error.trailing_metadata()
                self.retry_after_ms = next(float(value) for name, value in trailing if name == "retry-after-ms")
                return error.code().name
        return ""

    def metric(self, name: str, **labels: str) -> float | None:
        self.cluster.app.router.refresh_metrics()
        return self.cluster.app.metrics.registry.get_sample_value(name, labels)


@pytest.fixture
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    made = Cluster(folder)
    await made.start()
    await made.add(Role.PREFILL, Role.DECODE)
    yield made
    await made.check_clean()
    await made.stop()


async def test_back_pressure_is_heeded_until_it_is_lifted(cluster: Cluster) -> None:
    controlled = Controlled(cluster, LIMITS)
    await controlled.open()
    event = await controlled.tick(prompts=40, isl=6_000)
    assert event.action == events_pb2.BALANCE_ACTION_BACK_PRESSURE, event.reason
    assert event.epochs == sum(view.info.role_epoch for view in cluster.app.router.fleet)
    assert what_of(event) == f"routers: at most {event.admit_per_s:.3g} requests/s"
    ends = [await controlled.ask() for _ in range(12)]
    assert ends[:8] == [""] * 8, "these may come at once"
    assert ends[-1] == "RESOURCE_EXHAUSTED"
    assert 50.0 <= controlled.retry_after_ms <= 1e3 * 4 / event.admit_per_s
    assert controlled.metric("weir_admission_refusals_total", reason="back_pressure") == ends.count(ends[-1])
    await cluster.bus.publish(DECISION, events_pb2.DecisionEvent(origin=controlled.origin()).SerializeToString())
    assert [await controlled.ask() for _ in range(12)] == [""] * 12
    await controlled.loop.close()


async def test_advice_of_a_dry_run_is_not_heeded(cluster: Cluster) -> None:
    controlled = Controlled(cluster, LIMITS, dry_run=True)
    await controlled.open()
    event = await controlled.tick(prompts=40, isl=6_000)
    assert event.action == events_pb2.BALANCE_ACTION_BACK_PRESSURE
    assert [await controlled.ask() for _ in range(12)] == [""] * 12
    assert cluster.app.router.fleet.counsel.ignored == {"dry_run": 1}
    await controlled.loop.close()


async def test_local_prefill_is_heeded_and_on_the_trace(cluster: Cluster) -> None:
    await cluster.add(Role.DECODE)
    controlled = Controlled(cluster, LIMITS)
    await controlled.open()
    event = await controlled.tick(prompts=18, isl=600)
    assert event.action == events_pb2.BALANCE_ACTION_LOCAL_PREFILL, event.reason
    assert 0.0 < event.local_share < 1.0
    # Longer prompts than the short ones, which a decode worker would be given anyway.
    for number in range(12):
        await cluster.client.complete(tuple(5 + (number + place) % 90 for place in range(30)), max_tokens=4)
    routes = [
        mark.facts["reason"]
        for record in cluster.app.router.recent_traces(12)
        for mark in record.end.marks
        if mark.what == ROUTED
    ]
    assert len(routes) == 12
    assert routes.count("advised") / 12 == pytest.approx(event.local_share, abs=1 / 12)
    assert controlled.metric("weir_placements_total", reason="advised") == routes.count("advised")
    await controlled.loop.close()
