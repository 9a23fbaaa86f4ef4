"""``python -m tests.simulation --seed N --minutes M [--schedules K]``: run schedules until one fails."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.simulation.kinds import KINDS
from tests.simulation.schedules import make_plan
from tests.simulation.world import Outcome, run_plan


def main() -> int:
    """Exit status: 0 when every check held in every schedule, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="first seed")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after this time; 0 is no limit")
    parser.add_argument("--schedules", type=int, default=0, help="how many; 0 with --minutes 0 runs one")
    parser.add_argument("--kind", choices=sorted(KINDS), help="what all schedules are about")
    parser.add_argument("--history", action="store_true", help="print what happened also when nothing is wrong")
    parser.add_argument("--keep-going", action="store_true", help="go on after a failure")
    given = parser.parse_args()
    last = given.schedules or (1 << 60 if given.minutes else 1)
    begun_s, failed, done, totals = time.perf_counter(), 0, 0, Totals()
    for seed in range(given.seed, given.seed + last):
        if given.minutes and time.perf_counter() - begun_s > given.minutes * 60:
            break
        outcome = run_plan(make_plan(seed, given.kind))
        done += 1
        totals.add(outcome)
        if outcome.failures:
            failed += 1
            report(outcome, history=not given.keep_going)
            if not given.keep_going:
                return 1
        elif given.history:
            print("\n".join([*outcome.plan.describe(), *outcome.history]))
        if sys.stderr.isatty() or done % 100 == 0:
            rate = done / (time.perf_counter() - begun_s)
            print(f"\r{done} schedules, {failed} failed, {rate:.1f} a second", end="", file=sys.stderr)
        if done % 1_000 == 0:
            print(f"\n{done} schedules: {totals}", flush=True)
    took_s, cpu_s = time.perf_counter() - begun_s, time.process_time()
    print(f"\n{done} schedules from seed {given.seed}, {failed} failed, {took_s:.1f} s ({cpu_s:.1f} s of CPU)")
    print(totals)
    return int(failed > 0)


class Totals:
    """What all schedules together were."""

    def __init__(self) -> None:
        self._virtual_s = 0.0
        self._faults: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def add(self, outcome: Outcome) -> None:
        """One more."""
        self._virtual_s += outcome.virtual_s
        self._faults.update(fault.what for fault in outcome.plan.faults)
        self._counts.update(outcome.counts, requests=len(outcome.plan.requests))

    def __str__(self) -> str:
        faults = ", ".join(f"{what} {count}" for what, count in sorted(self._faults.items()))
        counts = ", ".join(f"{what} {count}" for what, count in sorted(self._counts.items()))
        return f"{self._virtual_s / 3_600:.2f} hours; faults {self._faults.total()}: {faults}; {counts}"


def report(outcome: Outcome, *, history: bool) -> None:
    """Print a failed schedule so that it can be read and run again."""
    print("\n".join(outcome.plan.describe()))
    if history:
        print("\n".join(outcome.history))
    print(f"FAILED seed {outcome.plan.seed} ({outcome.plan.kind}), history {outcome.digest}")
    for failure in outcome.failures:
        print(f"  {failure}")


if __name__ == "__main__":
    sys.exit(main())
