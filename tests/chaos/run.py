"""One run: a cluster under load, random trouble, and the question what is left of it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.leftovers import Leftovers
from tests.chaos.load import Load, make_cases
from tests.chaos.trouble import Trouble
from tests.e2e.faults.tiny import NAME, TinyLlama
from tests.e2e.faults.watched import renewed
from weir.cli.cluster import Cluster, ClusterSpec, router_doors
from weir.client import AsyncClient

WORKER_FLAGS = ("--num-blocks", "256", "--max-batch-tokens", "64", "--session-grace-s", "0.5")
EVENTS_BETWEEN_LOOKS = 50
MEAN_PAUSE_S = 0.4


@dataclass(frozen=True, slots=True)
class Outcome:
    """``wrong`` is empty when all was well."""

    wrong: list[str]
    events: Counter[str]
    ended: Counter[str]
    errors: Counter[str]
    tokens: int
    retried: int
    slowest_s: float
    processes: list[str]


async def run(
    tiny: TinyLlama, folder: Path, *, events: int, seed: int, clients: int = 6, say: Callable[[str], None] = print
) -> Outcome:
    """``events`` events under the load of ``clients`` clients; quiet is asked for now and then, and at the end."""
    source = random.Random(seed)
    spec = ClusterSpec(tiny.folder, NAME, folder, prefill=2, decode=2, mixed=1, routers=2, worker_flags=WORKER_FLAGS)
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(Cluster(spec))
        doors = [await stack.enter_async_context(AsyncClient(router_doors(r)[0])) for r in cluster.routers]
        say(f"seed {seed}: {len(cluster.workers)} workers, {len(doors)} routers, {clients} clients")
        load = Load(await make_cases(tiny, doors[0], source), lambda: doors, source, clients)
        trouble = Trouble(cluster, load, source, say)
        leftovers = Leftovers(cluster)
        wrong: list[str] = []
        for done in range(0, events, EVENTS_BETWEEN_LOOKS):
            load.start()
            for _ in range(min(EVENTS_BETWEEN_LOOKS, events - done)):
                await asyncio.sleep(source.expovariate(1 / MEAN_PAUSE_S))
                await trouble.event()
                trouble.check()
            await trouble.mended()
            await load.stop()
            await renewed(cluster)
            wrong += await leftovers.look()
            say(f"{sum(trouble.done.values())} events, {dict(load.ended)}, {len(wrong) + len(load.wrong)} wrong")
            for line in [*load.wrong, *wrong]:
                say(f"  {line}")
        return Outcome(
            [*load.wrong, *wrong],
            trouble.done,
            load.ended,
            load.errors,
            load.tokens,
            load.retried,
            load.slowest_s,
            leftovers.table(),
        )
