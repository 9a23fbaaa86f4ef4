"""``weir bench matrix``: every scenario, a split against its aggregated baseline, on the same cores."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import platform
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from weir.bench.cancels import WorkerPolls
from weir.bench.checklist import LinkFigures, checklist, reasons
from weir.bench.goodput import Slo, parse_goodput
from weir.bench.load import LoadResult, run_load
from weir.bench.metrics import latencies_ms, summarise
from weir.bench.plan import LoadPlan, Prompt, Target
from weir.bench.report import render_report
from weir.bench.scenarios import Scenario, choose_scenarios, judge_split, make_traffic
from weir.bench.synthetic import Vocabulary
from weir.cli.bench_handover import one_request
from weir.cli.bench_layouts import AGGREGATED, SPLIT, External, Layout, LoadPoint, sampled
from weir.cli.bench_link import LimitedLink, LinkedCluster, link_obstacle
from weir.cli.cluster import Cluster
from weir.client import AsyncClient
from weir.clock import Clock, SystemClock
from weir.errors import FailedPrecondition, InvalidArgument
from weir.lifecycle import Role

PERCENTILES = (50.0, 90.0, 95.0, 99.0)
REQUEST_TIMEOUT_S = 120.0
WARMUPS = 2
PROBE_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class MatrixOptions:
    """What to run and where to write ``report.json`` and ``report.html``.

    ``scenarios`` empty: all; ``goodput`` empty and ``link_mbit`` 0: as each scenario says.
    """

    model_dir: Path
    scenarios: tuple[str, ...]
    seconds: float
    rate_scales: tuple[float, ...]
    goodput: tuple[str, ...]
    seed: int
    out: Path
    externals: tuple[External, ...] = ()
    link_mbit: float = 0.0


class MatrixRunner:
    """Runs all scenarios on one layout after another; ``runs`` collects what the report shows.

    ``obstacle`` says why no link can be limited here. A scenario that was asked for by name is refused then (raises
    FailedPrecondition); else it is left out, and the report says so.
    """

    def __init__(self, console: Console, options: MatrixOptions, clock: Clock, obstacle: str = "") -> None:
        if not all(scale > 0 for scale in options.rate_scales):
            raise InvalidArgument("--rate-scale", options.rate_scales, "must be > 0")
        parse_goodput(options.goodput)
        self._console = console
        self._options = options
        self._clock = clock
        self._load_before = os.getloadavg()[0]
        chosen = [_with_link(scenario, options.link_mbit) for scenario in choose_scenarios(options.scenarios)]
        self._left_out = {s.name: obstacle for s in chosen if s.link_mbit and obstacle and not options.externals}
        for name in set(self._left_out) & set(options.scenarios):
            raise FailedPrecondition(f"scenario {name}: {obstacle}")
        self._scenarios = [scenario for scenario in chosen if scenario.name not in self._left_out]
        self.runs: dict[str, list[dict[str, Any]]] = {scenario.name: [] for scenario in self._scenarios}

    async def run(self) -> dict[str, Any]:
        """Both layouts, or the running systems given instead; the report as JSON-ready values."""
        if self._options.externals:
            return await self._extended()
        for layout in (SPLIT, AGGREGATED):
            self._console.print(f"[bold]{layout.name}[/]")
            plain = [scenario for scenario in self._scenarios if not scenario.link_mbit]
            if plain:
                await self._on_this_machine(layout, plain)
            for scenario in self._scenarios:
                if scenario.link_mbit:
                    await self._over_link(layout, scenario)
        return self._report()

    async def _on_this_machine(self, layout: Layout, scenarios: list[Scenario]) -> None:
        with tempfile.TemporaryDirectory(prefix="weir-bench-") as scratch:
            async with Cluster(layout.spec(self._options.model_dir, Path(scratch))) as cluster:
                for scenario in scenarios:
                    await self._all_rates(cluster, layout, scenario, None)

    async def _over_link(self, layout: Layout, scenario: Scenario) -> None:
        with tempfile.TemporaryDirectory(prefix="weir-bench-") as scratch, LimitedLink(scenario.link_mbit) as link:
            stream_mb_s = await link.measure_mb_s(self._clock)
            async with LinkedCluster(layout.spec(self._options.model_dir, Path(scratch)), link=link) as cluster:
                figures = await _link_figures(cluster, link, stream_mb_s, self._options.seed)
                self._console.print(f"  {link_line(figures)}", highlight=False)
                await self._all_rates(cluster, layout, scenario, figures)

    async def _all_rates(self, cluster: Cluster, layout: Layout, scenario: Scenario, link: LinkFigures | None) -> None:
        for scale in self._options.rate_scales:
            run = await self._one(cluster, layout, scenario, scale)
            self.runs[scenario.name].append(run | {"link": dataclasses.asdict(link) if link else None})

    async def _extended(self) -> dict[str, Any]:
        """The report that is there, with runs of running systems added. They lose no worker and show no queues."""
        path = self._options.out / "report.json"
        if not path.is_file():
            raise InvalidArgument("--out", str(path), "run the matrix first, then add other systems to its report")
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for key, value in self._conditions().items():
            if report["setup"][key] != value:
                raise InvalidArgument("--out", str(path), f"was run with {key} = {report['setup'][key]}, not {value}")
        entries = {entry["name"]: entry for entry in report["scenarios"]}
        for external in self._options.externals:
            self._console.print(f"[bold]{external.name}[/]")
            for scenario in self._scenarios:
                # Nobody kills the worker or limits the link of a system that is not ours.
                if scenario.kill_at is not None or scenario.link_mbit or scenario.name not in entries:
                    continue
                for scale in self._options.rate_scales:
                    plan = self._plan(external.target, scenario, scale)
                    run = self._run(external.name, scenario, scale, plan, await run_load(plan), [])
                    others = [r for r in entries[scenario.name]["runs"] if not _same_place(r, run)]
                    entries[scenario.name]["runs"] = [*others, run]
        return report

    async def _one(self, cluster: Cluster, layout: Layout, scenario: Scenario, scale: float) -> dict[str, Any]:
        plan = self._plan(Target("weir", cluster.router_address), scenario, scale)
        async with sampled(cluster, self._clock) as points:
            result = await self._loaded(cluster, layout, scenario, plan)
        async with WorkerPolls(cluster.worker_addresses) as polls:
            await polls.until_idle(self._clock)
        return self._run(layout.name, scenario, scale, plan, result, points)

    def _plan(self, target: Target, scenario: Scenario, scale: float) -> LoadPlan:
        traffic = make_traffic(scenario, self._options.seconds, scale, self._options.seed, Vocabulary())
        return LoadPlan(
            target,
            traffic.prompts,
            traffic.arrivals_s,
            # Their ids lie outside what prompts are drawn from: nothing of them is found in a cache.
            warmups=tuple(Prompt(4, tuple(range(100 + i, 164 + i))) for i in range(WARMUPS)),
            ignore_eos=True,
            timeout_s=REQUEST_TIMEOUT_S,
        )

    def _run(
        self, name: str, scenario: Scenario, scale: float, plan: LoadPlan, result: LoadResult, points: list[LoadPoint]
    ) -> dict[str, Any]:
        slo = self._slo(scenario)
        figures = summarise(result.records, result.duration_s, slo=slo, percentiles=PERCENTILES)
        figures["generator"] = {**dataclasses.asdict(result.health), "verdict": result.health.verdict}
        self._console.print(
            f"  {scenario.name} × {scale:g}: {figures['completed']} completed, {figures['failed']} failed, "
            f"goodput {figures['request_goodput']:.2f}/s, ITL p99 {figures['p99_itl_ms']:.0f} ms, "
            f"TTFT p99 {figures['p99_ttft_ms']:.0f} ms",
            highlight=False,
        )
        return {
            "layout": name,
            "rate_scale": scale,
            "offered_per_s": len(plan.prompts) / self._options.seconds,
            "figures": figures,
            "samples_ms": latencies_ms(result.records),
            "timeline": [dataclasses.asdict(_shifted(p, result.start_s)) for p in points],
        }

    async def _loaded(self, cluster: Cluster, layout: Layout, scenario: Scenario, plan: LoadPlan) -> LoadResult:
        if scenario.kill_at is None:
            return await run_load(plan)
        losing: asyncio.Task[None] | None = None

        def started(start_s: float) -> None:
            nonlocal losing
            kill_s = start_s + (scenario.kill_at or 0.0) * self._options.seconds
            losing = asyncio.create_task(_lose_worker(cluster, layout, kill_s, self._clock))

        result = await run_load(plan, on_started=started)
        assert losing is not None
        await losing
        return result

    def _objectives(self, scenario: Scenario) -> tuple[str, ...]:
        return self._options.goodput or scenario.objectives

    def _slo(self, scenario: Scenario) -> Slo:
        slo = parse_goodput(self._objectives(scenario))
        assert slo is not None, scenario.name
        return slo

    def _report(self) -> dict[str, Any]:
        scenarios = []
        for scenario in self._scenarios:
            runs = self.runs[scenario.name]
            split, mixed = (next(r for r in runs if r["layout"] == x.name) for x in (SPLIT, AGGREGATED))
            link = LinkFigures(**split["link"]) if split["link"] else None
            figures = split["figures"], mixed["figures"]
            findings = checklist(self._slo(scenario), *figures, link)
            verdict = dataclasses.asdict(judge_split(scenario, *figures))
            verdict["text"] += reasons(verdict["outcome"], findings)
            scenarios.append(
                {
                    "name": scenario.name,
                    "flows": [dataclasses.asdict(flow) for flow in scenario.flows],
                    "objectives": list(self._objectives(scenario)),
                    "kill_at": scenario.kill_at,
                    "link": link_line(link) if link else "",
                    "runs": runs,
                    "verdict": verdict,
                    "checklist": [dataclasses.asdict(finding) for finding in findings],
                }
            )
        setup = {
            "model": self._options.model_dir.name,
            "cores": len(os.sched_getaffinity(0)),
            "machine": _processor(),
            **self._conditions(),
            "load average before": f"{self._load_before:.2f}",
        }
        return {
            "title": "Weir: prefill and decode apart, or together?",
            "setup": setup,
            "scenarios": scenarios,
            "left_out": self._left_out,
        }

    def _conditions(self) -> dict[str, Any]:
        """What runs in one report must have in common."""
        options = self._options
        objectives = ", ".join(options.goodput) + " ms" if options.goodput else "those of each scenario"
        return {"arrivals in each run, s": options.seconds, "objectives": objectives, "seed": options.seed}


def _same_place(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether the one stands where the other would in a report."""
    return bool(one["layout"] == other["layout"] and one["rate_scale"] == other["rate_scale"])


