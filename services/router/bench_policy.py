"""``python -m weir.services.router.bench_policy``: CPU time of one placement decision over the size of the fleet."""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence

from weir.balance.profile import Fit, Profile
from weir.ids import WorkerKey
from weir.lifecycle import Role
from weir.services.router.fleet import Fleet, Load, WorkerInfo
from weir.services.router.policy import Demand
from weir.services.router.prefixes import PrefixMap, PromptKeys
from weir.services.router.slo_policy import SloOptions, SloPolicy

MODEL = "bench"
BLOCK = 16
PROMPT_TOKENS = 1_024
SHARED_TOKENS = 512
PROFILE = Profile(
    "", "", 1, Fit((2e-3, 1e-4, 1e-9), 1, 0, 9), Fit((8e-3, 2e-4, 1e-8), 1, 0, 9), Fit((1e-3, 1e-10), 1, 0, 9)
)


def make_fleet(workers: int, rng: random.Random) -> Fleet:
    """Half prefill, half decode, all with some load."""
    fleet = Fleet(lambda worker: rng.random())
    for number in range(workers):
        key = WorkerKey(f"w{number:05d}", 1)
        role = Role.PREFILL if number % 2 else Role.DECODE
        info = WorkerInfo(
            key, role, 1, "", False, MODEL, b"same", BLOCK, 10_000, 1 << 20,
            kv_bytes_per_token=23_040.0, profile=PROFILE,
        )  # fmt: skip
        view = fleet.put(info)
        view.connected = True
        running = rng.randrange(64) if role is Role.DECODE else 0
        pending = rng.randrange(8_000) if role is Role.PREFILL else 0
        used = 40 * running
        view.take_report(Load(1, running, 0, pending, 10_000 - used, 10_000, used_blocks=used), 0.0)
    return fleet


def decide_us(workers: int, decisions: int, rng: random.Random, reports: int) -> tuple[list[float], list[float]]:
    """CPU microseconds of each decision, and of each report; ``reports`` come between two decisions.

    Between them work is noted and caches fill, too.
    """
    fleet, prefixes = make_fleet(workers, rng), PrefixMap(1 << 20)
    policy = SloPolicy(prefixes, SloOptions(late_s=math.inf), rng.random)
    views = list(fleet)
    shared = [rng.randrange(32_000) for _ in range(SHARED_TOKENS)]
    deciding, reporting = [], []
    now_s, sequence = 0.1, 1
    for number in range(decisions):
        prompt = shared + [rng.randrange(32_000) for _ in range(PROMPT_TOKENS - SHARED_TOKENS)]
        keys = PromptKeys(prompt, b"")
        hashes = keys.hashes(b"same", BLOCK)
        demand = Demand(PROMPT_TOKENS, 256, frozenset(), 128, 2_000.0, 100.0, now_s, keys)
        start_s = time.thread_time()
        choice = policy.choose(fleet.able(MODEL, demand), demand, now_s)
        deciding.append((time.thread_time() - start_s) * 1e6)
        if choice is not None:  # a small fleet fills up: to wait is a decision too
            source = choice.prefill or choice.decode
            assert source is not None
            source.note(f"r{number}", now_s, PROMPT_TOKENS - choice.cached_tokens, 0, 0)
            fleet.used(source)
            prefixes.stored(source.key, hashes)
        for _ in range(reports):
            sequence += 1
            now_s += 1e-4
            reported = rng.choice(views)
            pending = 0 if reported.info.role is Role.DECODE else rng.randrange(8_000)
            load = Load(sequence, reported.load.running, 0, pending, 9_000, 10_000, used_blocks=500)
            start_s = time.thread_time()
            reported.take_report(load, now_s)
            reporting.append((time.thread_time() - start_s) * 1e6)
    return deciding, reporting


def least(runs: Sequence[Sequence[float]]) -> list[float]:
    """Of runs that do the same, the least that each step took: what others on the machine cost is left out."""
    return sorted(map(min, zip(*runs, strict=True)))


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m weir.services.router.bench_policy", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8, 32, 100, 1_000])
    parser.add_argument("--decisions", type=int, default=2_000)
    parser.add_argument("--reports", type=int, default=4, help="load reports between two decisions")
    parser.add_argument("--repeats", type=int, default=3, help="the same run so many times; the least of each counts")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    names = ("median us", "mean us", "p99 us", "report mean", "report p99")
    print(f"{'workers':>8} " + " ".join(f"{name:>11}" for name in names) + f"   (seed {given.seed})")
    for workers in given.workers:
        runs = [
            decide_us(workers, given.decisions, random.Random(given.seed), given.reports) for _ in range(given.repeats)
        ]
        taken = least([deciding for deciding, _ in runs])
        told = least([reporting for _, reporting in runs])
        figures = (statistics.median(taken), statistics.fmean(taken), p99(taken), statistics.fmean(told), p99(told))
        print(f"{workers:>8} " + " ".join(f"{figure:>11.1f}" for figure in figures))
    return 0


def p99(ascending: Sequence[float]) -> float:
    """Nearest rank from below."""
    return ascending[int(0.99 * (len(ascending) - 1))]


if __name__ == "__main__":
    sys.exit(main())
