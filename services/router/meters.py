"""What the router counts, as Prometheus metrics."""

from __future__ import annotations

from collections import Counter

import prometheus_client

from weir.lifecycle import RequestState
from weir.services.router.book import RequestBook
from weir.services.router.commands import End
from weir.telemetry.metrics import RouterMetrics


class Meters:
    """``ended`` and ``gap`` as it happens; ``refresh``, now and then, brings the rest up to date."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self.metrics = metrics
        self._stages = {
            name: metrics.stage_seconds.labels(name)
            for name in ("admit", "queue", "prefill", "first_token", "second_token", "decode")
        }
        self._seen: Counter[str] = Counter()
        self._placements = prometheus_client.Counter(
            "weir_placements", "Placements, by reason.", ("reason",), registry=metrics.registry
        )
        self.gap = metrics.itl_seconds.observe
        """Seconds between two messages of tokens of one request."""

    def ended(self, end: End) -> None:
        """A request is over."""
        times, usage = end.timings, end.usage
        if usage.completion_tokens:
            self.metrics.ttft_seconds.observe(times.ttft_ms / 1e3)
            self.metrics.generation_tokens.inc(usage.completion_tokens)
        if end.state is not RequestState.FINISHED:
            return
        self.metrics.e2e_seconds.observe(times.e2e_ms / 1e3)
        if usage.completion_tokens > 1:
            self.metrics.tpot_seconds.observe(times.tpot_ms / 1e3)
        self.metrics.prompt_tokens.inc(usage.prompt_tokens)
        self.metrics.prompt_sources.add(
            local_compute=usage.local_compute_tokens,
            local_cache_hit=usage.local_cache_hit_tokens,
            external_kv_transfer=usage.external_kv_tokens,
        )
        for name, stage in self._stages.items():
            stage.observe(getattr(times, f"{name}_ms") / 1e3)

    def refresh(self, book: RequestBook, links_up: int, stale: bool) -> None:
        """Bring gauges and counters that the book keeps up to date."""
        metrics = self.metrics
        states = Counter(entry.state.value for entry in book.entries())
        for state in RequestState:
            metrics.requests_active.labels(state.value).set(states[state.value])
        metrics.requests_running.set(len(book) - book.waiting)
        metrics.requests_waiting.set(book.waiting)
        for leg in ("prefill", "decode"):
            metrics.sessions_open.labels(leg).set(links_up)
        metrics.registry_stale.set(stale)
        for state_name, count in book.ended.items():
            metrics.requests_ended.labels(state_name).inc(self._fresh(f"ended {state_name}", count))
        for reason, count in book.decisions.items():
            self._placements.labels(reason).inc(self._fresh(f"placed {reason}", count))
        for reason, count in book.retries.items():
            metrics.retries.labels(reason).inc(self._fresh(f"retry {reason}", count))

    def _fresh(self, name: str, count: int) -> int:
        """What was added to a count since it was last looked at."""
        fresh = count - self._seen[name]
        self._seen[name] = count
        return fresh