def _with_link(scenario: Scenario, mbit: float) -> Scenario:
    """Its link limited to ``mbit`` instead, if it is limited at all."""
    return dataclasses.replace(scenario, link_mbit=mbit) if mbit and scenario.link_mbit else scenario


async def _link_figures(cluster: Cluster, link: LimitedLink, stream_mb_s: float, seed: int) -> LinkFigures:
    """Of one prompt of ``PROBE_TOKENS``, alone: the KV read, and the KV over the time that its prefill took."""
    random = np.random.default_rng([seed, 1])
    async with AsyncClient(cluster.router_address) as client:
        sample = await one_request(client, list(Vocabulary().draw(PROBE_TOKENS, random)))
    limit_mb_s = link.mbit / 8
    if not sample.kv_bytes:
        return LinkFigures(limit_mb_s, stream_mb_s)
    read_mb_s, made_mb_s = (sample.kv_bytes / 1e3 / ms for ms in (sample.kv_busy_ms, sample.ttft_ms))
    return LinkFigures(limit_mb_s, stream_mb_s, read_mb_s, made_mb_s, sample.transport)


def link_line(figures: LinkFigures) -> str:
    """The limit and what was measured, in words."""
    line = f"link limited to {figures.limit_mb_s:,.1f} MB/s: a TCP stream measured {figures.stream_mb_s:,.1f} MB/s"
    if not figures.transport:
        return f"{line}; no KV was read"
    return (
        f"{line}, a KV read by {figures.transport} {figures.read_mb_s:,.1f} MB/s, "
        f"while prefill alone makes {figures.made_mb_s:,.1f} MB/s"
    )


