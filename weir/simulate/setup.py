"""A scenario from what a user names; InvalidArgument and NotFound come before anything runs."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from weir.balance.profile import profile_from_json
from weir.bench.traces import MOONCAKE_BLOCK_TOKENS, BadRow, Trace, TraceRow, read_trace
from weir.errors import InvalidArgument, NotFound
from weir.services.router.policy import LeastLoaded, Policy
from weir.services.router.prefixes import PrefixMap
from weir.services.router.slo_policy import SloOptions, SloPolicy
from weir.simulate.distserve import distserve_model
from weir.simulate.models import WorkerModel, from_profile
from weir.simulate.splitwise import splitwise_model
from weir.simulate.traffic import Arrival, Phase, phases

TRACE_FILES = {
    "azure-code": "AzureLLMInferenceTrace_code.csv",
    "azure-conv": "AzureLLMInferenceTrace_conv.csv",
    "mooncake": "mooncake_conversation_trace.jsonl",
}
SYNTHETIC = "synthetic"
POLICIES = ("least-loaded", "slo")
OPT_13B_BYTES_PER_TOKEN = 2 * 40 * 40 * 128 * 2
DISTSERVE_LINK_BYTES_PER_S = 25e9
MAX_REQUESTS = 100_000_000


def data_folder(given: Path | None) -> Path:
    """Where recorded data lies: as given, else ``shared/traces`` beside this folder or one above it."""
    if given is not None:
        if not given.is_dir():
            raise NotFound("folder", str(given))
        return given
    here = Path.cwd()
    for base in (here, *here.parents):
        if (base / "shared" / "traces").is_dir():
            return base / "shared" / "traces"
    return here / "shared" / "traces"


def worker_model(name: str, folder: Path, *, kv_tokens: int = 0, bytes_per_token: float = 0.0) -> WorkerModel:
    """``distserve`` (OPT-13B on one A100), ``splitwise`` (Llama2-70B on eight H100), or a profile's file."""
    if name == "distserve":
        model = distserve_model(folder, "facebook/opt-13b", tp=1)
        return model.with_link(1e-3, DISTSERVE_LINK_BYTES_PER_S, OPT_13B_BYTES_PER_TOKEN)
    if name == "splitwise":
        return splitwise_model(folder)
    path = Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NotFound("profile", name, "distserve, splitwise, or a file that weir profile wrote") from error
    return from_profile(profile_from_json(text, source=name), kv_tokens=kv_tokens, bytes_per_token=bytes_per_token)


def policy(name: str, seed: int) -> Policy:
    """A fresh policy of this name; it draws from ``seed``. Heartbeats are not simulated, so nobody is late."""
    if name not in POLICIES:
        raise InvalidArgument("--policy", name, f"must be one of {', '.join(POLICIES)}")
    if name == "least-loaded":
        return LeastLoaded()
    return SloPolicy(PrefixMap(1), SloOptions(late_s=math.inf), random.Random(seed).random)


def load_trace(name: str, folder: Path) -> Trace:
    """The named trace, or the file of that path; bad rows are in it by line."""
    path = folder / TRACE_FILES[name] if name in TRACE_FILES else Path(name)
    if not path.is_file():
        known = f"{', '.join(TRACE_FILES)}, {SYNTHETIC}, or a file"
        raise NotFound("trace", str(path), known)
    try:
        with path.open(encoding="utf-8") as lines:
            trace = read_trace(lines)
    except (InvalidArgument, UnicodeDecodeError) as error:
        raise InvalidArgument("--trace", str(path), f"is no trace: {error}") from error
    if not trace.rows:
        raise InvalidArgument("--trace", str(path), f"holds no request ({len(trace.bad)} bad rows)")
    return trace


def describe(bad: Sequence[BadRow], most: int = 10) -> list[str]:
    """One line per bad row."""
    lines = [f"line {row.line}: {row.reason}" for row in bad[:most]]
    return lines + ([f"and {len(bad) - most} more"] if len(bad) > most else [])


def refuse(bad: Sequence[BadRow], on_bad: str) -> None:
    """``on_bad`` refuse: raise for the first bad row; skip: nothing."""
    if on_bad not in {"refuse", "skip"}:
        raise InvalidArgument("--on-bad-row", on_bad, "must be refuse or skip")
    if bad and on_bad == "refuse":
        raise InvalidArgument("--trace", f"line {bad[0].line}", f"{bad[0].reason} ({len(bad)} bad rows)")


def replayed(
    rows: Sequence[TraceRow], *, rate: float | None, scale: float, requests: int | None, prefix_cache: bool
) -> tuple[Iterator[Arrival], float, int]:
    """The trace's arrivals, over again if it is shorter than ``requests``; seconds, and how many.

    Times are stretched so that the mean rate is ``rate`` (None: as recorded), then ``scale`` times as fast.
    """
    count = len(rows) if requests is None else requests
    start_s = rows[0].at_s
    span_s = max(rows[-1].at_s - start_s, 1e-3)
    span_s += span_s / max(1, len(rows) - 1)
    speed = scale * (1.0 if rate is None else rate * span_s / len(rows))
    cached = _cached(rows) if prefix_cache else [0] * len(rows)

    def arrivals() -> Iterator[Arrival]:
        for index in range(count):
            lap, place = divmod(index, len(rows))
            row = rows[place]
            at_s = (row.at_s - start_s + lap * span_s) / speed
            yield Arrival(at_s, row.input_tokens, row.output_tokens, min(cached[place], row.input_tokens - 1))

    last = rows[(count - 1) % len(rows)]
    seconds = (last.at_s - start_s + (count - 1) // len(rows) * span_s) / speed
    return arrivals(), max(seconds, 1e-3), count


def _cached(rows: Sequence[TraceRow]) -> list[int]:
    """Tokens of each prompt that an unbounded cache shared by all workers would hold: an upper bound."""
    seen: set[int] = set()
    found = []
    for row in rows:
        hits = sum(1 for _ in itertools.takewhile(seen.__contains__, row.hash_ids))
        found.append(hits * MOONCAKE_BLOCK_TOKENS)
        seen.update(row.hash_ids)
    return found


def synthetic(part: Phase, seed: int, requests: int | None) -> tuple[Iterator[Arrival], float, int]:
    """``requests`` of endless traffic like ``part``, or ``part`` itself; seconds, and how many to expect."""
    if requests is None:
        return phases([part], seed), part.seconds, max(1, round(part.rate * part.seconds))
    if part.rate <= 0:
        raise InvalidArgument("--rate", part.rate, "must be above 0")
    endless = Phase(math.inf, part.rate, part.isl, part.osl, part.spread, part.burstiness)
    return itertools.islice(phases([endless], seed), requests), requests / part.rate, requests


def check_counts(requests: int | None, rate: float | None, scale: float) -> None:
    """Raises InvalidArgument for numbers that mean nothing."""
    if requests is not None and not 1 <= requests <= MAX_REQUESTS:
        raise InvalidArgument("--requests", requests, f"must lie in [1, {MAX_REQUESTS}]")
    for name, value in (("--rate", rate), ("--scale", scale)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InvalidArgument(name, value, "must be a finite number above 0")
