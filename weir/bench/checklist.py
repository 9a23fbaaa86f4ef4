"""What speaks for a split and what against it, from two runs of the same traffic on the same cores. Pure.

The questions are those of ``docs/balance.md`` ("Split or mixed?"), answered by what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weir.bench.goodput import Slo

PROMISED = "Is a TPOT promised?"
UNEVEN = 3.0
"""ITL p99 over its median from which decoding counts as interrupted; a batch that grows makes less than 2."""


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """The KV's way, in 10^6 bytes a second: the limit, one TCP stream, one KV read, and how fast prefill makes KV.

    ``transport`` is what NIXL took. Zero (and "") where nothing was read: mixed workers read no KV.
    """

    limit_mb_s: float
    stream_mb_s: float
    read_mb_s: float = 0.0
    made_mb_s: float = 0.0
    transport: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """An answer; ``speaks_for`` is split, mixed or neither."""

    question: str
    answer: str
    speaks_for: str


def checklist(
    slo: Slo, split: Mapping[str, Any], mixed: Mapping[str, Any], link: LinkFigures | None = None
) -> list[Finding]:
    """Answers from two summaries of ``weir.bench.metrics.summarise`` (with p90).

    ``link`` is the split's, if it was limited.
    """
    found = [_promised(slo), _interrupted(mixed)]
    found.append(_kept("Do the prompts get their first token in time?", "TTFT", slo.ttft_ms, split, mixed))
    found.append(_kept("Do the tokens come in time?", "TPOT", slo.tpot_ms, split, mixed))
    if link is not None:
        found.append(_carried(link))
    if split["failed"] != mixed["failed"]:
        better = "split" if split["failed"] < mixed["failed"] else "mixed"
        found.append(Finding("Do requests fail?", f"{split['failed']} failed split, {mixed['failed']} mixed", better))
    return found


def reasons(outcome: str, findings: Sequence[Finding]) -> str:
    """The measurements that speak for the layout that did better, as a sentence; empty without a winner."""
    winner = {"win": "split", "lose": "mixed"}.get(outcome, "")
    answers = [finding.answer for finding in findings if finding.speaks_for == winner and finding.question != PROMISED]
    return f" Measured: {'; '.join(answers)}." if answers else ""


def _promised(slo: Slo) -> Finding:
    if math.isinf(slo.tpot_ms):
        return Finding(PROMISED, "no: even tokens are worth nothing here", "mixed")
    return Finding(PROMISED, f"{slo.tpot_ms:g} ms", "split")


def _interrupted(mixed: Mapping[str, Any]) -> Finding:
    p50, p99 = mixed["median_itl_ms"], mixed["p99_itl_ms"]
    ratio = p99 / p50 if p50 > 0 else 0.0
    answer = f"ITL p99 is {ratio:.1f} × its median ({p99:,.0f} and {p50:,.0f} ms)"
    return Finding("Do prompts interrupt the tokens of mixed workers?", answer, "split" if ratio >= UNEVEN else "mixed")


def _kept(question: str, name: str, bound_ms: float, split: Mapping[str, Any], mixed: Mapping[str, Any]) -> Finding:
    """By the 90th percentile."""
    ours, theirs = (each[f"p90_{name.lower()}_ms"] for each in (split, mixed))
    answer = f"{name} p90 {ours:,.0f} ms split, {theirs:,.0f} ms mixed"
    if math.isinf(bound_ms):
        return Finding(question, f"{answer} (nothing is promised)", "neither")
    kept = [value <= bound_ms for value in (ours, theirs)]
    speaks_for = {(True, False): "split", (False, True): "mixed"}.get((kept[0], kept[1]), "neither")
    return Finding(question, f"{answer} (promised {bound_ms:,.0f})", speaks_for)


def _carried(link: LinkFigures) -> Finding:
    answer = f"KV is made at {link.made_mb_s:,.1f} MB/s and read at {link.read_mb_s:,.1f} ({link.transport})"
    return Finding("Does the link carry the KV?", answer, "mixed" if link.read_mb_s < link.made_mb_s else "neither")
