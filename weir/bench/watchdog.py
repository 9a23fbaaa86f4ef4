"""Whether the load generator, and not what it measured, was the bottleneck. Pure.

Two signs: its event loop came late (then arrivals were sent late and tokens stamped late), or its process used
most of one core (a Python process cannot use more).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_LAG_P99_MS = 10.0
MAX_CPU_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class GeneratorHealth:
    """``schedule_lag``: fired minus planned arrivals. ``loop_lag``: lateness of a timer that ticks all the run.

    Milliseconds; ``cpu_share`` is CPU time of the generator's process over the run's time.
    """

    schedule_lag_p50_ms: float
    schedule_lag_p99_ms: float
    loop_lag_p99_ms: float
    loop_lag_max_ms: float
    cpu_share: float

    @property
    def verdict(self) -> str:
        """Empty when the figures can be believed, else why not."""
        faults = []
        if self.loop_lag_p99_ms > MAX_LAG_P99_MS:
            faults.append(f"its event loop came {self.loop_lag_p99_ms:.1f} ms late (p99)")
        if self.schedule_lag_p99_ms > MAX_LAG_P99_MS:
            faults.append(f"requests were sent {self.schedule_lag_p99_ms:.1f} ms late (p99)")
        if self.cpu_share > MAX_CPU_SHARE:
            faults.append(f"it used {100 * self.cpu_share:.0f} % of a core")
        return "the load generator was a bottleneck: " + ", ".join(faults) if faults else ""


def judge(
    schedule_lags_s: Sequence[float], loop_lags_s: Sequence[float], cpu_s: float, wall_s: float
) -> GeneratorHealth:
    """The health of a run; ``schedule_lags_s`` is empty when all requests were due at once."""
    schedule_ms = 1e3 * np.asarray(list(schedule_lags_s) or [0.0])
    loop_ms = 1e3 * np.asarray(list(loop_lags_s) or [0.0])
    return GeneratorHealth(
        schedule_lag_p50_ms=float(np.percentile(schedule_ms, 50)),
        schedule_lag_p99_ms=float(np.percentile(schedule_ms, 99)),
        loop_lag_p99_ms=float(np.percentile(loop_ms, 99)),
        loop_lag_max_ms=float(loop_ms.max()),
        cpu_share=cpu_s / wall_s if wall_s > 0 else 0.0,
    )
