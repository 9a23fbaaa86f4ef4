"""Spans: what is sampled, how trees become spans, and what a slow or dead collector costs."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client import CollectorRegistry, generate_latest

from weir.clock import ManualClock, SystemClock
from weir.config import TelemetryConfig
from weir.errors import InvalidArgument
from weir.telemetry.spans import SpanCollector, SpanData, SpanEvent, SpanStats, Tracer, make_tracer, otlp_exporter
from weir.telemetry.tracing import parse_traceparent, traceparent_in

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
QUIET = PARENT[:-2] + "00"
SEED = 20_261_130


class Stuck(SpanExporter):
    """Takes nothing until it is let go; then fails."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.let_go = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.entered.set()
        assert self.let_go.wait(30)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.let_go.set()


def tracer(exporter: SpanExporter | None, ratio: float = 1.0, **options: int) -> Tracer:
    bits = random.Random(SEED).getrandbits
    return Tracer("router", ManualClock(5.0), bits, exporter=exporter, ratio=ratio, instance="r1", **options)


def tree() -> SpanData:
    inner = SpanData("inner", 1.5, 2.0, {"n": 3}, error="broke")
    first = SpanData("first", 1.0, 2.0, children=(inner,))
    second = SpanData("second", 2.0, 3.0, events=(SpanEvent("moment", 2.25, {"why": "so"}),))
    return SpanData("request", 1.0, 3.0, children=(first, second), kind=SpanKind.SERVER)


def test_a_tree_is_walked_parents_first() -> None:
    deep = SpanData("a", 0, 1, children=(tree(), SpanData("b", 0, 1)))
    walked = [(parent, span.name) for parent, span in deep.walk()]
    assert walked == [(-1, "a"), (0, "request"), (1, "first"), (2, "inner"), (1, "second"), (0, "b")]


def test_a_tree_becomes_spans_with_its_ids_times_and_errors() -> None:
    memory = InMemorySpanExporter()
    made = tracer(memory)
    opened = made.open(PARENT)
    assert made.close(opened, tree())
    made.flush()
    spans = {span.name: span for span in memory.get_finished_spans()}
    contexts = {name: span.context for name, span in spans.items()}
    request = spans["request"]
    assert {c.trace_id for c in contexts.values() if c} == {0x4BF92F3577B34DA6A3CE929D0E0E4736}
    assert len({c.span_id for c in contexts.values() if c}) == 4
    assert opened.traceparent == f"00-{PARENT.split('-')[1]}-{contexts['request'].span_id:016x}-01"
    parents = {name: span.parent.span_id if span.parent else 0 for name, span in spans.items()}
    ids = {name: context.span_id for name, context in contexts.items() if context}
    assert parents == {
        "request": 0x00F067AA0BA902B7,
        "first": ids["request"],
        "second": ids["request"],
        "inner": ids["first"],
    }
    assert (request.kind, spans["inner"].kind) == (SpanKind.SERVER, SpanKind.INTERNAL)
    # ManualClock: monotonic 5 is Unix 1_700_000_000.
    assert (request.start_time, request.end_time) == (1_699_999_996 * 10**9, 1_699_999_998 * 10**9)
    assert (spans["inner"].status.status_code, spans["inner"].status.description) == (StatusCode.ERROR, "broke")
    assert request.status.status_code is StatusCode.UNSET
    assert [(e.name, e.timestamp) for e in spans["second"].events] == [("moment", 1_699_999_997_250_000_000)]
    assert request.resource.attributes["service.name"] == "weir-router"
    assert request.resource.attributes["service.instance.id"] == "r1"
    assert made.stats() == SpanStats(exported=4)
    made.shutdown()


def test_the_callers_decision_is_kept() -> None:
    made = tracer(InMemorySpanExporter(), ratio=1.0)
    assert not made.open(QUIET).context.sampled
    assert made.child_of(QUIET) is None
    assert not made.close(made.open(QUIET), tree())
    never = tracer(InMemorySpanExporter(), ratio=0.0)
    assert never.open(PARENT).context.sampled
    child = never.child_of(PARENT)
    assert child is not None
    assert child.parent_id == PARENT.split("-")[2]
    assert not never.open().context.sampled
    assert never.open(always=True).context.sampled
    for one in (made, never):
        one.shutdown()


