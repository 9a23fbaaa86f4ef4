"""The balance loop, put together from the configuration."""

from __future__ import annotations

import math
from pathlib import Path

from weir.balance.decide import BalanceController
from weir.balance.decision import BalanceLimits
from weir.balance.observe import Links
from weir.balance.profile import Profile, profile_from_json
from weir.balance.sizing import Slo
from weir.clock import Clock
from weir.config import ControllerConfig
from weir.errors import NotFound
from weir.events.bus import EventBus
from weir.events.registry import Registry
from weir.events.sequence import SequenceCounter
from weir.rpc.v1 import events_pb2
from weir.services.controller.actuators import Actuator, Actuators, Flips, LocalScale
from weir.services.controller.kubernetes import KubernetesApi, KubernetesScale
from weir.services.controller.loop import BalanceLoop
from weir.services.controller.roles import RoleChanges
from weir.services.controller.senses import Senses
from weir.services.controller.speed import SpeedBook
from weir.services.controller.telling import DecisionLog
from weir.services.controller.traces import TracedActuator
from weir.telemetry.metrics import ControllerMetrics
from weir.telemetry.spans import Tracer

MB = 1e6
ADVICE_INTERVALS = 4
"""Advice counts for this many intervals: one that is lost, or late, changes nothing."""


def limits_of(config: ControllerConfig) -> BalanceLimits:
    """The limits that the settings mean; raises InvalidArgument for settings that contradict each other."""
    return BalanceLimits(
        slo=Slo(ttft_s=config.slo_ttft_ms / 1e3 or math.inf, tpot_s=config.slo_tpot_ms / 1e3 or math.inf),
        min_workers=config.min_workers,
        max_workers=config.max_workers,
        scale=config.actuator != "flip",
        mixed=config.mixed_fallback,
        local_prefill=config.local_prefill,
        busy=config.busy,
        spare=config.spare,
        band=config.band,
        confirm_s=config.confirm_s,
        confirm_down_s=config.confirm_down_s,
        min_confirm_s=min(3.0, config.confirm_s),
        cooldown_s=config.cooldown_s,
        pending_s=config.pending_s,
        advice_s=max(ADVICE_INTERVALS * config.interval_s, 1.0),
    )


def profile_of(config: ControllerConfig) -> Profile | None:
    """The profile that is named, if any. Raises NotFound, or InvalidArgument with what is wrong in it."""
    if not config.profile_path:
        return None
    path = Path(config.profile_path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise NotFound("profile", str(path)) from error
    return profile_from_json(text, source=str(path))


def make_loop(
    config: ControllerConfig,
    *,
    identity: str,
    registry: Registry,
    bus: EventBus,
    clock: Clock,
    changes: RoleChanges,
    metrics: ControllerMetrics,
    tracer: Tracer | None = None,
) -> BalanceLoop:
    """A loop that is ready to ``open``. Raises what ``limits_of``, ``profile_of`` and the Kubernetes client raise."""
    numbers = SequenceCounter()
    incarnation = max(1, int(clock.unix_s() * 1e3))

    def origin() -> events_pb2.EventOrigin:
        return events_pb2.EventOrigin(
            publisher_id=identity, incarnation=incarnation, sequence=numbers.next(), unix_s=clock.unix_s()
        )

    links = Links(config.link_prefill_mb_s * MB, config.link_decode_mb_s * MB)
    senses = Senses(SpeedBook(profile_of(config)), window_s=config.window_s, season_s=config.season_s, links=links)
    changes.on_made = senses.flipped
    scale: Actuator | None = None
    if config.actuator == "local":
        scale = LocalScale(bus, clock, origin)
    elif config.actuator == "kubernetes":
        api = KubernetesApi.in_cluster(config.kubernetes_namespace)
        scale = KubernetesScale(api, config.kubernetes_prefix, max_workers=config.max_workers)
    actuator: Actuator = Actuators(Flips(changes, drain_ms=config.drain_ms), scale)
    if tracer is not None and tracer.enabled:
        actuator = TracedActuator(actuator, tracer, clock)
    return BalanceLoop(
        BalanceController(limits_of(config)),
        senses,
        registry=registry,
        bus=bus,
        clock=clock,
        actuator=actuator,
        decisions=DecisionLog(config.max_decisions_kept),
        metrics=metrics,
        origin=origin,
        interval_s=config.interval_s,
        dry_run=config.dry_run or config.mode == "advise",
    )
