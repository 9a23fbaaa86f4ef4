"""``weir balance``: how many workers of each role, from a profile, lengths, a rate and an SLO."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from weir.balance.capacity import cost_per_million_tokens
from weir.balance.observe import Links, Speed
from weir.balance.profile import Profile, profile_from_json
from weir.balance.rideout import survivable_shortfall
from weir.balance.sizing import Roles, Sizing, Slo, fabric_of, size
from weir.errors import InvalidArgument, NotFound

MAX_ROWS = 12
GIGABIT = 1e9 / 8


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked. Rates in requests/s, links in bytes/s; 0: not given."""

    isl: float
    osl: float
    hit_ratio: float
    rate: float
    workers: int
    slo: Slo
    links: Links
    price_per_hour: float
    flip_s: float


def speed_of(
    profile_path: Path | None, *, prefill: float, step_ms: float, batch: int, kv_bytes: float, uncached: float
) -> Speed:
    """From a stored profile, or from the three figures. Raises NotFound and InvalidArgument."""
    if profile_path is None:
        if not (prefill > 0 and step_ms > 0):
            raise InvalidArgument("--profile", None, "give a profile, or --prefill-tokens-per-s and --step-ms")
        return Speed(prefill, step_ms / 1e3, max_batch=batch, bytes_per_token=kv_bytes, source="figures given")
    try:
        text = profile_path.read_text(encoding="utf-8")
    except OSError as error:
        raise NotFound("profile", str(profile_path)) from error
    profile: Profile = profile_from_json(text, source=str(profile_path))
    base, per_sequence, per_token = profile.step.coefficients
    rate = profile.prefill_tokens_per_s(max(uncached, 1.0))
    return Speed(rate, base, per_sequence, per_token, batch, 0, kv_bytes, f"profile of {profile.device}")


def run_balance(console: Console, speed: Speed, question: Question) -> None:
    """Print the table, and what it means."""
    uncached = question.isl * (1 - question.hit_ratio)
    sizing = size(speed, question.slo, isl=question.isl, uncached=uncached, osl=question.osl)
    for line in head_lines(speed, sizing, question):
        console.print(line, highlight=False)
    console.print(splits_table(speed, sizing, question))
    for line in verdict_lines(speed, sizing, question):
        console.print(line, highlight=False, soft_wrap=True)


def head_lines(speed: Speed, sizing: Sizing, question: Question) -> list[str]:
    """Work per request, and the batch that the TPOT allows."""
    work = sizing.work
    lines = [
        f"{speed.source}: prefill {speed.prefill_tokens_per_s:.0f} tok/s"
        f" ({sizing.prefill_tokens_per_s:.0f} with the TTFT's reserve), decode step {sizing.step_s * 1e3:.1f} ms"
        f" at batch {sizing.batch}",
        f"t_P {work.prefill_s:.4g} s, t_D {work.decode_s:.4g} s per request; phi {work.prefill_share:.3f}",
    ]
    return [*lines, *(f"not to be met: {note}" for note in sizing.notes)]


def sizes_of(sizing: Sizing, question: Question) -> list[int]:
    """Numbers of workers to show: around the one asked for, or the one that the rate needs."""
    middle = question.workers
    if not middle and question.rate > 0:
        middle = sizing.workers_for(question.rate, 1 << 14, mixed=False) or 2
    low = max(2, (middle or 2) - MAX_ROWS // 2)
    return list(range(low, low + MAX_ROWS))


def splits_table(speed: Speed, sizing: Sizing, question: Question) -> Table:
    """One row per number of workers: split, loss, rates, fabric, cost."""
    table = Table(title="splits", title_justify="left", header_style="bold")
    for heading in ("workers", "split", "loss", "R_max split", "R_max mixed", "split pays", "fabric", "cost/1M out"):
        table.add_column(heading, justify="right")
    for workers in sizes_of(sizing, question):
        split = sizing.best_split(workers)
        roles = Roles(split.prefill, split.decode)
        rate = sizing.capacity(roles)
        check = fabric_of(sizing, roles, speed, question.links)
        fabric = "-" if check is None else f"{check.utilisation:.0%}" + ("" if check.holds else f" {check.binding}!")
        cost = cost_per_million_tokens(
            workers=workers, price_per_worker_hour=question.price_per_hour, tokens_per_s=rate * question.osl
        )
        table.add_row(
            str(workers), str(roles), f"{split.loss:.1%}", f"{rate:.3g}/s",
            f"{sizing.capacity(Roles(mixed=workers)):.3g}/s", f"{sizing.split_gain(workers):+.0%}", fabric,
            f"{cost:.3g}" if question.price_per_hour else "-",
            style="bold" if workers == question.workers else "",
        )  # fmt: skip
    return table


def verdict_lines(speed: Speed, sizing: Sizing, question: Question) -> list[str]:
    """Workers for the rate, and how much shortfall a flip of this time rides out."""
    lines = []
    if question.rate > 0:
        split = sizing.workers_for(question.rate, 1 << 14, mixed=False)
        mixed = sizing.workers_for(question.rate, 1 << 14, mixed=True)
        better = "split" if split is not None and (mixed is None or split < mixed) else "mixed"
        counts = f"{split or 'no number'} split or {mixed or 'no number'} mixed workers"
        lines.append(f"{question.rate:g} requests/s need {counts}: {better}")
    if math.isfinite(question.slo.ttft_s):
        left = question.slo.ttft_s - question.slo.overhead_s - sizing.work.prefill_s
        slack_s = max(0.0, left)
        share = survivable_shortfall(ttft_slack_s=slack_s, tau_s=question.flip_s)
        lines.append(
            f"TTFT slack {slack_s:.3g} s: a flip of {question.flip_s:g} s rides out a shortfall of {share:.0%}"
        )
    return lines
