"""Spans of the decode side, for those requests whose trace is sampled: one span a sequence, one a KV read."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from weir.clock import Clock
from weir.engine.output import Event, Finished, Preempted, Progress, Started, TokensOut
from weir.errors import KvReadVoid, WeirError
from weir.ids import RequestKey
from weir.services.decode.desk import BeginRead
from weir.telemetry.spans import AttributeValue, OpenSpan, SpanData, SpanEvent, Tracer
from weir.transfer.plan import ReadReport

MAX_TRACED = 4_096
MAX_PARTS = 128
"""Moments, and reads, kept of one sequence; later ones are left out."""


@dataclass(slots=True)
class _Traced:
    span: OpenSpan
    begun_s: float
    attributes: dict[str, AttributeValue]
    events: list[SpanEvent] = field(default_factory=list)
    reads: list[SpanData] = field(default_factory=list)
    reading: dict[int, float] = field(default_factory=dict)
    tokens: int = 0
    steps: int = 0

    def note(self, event: SpanEvent) -> None:
        if len(self.events) < MAX_PARTS:
            self.events.append(event)


class DecodeTraces:
    """Follows sequences from their arrival to their end. Never raises."""

    def __init__(self, tracer: Tracer, clock: Clock) -> None:
        self._tracer = tracer
        self._clock = clock
        self._traced: dict[RequestKey, _Traced] = {}

    def __len__(self) -> int:
        return len(self._traced)

    def begin(self, key: RequestKey, traceparent: str, tokens: int, *, remote: bool) -> None:
        """A sequence with a context of ``tokens`` came in; ``remote``: its KV is read from another worker."""
        span = self._tracer.child_of(traceparent)
        if span is not None and len(self._traced) < MAX_TRACED:
            attributes: dict[str, AttributeValue] = {
                "weir.request_id": key.request_id,
                "weir.attempt": key.attempt,
                "weir.context_tokens": tokens,
                "weir.kv_source": "remote" if remote else "local",
            }
            self._traced[key] = _Traced(span, self._clock.monotonic_s(), attributes)

    def read_begun(self, order: BeginRead) -> None:
        """A KV read is about to begin."""
        traced = self._traced.get(order.key)
        if traced is not None:
            traced.reading[order.read.read_id] = self._clock.monotonic_s()

    def read_ended(self, order: BeginRead, report: ReadReport | None, void: KvReadVoid | None) -> None:
        """It is proven, as ``report`` says, or void."""
        traced = self._traced.get(order.key)
        begun_s = None if traced is None else traced.reading.pop(order.read.read_id, None)
        if traced is None or begun_s is None or len(traced.reads) >= MAX_PARTS:
            return
        traced.reads.append(_read(order, begun_s, self._clock.monotonic_s(), report, void))

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
        if isinstance(event, TokensOut):
            if not traced.tokens:
                traced.note(SpanEvent("first_token_here", now_s, {"weir.index": event.first_index}))
            traced.tokens += len(event.tokens)
            traced.steps += 1
        elif isinstance(event, Started):
            traced.attributes["weir.queue_ms"] = event.queued_s * 1e3
            traced.attributes["weir.tokens.cached"] = event.cached_tokens
            traced.note(SpanEvent("started", now_s))
        elif isinstance(event, Progress):
            traced.note(SpanEvent("chunk", now_s, {"weir.tokens": event.num_tokens}))
        elif isinstance(event, Preempted):
            traced.note(SpanEvent("preempted", now_s))
        elif isinstance(event, Finished):
            traced.attributes["weir.finish_reason"] = event.reason.value
            traced.attributes["weir.preemptions"] = event.usage.preemptions
            self._close(event.key, traced, now_s, "" if event.error is None else str(event.error))

    def _close(self, key: RequestKey, traced: _Traced, now_s: float, error: str) -> None:
        del self._traced[key]
        attributes = {**traced.attributes, "weir.tokens.generated": traced.tokens, "weir.steps": traced.steps}
        span = SpanData(
            "worker.decode",
            traced.begun_s,
            now_s,
            attributes,
            events=tuple(traced.events),
            error=error,
            children=tuple(traced.reads),
        )
        self._tracer.close(traced.span, span)


def _read(
    order: BeginRead, begun_s: float, ended_s: float, report: ReadReport | None, void: KvReadVoid | None
) -> SpanData:
    attributes: dict[str, AttributeValue] = {
        "weir.kv.read": order.read.read_id,
        "weir.kv.blocks": len(order.read.destinations),
        "weir.kv.source": order.peer.worker.worker_id,
    }
    if report is None:
        reason = "transport" if void is None else void.reason
        attributes["weir.kv.void_reason"] = reason
        detail = "" if void is None else void.detail
        return SpanData("worker.kv_read", begun_s, ended_s, attributes, error=f"void: {reason}: {detail}")
    attributes |= {
        "weir.kv.bytes": report.bytes,
        "weir.kv.descriptors": report.descriptors,
        "weir.kv.transport": report.transport,
        "weir.kv.gb_per_s": report.bytes / report.data_s / 1e9 if report.data_s > 0 else 0.0,
        "weir.kv.data_ms": report.data_s * 1e3,
    }
    proof_s = report.guard_s + report.checksum_s
    proof: dict[str, AttributeValue] = {
        "weir.kv.guard_ms": report.guard_s * 1e3,
        "weir.kv.checksum_ms": report.checksum_s * 1e3,
    }
    check = SpanData("worker.guard_check", max(begun_s, ended_s - proof_s), ended_s, proof)
    return SpanData("worker.kv_read", begun_s, ended_s, attributes, children=(check,))
