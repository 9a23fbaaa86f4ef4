"""What the router counts, as Prometheus metrics."""

from __future__ import annotations

from collections import Counter as Count
from dataclasses import dataclass

from prometheus_client import Counter, Histogram

from weir.ids import WorkerKey
from weir.lifecycle import RequestState
from weir.services.router.book import RequestBook
from weir.services.router.commands import End
from weir.services.router.fleet import Fleet
from weir.telemetry.metrics import RouterMetrics

STAGES = ("admit", "queue", "prefill", "first_token", "second_token", "decode")
BREAKER_STATES = ("closed", "open", "half_open")


@dataclass(frozen=True, slots=True)
class _ModelMeters:
    """What is counted for one model, found once: a look-up by label costs more than counting."""

    generated: Counter
    prompt: Counter
    e2e_seconds: Histogram


class Meters:
    """``ended`` and ``gap`` as it happens; ``refresh``, now and then, brings the rest up to date."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self.metrics = metrics
        self._stages = [(f"{name}_ms", metrics.stage_seconds.labels(name)) for name in STAGES]
        self._by_model: dict[str, _ModelMeters] = {}
        self._seen: Count[str] = Count()
        self._models: set[str] = set()
        self._openings: dict[WorkerKey, int] = {}
        self.gap = metrics.saw_gap
        """(model, requests under way, seconds between two messages of tokens of one request)"""

    def ended(self, end: End, model: str, active: int) -> None:
        """A request for ``model`` is over; ``active`` were under way, it included."""
        times, usage, metrics = end.timings, end.usage, self.metrics
        if not usage.completion_tokens and end.state is not RequestState.FINISHED:
            return
        own = self._of_model(metrics.models(model))
        if usage.completion_tokens:
            metrics.saw_ttft(model, prompt_tokens=usage.prompt_tokens, path=end.path, seconds=times.ttft_ms / 1e3)
            own.generated.inc(usage.completion_tokens)
        if end.state is not RequestState.FINISHED:
            return
        own.e2e_seconds.observe(times.e2e_ms / 1e3)
        if usage.completion_tokens > 1:
            metrics.saw_tpot(model, active=active, seconds=times.tpot_ms / 1e3)
        self._judge(end)
        own.prompt.inc(usage.prompt_tokens)
        metrics.prefix_hit_tokens.inc(usage.cached_tokens)
        metrics.prompt_sources.add(
            local_compute=usage.local_compute_tokens,
            local_cache_hit=usage.local_cache_hit_tokens,
            external_kv_transfer=usage.external_kv_tokens,
        )
        for stage_ms, stage in self._stages:
            stage.observe(getattr(times, stage_ms) / 1e3)

    def _of_model(self, name: str) -> _ModelMeters:
        own = self._by_model.get(name)
        if own is None:
            metrics = self.metrics
            own = self._by_model[name] = _ModelMeters(
                metrics.generation_tokens.labels(name),
                metrics.prompt_tokens.labels(name),
                metrics.e2e_seconds.labels(name),
            )
        return own

    def _judge(self, end: End) -> None:
        """Goodput: a finished request is good when it met each SLO that it had."""
        missed = [
            slo
            for slo, took_ms, limit_ms in (
                ("ttft", end.timings.ttft_ms, end.slo_ttft_ms),
                ("tpot", end.timings.tpot_ms, end.slo_tpot_ms),
            )
            if 0 < limit_ms < took_ms
        ]
        for slo in missed:
            self.metrics.slo_missed.labels(slo).inc()
        self.metrics.requests_good.inc(not missed)

    def refresh(self, book: RequestBook, fleet: Fleet, links_up: int, now_s: float) -> None:
        """Bring gauges and counters that others keep up to date."""
        metrics = self.metrics
        self._count_active(book)
        self._look_at_breakers(fleet, now_s)
        for leg in ("prefill", "decode"):
            metrics.sessions_open.labels(leg).set(links_up)
        metrics.registry_stale.set(fleet.stale)
        for state_name, count in book.ended.items():
            metrics.requests_ended.labels(state_name).inc(self._fresh(f"ended {state_name}", count))
        for kind, counts, counter in (
            ("placed", book.decisions, metrics.placements),
            ("retry", book.retries, metrics.retries),
            ("refused", book.refusals, metrics.refusals),
        ):
            for reason, count in counts.items():
                counter.labels(metrics.reasons(reason)).inc(self._fresh(f"{kind} {reason}", count))

    def _count_active(self, book: RequestBook) -> None:
        metrics = self.metrics
        states: Count[str] = Count()
        running: Count[str] = Count()
        waiting: Count[str] = Count()
        for entry in book.entries():
            states[entry.state.value] += 1
            model = metrics.models(entry.admission.model)
            (waiting if entry.waiting else running)[model] += 1
        for state in RequestState:
            metrics.requests_active.labels(state.value).set(states[state.value])
        self._models |= running.keys() | waiting.keys()
        for model in self._models:
            metrics.requests_running.labels(model).set(running[model])
            metrics.requests_waiting.labels(model).set(waiting[model])

    def _look_at_breakers(self, fleet: Fleet, now_s: float) -> None:
        states: Count[str] = Count()
        openings: dict[WorkerKey, int] = {}
        for view in fleet:
            states[view.breaker.state(now_s)] += 1
            opened = openings[view.key] = view.breaker.opened
            seen = self._openings.get(view.key, 0)
            # A worker that was gone and is listed again has a new breaker, which counts from 0.
            self.metrics.breaker_openings.inc(opened - seen if opened >= seen else opened)
        self._openings = openings
        for state in BREAKER_STATES:
            self.metrics.breakers.labels(state).set(states[state])

    def _fresh(self, name: str, count: int) -> int:
        """What was added to a count since it was last looked at."""
        fresh = count - self._seen[name]
        self._seen[name] = count
        return fresh
