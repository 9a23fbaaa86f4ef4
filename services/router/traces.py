"""Traces of requests: each ended one becomes a record, remembered in a ring and drawn as a tree of spans.

    request
    ├ admit ─ queue ─ prefill ─ first_token ─ second_token ─ decode      the stages: without gaps, their sum is the
    ├ route   who was chosen, why, by which numbers; once an attempt      end-to-end time (see timings.py)
    ├ kv_read proven or void; attempt and retry when there was more than one; cancel

The stages are cut by the stamps that the answer's timings come from; so they add up whatever workers report.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from opentelemetry.trace import SpanKind

from weir.clock import Clock
from weir.errors import WeirError
from weir.lifecycle import FinishReason, RequestState
from weir.services.router.answer import Accepted, Usage
from weir.services.router.commands import End
from weir.services.router.intake import Ask, ChatPrompt
from weir.services.router.journal import BOUND, READ, READ_VOID, REBIND, REFUSED, RETRY, ROUTED, Mark
from weir.services.router.timings import Served, Stamps, Timings, measure
from weir.telemetry.spans import AttributeValue, OpenSpan, SpanData, SpanEvent, Tracer

STAGES = ("admit", "queue", "prefill", "first_token", "second_token", "decode")
PROVIDER = "weir"


@dataclass(slots=True)
class RequestTrace:
    """Where a request stands in a trace, from its receipt on. ``operation`` in GenAI's words. Not modified."""

    span: OpenSpan
    operation: str
    received_s: float
    max_tokens: int
    tenant: str


@dataclass(slots=True)
class TraceRecord:
    """A request that has ended. ``end.usage`` and ``end.timings`` are what the client was told. Not modified."""

    trace: RequestTrace
    accepted: Accepted
    end: End
    finish_reason: FinishReason
    usage: Usage


class RequestTraces:
    """Opens, ends and remembers. ``capacity`` is the number of ended requests remembered, sampled or not."""

    def __init__(self, tracer: Tracer, clock: Clock, capacity: int) -> None:
        self._tracer = tracer
        self._clock = clock
        self._capacity = capacity
        self._ring: OrderedDict[str, TraceRecord] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ring)

    def open(self, ask: Ask, max_tokens: int, received_s: float) -> RequestTrace:
        """A request came in: join its caller's trace, or begin one."""
        operation = "chat" if isinstance(ask.prompt, ChatPrompt) else "text_completion"
        return RequestTrace(self._tracer.open(ask.traceparent), operation, received_s, max_tokens, ask.tenant)

    def ended(
        self, trace: RequestTrace | None, accepted: Accepted, end: End, reason: FinishReason, usage: Usage
    ) -> None:
        """It has ended, as ``end`` says, with what the client was told."""
        if trace is None:
            return
        self._keep(TraceRecord(trace, accepted, end, reason, usage))

    def refused(self, trace: RequestTrace, accepted: Accepted, error: WeirError) -> None:
        """It was refused at the door."""
        now_s = self._clock.monotonic_s()
        timings = measure(Stamps(trace.received_s, now_s), end_s=now_s, tokens=0, served=Served(None, "", "", 0))
        usage = Usage(accepted.prompt_tokens, 0, 0, 0, 0, 0)
        state, reason = RequestState.REJECTED, FinishReason.ERROR
        end = End(accepted.request_id, state, reason, error, "", usage, timings)
        self._keep(TraceRecord(trace, accepted, end, reason, usage))

    def find(self, request_id: str) -> TraceRecord | None:
        """The record of a request; of the last one when ``request_id`` is empty or "last"."""
        if request_id in ("", "last"):
            return next(reversed(self._ring.values()), None)
        return self._ring.get(request_id)

    def recent(self, count: int) -> list[TraceRecord]:
        """The records of the ``count`` requests that ended last, the last one first."""
        return list(islice(reversed(self._ring.values()), count))

    def _keep(self, record: TraceRecord) -> None:
        if self._capacity:
            while len(self._ring) >= self._capacity:
                self._ring.popitem(last=False)
            self._ring[record.end.request_id] = record
        if record.trace.span.context.sampled and self._tracer.enabled:
            self._tracer.close(record.trace.span, span_of(record))


def span_of(record: TraceRecord) -> SpanData:
    """The request as a tree of spans, on the router's monotonic clock."""
    end, start_s = record.end, record.trace.received_s
    end_s = start_s + end.timings.e2e_ms / 1e3
    children = [*_stages(record), *_turns(end.marks, end_s)]
    if end.state is RequestState.CANCELLED:
        children.append(SpanData("cancel", end_s, end_s, {"weir.reason": str(end.error)}))
    return SpanData(
        name=f"{record.trace.operation} {record.accepted.model}",
        start_s=start_s,
        end_s=end_s,
        attributes=_request_attributes(record),
        events=tuple(_events(end.marks, (BOUND, REBIND, REFUSED))),
        error="" if end.error is None else str(end.error),
        children=tuple(sorted(children, key=lambda span: span.start_s)),
        kind=SpanKind.SERVER,
    )


