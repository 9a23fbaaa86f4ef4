"""``weir bench interference``: what long prompts do to the tokens of running chats, split and aggregated."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from weir.bench.cancels import WorkerPolls
from weir.bench.load import run_load
from weir.bench.plan import LoadPlan, Prompt, Target
from weir.bench.records import RequestRecord
from weir.bench.synthetic import Vocabulary
from weir.cli.bench_layouts import AGGREGATED, SPLIT, External, Layout
from weir.cli.cluster import Cluster
from weir.clock import SystemClock
from weir.errors import InternalError

TARGET_RATIO = 1.3
PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class InterferenceShape:
    """``chats`` begin together; ``longs`` prompts arrive together ``after_s`` later, while the chats decode."""

    chats: int = 8
    chat_input: int = 64
    chat_output: int = 64
    longs: int = 4
    long_input: int = 1024
    long_output: int = 4
    after_s: float = 1.0
    rounds: int = 2
    seed: int = 0

    def plan(self, target: Target, number: int, *, disturbed: bool) -> LoadPlan:
        """Round ``number``; idle rounds have the chats alone. No prompt comes twice."""
        random = np.random.default_rng([self.seed, number, disturbed])
        draw = Vocabulary().draw
        prompts = [Prompt(self.chat_output, draw(self.chat_input, random), kind="chat") for _ in range(self.chats)]
        arrivals = [0.0] * self.chats
        if disturbed:
            prompts += [Prompt(self.long_output, draw(self.long_input, random), kind="long") for _ in range(self.longs)]
            arrivals += [self.after_s] * self.longs
        return LoadPlan(target, tuple(prompts), tuple(arrivals), ignore_eos=True)


@dataclass(frozen=True, slots=True)
class InterferenceFigures:
    """Gaps of the chats in milliseconds, all of them pooled; ``long_ttft_ms`` one by one."""

    layout: str
    idle: dict[str, float]
    disturbed: dict[str, float]
    long_ttft_ms: tuple[float, ...]
    generator: str

    @property
    def ratio(self) -> float:
        """ITL p99 while long prompts arrive, over ITL p99 without them."""
        return self.disturbed["p99"] / self.idle["p99"]


async def measure_interference(model_dir: Path, layout: Layout, shape: InterferenceShape) -> InterferenceFigures:
    """Start the layout and measure; the workers are idle before each round."""
    clock = SystemClock()
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as scratch:
        async with Cluster(layout.spec(model_dir, Path(scratch))) as cluster:
            async with WorkerPolls(cluster.worker_addresses) as polls:
                target = Target("weir", cluster.router_address)
                return await measure_rounds(layout.name, target, shape, lambda: polls.until_idle(clock))


async def measure_rounds(
    name: str, target: Target, shape: InterferenceShape, until_idle: Callable[[], Awaitable[object]]
) -> InterferenceFigures:
    """Rounds of idle and disturbed in turn, after one that does not count."""
    idle, disturbed = list[RequestRecord](), list[RequestRecord]()
    verdicts: list[str] = []
    for number in range(shape.rounds + 1):
        for records, wanted in ((idle, False), (disturbed, True)):
            result = await run_load(shape.plan(target, number, disturbed=wanted))
            check_completed(result.records)
            if number > 0:
                records += result.records
                verdicts += [result.health.verdict] if result.health.verdict else []
            await until_idle()
    longs = tuple(1e3 * r.ttft_s for r in disturbed if r.kind == "long")
    return InterferenceFigures(name, chat_itl(idle), chat_itl(disturbed), longs, verdicts[0] if verdicts else "")


def chat_itl(records: Sequence[RequestRecord]) -> dict[str, float]:
    """p50, p95, p99 and max of the chats' gaps between tokens, in milliseconds.

    ``later_p99`` leaves out each chat's first gap, which contains the hand-over (or the rest of its batch's prefill).
    """
    gaps = [[1e3 * gap for gap in r.itls_s] for r in records if r.kind == "chat"]
    pooled = [gap for each in gaps for gap in each]
    figures = {f"p{p}": float(np.percentile(pooled, p)) for p in PERCENTILES}
    later = [gap for each in gaps for gap in each[1:]]
    return figures | {"max": max(pooled), "later_p99": float(np.percentile(later, 99))}


def check_completed(records: Sequence[RequestRecord]) -> None:
    """Raise InternalError for a request that failed: its gaps would be missing."""
    for record in records:
        if not record.ok:
            raise InternalError(f"request {record.index} failed: {record.error} {record.detail}")


async def run_bench_interference(
    console: Console,
    model_dir: Path,
    shape: InterferenceShape,
    externals: Sequence[External] = (),
    out: Path | None = None,
) -> list[InterferenceFigures]:
    """Both layouts one after the other, or the running systems given instead, and a table."""
    table = Table(
        "chats' ITL, ms", "p50", "p95", "p99", "max", "p99 after 2nd token", "p99 / idle p99", "long TTFT, ms"
    )
    measured = []
    for external in externals:
        measured.append(await measure_rounds(external.name, external.target, shape, lambda: asyncio.sleep(0)))
        _add_rows(table, measured[-1])
    for layout in () if externals else (SPLIT, AGGREGATED):
        with console.status(layout.name):
            measured.append(await measure_interference(model_dir, layout, shape))
        _add_rows(table, measured[-1])
    console.print(table)
    for figures in measured:
        word = "reached" if figures.ratio <= TARGET_RATIO else "missed"
        console.print(
            f"{figures.layout}: ITL p99 disturbed / idle = {figures.ratio:.2f}, target {TARGET_RATIO:g} {word}"
        )
    if out is not None:
        rows = [dataclasses.asdict(m) | {"ratio": m.ratio} for m in measured]
        out.write_text(json.dumps({"shape": dataclasses.asdict(shape), "layouts": rows}, indent=1), encoding="utf-8")
    return measured


def _add_rows(table: Table, figures: InterferenceFigures) -> None:
    keys = ("p50", "p95", "p99", "max", "later_p99")
    longs = figures.long_ttft_ms
    span = f"{min(longs):,.0f}..{max(longs):,.0f}" if longs else "-"
    table.add_row(f"{figures.layout}, idle", *(f"{figures.idle[k]:.1f}" for k in keys), "", "")
    disturbed = (f"{figures.disturbed[k]:.1f}" for k in keys)
    table.add_row(f"{figures.layout}, long prompts", *disturbed, f"{figures.ratio:.2f}", span)
    if figures.generator:
        table.add_row(f"[yellow]{figures.generator}[/]", *[""] * 7)
