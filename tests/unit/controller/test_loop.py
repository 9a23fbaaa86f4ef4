"""The balance loop on in-memory bus and registry, by a manual clock."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from weir.balance.decide import BalanceController
from weir.balance.decision import Action, BalanceLimits, Decision
from weir.balance.sizing import Slo
from weir.clock import ManualClock
from weir.config import ControllerConfig
from weir.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from weir.events.bus import Event
from weir.events.memory import MemoryBus, MemoryRegistry, MemoryServer
from weir.events.subjects import DECISION, SCALE, load_subject, request_subject
from weir.lifecycle import RequestState, Role
from weir.rpc.convert import state_to_pb
from weir.rpc.v1 import common_pb2, controller_pb2, events_pb2
from weir.services.controller.actuators import Actuators, Flips, LocalScale, RecordingActuator
from weir.services.controller.balancing import limits_of, make_loop, profile_of
from weir.services.controller.ledger import RoleLedger
from weir.services.controller.loop import BalanceLoop
from weir.services.controller.roles import RoleChanges
from weir.services.controller.senses import Senses
from weir.services.controller.servicer import ControllerServicer
from weir.services.controller.speed import SpeedBook
from weir.services.controller.telling import DecisionLog
from weir.services.controller.workers import RoleAnswer
from weir.telemetry.metrics import ControllerMetrics

LIMITS = BalanceLimits(slo=Slo(ttft_s=2.0, tpot_s=0.05), mixed=False, confirm_s=3.0, cooldown_s=5.0)


class Stand:
    """A loop with workers p (prefill) and a, b, c (decode) that say what they are told to say."""

    def __init__(self, *, dry_run: bool = False) -> None:
        self.clock = ManualClock()
        self.server = MemoryServer()
        self.bus = MemoryBus(self.server)
        self.registry = MemoryRegistry(self.server, self.clock)
        self.actuator = RecordingActuator()
        self.metrics = ControllerMetrics()
        self.events: list[events_pb2.DecisionEvent] = []
        self.requests = 0
        self.loop = BalanceLoop(
            BalanceController(LIMITS),
            Senses(SpeedBook(), window_s=10),
            registry=self.registry,
            bus=self.bus,
            clock=self.clock,
            actuator=self.actuator,
            decisions=DecisionLog(50),
            metrics=self.metrics,
            origin=lambda: events_pb2.EventOrigin(publisher_id="c"),
            interval_s=1e6,
            dry_run=dry_run,
        )

    async def open(self) -> None:
        await self.registry.watch(lambda change: None)
        await self.bus.subscribe(DECISION, self._on_decision)
        for worker_id in "pabc":
            role = common_pb2.ROLE_PREFILL if worker_id == "p" else common_pb2.ROLE_DECODE
            await self.registry.put(
                events_pb2.WorkerRecord(worker_id=worker_id, incarnation=1, role=role, role_epoch=1, max_running=32)
            )
        await self.loop.open()
        await self.loop.tick()  # the window begins

    def _on_decision(self, event: Event) -> None:
        self.events.append(events_pb2.DecisionEvent.FromString(event.payload))

    async def second(self, *, rate: int = 4, isl: int = 6000, osl: int = 50) -> None:
        """A second of traffic and reports, then one round."""
        for _ in range(rate):
            self.requests += 1
            for state in (RequestState.ADMITTED, RequestState.PREFILLED, RequestState.DECODING, RequestState.FINISHED):
                event = events_pb2.LifecycleEvent(
                    request_id=f"r-{self.requests}", attempt=1, state=state_to_pb(state), prompt_tokens=isl,
                    completion_tokens=osl,
                )  # fmt: skip
                await self.bus.publish(request_subject(state), event.SerializeToString())
        for worker_id in "pabc":
            load = common_pb2.WorkerLoad(running=4, decode_step_ms=30.0, prefill_tokens_per_s=10_000)
            origin = events_pb2.EventOrigin(publisher_id=worker_id, incarnation=1)
            report = events_pb2.LoadEvent(origin=origin, load=load)
            await self.bus.publish(load_subject(worker_id), report.SerializeToString())
        self.clock.advance(1.0)
        await self.loop.tick()
        await asyncio.sleep(0)

    async def until_decided(self, seconds: int = 12) -> events_pb2.DecisionEvent:
        for _ in range(seconds):
            await self.second()
            if self.events[-1].action != events_pb2.BALANCE_ACTION_NONE:
                return self.events[-1]
        raise AssertionError([event.reason for event in self.events])


async def test_traffic_becomes_a_decision_an_event_and_an_action() -> None:
    stand = Stand()
    await stand.open()
    event = await stand.until_decided()
    assert event.action == events_pb2.BALANCE_ACTION_FLIP
    assert [(f.worker_id, f.role, f.expected_epoch) for f in event.flips] == [("a", common_pb2.ROLE_PREFILL, 1)]
    assert event.inputs["isl_mean"] == 6000
    assert "3P+1D" in event.reason
    assert event.expires_unix_s == pytest.approx(stand.clock.unix_s() + LIMITS.pending_s)
    assert not event.dry_run
    assert [one.action for one in stand.actuator.asked] == [Action.FLIP]
    assert stand.loop.pending == event.number
    await stand.second()
    assert stand.events[-1].reason == f"decision {event.number}, flip, is under way"
    assert stand.metrics.registry.get_sample_value("weir_decisions_total", {"action": "flip"}) == 1
    await stand.loop.close()


async def test_advice_is_told_and_not_followed() -> None:
    stand = Stand(dry_run=True)
    await stand.open()
    event = await stand.until_decided()
    assert event.dry_run
    assert (stand.actuator.asked, stand.loop.pending) == ([], 0)
    count = len(stand.loop.decisions.kept)
    for _ in range(4):
        await stand.second()
    assert len(stand.loop.decisions.kept) == count, "the same advice waits for the cooldown"
    await stand.loop.close()


async def test_an_action_that_fails_is_no_more_pending() -> None:
    stand = Stand()
    stand.actuator.error = Unavailable("the worker is gone")
    await stand.open()
    await stand.until_decided()
    await asyncio.sleep(0)
    assert stand.loop.pending == 0
    await stand.loop.close()


async def test_nonsense_on_the_bus_and_a_lost_registry_change_nothing() -> None:
    stand = Stand()
    await stand.open()
    await stand.bus.publish(request_subject(RequestState.ADMITTED), b"\xff\xff")
    await stand.bus.publish(load_subject("p"), b"\xff\xff")
    await stand.bus.publish(request_subject(RequestState.ADMITTED), b"")
    for _ in range(3):
        await stand.second()
    stand.server.set_up(False)
    for _ in range(8):
        stand.clock.advance(1.0)
        await stand.loop.tick()
    latest = stand.loop.decisions.latest
    assert latest is not None
    assert latest.reason == "not acted on: the registry is out of reach"
    assert stand.actuator.asked == []
    await stand.loop.close()


async def test_operators_see_and_cancel() -> None:
    stand = Stand()
    await stand.open()
    servicer = ControllerServicer(
        registry=stand.registry, ledger=RoleLedger(5), workers=Workers(), clock=stand.clock, metrics=stand.metrics,
        role_change_timeout_s=1,
    )  # fmt: skip
    context: Any = None
    assert (await servicer.ListDecisions(controller_pb2.ListDecisionsRequest(), context)).mode == "off"
    with pytest.raises(FailedPrecondition):
        await servicer.CancelDecision(controller_pb2.CancelDecisionRequest(number=1), context)
    servicer.balance = stand.loop
    event = await stand.until_decided()
    answer = await servicer.ListDecisions(controller_pb2.ListDecisionsRequest(limit=1), context)
    assert (answer.mode, answer.pending, answer.latest, list(answer.decisions)) == (
        "auto",
        event.number,
        event,
        [event],
    )
    with pytest.raises(FailedPrecondition, match="not pending"):
        await servicer.CancelDecision(controller_pb2.CancelDecisionRequest(number=event.number + 1), context)
    await servicer.CancelDecision(controller_pb2.CancelDecisionRequest(number=event.number), context)
    assert stand.loop.pending == 0
    assert stand.events[-1].cancels == event.number
    with pytest.raises(InvalidArgument):
        await servicer.ListDecisions(controller_pb2.ListDecisionsRequest(limit=-1), context)
    await stand.loop.close()


class Workers:
    """A WorkerPort that says yes, or why not."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Role, int, float]] = []
        self.stale: set[str] = set()

    async def set_role(
        self, address: str, role: Role, *, expected_epoch: int, drain_timeout_ms: float, timeout_s: float
    ) -> RoleAnswer:
        self.asked.append((address, role, expected_epoch, drain_timeout_ms))
        if address in self.stale:
            raise FailedPrecondition("stale epoch")
        return RoleAnswer(role, expected_epoch + 1, 250.0)


