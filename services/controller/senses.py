"""What the controller hears, put together into an observation. Pure: messages and times come in.

Events come at most once, late, or again: a request's state counts once, a worker's report counts if it is of the
incarnation that the registry lists. Reports of workers that are not listed are forgotten.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from weir.balance.forecast import Constant, Forecaster, ForecastPanel, HoltWinters
from weir.balance.observe import Links, Observation, WorkerFacts
from weir.balance.window import TrafficWindow
from weir.lifecycle import RequestState, Role
from weir.rpc.convert import role_from_pb, state_from_pb
from weir.rpc.v1 import common_pb2, events_pb2
from weir.services.controller.speed import SpeedBook, bytes_per_token

MAX_STATES_REMEMBERED = 1 << 14
MAX_WORKERS = 1 << 14
FLIPS_KEPT = 20
HORIZON_S = 10


@dataclass(frozen=True, slots=True)
class _Report:
    incarnation: int
    load: common_pb2.WorkerLoad
    heard_s: float


class Senses:
    """``lifecycle``, ``load`` and ``flipped`` as it happens; ``observe`` at each interval."""

    def __init__(
        self, speeds: SpeedBook, *, window_s: float, season_s: float = 0.0, links: Links | None = None
    ) -> None:
        self.window = TrafficWindow(span_s=window_s)
        methods: list[Forecaster] = [Constant(max(1, int(window_s))), HoltWinters()]
        if season_s >= 2:
            methods.append(HoltWinters(int(season_s)))
        self.panel = ForecastPanel(methods, horizon=HORIZON_S)
        self.repeats = 0
        """Lifecycle events that had been counted before."""
        self._speeds = speeds
        self._links = links or Links()
        self._reports: dict[str, _Report] = {}
        self._counted: OrderedDict[tuple[str, int, int], None] = OrderedDict()
        self._flips_s: deque[float] = deque(maxlen=FLIPS_KEPT)
        self._fed_s = -math.inf

    def lifecycle(self, event: events_pb2.LifecycleEvent, now_s: float) -> None:
        """A request entered a state. Raises InvalidArgument for a state that is none."""
        state = state_from_pb(event.state)
        key = (event.request_id, event.attempt, event.state)
        if key in self._counted:
            self.repeats += 1
            return
        self._counted[key] = None
        if len(self._counted) > MAX_STATES_REMEMBERED:
            self._counted.popitem(last=False)
        window = self.window
        if state is RequestState.ADMITTED:
            window.arrived(now_s, event.prompt_tokens)
        elif state is RequestState.REJECTED:
            window.refused(now_s)
        elif state is RequestState.PREFILLED:
            window.prefilled(now_s, event.prompt_tokens, event.cached_tokens)
        elif state is RequestState.DECODING:
            window.decode_began(now_s, event.prompt_tokens)
        elif state is RequestState.FINISHED:
            window.finished(now_s, event.completion_tokens, event.ttft_ms / 1e3, event.tpot_ms / 1e3)

    def load(self, event: events_pb2.LoadEvent, now_s: float) -> None:
        """A worker said how loaded it is."""
        worker_id, load = event.origin.publisher_id, event.load
        if worker_id not in self._reports and len(self._reports) >= MAX_WORKERS:
            return
        self._reports[worker_id] = _Report(event.origin.incarnation, load, now_s)
        self._speeds.note(worker_id, load.running, load.decode_step_ms, load.prefill_tokens_per_s)

    def flipped(self, took_s: float) -> None:
        """A role change was made."""
        if math.isfinite(took_s) and took_s >= 0:
            self._flips_s.append(took_s)

    @property
    def flip_s(self) -> float:
        """The longest of the last flips; 0 when there was none."""
        return max(self._flips_s, default=0.0)

    def observe(self, members: Mapping[str, events_pb2.WorkerRecord], stale: bool, now_s: float) -> Observation:
        """The observation now; ``members`` is the registry's view. InvalidArgument for a record without a role."""
        self._feed_forecast(now_s)
        for worker_id in self._reports.keys() - members.keys():
            del self._reports[worker_id]
        self._speeds.keep(members)
        traffic = self.window.snapshot(now_s)
        computed = traffic.uncached.mean if traffic.uncached.count else traffic.isl.mean
        return Observation(
            workers=tuple(self._facts(record) for _, record in sorted(members.items())),
            traffic=traffic,
            forecast=self.panel.forecast(),
            speed=self._speeds.speed(members.values(), computed),
            links=self._links,
            flip_s=self.flip_s,
            stale="the registry is out of reach" if stale else "",
        )

    def _feed_forecast(self, now_s: float) -> None:
        """Give the forecast the seconds that have ended since the last time."""
        self.window.start(now_s)
        second = math.floor(now_s)
        missing = 0 if math.isinf(self._fed_s) else min(second - int(self._fed_s), int(self.window.span_s))
        self._fed_s = second
        for value in self.window.arrivals_by_bucket(now_s, missing):
            self.panel.observe(value)

    def _facts(self, record: events_pb2.WorkerRecord) -> WorkerFacts:
        report = self._reports.get(record.worker_id)
        if report is not None and report.incarnation != record.incarnation:
            report = None
        role = role_from_pb(record.role)
        load = common_pb2.WorkerLoad() if report is None else report.load
        block_bytes = bytes_per_token(record) * record.block_size
        blocks = load.blocks
        return WorkerFacts(
            worker_id=record.worker_id,
            role=role,
            epoch=record.role_epoch,
            heard_s=None if report is None else report.heard_s,
            draining=record.draining,
            running=load.running,
            waiting=load.waiting,
            pending_prefill_tokens=load.pending_prefill_tokens if role is not Role.DECODE else 0,
            stock_bytes=blocks.leased * block_bytes,
            headroom_bytes=(blocks.free + blocks.cached) * block_bytes,
            incarnation=record.incarnation,
        )
