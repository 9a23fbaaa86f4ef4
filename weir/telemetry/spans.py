"""Spans: made when they are over, from stamps taken anyway, and only for traces that are sampled.

    TraceContext ─► Tracer.open ─► OpenSpan ─► (work) ─► Tracer.close(OpenSpan, SpanData tree) ─► SDK's batch
                        │                                                                         processor
                        └ sampled? the caller's flag, else by the trace id and the ratio              │
                                                                                          exporter on its thread

An unsampled request costs the parsing or minting of one context. What is handed over waits in a bounded queue:
when the collector does not keep up, whole trees are dropped and counted; nobody waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric

from weir.clock import Clock
from weir.config.sections import TelemetryConfig
from weir.errors import InvalidArgument
from weir.telemetry.tracing import TraceContext, format_traceparent, parse_traceparent

_log = logging.getLogger(__name__)

MAX_QUEUED_SPANS = 8_192
BATCH_SPANS = 512
BATCH_DELAY_MS = 500
EXPORT_TIMEOUT_S = 2.0
CLOSE_TIMEOUT_S = 2.0

AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]

_SCOPE = InstrumentationScope("weir")
_UNSET, _SAMPLED = Status(StatusCode.UNSET), TraceFlags(TraceFlags.SAMPLED)
_OTLP_LOGGERS = ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal")


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """A moment in a span; seconds on the process's monotonic clock."""

    name: str
    at_s: float
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SpanData:
    """A span that is over, with those inside it. Times in seconds on the process's monotonic clock.

    ``error`` is empty when all went well. ``kind`` is internal unless the span answers a remote caller.
    """

    name: str
    start_s: float
    end_s: float
    attributes: Attributes = field(default_factory=dict)
    events: tuple[SpanEvent, ...] = ()
    error: str = ""
    children: tuple[SpanData, ...] = ()
    kind: SpanKind = SpanKind.INTERNAL

    def walk(self, parent: int = -1, first: int = 0) -> Iterator[tuple[int, SpanData]]:
        """This span and all inside it, parents first, each with the index of its parent in this order."""
        yield parent, self
        index = first + 1
        for child in self.children:
            for found in child.walk(first, index):
                yield found
                index += 1


@dataclass(frozen=True, slots=True)
class OpenSpan:
    """A span under way: its own context, and the id of its parent (empty: it is the first of its trace)."""

    context: TraceContext
    parent_id: str

    @property
    def traceparent(self) -> str:
        """What others are told, so that their spans become children of this one."""
        return format_traceparent(self.context)


@dataclass(frozen=True, slots=True)
class SpanStats:
    """Spans since start: ``exported``, ``failed`` at the collector, ``dropped`` for want of room."""

    exported: int = 0
    failed: int = 0
    dropped: int = 0