async def test_flips_go_to_the_workers_and_are_timed() -> None:
    stand = Stand()
    await stand.open()
    workers, took = Workers(), list[float]()
    changes = RoleChanges(stand.registry, RoleLedger(5), workers, stand.clock, stand.metrics, 1.0)
    changes.on_made = took.append
    for worker_id in "ab":
        await stand.registry.put(
            events_pb2.WorkerRecord(
                worker_id=worker_id, incarnation=1, role=common_pb2.ROLE_DECODE, role_epoch=1, address=worker_id
            )
        )
    decision = await _decided(stand)
    await Actuators(Flips(changes, drain_ms=70.0)).carry_out(decision)
    assert workers.asked == [("a", Role.PREFILL, 1, 70.0)]
    assert took == [0.25]
    workers.stale = {"a"}
    with pytest.raises(FailedPrecondition, match="stale epoch"):
        await Flips(changes, drain_ms=70.0).carry_out(decision)
    await stand.loop.close()


async def _decided(stand: Stand) -> Decision:
    await stand.until_decided()
    return stand.actuator.asked[-1]


async def test_scaling_of_local_workers_is_asked_by_event() -> None:
    stand = Stand()
    events: list[events_pb2.ScaleEvent] = []
    await stand.bus.subscribe(SCALE, lambda event: events.append(events_pb2.ScaleEvent.FromString(event.payload)))
    scale = LocalScale(stand.bus, stand.clock, lambda: events_pb2.EventOrigin(publisher_id="c"))
    up = Decision(7, Action.SCALE_UP, 0.0, "more", role=Role.DECODE, expires_s=30.0)
    down = Decision(8, Action.SCALE_DOWN, 0.0, "less", worker_id="w", role=Role.DECODE, expires_s=30.0)
    for decision in (up, down):
        await Actuators(RecordingActuator(), scale).carry_out(decision)
    assert [(e.number, e.start_role, e.stop_worker_id) for e in events] == [
        (7, common_pb2.ROLE_DECODE, ""),
        (8, common_pb2.ROLE_UNSPECIFIED, "w"),
    ]
    assert events[0].deadline_unix_s == stand.clock.unix_s() + 30.0
    with pytest.raises(FailedPrecondition, match="nothing here starts or stops workers"):
        await Actuators(RecordingActuator()).carry_out(up)


