"""Spans of decisions that are carried out; the role changes that they make become their children."""

from __future__ import annotations

import contextvars

from weir.balance.decision import Decision
from weir.clock import Clock
from weir.services.controller.actuators import Actuator
from weir.services.controller.telling import log_fields
from weir.services.controller.workers import current_traceparent
from weir.telemetry.spans import SpanData, Tracer

SPAN = "decision"


class TracedActuator:
    """An Actuator around another. Decisions are rare: each is sampled."""

    def __init__(self, inner: Actuator, tracer: Tracer, clock: Clock) -> None:
        self._inner = inner
        self._tracer = tracer
        self._clock = clock

    async def carry_out(self, decision: Decision) -> None:
        """See Actuator."""
        span, begun_s, error = self._tracer.open(always=True), self._clock.monotonic_s(), ""
        token: contextvars.Token[str] = current_traceparent.set(span.traceparent)
        try:
            await self._inner.carry_out(decision)
        except BaseException as raised:
            error = str(raised) or type(raised).__name__
            raise
        finally:
            current_traceparent.reset(token)
            attributes = {f"weir.decision.{name}": str(value) for name, value in log_fields(decision).items()}
            self._tracer.close(span, SpanData(SPAN, begun_s, self._clock.monotonic_s(), attributes, error=error))
