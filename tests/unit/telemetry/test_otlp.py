"""The encoder of our own says byte for byte what OpenTelemetry's says."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from weir.telemetry.otlp import encode

SAMPLED = TraceFlags(TraceFlags.SAMPLED)
RESOURCE = Resource({"service.name": "weir-router", "service.instance.id": "r1"})
ATTRIBUTES: dict[str, Any] = {
    "text": "über 水",
    "empty": "",
    "long": "x" * 20_000,
    "yes": True,
    "no": False,
    "zero": 0,
    "many": 1 << 40,
    "less": -3,
    "share": 0.25,
    "endless": float("inf"),
    "names": ("a", "b" * 200),
    "none": (),
}


def made(
    name: str = "prefill",
    parent: SpanContext | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    status: Status | None = None,
    events: int = 0,
) -> ReadableSpan:
    return ReadableSpan(
        name=name,
        context=SpanContext((1 << 128) - 5, 7, False, SAMPLED),
        parent=parent,
        resource=RESOURCE,
        attributes=ATTRIBUTES,
        events=[Event(f"event {n}", {"n": n}, 1_700_000_000_000_000_000 + n) for n in range(events)],
        kind=kind,
        status=status or Status(StatusCode.UNSET),
        start_time=1_700_000_000_000_000_001,
        end_time=1_700_000_000_000_000_300,
        instrumentation_scope=InstrumentationScope("weir"),
    )


@pytest.mark.parametrize(
    "span",
    [
        made(),
        made("ü" * 100, SpanContext(5, 1 << 63, True, SAMPLED), SpanKind.SERVER),
        made("", SpanContext(5, 1, False, SAMPLED), SpanKind.CLIENT, Status(StatusCode.ERROR, "broke " * 40)),
        made(status=Status(StatusCode.OK), events=3),
        made(kind=SpanKind.CONSUMER, events=1),
    ],
)
def test_one_span(span: ReadableSpan) -> None:
    request = encode([span])
    assert request == encode_spans([span])
    assert request.SerializeToString(deterministic=True) == encode_spans([span]).SerializeToString(deterministic=True)


def test_many_spans_keep_their_order() -> None:
    spans = [made(str(number), events=number % 3) for number in range(40)]
    assert encode(spans) == encode_spans(spans)
    assert [span.name for span in encode(spans).resource_spans[0].scope_spans[0].spans] == [s.name for s in spans]
