"""``weir simulate``: the production policy and controller under virtual time."""

from __future__ import annotations

import json as jsonlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from weir.clock import SystemClock
from weir.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from weir.balance.decision import BalanceLimits
    from weir.balance.sizing import Slo
    from weir.simulate.scenario import Result, Scenario
    from weir.simulate.traffic import Arrival

Flag = typer.Option
PROGRESS_EVERY = 2000
PIPED_WIDTH = 120
EXAMPLE = "weir simulate --trace synthetic --rate 20 --seconds 600 --prefill 2 --decode 2 --controller auto"


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """What was asked for, by flag."""

    trace: str
    rate: float | None
    scale: float
    requests: int | None
    seconds: float
    isl: float
    osl: float
    spread: float
    burstiness: float
    prefill: int
    decode: int
    mixed: int
    profile: str
    kv_tokens: int
    kv_bytes: float
    slo_ttft: float
    slo_tpot: float
    policy: str
    controller: str
    workers_max: int | None
    seed: int
    on_bad_row: str
    prefix_cache: bool
    data: Path | None


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="simulate", epilog=f"Example: {EXAMPLE}")(simulate)


def simulate(
    trace: Annotated[str, Flag(help="synthetic, azure-code, azure-conv, mooncake, or a file")] = "synthetic",
    rate: Annotated[float | None, Flag(help="Requests/s; default: 10, or as recorded")] = None,
    scale: Annotated[float, Flag(help="This many times as many requests/s")] = 1.0,
    requests: Annotated[int | None, Flag(help="Requests in all; a trace that is shorter begins again")] = None,
    seconds: Annotated[float, Flag(help="synthetic: duration, without --requests")] = 300.0,
    isl: Annotated[float, Flag(help="synthetic: mean prompt tokens")] = 1024.0,
    osl: Annotated[float, Flag(help="synthetic: mean output tokens")] = 128.0,
    spread: Annotated[float, Flag(help="synthetic: coefficient of variation of lengths")] = 0.5,
    burstiness: Annotated[float, Flag(help="synthetic: gaps have CV 1/sqrt(this)")] = 1.0,
    prefill: Annotated[int, Flag(min=0, max=10_000, help="Prefill workers")] = 0,
    decode: Annotated[int, Flag(min=0, max=10_000, help="Decode workers")] = 0,
    mixed: Annotated[int, Flag(min=0, max=10_000, help="Mixed workers")] = 0,
    profile: Annotated[str, Flag(help="distserve, splitwise, or a file of weir profile")] = "splitwise",
    kv_tokens: Annotated[int, Flag(min=0, help="profile file: tokens of a worker's KV pool; 0: no limit")] = 0,
    kv_bytes: Annotated[float, Flag(min=0, help="profile file: KV bytes per token")] = 0.0,
    slo_ttft: Annotated[float, Flag(help="ms to the first token; inf: any")] = math.inf,
    slo_tpot: Annotated[float, Flag(help="ms per output token; inf: any")] = math.inf,
    policy: Annotated[str, Flag(help="Router policy: least-loaded or slo")] = "least-loaded",
    controller: Annotated[str, Flag(help="off, or auto: roles follow the traffic")] = "off",
    workers_max: Annotated[int | None, Flag(min=1, help="auto: also start and stop workers, up to this many")] = None,
    seed: Annotated[int, Flag(min=0, help="Start of the random stream")] = 1,
    on_bad_row: Annotated[str, Flag(help="refuse or skip bad rows of a trace")] = "refuse",
    prefix_cache: Annotated[bool, Flag(help="mooncake: an unbounded cache shared by all, an upper bound")] = False,
    data: Annotated[Path | None, Flag(help="Folder of recorded data; default: shared/traces beside or above")] = None,
    json: Annotated[Path | None, Flag(help="Write the result here")] = None,
    plot: Annotated[Path | None, Flag(help="Write an SVG here")] = None,
) -> None:
    """Simulate a cluster: the production router policy and balance controller, workers from profiles."""
    options = SimulateOptions(
        trace, rate, scale, requests, seconds, isl, osl, spread, burstiness, prefill, decode, mixed, profile,
        kv_tokens, kv_bytes, slo_ttft, slo_tpot, policy, controller, workers_max, seed, on_bad_row, prefix_cache, data,
    )  # fmt: skip
    run_simulate(Console(width=None if sys.stdout.isatty() else PIPED_WIDTH), options, json, plot)


