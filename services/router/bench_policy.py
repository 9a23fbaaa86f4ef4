"""``python -m weir.services.router.bench_policy``: CPU time of one placement decision over the size of the fleet."""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time

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


def decide_us(workers: int, decisions: int, rng: random.Random) -> list[float]:
    """CPU microseconds of each decision; between them work is noted, caches fill and reports come."""
    fleet, prefixes = make_fleet(workers, rng), PrefixMap(1 << 20)
    policy = SloPolicy(prefixes, SloOptions(late_s=math.inf), rng.random)
    views = list(fleet)
    shared = [rng.randrange(32_000) for _ in range(SHARED_TOKENS)]
    taken = []
    for number in range(decisions):
        prompt = shared + [rng.randrange(32_000) for _ in range(PROMPT_TOKENS - SHARED_TOKENS)]
        keys = PromptKeys(prompt, b"")
        hashes = keys.hashes(b"same", BLOCK)
        demand = Demand(PROMPT_TOKENS, 256, frozenset(), 128, 2_000.0, 100.0, 0.0, keys)
        start_s = time.thread_time()
        choice = policy.choose(fleet.serving(MODEL), demand, 0.1)
        taken.append((time.thread_time() - start_s) * 1e6)
        assert choice is not None
        source = choice.prefill or choice.decode
        assert source is not None
        source.note(f"r{number}", 0.1, PROMPT_TOKENS - choice.cached_tokens, 0, 0)
        fleet.used(source)
        prefixes.stored(source.key, hashes)
        reported = rng.choice(views)
        reported.take_report(Load(number + 2, reported.load.running, 0, 100, 9_000, 10_000, used_blocks=500), 0.2)
    return taken


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m weir.services.router.bench_policy", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8, 32, 100, 1_000])
    parser.add_argument("--decisions", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    print(f"{'workers':>8} {'median us':>10} {'mean us':>10} {'p99 us':>10}   (seed {given.seed})")
    for workers in given.workers:
        taken = sorted(decide_us(workers, given.decisions, random.Random(given.seed)))
        p99 = taken[int(0.99 * (len(taken) - 1))]
        print(f"{workers:>8} {statistics.median(taken):>10.1f} {statistics.fmean(taken):>10.1f} {p99:>10.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
