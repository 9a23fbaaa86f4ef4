"""Mean TTFT of a prefill worker under Poisson arrivals of equal prompts (M/D/1), and of two ways to use two GPUs.

D is the prefill time in seconds, R the arrivals per second; load must stay below one.
"""

from __future__ import annotations

from weir.balance.capacity import not_negative, positive
from weir.errors import InvalidArgument


def _check(rate: float, service_s: float, servers: float) -> None:
    not_negative("rate", rate)
    if positive("service_s", service_s) * rate >= servers:
        raise InvalidArgument("rate", rate, f"must stay below {servers / service_s:g} requests/s")


def mean_ttft_s(*, rate: float, prefill_s: float) -> float:
    """D + R D^2 / (2 (1 - R D))."""
    _check(rate, prefill_s, 1)
    return prefill_s + rate * prefill_s**2 / (2 * (1 - rate * prefill_s))


def mean_ttft_pipeline_s(*, rate: float, prefill_s: float) -> float:
    """Two pipeline stages: D + R D^2 / (4 (2 - R D))."""
    _check(rate, prefill_s, 2)
    return prefill_s + rate * prefill_s**2 / (4 * (2 - rate * prefill_s))


def mean_ttft_tensor_s(*, rate: float, prefill_s: float, speedup: float) -> float:
    """Two tensor-parallel ranks with speed-up K: D/K + R D^2 / (2 K (K - R D))."""
    _check(rate, prefill_s, positive("speedup", speedup))
    return prefill_s / speedup + rate * prefill_s**2 / (2 * speedup * (speedup - rate * prefill_s))
