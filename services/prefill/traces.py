"""Spans of prefills, for those requests whose trace is sampled; the others are not even looked at."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from weir.clock import Clock
from weir.engine.output import Event, Finished, Preempted, Prefilled, Progress, Started, Usage
from weir.errors import WeirError
from weir.ids import RequestKey
from weir.telemetry.spans import AttributeValue, OpenSpan, SpanData, SpanEvent, Tracer

MAX_TRACED = 4_096
MAX_EVENTS = 128
"""Moments kept of one prefill; later chunks are only counted."""


@dataclass(slots=True)
class _Traced:
    span: OpenSpan
    begun_s: float
    attributes: dict[str, AttributeValue]
    events: list[SpanEvent] = field(default_factory=list)
    chunks: int = 0

    def note(self, event: SpanEvent) -> None:
        if len(self.events) < MAX_EVENTS:
            self.events.append(event)


class PrefillTraces:
    """Follows prefills from their arrival until their KV is complete, or they end before. Never raises."""

    def __init__(self, tracer: Tracer, clock: Clock) -> None:
        self._tracer = tracer
        self._clock = clock
        self._traced: dict[RequestKey, _Traced] = {}

    def __len__(self) -> int:
        return len(self._traced)

    def begin(self, key: RequestKey, traceparent: str, tokens: int) -> None:
        """A prompt of ``tokens`` came in."""
        span = self._tracer.child_of(traceparent)
        if span is not None and len(self._traced) < MAX_TRACED:
            attributes: dict[str, AttributeValue] = {
                "weir.request_id": key.request_id,
                "weir.attempt": key.attempt,
                "weir.tokens": tokens,
            }
            self._traced[key] = _Traced(span, self._clock.monotonic_s(), attributes)

    def on_events(self, events: Iterable[Event]) -> None:
        """An engine step's events."""
        if not self._traced:
            return
        now_s = self._clock.monotonic_s()
        for event in events:
            traced = self._traced.get(event.key)
            if traced is not None:
                self._on_event(traced, event, now_s)

    def refused(self, key: RequestKey, error: WeirError) -> None:
        """The engine did not take it."""
        traced = self._traced.get(key)
        if traced is not None:
            self._close(key, traced, self._clock.monotonic_s(), str(error))

    def engine_lost(self, error: WeirError) -> None:
        """No event will come any more."""
        for key in list(self._traced):
            self.refused(key, error)

    def _on_event(self, traced: _Traced, event: Event, now_s: float) -> None:
        if isinstance(event, Started):
            traced.attributes["weir.queue_ms"] = event.queued_s * 1e3
            traced.attributes["weir.tokens.cached"] = event.cached_tokens
            traced.note(SpanEvent("started", now_s))
        elif isinstance(event, Progress):
            traced.chunks += 1
            counts = {"weir.tokens": event.num_tokens, "weir.blocks_sealed": len(event.sealed)}
            traced.note(SpanEvent("chunk", now_s, counts))
        elif isinstance(event, Preempted):
            traced.note(SpanEvent("preempted", now_s))
        elif isinstance(event, Prefilled):
            self._finish(traced, event.key, event.usage, now_s, "")
        elif isinstance(event, Finished):
            error = "" if event.error is None else str(event.error)
            traced.attributes["weir.finish_reason"] = event.reason.value
            self._finish(traced, event.key, event.usage, now_s, error)

    def _finish(self, traced: _Traced, key: RequestKey, usage: Usage, now_s: float, error: str) -> None:
        traced.attributes["weir.tokens.local_compute"] = usage.local_compute
        traced.attributes["weir.preemptions"] = usage.preemptions
        self._close(key, traced, now_s, error)

    def _close(self, key: RequestKey, traced: _Traced, now_s: float, error: str) -> None:
        del self._traced[key]
        attributes = {**traced.attributes, "weir.chunks": traced.chunks}
        events = tuple(traced.events)
        span = SpanData("worker.prefill", traced.begun_s, now_s, attributes, events=events, error=error)
        self._tracer.close(traced.span, span)