def _request_attributes(record: TraceRecord) -> dict[str, AttributeValue]:
    end, usage, timings = record.end, record.usage, record.end.timings
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": record.trace.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": record.accepted.model,
        "gen_ai.request.max_tokens": record.trace.max_tokens,
        "gen_ai.response.id": end.request_id,
        "gen_ai.response.finish_reasons": (record.finish_reason.value,),
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "weir.request_id": end.request_id,
        "weir.state": end.state.value,
        "weir.attempts": timings.attempts,
        "weir.prefill_worker": timings.prefill_worker,
        "weir.decode_worker": timings.decode_worker,
        "weir.ttft_ms": timings.ttft_ms,
        "weir.tpot_ms": timings.tpot_ms,
        "weir.tokens.local_compute": usage.local_compute_tokens,
        "weir.tokens.local_cache_hit": usage.local_cache_hit_tokens,
        "weir.tokens.external_kv": usage.external_kv_tokens,
    }
    if record.trace.tenant:
        attributes["weir.tenant"] = record.trace.tenant
    if end.error is not None:
        attributes["error.type"] = end.error.code
    return attributes


def _stages(record: TraceRecord) -> Iterator[SpanData]:
    """The stages in order, each beginning where the one before ends; those that took no time are left out."""
    timings: Timings = record.end.timings
    at_s = record.trace.received_s
    for name in STAGES:
        length_s = getattr(timings, f"{name}_ms") / 1e3
        if length_s <= 0.0:
            continue
        next_s = at_s + length_s
        events: tuple[SpanEvent, ...] = ()
        if name == "decode":
            events = tuple(e for e in _events(record.end.marks, (RETRY, REBIND)) if at_s <= e.at_s <= next_s)
        yield SpanData(name, at_s, next_s, events=events)
        at_s = next_s


def _turns(marks: Sequence[Mark], end_s: float) -> Iterator[SpanData]:
    """Routes, reads, and, when there was more than one, attempts and the waits between them."""
    routes = [mark for mark in marks if mark.what == ROUTED]
    for mark in routes:
        yield SpanData("route", mark.at_s, mark.at_s, _route_attributes(mark))
    for mark in marks:
        if mark.what == READ:
            yield _read(mark)
        elif mark.what == READ_VOID:
            yield SpanData("kv_read", mark.at_s, mark.at_s, _plain(mark, "weir.kv.void_"), error=_void(mark))
    if len(routes) < 2:
        return
    for number, mark in enumerate(routes):
        until_s = routes[number + 1].at_s if number + 1 < len(routes) else end_s
        retry = next((m for m in marks if m.what == RETRY and m.attempt == mark.attempt), None)
        attributes = {"weir.attempt": mark.attempt}
        if retry is None:
            yield SpanData("attempt", mark.at_s, until_s, attributes)
            continue
        yield SpanData("attempt", mark.at_s, retry.at_s, attributes, error=str(retry.facts["error"]))
        yield SpanData("retry", retry.at_s, until_s, _plain(retry, "weir."))


def _read(mark: Mark) -> SpanData:
    """A proven hand-over as the decode worker reported it, ending when the router heard of it."""
    kv: Any = mark.facts["timings"]
    attributes: dict[str, AttributeValue] = {"weir.attempt": mark.attempt, "weir.worker": mark.facts["worker"]}
    if kv is None:
        return SpanData("kv_read", mark.at_s, mark.at_s, attributes)
    attributes |= {
        "weir.kv.bytes": kv.bytes,
        "weir.kv.descriptors": kv.descriptors,
        "weir.kv.reads": kv.reads,
        "weir.kv.transport": kv.transport,
        "weir.kv.gb_per_s": kv.bytes / kv.busy_ms / 1e6 if kv.busy_ms > 0 else 0.0,
        "weir.kv.busy_ms": kv.busy_ms,
        "weir.kv.exposed_ms": kv.exposed_ms,
        "weir.kv.guard_ms": kv.guard_ms,
        "weir.kv.checksum_ms": kv.checksum_ms,
        "weir.kv.void_reads": kv.void_reads,
    }
    return SpanData("kv_read", mark.at_s - kv.busy_ms / 1e3, mark.at_s, attributes)


def _void(mark: Mark) -> str:
    return f"void: {mark.facts['reason']}"


def _route_attributes(mark: Mark) -> dict[str, AttributeValue]:
    facts = mark.facts
    attributes: dict[str, AttributeValue] = {
        "weir.attempt": mark.attempt,
        "weir.route.prefill_worker": facts["prefill"],
        "weir.route.decode_worker": facts["decode"],
        "weir.route.reason": facts["reason"],
    }
    attributes |= {f"weir.route.score.{name}": float(value) for name, value in facts["scores"].items()}
    return attributes


def _plain(mark: Mark, prefix: str) -> dict[str, AttributeValue]:
    return {"weir.attempt": mark.attempt, **{prefix + name: str(value) for name, value in mark.facts.items()}}


def _events(marks: Sequence[Mark], kinds: tuple[str, ...]) -> Iterator[SpanEvent]:
    for mark in marks:
        if mark.what in kinds:
            yield SpanEvent(mark.what, mark.at_s, _plain(mark, "weir."))
