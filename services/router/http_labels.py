"""What the headers of a request say about it. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from weir.errors import InvalidArgument
from weir.services.router.intake import MAX_LABEL_CHARS

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(slots=True)
class Labels:
    """Fields of an Ask that come in headers; empty and 0 are absent."""

    client_request_id: str = ""
    tenant: str = ""
    slo_ttft_ms: float = 0.0
    slo_tpot_ms: float = 0.0
    traceparent: str = ""


def parse_labels(headers: Mapping[bytes, bytes]) -> Labels:
    """Labels from ``headers``, whose names are lower case. Raises InvalidArgument naming the header.

    A malformed ``traceparent`` counts as absent, as W3C's trace context wants it.
    """
    trace = headers.get(b"traceparent", b"").decode("latin-1")
    return Labels(
        client_request_id=_label(headers, "x-request-id"),
        tenant=_label(headers, "x-weir-tenant"),
        slo_ttft_ms=_milliseconds(headers, "x-slo-ttft-ms"),
        slo_tpot_ms=_milliseconds(headers, "x-slo-tpot-ms"),
        traceparent=trace if _TRACEPARENT.fullmatch(trace) else "",
    )


def _label(headers: Mapping[bytes, bytes], name: str) -> str:
    raw = headers.get(name.encode(), b"")
    try:
        label = raw.decode()
    except UnicodeDecodeError:
        raise InvalidArgument(name, raw, "must be UTF-8") from None
    if len(label) > MAX_LABEL_CHARS:
        raise InvalidArgument(name, label, f"at most {MAX_LABEL_CHARS} characters")
    return label


def _milliseconds(headers: Mapping[bytes, bytes], name: str) -> float:
    raw = headers.get(name.encode())
    if raw is None:
        return 0.0
    text = raw.decode("latin-1")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise InvalidArgument(name, text, "must be a finite number of milliseconds, at least 0")
    return value
