"""When requests arrive, decided before the run. Pure: the random stream is given."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from weir.bench.plan import Prompt
from weir.errors import InvalidArgument


def arrival_times_s(
    requests: int, rate_per_s: float, burstiness: float, random: np.random.Generator
) -> tuple[float, ...]:
    """Arrivals of a renewal process whose gaps are gamma with CV 1/sqrt(burstiness); 1 is Poisson.

    The first gap precedes the first request. As in ``vllm bench serve``, the times are scaled so that the last
    is ``requests / rate_per_s``: the offered rate is exact in every run. An infinite rate gives zeros.
    Raises InvalidArgument for a rate or burstiness that is not positive.
    """
    if not rate_per_s > 0:
        raise InvalidArgument("--request-rate", rate_per_s, "must be > 0 (requests a second), or inf")
    if not 0 < burstiness < math.inf:
        raise InvalidArgument("--burstiness", burstiness, "must be > 0")
    if math.isinf(rate_per_s) or requests == 0:
        return (0.0,) * requests
    gaps = random.gamma(shape=burstiness, scale=1.0 / (rate_per_s * burstiness), size=requests)
    times = np.cumsum(gaps)
    return tuple(float(t) for t in times * (requests / rate_per_s / times[-1]))


def trace_times_s(prompts: Sequence[Prompt], speed: float) -> tuple[float, ...]:
    """Arrivals as the trace has them, from its first request on, ``speed`` times as fast."""
    if not speed > 0:
        raise InvalidArgument("--trace-speed", speed, "must be > 0")
    assert all(p.at_s is not None for p in prompts), "every prompt of a trace has a time"
    times = [float(p.at_s or 0.0) for p in prompts]
    return tuple((t - times[0]) / speed for t in times)