def _shifted(point: LoadPoint, start_s: float) -> LoadPoint:
    return dataclasses.replace(point, at_s=round(point.at_s - start_s, 3))


async def _lose_worker(cluster: Cluster, layout: Layout, kill_s: float, clock: Clock) -> None:
    """Kill the last worker (it decodes in either layout) and start another in its place, as a supervisor would."""
    await asyncio.sleep(max(0.0, kill_s - clock.monotonic_s()))
    victim = cluster.workers.pop()
    victim.kill()
    await victim.wait()
    lost = next(name for name in cluster.worker_addresses if name == victim.ready[1])
    del cluster.worker_addresses[lost]
    role = Role.MIXED if layout.mixed else Role.DECODE
    await cluster.start_worker(role, len(cluster.workers))
    await victim.stop(0.0)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def goodput_table(report: dict[str, Any]) -> Table:
    """Scenarios against all systems of a report, at its first rate."""
    layouts = list(dict.fromkeys(run["layout"] for scenario in report["scenarios"] for run in scenario["runs"]))
    table = Table("scenario", title="goodput: requests/s that met every objective", title_justify="left")
    for layout in layouts:
        table.add_column(layout, justify="right")
    for scenario in report["scenarios"]:
        # The first rate stands first: the later ones of a layout do not replace it.
        found = {run["layout"]: f"{run['figures']['request_goodput']:.2f}" for run in reversed(scenario["runs"])}
        table.add_row(scenario["name"], *(found.get(layout, "-") for layout in layouts))
    return table


async def run_bench_matrix(console: Console, options: MatrixOptions) -> dict[str, Any]:
    """Run, print verdicts, write both files."""
    report = await MatrixRunner(console, options, SystemClock(), link_obstacle()).run()
    table = Table("scenario", "split beside aggregated", title="verdict", title_justify="left")
    for scenario in report["scenarios"]:
        table.add_row(scenario["name"], scenario["verdict"]["text"])
    for name, why in report.get("left_out", {}).items():
        table.add_row(name, f"[yellow]not run:[/] {why}")
    console.print(goodput_table(report))
    console.print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "report.json").write_text(json.dumps(report), encoding="utf-8")
    (options.out / "report.html").write_text(render_report(report), encoding="utf-8")
    console.print(f"wrote {options.out / 'report.html'} and report.json", highlight=False)
    return report