@pytest.mark.parametrize("header", ["", "nonsense", "00-" + "0" * 32 + "-00f067aa0ba902b7-01"])
def test_without_a_valid_caller_a_trace_begins(header: str) -> None:
    made = tracer(InMemorySpanExporter())
    opened = made.open(header)
    assert opened.parent_id == ""
    assert parse_traceparent(opened.traceparent) == opened.context
    assert made.child_of(header) is None
    made.shutdown()


def test_the_ratio_is_kept_as_the_sdk_keeps_it() -> None:
    made, reference = tracer(InMemorySpanExporter(), ratio=0.1), TraceIdRatioBased(0.1)
    contexts = [made.open().context for _ in range(20_000)]
    by_reference = [reference.should_sample(None, int(c.trace_id, 16), "").decision for c in contexts]
    assert [Decision.RECORD_AND_SAMPLE if c.sampled else Decision.DROP for c in contexts] == by_reference
    assert 1_800 < sum(c.sampled for c in contexts) < 2_200, SEED
    made.shutdown()


def test_without_an_exporter_nothing_is_sampled_or_recorded() -> None:
    made = tracer(None)
    assert not made.enabled
    assert not made.open().context.sampled
    assert made.open(PARENT).context.sampled, "others may record it"
    assert made.child_of(PARENT) is None
    assert not made.close(made.open(PARENT), tree())
    assert made.stats() == SpanStats()
    made.flush()
    made.shutdown()


def test_too_many_waiting_spans_are_dropped_and_counted() -> None:
    stuck = Stuck()
    made = tracer(stuck, max_queued_spans=10)
    taken = [made.close(made.open(), tree()) for _ in range(5)]
    assert taken == [True, True, False, False, False]
    assert made.stats() == SpanStats(dropped=12)
    registry = CollectorRegistry()
    SpanCollector(made).register(registry)
    assert b'weir_trace_spans_total{outcome="dropped"} 12.0' in generate_latest(registry)
    stuck.let_go.set()
    made.flush()
    assert made.stats() == SpanStats(failed=8, dropped=12)
    assert made.close(made.open(), tree()), "there is room again"
    made.shutdown()
    assert made.stats() == SpanStats(failed=12, dropped=12)


def test_shutdown_does_not_wait_for_a_dead_collector() -> None:
    stuck = Stuck()
    made = tracer(stuck)
    made.close(made.open(), tree())
    made.shutdown(timeout_s=0.05)
    assert stuck.let_go.is_set(), "the exporter was told to stop"
    assert not made.enabled
    assert not made.close(made.open(PARENT), tree())
    made.shutdown()


def test_an_endpoint_without_the_exporter_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    config = TelemetryConfig(otlp_endpoint="collector:4317")
    with pytest.raises(InvalidArgument, match=r"weir\[otlp\]"):
        make_tracer(config, "router", "r", SystemClock(), random.getrandbits)
    assert not make_tracer(TelemetryConfig(), "router", "r", SystemClock(), random.getrandbits).enabled


@pytest.mark.parametrize("endpoint", ["collector", "ftp://collector:1", "collector:port", "http://:4317"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidArgument, match="otlp_endpoint"):
        otlp_exporter(endpoint)


@pytest.mark.parametrize("endpoint", ["collector:4317", "http://collector:4317", "https://collector:4317/"])
def test_endpoints(endpoint: str) -> None:
    otlp_exporter(endpoint).shutdown()


def test_the_header_is_found_in_metadata() -> None:
    assert traceparent_in((("a", "b"), ("traceparent", PARENT))) == PARENT
    assert traceparent_in((("traceparent", PARENT.encode()),)) == ""
    assert traceparent_in(None) == ""
