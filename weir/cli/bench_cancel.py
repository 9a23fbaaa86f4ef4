"""``weir bench cancel``: cancel at any moment of a request's life; how soon are its blocks back?"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from weir.bench.cancels import CancelSample, CancelShape, measure_cancels
from weir.cli.cluster import Cluster, ClusterSpec
from weir.clock import SystemClock

TARGET_P99_MS = 50.0


def cancel_figures(samples: Sequence[CancelSample]) -> dict[str, dict[str, float]]:
    """Count, p50, p99 and the longest by phase and over all; phases without a sample are left out."""
    groups = {"all": list(samples)}
    for sample in samples:
        groups.setdefault(sample.phase, []).append(sample)
        groups.setdefault(f"by {sample.by}", []).append(sample)
    figures = {}
    for name, group in groups.items():
        back = np.array([s.back_ms for s in group])
        p50, p99 = np.percentile(back, [50, 99]).tolist()
        figures[name] = {"count": len(group), "p50_ms": p50, "p99_ms": p99, "max_ms": float(back.max())}
    return figures


async def run_bench_cancel(
    console: Console, model_dir: Path, count: int, prompt_tokens: int, output_tokens: int, seed: int, out: Path | None
) -> dict[str, Any]:
    """Start one pair, cancel ``count`` requests, print."""
    shape = CancelShape(prompt_tokens, output_tokens)
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as scratch:
        async with Cluster(ClusterSpec(model_dir, model_dir.name, Path(scratch))) as cluster:
            samples = await measure_cancels(
                cluster.router_address,
                cluster.worker_addresses,
                shape,
                count,
                np.random.default_rng(seed),
                SystemClock(),
            )
    figures = cancel_figures(samples)
    table = Table("cancelled in", "requests", "p50 ms", "p99 ms", "longest ms", title="until blocks are back")
    for name, group in figures.items():
        numbers = (f"{group[key]:.1f}" for key in ("p50_ms", "p99_ms", "max_ms"))
        table.add_row(name, f"{group['count']:.0f}", *numbers)
    console.print(table)
    reached = figures["all"]["p99_ms"] <= TARGET_P99_MS
    console.print(f"target: p99 <= {TARGET_P99_MS:g} ms: {'[green]reached[/]' if reached else '[red]missed[/]'}")
    document = {"seed": seed, "figures": figures, "samples": [dataclasses.asdict(s) for s in samples]}
    if out is not None:
        out.write_text(json.dumps(document, indent=1), encoding="utf-8")
    return document
