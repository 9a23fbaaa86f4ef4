"""``weir bench soak``: many requests; does any process grow?"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from weir.bench.growth import Growth, Reading, growth
from weir.bench.load import run_load
from weir.bench.plan import LoadPlan, Target
from weir.bench.synthetic import Vocabulary, random_prompts
from weir.cli.cluster import Cluster, ClusterSpec

BATCHES = 10


@dataclasses.dataclass(frozen=True, slots=True)
class SoakShape:
    """``requests`` in all, ``concurrency`` at once; every tenth prompt is eight times as long as ``input_tokens``.

    ``num_blocks`` of KV per worker: few, so that all of the pool has been touched early and stops adding to the RSS.
    """

    requests: int
    concurrency: int
    input_tokens: int
    output_tokens: int
    seed: int = 0
    num_blocks: int = 512


def read_processes(cluster: Cluster, requests: int) -> dict[str, Reading]:
    """Memory and open files of every process of the cluster."""
    readings = {}
    for child in cluster.processes():
        process = psutil.Process(child.pid)
        readings[child.name] = Reading(requests, process.memory_info().rss, process.num_fds())
    return readings


def soak_plan(router: str, shape: SoakShape, batch: int, count: int) -> LoadPlan:
    """One batch; prompts are new in every batch."""
    random = np.random.default_rng([shape.seed, batch])
    prompts = random_prompts(
        count,
        input_tokens=shape.input_tokens,
        output_tokens=shape.output_tokens,
        range_ratio=0.5,
        prefix_tokens=0,
        vocabulary=Vocabulary(),
        random=random,
    )
    for index in range(0, count, 10):
        long = Vocabulary().draw(8 * shape.input_tokens, random)
        prompts[index] = dataclasses.replace(prompts[index], token_ids=long)
    zeros = (0.0,) * count
    target = Target("weir", router)
    return LoadPlan(target, tuple(prompts), zeros, max_concurrency=shape.concurrency, ignore_eos=True)


async def measure_soak(console: Console, cluster: Cluster, shape: SoakShape) -> tuple[dict[str, list[Reading]], int]:
    """Readings of each process after every batch, and the number of failed requests."""
    count, failed = max(1, shape.requests // BATCHES), 0
    readings: dict[str, list[Reading]] = {}
    for batch in range(BATCHES + 1):  # the first one warms up
        result = await run_load(soak_plan(cluster.router_address, shape, batch, count))
        failed += sum(not r.ok for r in result.records)
        for name, reading in read_processes(cluster, batch * count).items():
            readings.setdefault(name, []).append(reading)
        console.print(f"  {batch * count} requests, {failed} failed", style="grey50")
    return readings, failed


async def run_bench_soak(
    console: Console, model_dir: Path, shape: SoakShape, mixed: bool, out: Path | None
) -> dict[str, Any]:
    """Start a pair (or two mixed workers), send the requests, print."""
    split = 0 if mixed else 1
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as scratch:
        spec = ClusterSpec(
            model_dir,
            model_dir.name,
            Path(scratch),
            prefill=split,
            decode=split,
            mixed=2 if mixed else 0,
            worker_flags=("--num-blocks", str(shape.num_blocks)),
        )
        async with Cluster(spec) as cluster:
            readings, failed = await measure_soak(console, cluster, shape)
    grown = {name: growth(series) for name, series in readings.items()}
    _print(console, grown, shape.requests, failed)
    document = {
        "shape": dataclasses.asdict(shape),
        "failed": failed,
        "growth": {name: dataclasses.asdict(g) for name, g in grown.items()},
        "readings": {name: [dataclasses.asdict(r) for r in series] for name, series in readings.items()},
    }
    if out is not None:
        out.write_text(json.dumps(document, indent=1), encoding="utf-8")
    return document


def _print(console: Console, grown: dict[str, Growth], requests: int, failed: int) -> None:
    table = Table("process", "RSS before", "RSS after", "bytes a request", "files", title=f"{requests} requests")
    for name, g in grown.items():
        sizes = (f"{size / 1e6:.1f} MB" for size in (g.rss_first, g.rss_last))
        table.add_row(name, *sizes, f"{g.bytes_per_request:,.0f}", f"{g.files_first} → {g.files_last}")
    console.print(table)
    if failed:
        console.print(f"[red]{failed} requests failed[/]")
