"""How many workers of each role: work per request, the balanced split, and what whole workers cost.

Symbols: ISL, OSL prompt and output tokens; r_P prefill tokens/s of one worker; B decode batch; t_step decode step
time in seconds; N workers; phi the share of workers that prefill.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weir.errors import InvalidArgument


def positive(name: str, value: float) -> float:
    """``value``, if it is a finite number above 0; else InvalidArgument."""
    if not (math.isfinite(value) and value > 0):
        raise InvalidArgument(name, value, "must be a finite number above 0")
    return value


def not_negative(name: str, value: float) -> float:
    """``value``, if it is a finite number of at least 0; else InvalidArgument."""
    if not (math.isfinite(value) and value >= 0):
        raise InvalidArgument(name, value, "must be a finite number of at least 0")
    return value


@dataclass(frozen=True, slots=True)
class Work:
    """Worker-seconds that one request costs each pool."""

    prefill_s: float
    decode_s: float

    @property
    def prefill_share(self) -> float:
        """phi = t_P / (t_P + t_D)."""
        return self.prefill_s / (self.prefill_s + self.decode_s)


def work_per_request(*, isl: float, osl: float, prefill_tokens_per_s: float, step_s: float, batch: float) -> Work:
    """t_P = ISL / r_P and t_D = OSL * t_step / B, in worker-seconds.

    Note the / B: requests/s times decode seconds is a concurrency, not a number of workers.
    """
    positive("isl", isl)
    positive("osl", osl)
    prefill_s = isl / positive("prefill_tokens_per_s", prefill_tokens_per_s)
    return Work(prefill_s, osl * positive("step_s", step_s) / positive("batch", batch))


def balanced_prefill_workers(work: Work, workers: float) -> float:
    """n_P = phi * N, not rounded."""
    return work.prefill_share * positive("workers", workers)


def max_request_rate(work: Work, workers: float) -> float:
    """R_max = N / (t_P + t_D), requests per second, when the split is perfect."""
    return positive("workers", workers) / (work.prefill_s + work.decode_s)


@dataclass(frozen=True, slots=True)
class Split:
    """Whole workers of each role, and the share of R_max lost to rounding."""

    prefill: int
    decode: int
    loss: float


def split_loss(prefill_share: float, workers: int, prefill: int, decode: int) -> float:
    """L = 1 - min(n_P / (phi N), n_D / ((1 - phi) N))."""
    return 1 - min(prefill / (prefill_share * workers), decode / ((1 - prefill_share) * workers))


def whole_worker_split(
    prefill_share: float, workers: int, *, prefill_unit: int = 1, decode_unit: int = 1, minimum: int = 1
) -> Split:
    """The integer split with the least loss; roles come in units (for example of nodes) of so many workers.

    ``minimum`` units of each role are kept. Ties go to fewer prefill workers. Raises InvalidArgument when the
    budget does not hold the minimum of both.
    """
    if not 0 < prefill_share < 1:
        raise InvalidArgument("prefill_share", prefill_share, "must lie in (0, 1)")
    best: Split | None = None
    for units in range(minimum, workers // prefill_unit + 1):
        prefill = units * prefill_unit
        decode = (workers - prefill) // decode_unit * decode_unit
        if decode < minimum * decode_unit:
            break
        loss = split_loss(prefill_share, workers, prefill, decode)
        if best is None or loss < best.loss - 1e-12:
            best = Split(prefill, decode, loss)
    if best is None:
        needed = minimum * (prefill_unit + decode_unit)
        raise InvalidArgument("workers", workers, f"a split needs at least {needed}")
    return best


def split_loss_bound(prefill_share: float, workers: int, unit: int = 1) -> float:
    """L <= w / (2 * min(phi, 1 - phi) * N)."""
    return unit / (2 * min(prefill_share, 1 - prefill_share) * workers)


def slo_prefill_tokens_per_s(*, max_tokens_per_s: float, isl: float, ttft_s: float, overhead_s: float) -> float:
    """r_P,SLO = r_max - ISL / (TTFT - overhead): the rate to size with, so that queueing still meets the TTFT."""
    slack_s = positive("ttft_s - overhead_s", ttft_s - overhead_s)
    return positive("max_tokens_per_s", max_tokens_per_s) - positive("isl", isl) / slack_s


def slo_ratio(*, max_batch: float, ttft_s: float, osl: float, tpot_s: float) -> float:
    """P/D from the SLOs alone: B_max * TTFT / (OSL * TPOT) (DOPD)."""
    return (
        positive("max_batch", max_batch)
        * positive("ttft_s", ttft_s)
        / (positive("osl", osl) * positive("tpot_s", tpot_s))
    )


def cost_per_million_tokens(*, workers: float, price_per_worker_hour: float, tokens_per_s: float) -> float:
    """Price of 10^6 output tokens at ``tokens_per_s`` from ``workers`` workers."""
    hourly = not_negative("workers", workers) * not_negative("price_per_worker_hour", price_per_worker_hour)
    return hourly / 3600 / positive("tokens_per_s", tokens_per_s) * 1e6
