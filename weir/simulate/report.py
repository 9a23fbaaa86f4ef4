"""A run as plain values for JSON, and as rows for a table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from weir.balance.window import Distribution
from weir.lifecycle import Role
from weir.simulate.scenario import Result, Scenario


def to_json(scenario: Scenario, result: Result, *, seed: int, wall_s: float) -> dict[str, Any]:
    """Everything a run says; infinite limits are null."""
    summary = result.summary
    return {
        "seed": seed,
        "model": scenario.model.name,
        "roles": str(scenario.roles),
        "slo": {"ttft_s": _finite(scenario.slo.ttft_s), "tpot_s": _finite(scenario.slo.tpot_s)},
        "seconds": scenario.seconds,
        "simulated_s": result.seconds,
        "wall_s": wall_s,
        "events": result.events,
        "unfinished": result.unfinished,
        "retried": result.metrics.retried,
        "output_tokens": result.metrics.output_tokens,
        "preemptions": sum(worker.preemptions for worker in result.workers),
        "summary": asdict(summary),
        "workers": [_worker(worker, result.seconds) for worker in result.workers],
        "decisions": [
            {
                "number": one.number,
                "at_s": one.at_s,
                "action": one.action.value,
                "reason": one.reason,
                "flips": {flip.worker_id: flip.role.value for flip in one.flips},
                "cancels": one.cancels,
            }
            for one in result.decisions
        ],
        "roles_over_time": [{"at_s": at_s, "prefill": p, "decode": d, "mixed": m} for at_s, p, d, m in result.roles],
    }


def rows(result: Result) -> Iterator[tuple[str, str]]:
    """Name and value of each line of the summary table."""
    summary = result.summary
    yield "requests", f"{summary.arrived:,} arrived, {summary.finished:,} finished, {summary.rejected:,} rejected"
    if result.unfinished:
        yield "unfinished", f"{result.unfinished:,}"
    yield "TTFT", _times(summary.ttft_s)
    yield "TPOT", _times(summary.tpot_s)
    yield "ITL", f"p50 {summary.itl_p50_s * 1e3:.4g} ms, p99 {summary.itl_p99_s * 1e3:.4g} ms (to 5 %)"
    yield "end to end", _times(summary.e2e_s)
    yield "throughput", f"{summary.throughput:.4g} requests/s"
    yield "goodput", f"{summary.goodput:.4g} requests/s, {summary.attainment:.1%} of all meet the SLO"
    for role in Role:
        mine = [worker for worker in result.workers if worker.role is role]
        if mine and result.seconds > 0:
            prefill = sum(worker.prefill_busy_s for worker in mine) / len(mine) / result.seconds
            decode = sum(worker.decode_busy_s for worker in mine) / len(mine) / result.seconds
            yield f"{role.value} workers", f"{len(mine)}: prefill {prefill:.0%}, decode {decode:.0%} of the time"
    if result.considered:
        changes = len(result.changes)
        yield "controller", f"{result.considered:,} decisions, {changes} of them change roles or numbers"


def _worker(worker: Any, seconds: float) -> dict[str, Any]:
    values = asdict(worker)
    values["role"] = worker.role.value
    values["used"] = (worker.prefill_busy_s + worker.decode_busy_s) / seconds if seconds > 0 else 0.0
    return values


def _times(found: Distribution) -> str:
    return "mean {:.4g}, p50 {:.4g}, p90 {:.4g}, p99 {:.4g} ms".format(
        *(value * 1e3 for value in (found.mean, found.p50, found.p90, found.p99))
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
