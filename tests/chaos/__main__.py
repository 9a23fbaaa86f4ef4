"""``python -m tests.chaos --events 1000 --seed 1``: real processes, killed and stopped at random under load."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.run import Outcome, run
from tests.e2e.faults.tiny import TinyLlama


def main() -> int:
    """The exit status: 0 when nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--events", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--logs", type=Path, help="folder for the processes' logs; a temporary one by default")
    given = parser.parse_args()
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="weir-chaos-") as temporary:
        folder = Path(temporary)
        (folder / "model").mkdir()
        tiny = TinyLlama(folder / "model")
        outcome = asyncio.run(
            run(tiny, given.logs or folder / "logs", events=given.events, seed=given.seed, clients=given.clients)
        )
    report(outcome, time.monotonic() - started_s)
    return 1 if outcome.wrong else 0


def report(outcome: Outcome, took_s: float) -> None:
    """What happened, for people."""
    requests = sum(outcome.ended.values())
    print(f"\n{sum(outcome.events.values())} events in {took_s:.0f} s: {dict(outcome.events.most_common())}")
    print(f"{requests} requests, {outcome.tokens} tokens, {outcome.retried} answers took more than one attempt")
    print(f"ended: {dict(outcome.ended.most_common())}; the slowest took {outcome.slowest_s:.1f} s")
    for error, count in outcome.errors.most_common(12):
        print(f"  {count:4d} {error}")
    print("\n".join(outcome.processes))
    print("\n".join(outcome.wrong) or "nothing wrong: every token exact, nothing left over")


if __name__ == "__main__":
    sys.exit(main())
