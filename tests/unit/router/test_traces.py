"""The tree of a request's spans, drawn from a record; and the ring."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from weir.clock import ManualClock
from weir.errors import RequestCancelled, ResourceExhausted, WeirError
from weir.lifecycle import FinishReason, RequestState
from weir.services.router.answer import Accepted, Usage
from weir.services.router.commands import End
from weir.services.router.intake import Ask, ChatPrompt, TextPrompt
from weir.services.router.journal import MAX_MARKS, READ, READ_VOID, REFUSED, RETRY, ROUTED, Journal, Mark
from weir.services.router.timings import Served, Stamps, measure
from weir.services.router.traces import RequestTraces, TraceRecord, span_of
from weir.telemetry.spans import SpanData, Tracer

RECEIVED_S = 10.0
USAGE = Usage(100, 5, 0, 100, 0, 0)


def traces(capacity: int = 4) -> RequestTraces:
    clock = ManualClock(RECEIVED_S)
    return RequestTraces(Tracer("router", clock, random.Random(1).getrandbits), clock, capacity)


def ended(
    marks: Sequence[Mark] = (),
    *,
    state: RequestState = RequestState.FINISHED,
    error: WeirError | None = None,
    request_id: str = "r-1",
    attempts: int = 1,
) -> End:
    stamps = Stamps(RECEIVED_S, 10.1, dispatched_s=10.2, first_s=11.0, second_s=11.5)
    stamps.worker_queue_ms, stamps.worker_prefill_ms = 50.0, 600.0
    timings = measure(stamps, end_s=13.0, tokens=5, served=Served(None, "p1", "d1", attempts))
    return End(request_id, state, FinishReason.LENGTH, error, "", USAGE, timings, marks)


def drawn(end: End, ask: Ask | None = None) -> SpanData:
    trace = traces().open(ask or Ask(TextPrompt("x")), 5, RECEIVED_S)
    accepted = Accepted(end.request_id, 100, "toy", 1.7e9)
    return span_of(TraceRecord(trace, accepted, end, end.finish_reason, end.usage))


def route(at_s: float, attempt: int, decode: str) -> Mark:
    facts = {"prefill": "p1", "decode": decode, "reason": "least loaded pair", "scores": {"decode_sequences": 3}}
    return Mark(at_s, ROUTED, attempt, facts)


def test_stages_follow_each_other_from_receipt_to_end() -> None:
    request = drawn(ended([route(10.2, 1, "d1")]))
    stages = [span for span in request.children if span.name != "route"]
    shown = [(span.name, round(span.start_s, 6), round(span.end_s, 6)) for span in stages]
    assert shown == [
        ("admit", 10.0, 10.1),
        ("queue", 10.1, 10.25),
        ("prefill", 10.25, 10.85),
        ("first_token", 10.85, 11.0),
        ("second_token", 11.0, 11.5),
        ("decode", 11.5, 13.0),
    ]
    assert (request.name, request.start_s, round(request.end_s, 6)) == ("text_completion toy", 10.0, 13.0)
    (chosen,) = [span for span in request.children if span.name == "route"]
    assert chosen.attributes == {
        "weir.attempt": 1,
        "weir.route.prefill_worker": "p1",
        "weir.route.decode_worker": "d1",
        "weir.route.reason": "least loaded pair",
        "weir.route.score.decode_sequences": 3.0,
    }


def test_a_proven_read_ends_when_it_was_heard_of() -> None:
    kv = SimpleNamespace(
        bytes=8_000_000, descriptors=4, reads=2, transport="ucx:cma", busy_ms=4.0, exposed_ms=1.0, guard_ms=0.2,
        checksum_ms=0.3, void_reads=0,
    )  # fmt: skip
    request = drawn(ended([Mark(11.2, READ, 1, {"worker": "d1", "timings": kv})]))
    (read,) = [span for span in request.children if span.name == "kv_read"]
    assert read.start_s == pytest.approx(11.196)
    assert (read.end_s, read.error) == (11.2, "")
    assert read.attributes["weir.kv.gb_per_s"] == pytest.approx(2.0)
    assert read.attributes["weir.kv.transport"] == "ucx:cma"
    assert read.attributes["weir.kv.exposed_ms"] == 1.0


def test_attempts_retries_and_void_reads_are_shown() -> None:
    marks = [
        route(10.2, 1, "d1"),
        Mark(11.6, READ_VOID, 1, {"worker": "d1", "reason": "generation", "detail": "block 3"}),
        Mark(11.7, RETRY, 1, {"kind": "read_void", "error": "KV read void"}),
        Mark(11.75, REFUSED, 1, {"worker": "d2", "error": "full"}),
        route(12.0, 2, "d2"),
    ]
    request = drawn(ended(marks, attempts=2))
    turns = [
        (span.name, span.start_s, round(span.end_s, 6), span.error)
        for span in request.children
        if span.name in ("attempt", "retry", "kv_read")
    ]
    assert turns == [
        ("attempt", 10.2, 11.7, "KV read void"),
        ("kv_read", 11.6, 11.6, "void: generation"),
        ("retry", 11.7, 12.0, ""),
        ("attempt", 12.0, 13.0, ""),
    ]
    (decode,) = [span for span in request.children if span.name == "decode"]
    assert [(event.name, event.at_s) for event in decode.events] == [("retry", 11.7)]
    assert [(event.name, event.attributes["weir.worker"]) for event in request.events] == [("refused", "d2")]
    assert request.attributes["weir.attempts"] == 2


def test_a_cancel_is_shown_with_its_reason() -> None:
    error = RequestCancelled("the client left")
    request = drawn(ended(state=RequestState.CANCELLED, error=error), Ask(ChatPrompt([]), tenant="acme"))
    assert request.name == "chat toy"
    assert request.children[-1] == SpanData("cancel", request.end_s, request.end_s, {"weir.reason": str(error)})
    assert (request.error, request.attributes["error.type"]) == (str(error), "CANCELLED")
    assert request.attributes["weir.tenant"] == "acme"


def test_a_refusal_is_remembered_with_its_error() -> None:
    kept = traces()
    trace = kept.open(Ask(TextPrompt("x")), 5, RECEIVED_S)
    kept.refused(trace, Accepted("r-9", 100, "toy", 1.7e9), ResourceExhausted("full", 1.0))
    record = kept.find("r-9")
    assert record is not None
    request = span_of(record)
    assert (request.attributes["weir.state"], request.attributes["error.type"]) == ("rejected", "RESOURCE_EXHAUSTED")


def test_the_ring_keeps_the_last_ones() -> None:
    kept = traces(capacity=3)
    assert kept.find("last") is None
    for number in range(10):
        end = ended(request_id=f"r-{number}")
        trace = kept.open(Ask(TextPrompt("x")), 5, RECEIVED_S)
        kept.ended(trace, Accepted(end.request_id, 100, "toy", 1.7e9), end, end.finish_reason, end.usage)
        assert len(kept) == min(number + 1, 3)
    assert [kept.find(f"r-{number}") is not None for number in range(10)] == [False] * 7 + [True] * 3
    for word in ("", "last"):
        found = kept.find(word)
        assert found is not None
        assert found.end.request_id == "r-9"
    off = traces(capacity=0)
    off.ended(off.open(Ask(TextPrompt("x")), 5, 0.0), Accepted("r", 1, "m", 0.0), ended(), FinishReason.STOP, USAGE)
    assert (len(off), off.find("last")) == (0, None)


def test_a_journal_is_bounded() -> None:
    journal = Journal()
    for number in range(3 * MAX_MARKS):
        journal.note(float(number), RETRY, number, error="again")
    assert len(journal.marks) == MAX_MARKS
