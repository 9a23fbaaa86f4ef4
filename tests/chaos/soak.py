"""``python -m tests.chaos.soak --minutes 10``: one pair under load, clients that leave in between; does a process grow?

Nothing is killed, so that lives are long: what ``python -m tests.chaos`` cannot see.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.chaos.load import Load, make_cases
from tests.chaos.run import WORKER_FLAGS
from tests.e2e.faults.tiny import NAME, TinyLlama
from tests.e2e.quiet import assert_quiet
from weir.bench.growth import Growth, Reading, growth
from weir.cli.cluster import Cluster, ClusterSpec
from weir.client import AsyncClient

MOST_GROWTH_MB = 16.0
"""By the straight line through the second half of the readings. Single ones go up and down by some 10 MB."""
READ_EVERY_S = 10.0
MEAN_PAUSE_S = 0.3


async def soak(
    tiny: TinyLlama, folder: Path, *, minutes: float, seed: int, clients: int, say: Callable[[str], None] = print
) -> tuple[dict[str, list[Reading]], Load]:
    """Readings of every process, one each READ_EVERY_S while nothing runs; and the load that was."""
    source = random.Random(seed)
    readings: dict[str, list[Reading]] = {}
    async with (
        Cluster(ClusterSpec(tiny.folder, NAME, folder, worker_flags=WORKER_FLAGS)) as cluster,
        AsyncClient(cluster.router_address) as client,
    ):
        load = Load(await make_cases(tiny, client, source), lambda: [client], source, clients)
        end_s = time.monotonic() + minutes * 60
        while time.monotonic() < end_s:
            load.start()
            stop_s = time.monotonic() + READ_EVERY_S
            while time.monotonic() < stop_s:
                await asyncio.sleep(source.expovariate(1 / MEAN_PAUSE_S))
                await load.abort_one()
            await load.stop()
            await assert_quiet(cluster)
            requests = sum(load.ended.values())
            for child in cluster.processes():
                process = psutil.Process(child.pid)
                now = Reading(requests, process.memory_info().rss, process.num_fds())
                readings.setdefault(child.name, []).append(now)
            say(f"{requests} requests " + " ".join(f"{n} {r[-1].rss_bytes / 1e6:.1f}" for n, r in readings.items()))
    return readings, load


def line(name: str, found: Growth) -> str:
    """One process, for people."""
    return (
        f"{name:<12} {found.rss_first / 1e6:6.1f} -> {found.rss_last / 1e6:6.1f} MB, "
        f"{found.bytes_per_request:8.0f} bytes a request, {found.files_first} -> {found.files_last} files"
    )


def main() -> int:
    """The exit status: 0 when nothing grew and every token was right."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=4)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weir-soak-") as temporary:
        folder = Path(temporary)
        (folder / "model").mkdir()
        tiny = TinyLlama(folder / "model")
        readings, load = asyncio.run(
            soak(tiny, folder / "logs", minutes=given.minutes, seed=given.seed, clients=given.clients)
        )
    grown = {name: growth(series) for name, series in readings.items()}
    print("\n".join(line(name, found) for name, found in grown.items()))
    print(f"{sum(load.ended.values())} requests: {dict(load.ended)}")
    half = sum(load.ended.values()) / 2
    wrong = load.wrong + [
        f"{name} grew by {found.bytes_per_request * half / 1e6:.1f} MB over the second half"
        for name, found in grown.items()
        if found.bytes_per_request * half > MOST_GROWTH_MB * 1e6
    ]
    print("\n".join(wrong) or "nothing grew, every token was right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
