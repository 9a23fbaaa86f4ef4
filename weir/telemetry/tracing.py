"""W3C trace context (https://www.w3.org/TR/trace-context/, version 00). Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A position in a trace: ids as lower-case hex (32 and 16 digits, never all zero)."""

    trace_id: str
    span_id: str
    sampled: bool = True

    def child(self, random_bits: Callable[[int], int]) -> TraceContext:
        """A new span in the same trace."""
        return TraceContext(self.trace_id, _nonzero_hex(random_bits, 64), self.sampled)


def new_trace(random_bits: Callable[[int], int], *, sampled: bool = True) -> TraceContext:
    """A trace of its own."""
    return TraceContext(_nonzero_hex(random_bits, 128), _nonzero_hex(random_bits, 64), sampled)


def parse_traceparent(header: str) -> TraceContext | None:
    """The context, or None when the header is not valid (the standard says: start a new trace then)."""
    found = _TRACEPARENT.fullmatch(header.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    # 00 has no further parts; ff is forbidden; versions to come may add parts.
    if version == "ff" or (version == "00" and rest):
        return None
    if trace_id == "0" * 32 or span_id == "0" * 16:
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def format_traceparent(context: TraceContext) -> str:
    """The header's value."""
    return f"00-{context.trace_id}-{context.span_id}-{int(context.sampled):02x}"


def traceparent_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The value of the header in a call's metadata; empty when there is none."""
    for name, value in metadata or ():
        if name == "traceparent" and isinstance(value, str):
            return value
    return ""


def _nonzero_hex(random_bits: Callable[[int], int], bits: int) -> str:
    value = random_bits(bits) or 1
    return f"{value:0{bits // 4}x}"
