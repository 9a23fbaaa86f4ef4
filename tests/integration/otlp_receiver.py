"""A collector: a real gRPC server of OTLP's trace service that keeps what it is sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

Value = str | int | float | bool | list[str]


@dataclass(frozen=True)
class Received:
    """One span as it arrived; ids in hexadecimal, times in nanoseconds."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Value]
    events: list[str]
    error: str

    @property
    def length_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


@dataclass
class Collector:
    """What arrived until now."""

    address: str = ""
    spans: list[Received] = field(default_factory=list)

    def trace(self, trace_id: str) -> list[Received]:
        """The spans of one trace, by start."""
        return sorted((s for s in self.spans if s.trace_id == trace_id), key=lambda s: s.start_ns)

    def traces(self) -> dict[str, list[Received]]:
        """All spans by trace."""
        found: dict[str, list[Received]] = {}
        for span in self.spans:
            found.setdefault(span.trace_id, []).append(span)
        return found


class _Service(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc, unused-ignore]
    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._lock = threading.Lock()

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            for group in request.resource_spans:
                resource = {a.key: _value(a.value) for a in group.resource.attributes}
                for scope in group.scope_spans:
                    self._collector.spans += [_span(resource, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a port of its own."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Service(collector), server)  # type: ignore[no-untyped-call, unused-ignore]
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()


def _span(resource: dict[str, Value], span: Any) -> Received:
    return Received(
        service=str(resource["service.name"]),
        instance=str(resource["service.instance.id"]),
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=span.kind,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes={a.key: _value(a.value) for a in span.attributes},
        events=[event.name for event in span.events],
        error=span.status.message if span.status.code == 2 else "",
    )


def _value(value: Any) -> Value:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [str(_value(item)) for item in value.array_value.values]
    found: Value = getattr(value, kind)
    return found
