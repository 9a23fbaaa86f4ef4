"""``weir balance``, ``weir decisions`` and ``weir bench flip``: their flags, nothing else."""

from __future__ import annotations

import asyncio
import math
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weir.errors import InvalidArgument

PIPED_WIDTH = 160
console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
Flag = typer.Option


def register(app: typer.Typer, bench: typer.Typer) -> None:
    """Add the commands."""
    example = "weir balance --profile profile.json --isl 4096 --osl 512 --rate 20 --ttft-ms 2000 --tpot-ms 50"
    app.command(name="balance", epilog=f"Example: {example}")(balance)
    app.command(name="decisions", epilog="Example: weir decisions --controller 127.0.0.1:7401")(decisions)
    bench.command(name="flip", epilog="Example: weir bench flip --flips 200")(flip)


def balance(
    isl: Annotated[float, Flag(help="Prompt tokens per request")],
    osl: Annotated[float, Flag(help="Output tokens per request")],
    profile: Annotated[Path | None, Flag(help="JSON of weir profile")] = None,
    prefill_tokens_per_s: Annotated[float, Flag(help="Instead of a profile: of one worker")] = 0.0,
    step_ms: Annotated[float, Flag(help="Instead of a profile: one decode step")] = 0.0,
    max_batch: Annotated[int, Flag(min=1, help="Most sequences of a worker")] = 64,
    rate: Annotated[float, Flag(min=0, help="Requests/s to serve")] = 0.0,
    workers: Annotated[int, Flag(min=0, help="Workers there are")] = 0,
    hit_ratio: Annotated[float, Flag(help="Share of prompt tokens found in a cache")] = 0.0,
    ttft_ms: Annotated[float, Flag(min=0, help="TTFT to meet; 0: none")] = 0.0,
    tpot_ms: Annotated[float, Flag(min=0, help="TPOT to meet; 0: none")] = 0.0,
    kv_bytes_per_token: Annotated[float, Flag(min=0, help="For the fabric check")] = 0.0,
    prefill_link_gbit: Annotated[float, Flag(min=0, help="Egress of a prefill worker")] = 0.0,
    decode_link_gbit: Annotated[float, Flag(min=0, help="Ingress of a decode worker")] = 0.0,
    price_per_hour: Annotated[float, Flag(min=0, help="Of one worker")] = 0.0,
    flip_s: Annotated[float, Flag(min=0.001, help="Time of a role flip")] = 1.0,
) -> None:
    """Size the pools: balanced split, whole-worker loss, fabric condition, cost; split against mixed."""
    from weir.balance.observe import Links
    from weir.balance.sizing import Slo
    from weir.cli.balance import GIGABIT, Question, run_balance, speed_of

    if not 0 <= hit_ratio < 1:
        raise InvalidArgument("--hit-ratio", hit_ratio, "must lie in [0, 1)")
    speed = speed_of(
        profile, prefill=prefill_tokens_per_s, step_ms=step_ms, batch=max_batch, kv_bytes=kv_bytes_per_token,
        uncached=isl * (1 - hit_ratio),
    )  # fmt: skip
    slo = Slo(ttft_s=ttft_ms / 1e3 or math.inf, tpot_s=tpot_ms / 1e3 or math.inf)
    links = Links(prefill_link_gbit * GIGABIT, decode_link_gbit * GIGABIT)
    run_balance(console, speed, Question(isl, osl, hit_ratio, rate, workers, slo, links, price_per_hour, flip_s))


def decisions(
    controller: Annotated[str, Flag(envvar="WEIR_CONTROLLER", help="host:port of the controller")] = "127.0.0.1:7401",
    limit: Annotated[int, Flag(min=0, help="Latest so many; 0: all that are kept")] = 20,
    cancel: Annotated[int | None, Flag(min=1, help="Give up this pending decision")] = None,
) -> None:
    """What the balance controller decided, and why."""
    from weir.cli.decisions import run_decisions

    asyncio.run(run_decisions(console, controller, limit, cancel))


def flip(
    model: Annotated[str, Flag("--model", help="'demo' or a Hugging Face folder")] = "demo",
    flips: Annotated[int, Flag(min=1, max=100_000, help="Role changes under load")] = 200,
    clients: Annotated[int, Flag(min=1, max=1_000, help="Clients that ask without a pause")] = 3,
    seed: Annotated[int, Flag(help="Of prompts and flips")] = 1,
    json: Annotated[Path | None, Flag(help="Write the figures here")] = None,
) -> None:
    """Change roles under load: nothing may be lost, no token may differ."""
    from weir.cli.bench_flip import run_bench_flip
    from weir.cli.paths import model_dir

    done = run_bench_flip(console, model_dir(model), flips=flips, clients=clients, seed=seed, json_path=json)
    raise typer.Exit(0 if asyncio.run(done) else 1)
