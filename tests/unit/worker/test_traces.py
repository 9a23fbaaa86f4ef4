"""Spans of both legs of a worker, from the engine's events: what they say, and that none is left behind."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.unit.worker.kv_cases import KEY, peer, source_block, ticket
from weir.clock import ManualClock
from weir.engine.output import Event, Finished, Preempted, Prefilled, Progress, Started, TokensOut, Usage
from weir.errors import InternalError, KvReadVoid, ResourceExhausted
from weir.lifecycle import FinishReason
from weir.services.decode.desk import BeginRead
from weir.services.decode.reads import StartRead
from weir.services.decode.traces import DecodeTraces
from weir.services.prefill.traces import MAX_TRACED, PrefillTraces
from weir.telemetry.spans import Tracer
from weir.transfer.plan import ReadReport

SAMPLED = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
QUIET = SAMPLED[:-2] + "00"
USAGE = Usage(100, 5, 100, 0, 0, 0, 1)
REPORT = ReadReport(8_000_000, 4, 2, "ucx:cma", 0.0, 0.004, 0.001, 0.002, 0.008)


@dataclass
class Stand:
    """A clock, a tracer that exports into memory, and both legs' traces."""

    clock: ManualClock
    memory: InMemorySpanExporter
    tracer: Tracer
    prefill: PrefillTraces
    decode: DecodeTraces

    def spans(self) -> list[ReadableSpan]:
        """What was exported, in order."""
        self.tracer.flush()
        return list(self.memory.get_finished_spans())

    def step(self, *events: Event, after_s: float = 0.1) -> None:
        """An engine step's events, told to both legs."""
        self.clock.advance(after_s)
        self.prefill.on_events(events)
        self.decode.on_events(events)


@pytest.fixture
def stand() -> Stand:
    clock, memory = ManualClock(100.0), InMemorySpanExporter()
    tracer = Tracer("worker", clock, random.Random(3).getrandbits, exporter=memory, ratio=0.0)
    return Stand(clock, memory, tracer, PrefillTraces(tracer, clock), DecodeTraces(tracer, clock))


def order(read_id: int = 1) -> BeginRead:
    destinations = ((source_block(0), 5), (source_block(1), 6))
    return BeginRead(KEY, peer(), StartRead(read_id, ticket(0, 2, 8), destinations, notify=True))


def length_s(span: ReadableSpan) -> float:
    assert span.end_time is not None
    assert span.start_time is not None
    return round((span.end_time - span.start_time) / 1e9, 6)


def test_a_prefill_has_an_event_for_each_chunk(stand: Stand) -> None:
    stand.prefill.begin(KEY, SAMPLED, 100)
    stand.step(Started(KEY, 16, (), 0.05), Progress(KEY, 64, ()))
    stand.step(Preempted(KEY))
    stand.step(Started(KEY, 0, (), 0.02), Progress(KEY, 64, ()))
    stand.step(Progress(KEY, 100, ()), TokensOut(KEY, 0, (7,)), Prefilled(KEY, USAGE))
    (span,) = stand.spans()
    assert (span.name, length_s(span), len(stand.prefill)) == ("worker.prefill", 0.4, 0)
    assert [event.name for event in span.events] == ["started", "chunk", "preempted", "started", "chunk", "chunk"]
    assert span.attributes == {
        "weir.request_id": "r-1",
        "weir.attempt": 1,
        "weir.tokens": 100,
        "weir.queue_ms": 20.0,
        "weir.tokens.cached": 0,
        "weir.tokens.local_compute": 100,
        "weir.preemptions": 1,
        "weir.chunks": 3,
    }
    assert span.parent is not None
    assert span.parent.span_id == 0x00F067AA0BA902B7


def test_a_sequence_has_its_reads_and_their_proofs_inside(stand: Stand) -> None:
    stand.decode.begin(KEY, SAMPLED, 8, remote=True)
    stand.step(Started(KEY, 0, (), 0.0))
    stand.decode.read_begun(order(1))
    stand.clock.advance(0.01)
    stand.decode.read_ended(order(1), None, KvReadVoid("generation", "block 3 has 8, not 7"))
    stand.decode.read_begun(order(2))
    stand.clock.advance(0.008)
    stand.decode.read_ended(order(2), REPORT, None)
    stand.step(TokensOut(KEY, 1, (7,)))
    stand.step(TokensOut(KEY, 2, (8, 9)), Finished(KEY, FinishReason.LENGTH, None, USAGE))
    decode, void, proven, check = stand.spans()
    assert [s.name for s in (decode, void, proven, check)] == [
        "worker.decode",
        "worker.kv_read",
        "worker.kv_read",
        "worker.guard_check",
    ]
    assert void.status.description == "void: generation: block 3 has 8, not 7"
    assert (void.attributes or {})["weir.kv.void_reason"] == "generation"
    assert (length_s(void), length_s(proven), length_s(check)) == (0.01, 0.008, 0.003)
    assert check.end_time == proven.end_time
    numbers = dict(proven.attributes or {})
    assert (numbers["weir.kv.bytes"], numbers["weir.kv.transport"], numbers["weir.kv.blocks"]) == (
        8_000_000, "ucx:cma", 2,
    )  # fmt: skip
    assert numbers["weir.kv.gb_per_s"] == pytest.approx(2.0)
    summary = dict(decode.attributes or {})
    assert (summary["weir.tokens.generated"], summary["weir.steps"]) == (3, 2)
    assert (summary["weir.finish_reason"], summary["weir.kv_source"]) == ("length", "remote")
    assert [event.name for event in decode.events] == ["started", "first_token_here"]
    assert len(stand.decode) == 0


def test_what_is_not_sampled_leaves_nothing(stand: Stand) -> None:
    for header in (QUIET, "", "nonsense"):
        stand.prefill.begin(KEY, header, 100)
        stand.decode.begin(KEY, header, 100, remote=True)
    stand.decode.read_begun(order())
    stand.decode.read_ended(order(), REPORT, None)
    stand.step(Started(KEY, 0, (), 0.0), Finished(KEY, FinishReason.LENGTH, None, USAGE))
    assert (len(stand.prefill), len(stand.decode), stand.spans()) == (0, 0, [])


def test_refused_and_lost_attempts_end_with_the_error(stand: Stand) -> None:
    stand.prefill.begin(KEY, SAMPLED, 100)
    stand.prefill.refused(KEY, ResourceExhausted("no room"))
    stand.prefill.refused(KEY, ResourceExhausted("no room"))
    stand.decode.begin(KEY, SAMPLED, 100, remote=False)
    stand.decode.engine_lost(InternalError("the engine died"))
    stand.prefill.begin(KEY, SAMPLED, 100)
    stand.step(Finished(KEY, FinishReason.ERROR, None, USAGE, InternalError("a step failed")))
    shown = [(span.name, span.status.description) for span in stand.spans()]
    assert shown == [
        ("worker.prefill", "no room"),
        ("worker.decode", "the engine died"),
        ("worker.prefill", "a step failed"),
    ]
    assert (len(stand.prefill), len(stand.decode)) == (0, 0)


def test_what_is_followed_is_bounded(stand: Stand) -> None:
    for number in range(MAX_TRACED + 5):
        key = type(KEY)(f"r-{number}", 1)
        stand.prefill.begin(key, SAMPLED, 1)
        stand.decode.begin(key, SAMPLED, 1, remote=False)
    assert (len(stand.prefill), len(stand.decode)) == (MAX_TRACED, MAX_TRACED)