def test_settings_become_limits_or_are_refused(tmp_path: Any) -> None:
    limits = limits_of(ControllerConfig(slo_ttft_ms=500, slo_tpot_ms=0, actuator="local", max_workers=5))
    assert (limits.slo.ttft_s, limits.slo.tpot_s, limits.scale, limits.max_workers) == (0.5, math.inf, True, 5)
    assert not limits_of(ControllerConfig()).scale
    for wrong in (
        ControllerConfig(busy=0.5, spare=0.6),
        ControllerConfig(min_workers=9),
        ControllerConfig(slo_ttft_ms=5),
    ):
        with pytest.raises(InvalidArgument):
            limits_of(wrong)
    with pytest.raises(NotFound):
        profile_of(ControllerConfig(profile_path=str(tmp_path / "none.json")))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(InvalidArgument, match="version"):
        profile_of(ControllerConfig(profile_path=str(tmp_path / "bad.json")))
    assert profile_of(ControllerConfig()) is None


async def test_the_loop_is_made_from_settings_and_runs() -> None:
    stand = Stand()
    await stand.registry.watch(lambda change: None)
    changes = RoleChanges(stand.registry, RoleLedger(5), Workers(), stand.clock, stand.metrics, 1.0)
    loop = make_loop(
        ControllerConfig(mode="advise", interval_s=0.05),
        identity="c-1", registry=stand.registry, bus=stand.bus, clock=stand.clock, changes=changes,
        metrics=stand.metrics,
    )  # fmt: skip
    assert loop.dry_run
    heard: asyncio.Future[events_pb2.DecisionEvent] = asyncio.get_running_loop().create_future()

    def on_decision(event: Event) -> None:
        if not heard.done():
            heard.set_result(events_pb2.DecisionEvent.FromString(event.payload))

    await stand.bus.subscribe(DECISION, on_decision)
    await loop.open()
    event = await asyncio.wait_for(heard, 10)
    assert (event.origin.publisher_id, event.origin.sequence, event.reason) == ("c-1", 1, "no worker is ready")
    await loop.close()
    await loop.close()
