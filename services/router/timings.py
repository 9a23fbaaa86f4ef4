"""Stage times of a request. Pure.

The router's own stamps cut the line; durations that workers report only divide what lies between two stamps:

    received ─ admit ► admitted ─ queue ─ prefill ─ first token ► first ─ second token ► second ─ decode ► end

so the first four add up to TTFT and all of them to the end-to-end time, whatever a worker reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Stamps:
    """Moments on the router's monotonic clock, seconds; 0 is not yet."""

    received_s: float
    admitted_s: float
    dispatched_s: float = 0.0
    first_s: float = 0.0
    second_s: float = 0.0
    worker_queue_ms: float = 0.0
    worker_prefill_ms: float = 0.0


@dataclass(slots=True)
class Timings:
    """Stages in milliseconds; admit + queue + prefill + first_token = ttft, + second_token + decode = e2e.

    ``kv_read`` is the decode worker's report of the hand-over (a ``KvReadTimings`` message), or None.
    """

    admit_ms: float
    queue_ms: float
    prefill_ms: float
    first_token_ms: float
    ttft_ms: float
    second_token_ms: float
    decode_ms: float
    e2e_ms: float
    tpot_ms: float
    kv_read: Any | None
    prefill_worker: str
    decode_worker: str
    attempts: int


@dataclass(slots=True)
class Served:
    """Who served a request, and how its KV travelled."""

    kv_read: Any | None
    prefill_worker: str
    decode_worker: str
    attempts: int


def measure(stamps: Stamps, *, end_s: float, tokens: int, served: Served) -> Timings:
    """The stages of a request that ended at ``end_s`` with ``tokens`` generated tokens."""
    admit = _ms(stamps.received_s, stamps.admitted_s)
    first_s = stamps.first_s or end_s
    queue, prefill, first = _split(stamps, first_s)
    ttft = admit + queue + prefill + first
    second = _ms(first_s, stamps.second_s) if stamps.second_s else 0.0
    decode = _ms(stamps.second_s or first_s, end_s)
    e2e = ttft + second + decode
    return Timings(
        admit_ms=admit,
        queue_ms=queue,
        prefill_ms=prefill,
        first_token_ms=first,
        ttft_ms=ttft,
        second_token_ms=second,
        decode_ms=decode,
        e2e_ms=e2e,
        tpot_ms=(e2e - ttft) / (tokens - 1) if tokens > 1 else 0.0,
        kv_read=served.kv_read,
        prefill_worker=served.prefill_worker,
        decode_worker=served.decode_worker,
        attempts=served.attempts,
    )


def _split(stamps: Stamps, first_s: float) -> tuple[float, float, float]:
    """Admitted until the first token, as queue, prefill and the rest: none negative, the sum exact."""
    span = _ms(stamps.admitted_s, first_s)
    if not stamps.dispatched_s:
        return span, 0.0, 0.0
    prefill = min(max(stamps.worker_prefill_ms, 0.0), span)
    waited = _ms(stamps.admitted_s, stamps.dispatched_s) + max(stamps.worker_queue_ms, 0.0)
    queue = min(waited, span - prefill)
    return queue, prefill, span - prefill - queue


def _ms(start_s: float, end_s: float) -> float:
    return max(0.0, (end_s - start_s) * 1e3)
