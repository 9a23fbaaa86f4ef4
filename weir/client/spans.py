"""The caller's side of a trace: its active span is passed on, and a CLIENT span of our own is made when the process
has set a tracer provider. Without opentelemetry set up this costs a look-up and sends nothing.
"""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from weir.client.types import Accepted, Event, Final
from weir.errors import WeirError
from weir.rpc.v1 import router_pb2
from weir.telemetry.tracing import TraceContext, format_traceparent

Metadata = tuple[tuple[str, str], ...]


class ClientSpan:
    """Around one generation: ``metadata`` goes with the call, ``saw`` hears each event, ``end`` is called once."""

    def __init__(self, request: router_pb2.GenerateRequest) -> None:
        operation = "chat" if request.WhichOneof("prompt") == "chat" else "text_completion"
        name = f"{operation} {request.model}" if request.model else operation
        self._span = trace.get_tracer("weir.client").start_span(
            name,
            kind=SpanKind.CLIENT,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "weir",
                "gen_ai.request.model": request.model,
            },
        )
        self._first = True

    def metadata(self, given: Metadata) -> Metadata:
        """``given`` and the trace context, if there is one."""
        context = self._span.get_span_context()
        if not context.is_valid:
            return given
        ours = TraceContext(f"{context.trace_id:032x}", f"{context.span_id:016x}", context.trace_flags.sampled)
        return (*given, ("traceparent", format_traceparent(ours)))

    def saw(self, event: Event) -> None:
        """Note what belongs into the span."""
        span = self._span
        if not span.is_recording():
            return
        if isinstance(event, Accepted):
            span.set_attributes({"weir.request_id": event.request_id, "gen_ai.response.model": event.model})
        elif isinstance(event, Final):
            span.set_attribute("gen_ai.usage.input_tokens", event.usage.prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", event.usage.completion_tokens)
            span.set_attribute("gen_ai.response.finish_reasons", (event.finish_reason.value,))
        elif self._first:
            self._first = False
            span.add_event("first_token")

    def failed(self, error: WeirError) -> None:
        """The generation ended with ``error``."""
        self._span.set_attribute("error.type", error.code)
        self._span.set_status(Status(StatusCode.ERROR, str(error)))

    def end(self) -> None:
        """The generation is over, or its reader has left."""
        self._span.end()
