"""What tracing costs the router: two of them before the same mock workers, one with and one without.

Both work at the same time, so that whatever else the machine does makes both dearer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from weir.bench.plan import Target
from weir.cli.bench_router import MODEL_NAME, MockCluster, RouterShape, RunningRouter, router_plan, timed

TARGET_OVERHEAD = 0.02


@dataclass(frozen=True, slots=True)
class TracingFigures:
    """CPU of the router for an answer of ``tokens``, microseconds, median over ``rounds``; export is part of it.

    ``overhead`` is the median of the rounds' own differences, as a share of ``off_us``; ``low`` and ``high`` are
    their quartiles: how sure that is.
    """

    tokens: int
    rounds: int
    ratio: float
    off_us: float
    on_us: float
    overhead: float
    low: float
    high: float


async def measure_tracing(model_dir: Path, shape: RouterShape, ratio: float, rounds: int) -> list[TracingFigures]:
    """Answers of one token and long ones, over HTTP; the first round does not count."""
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as scratch:
        async with contextlib.AsyncExitStack() as stack:
            cluster = await stack.enter_async_context(MockCluster(model_dir, Path(scratch), shape.step_ms).running())
            flags = ("--otlp-endpoint", cluster.mock_address, "--trace-ratio", f"{ratio:g}")
            routers = [cluster.router, await cluster.start_router(stack, "traced", *flags)]
            kinds = {1: shape.requests, shape.stream_tokens: shape.streams}
            used: dict[int, list[tuple[float, float]]] = {tokens: [] for tokens in kinds}
            for number in range(rounds + 1):
                for tokens, count in kinds.items():
                    off, on = await asyncio.gather(*(_answer_us(r, count, tokens, shape) for r in routers))
                    if number:
                        used[tokens].append((off, on))
    return [_figures(tokens, np.array(pairs), ratio) for tokens, pairs in used.items()]


async def run_bench_router_tracing(
    console: Console, model_dir: Path, shape: RouterShape, ratio: float, rounds: int, out: Path | None
) -> dict[str, Any]:
    """Measure and print."""
    figures = await measure_tracing(model_dir, shape, ratio, rounds)
    table = Table("answer", "CPU µs, off", f"traced at {ratio:g}", "overhead", "quartiles of the rounds")
    for f in figures:
        spread = f"{f.low:+.1%} to {f.high:+.1%}"
        table.add_row(f"{f.tokens} tokens", f"{f.off_us:,.0f}", f"{f.on_us:,.0f}", f"{f.overhead:+.1%}", spread)
    console.print(table)
    console.print(f"target: {TARGET_OVERHEAD:.0%}; {rounds} rounds, both at the same time", highlight=False)
    document = {"shape": dataclasses.asdict(shape), "tracing": [dataclasses.asdict(f) for f in figures]}
    if out is not None:
        out.write_text(json.dumps(document, indent=1), encoding="utf-8")
    return document


async def _answer_us(router: RunningRouter, count: int, tokens: int, shape: RouterShape) -> float:
    target = Target("openai", f"http://{router.http}", MODEL_NAME)
    _, used_s = await timed(router_plan(target, count, tokens, shape.concurrency, shape), router.pid)
    return 1e6 * used_s / count


def _figures(tokens: int, pairs: np.ndarray, ratio: float) -> TracingFigures:
    off_us, on_us = np.median(pairs, axis=0)
    low, middle, high = np.percentile((pairs[:, 1] - pairs[:, 0]) / off_us, (25, 50, 75))
    return TracingFigures(
        tokens, len(pairs), ratio, float(off_us), float(on_us), float(middle), float(low), float(high)
    )