def run_simulate(console: Console, options: SimulateOptions, json: Path | None, plot: Path | None) -> None:
    """Build, run, show, write. Raises InvalidArgument and NotFound before anything runs."""
    from weir.simulate.report import rows, to_json
    from weir.simulate.scenario import run

    for path in (json, plot):
        if path is not None and not path.parent.is_dir():
            raise NotFound("folder", str(path.parent))
    scenario, expected = scenario_of(console, options)
    clock = SystemClock()
    began_s = clock.monotonic_s()
    with _progress(console) as bar:
        task = bar.add_task("requests", total=expected)

        def on_finished(count: int) -> None:
            if count % PROGRESS_EVERY == 0:
                bar.update(task, completed=count)

        result = run(scenario, on_finished)
        bar.update(task, completed=result.summary.finished, total=max(result.summary.arrived, 1))
    wall_s = clock.monotonic_s() - began_s
    table = Table(title=f"{scenario.roles} of {scenario.model.name}", show_header=False)
    for name, value in rows(result):
        table.add_row(name, value)
    pace = result.summary.finished / wall_s if wall_s > 0 else 0.0
    table.add_row("simulated", f"{result.seconds:,.0f} s in {wall_s:.2f} s; {pace:,.0f} requests/s of this process")
    console.print(table)
    _show_decisions(console, result)
    if json is not None:
        json.write_text(jsonlib.dumps(to_json(scenario, result, seed=options.seed, wall_s=wall_s), indent=1) + "\n")
    if plot is not None:
        _write_plot(plot, scenario, result)


def scenario_of(console: Console, options: SimulateOptions) -> tuple[Scenario, int]:
    """The scenario and how many requests to expect; bad rows of a trace are shown."""
    from weir.balance.sizing import Roles, Slo
    from weir.simulate import setup
    from weir.simulate.cluster import ClusterOptions
    from weir.simulate.scenario import Scenario

    setup.check_counts(options.requests, options.rate, options.scale)
    if options.controller not in {"off", "auto"}:
        raise InvalidArgument("--controller", options.controller, "must be off or auto")
    if options.workers_max is not None and options.controller == "off":
        raise InvalidArgument("--workers-max", options.workers_max, "needs --controller auto")
    slo = Slo(options.slo_ttft / 1e3, options.slo_tpot / 1e3, overhead_s=min(0.02, options.slo_ttft / 1e4))
    roles = Roles(options.prefill, options.decode, options.mixed)
    if roles.total == 0:
        roles = Roles(1, 1, 0)
    folder = setup.data_folder(options.data)
    model = setup.worker_model(options.profile, folder, kv_tokens=options.kv_tokens, bytes_per_token=options.kv_bytes)
    arrivals, seconds, expected = _traffic(console, options, folder)
    return (
        Scenario(
            roles=roles,
            model=model,
            arrivals=arrivals,
            seconds=seconds,
            slo=slo,
            policy=setup.policy(options.policy, options.seed),
            cluster=ClusterOptions(lengths=options.policy == "slo"),
            limits=_limits(options, slo, roles.total),
        ),
        expected,
    )


def _limits(options: SimulateOptions, slo: Slo, workers: int) -> BalanceLimits | None:
    from weir.balance.decision import BalanceLimits

    if options.controller == "off":
        return None
    if options.workers_max is None:
        return BalanceLimits(slo=slo)
    if options.workers_max < workers:
        raise InvalidArgument("--workers-max", options.workers_max, f"at least the {workers} at the start")
    return BalanceLimits(slo=slo, scale=True, max_workers=options.workers_max)


def _traffic(console: Console, options: SimulateOptions, folder: Path) -> tuple[Iterator[Arrival], float, int]:
    from weir.simulate import setup
    from weir.simulate.traffic import Phase

    if options.trace == setup.SYNTHETIC:
        rate = (10.0 if options.rate is None else options.rate) * options.scale
        part = Phase(options.seconds, rate, options.isl, options.osl, options.spread, options.burstiness)
        return setup.synthetic(part, options.seed, options.requests)
    trace = setup.load_trace(options.trace, folder)
    for line in setup.describe(trace.bad):
        console.print(f"[yellow]bad row[/] {line}", highlight=False)
    setup.refuse(trace.bad, options.on_bad_row)
    return setup.replayed(
        trace.rows,
        rate=options.rate,
        scale=options.scale,
        requests=options.requests,
        prefix_cache=options.prefix_cache,
    )


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _show_decisions(console: Console, result: Result, most: int = 20) -> None:
    changes = result.changes
    for one in changes[:most]:
        console.print(f"{one.at_s:10.1f} s  {one.action.value:<12} {one.reason}", highlight=False)
    if len(changes) > most:
        console.print(f"and {len(changes) - most} more")


def _write_plot(path: Path, scenario: Scenario, result: Result) -> None:
    from weir.simulate.plot import svg

    path.write_text(svg(result, scenario.seconds, f"{scenario.roles} of {scenario.model.name}"))
