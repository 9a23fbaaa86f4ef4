"""Spans as OTLP's protobuf, written field by field: a third of the time of building a message for each attribute.

Only what Weir's spans have: no links, no trace state, nothing dropped. Field numbers are those of
``opentelemetry/proto/trace/v1/trace.proto`` and ``common/v1/common.proto``. Needs the OTLP exporter's package.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext

_HAS_IS_REMOTE, _IS_REMOTE = 0x100, 0x200
_TIMES = struct.Struct("<BQBQ")  # start_time_unix_nano and end_time_unix_nano, each after its tag
_TIME = struct.Struct("<BQ")
_FLAGS = struct.Struct("<HI")
_DOUBLE = struct.Struct("<Bd")


class FastOtlpExporter(OTLPSpanExporter):
    """The exporter of OpenTelemetry with an encoder of our own."""

    def _translate_data(self, data: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
        return encode(data)


def encode(spans: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
    """The request for ``spans``, at least one, all of one resource and one scope."""
    request = encode_spans(spans[:1])
    scope_spans = request.resource_spans[0].scope_spans[0]
    del scope_spans.spans[:]
    scope_spans.MergeFromString(b"".join([_field(0x12, _span(span)) for span in spans]))
    return request


def _span(span: ReadableSpan) -> bytes:
    context, parent = span.get_span_context(), span.parent
    assert context is not None, "a span has an identity"
    parts = [
        b"\x0a\x10" + context.trace_id.to_bytes(16, "big"),
        b"\x12\x08" + context.span_id.to_bytes(8, "big"),
        b"" if parent is None else b"\x22\x08" + parent.span_id.to_bytes(8, "big"),
        _text(0x2A, span.name),
        bytes((0x30, span.kind.value + 1)),
        _TIMES.pack(0x39, span.start_time or 0, 0x41, span.end_time or 0),
        *_attributes(0x4A, span.attributes),
        *[_field(0x5A, _event(event)) for event in span.events],
        _field(0x7A, _status(span)),
        _FLAGS.pack(0x185, _flags(parent)),  # the tag of field 16 takes two bytes
    ]
    return b"".join(parts)


def _event(event: Any) -> bytes:
    return b"".join([_TIME.pack(0x09, event.timestamp), _text(0x12, event.name), *_attributes(0x1A, event.attributes)])


def _status(span: ReadableSpan) -> bytes:
    status = span.status
    code = status.status_code.value
    return (_text(0x12, status.description) if status.description else b"") + (bytes((0x18, code)) if code else b"")


def _flags(parent: SpanContext | None) -> int:
    return _HAS_IS_REMOTE | (_IS_REMOTE if parent is not None and parent.is_remote else 0)


def _attributes(tag: int, attributes: Mapping[str, Any] | None) -> Iterable[bytes]:
    if not attributes:
        return ()
    return [_field(tag, _key(name) + _field(0x12, _value(value))) for name, value in attributes.items()]


@lru_cache(maxsize=512)
def _key(name: str) -> bytes:
    return _text(0x0A, name)


def _value(value: Any) -> bytes:
    """An AnyValue."""
    if isinstance(value, str):
        return _text(0x0A, value)
    if isinstance(value, bool):
        return bytes((0x10, value))
    if isinstance(value, int):
        return b"\x18" + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)
    if isinstance(value, float):
        return _DOUBLE.pack(0x21, value)
    return _field(0x2A, b"".join([_field(0x0A, _value(item)) for item in value]))


def _text(tag: int, text: str) -> bytes:
    return _field(tag, text.encode("utf-8", "replace"))


def _field(tag: int, data: bytes) -> bytes:
    """A field of bytes."""
    size = len(data)
    return (bytes((tag, size)) if size < 0x80 else bytes((tag,)) + _varint(size)) + data


def _varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