class _Counting(SpanExporter):
    """An exporter that counts, and says once each time it begins to fail."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self._failing = False
        self.exported = 0
        self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            failed = result is not SpanExportResult.SUCCESS
            if failed:
                self.failed += len(spans)
            else:
                self.exported += len(spans)
            if failed and not self._failing:
                _log.warning("the trace collector does not take spans; requests go on without it")
            self._failing = failed
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


class Tracer:
    """Decides what is sampled and exports it. One per process part; ``exporter`` None exports nothing.

    ``open`` and ``close`` belong to one thread; neither waits nor raises.
    """

    def __init__(
        self,
        service: str,
        clock: Clock,
        random_bits: Callable[[int], int],
        *,
        exporter: SpanExporter | None = None,
        ratio: float = 0.0,
        instance: str = "",
        max_queued_spans: int = MAX_QUEUED_SPANS,
    ) -> None:
        self._clock = clock
        # Ids have to differ, not to be secret: one draw from the given source, not a system call a span.
        self._id_bits = random.Random(random_bits(128)).getrandbits
        self._bound = TraceIdRatioBased.get_bound_for_rate(ratio)
        self._resource = Resource({"service.name": f"weir-{service}", "service.instance.id": instance or service})
        self._max_queued = max_queued_spans
        self._given = 0
        self._dropped = 0
        self._exporter = _Counting(exporter) if exporter is not None else None
        self._processor: BatchSpanProcessor | None = None
        if self._exporter is not None:
            self._processor = BatchSpanProcessor(
                self._exporter,
                max_queue_size=max_queued_spans,
                schedule_delay_millis=BATCH_DELAY_MS,
                max_export_batch_size=min(BATCH_SPANS, max_queued_spans),
            )

    @property
    def enabled(self) -> bool:
        """Whether spans go anywhere."""
        return self._processor is not None

    def stats(self) -> SpanStats:
        """Counts since start."""
        exporter = self._exporter
        if exporter is None:
            return SpanStats()
        return SpanStats(exporter.exported, exporter.failed, self._dropped)

    # -- contexts ---------------------------------------------------------------------------------------

    def open(self, traceparent: str = "", *, always: bool = False) -> OpenSpan:
        """A new span: a child of ``traceparent``, or the first of a new trace when that is absent or invalid.

        The caller's decision to sample is kept. A new trace is sampled by its id and the ratio, or ``always``,
        and never without an exporter.
        """
        parent = parse_traceparent(traceparent) if traceparent else None
        if parent is not None:
            return OpenSpan(parent.child(self._id_bits), parent.span_id)
        trace_id, span_id = self._id_bits(128) or 1, self._id_bits(64) or 1
        chosen = always or trace_id & TraceIdRatioBased.TRACE_ID_LIMIT < self._bound
        return OpenSpan(TraceContext(f"{trace_id:032x}", f"{span_id:016x}", chosen and self.enabled), "")

    def child_of(self, traceparent: str) -> OpenSpan | None:
        """A new span in the caller's trace; None when there is nothing to record."""
        if self._processor is None or not traceparent:
            return None
        parent = parse_traceparent(traceparent)
        if parent is None or not parent.sampled:
            return None
        return OpenSpan(parent.child(self._id_bits), parent.span_id)

    # -- recording --------------------------------------------------------------------------------------

    def close(self, opened: OpenSpan, span: SpanData) -> bool:
        """``opened`` is over and was ``span``. Whether it will be exported: False when it is not sampled, when
        there is no exporter, or when too many spans wait.
        """
        exporter, processor = self._exporter, self._processor
        if exporter is None or processor is None or not opened.context.sampled:
            return False
        spans = list(span.walk())
        waiting = self._given - exporter.exported - exporter.failed
        if waiting + len(spans) > self._max_queued:
            self._dropped += len(spans)
            return False
        self._given += len(spans)
        for readable in self._readable(opened, spans):
            processor.on_end(readable)
        return True

    def _readable(self, opened: OpenSpan, spans: Sequence[tuple[int, SpanData]]) -> Iterator[ReadableSpan]:
        trace_id = int(opened.context.trace_id, 16)
        offset_ns = round((self._clock.unix_s() - self._clock.monotonic_s()) * 1e9)
        contexts = [_context(trace_id, int(opened.context.span_id, 16))]
        outer = _context(trace_id, int(opened.parent_id, 16), remote=True) if opened.parent_id else None
        for _ in spans[1:]:
            contexts.append(_context(trace_id, self._id_bits(64) or 1))
        for context, (parent, span) in zip(contexts, spans, strict=True):
            yield ReadableSpan(
                name=span.name,
                context=context,
                parent=outer if parent < 0 else contexts[parent],
                resource=self._resource,
                attributes=span.attributes,
                events=[Event(e.name, e.attributes, _ns(e.at_s, offset_ns)) for e in span.events],
                kind=span.kind,
                status=Status(StatusCode.ERROR, span.error) if span.error else _UNSET,
                start_time=_ns(span.start_s, offset_ns),
                end_time=_ns(span.end_s, offset_ns),
                instrumentation_scope=_SCOPE,
            )

    # -- its end ----------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Export what waits now. Blocks: for tests and threads of their own."""
        if self._processor is not None:
            self._processor.force_flush()

    def shutdown(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Export what waits, for at most about ``timeout_s``. Blocks; idempotent."""
        processor, exporter = self._processor, self._exporter
        self._processor = None
        if processor is None or exporter is None:
            return
        ending = threading.Thread(target=processor.shutdown, name="spans-shutdown", daemon=True)
        ending.start()
        ending.join(timeout_s)
        if ending.is_alive():
            with contextlib.suppress(Exception):
                exporter.shutdown()  # wakes an export that waits to try again
            ending.join(timeout_s)


class SpanCollector:
    """``weir_trace_spans_total`` by outcome, read when scraped."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def register(self, registry: CollectorRegistry) -> None:
        """Export the counts there."""
        registry.register(self)  # type: ignore[arg-type, unused-ignore]

    def collect(self) -> Iterable[Metric]:
        """The counts now."""
        stats = self._tracer.stats()
        family = CounterMetricFamily("weir_trace_spans", "Spans of sampled traces, by outcome.", labels=("outcome",))
        family.add_metric(("exported",), stats.exported)
        family.add_metric(("failed",), stats.failed)
        family.add_metric(("dropped",), stats.dropped)
        yield family


def make_tracer(
    config: TelemetryConfig, service: str, instance: str, clock: Clock, random_bits: Callable[[int], int]
) -> Tracer:
    """The tracer of a process. Raises InvalidArgument for an endpoint that cannot be used."""
    exporter = otlp_exporter(config.otlp_endpoint) if config.otlp_endpoint else None
    return Tracer(service, clock, random_bits, exporter=exporter, ratio=config.trace_ratio, instance=instance)


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Spans to an OTLP/gRPC collector: host:port or http:// in the clear, https:// with TLS.

    Raises InvalidArgument when the exporter is not installed. Connects lazily: a dead collector is no error.
    """
    try:
        import opentelemetry.exporter.otlp.proto.grpc.trace_exporter  # noqa: F401  # what may be missing

        from weir.telemetry.otlp import FastOtlpExporter
    except ImportError:
        limit = "needs the exporter: pip install 'weir[otlp]'"
        raise InvalidArgument("telemetry.otlp_endpoint", endpoint, limit) from None
    scheme, separator, address = endpoint.partition("://")
    if not separator:
        scheme, address = "http", endpoint
    host, colon, port = address.rstrip("/").rpartition(":")
    if scheme not in ("http", "https") or not host or not colon or not port.isdigit():
        limit = "must be host:port, http://host:port or https://host:port"
        raise InvalidArgument("telemetry.otlp_endpoint", endpoint, limit)
    for name in _OTLP_LOGGERS:  # each failed batch in many words; what matters is said and counted here
        logging.getLogger(name).setLevel(logging.CRITICAL)
    insecure = scheme == "http"
    return FastOtlpExporter(endpoint=f"{scheme}://{host}:{port}", insecure=insecure, timeout=EXPORT_TIMEOUT_S)


def _context(trace_id: int, span_id: int, *, remote: bool = False) -> SpanContext:
    return SpanContext(trace_id, span_id, remote, _SAMPLED)


def _ns(at_s: float, offset_ns: int) -> int:
    return round(at_s * 1e9) + offset_ns
