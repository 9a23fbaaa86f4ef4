"""Whether anything is left: blocks, leases, tasks, files, memory, connections and consumers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import nats
import psutil

from tests.e2e.quiet import assert_quiet
from weir.cli.cluster import Cluster, router_doors
from weir.cli.process import ChildProcess
from weir.cli.workers import worker_state
from weir.client import AsyncClient

WARM_UP_MB = 128.0
"""A process may grow by this from its first quiet moment, which may be right after its start, to its second."""
RSS_GROWTH_MB = 32.0
"""And by this from the most it had at its second or third quiet moment to its last. Memory in use goes up and down by
some 10 MB (see ``tests.chaos.soak``): what counts is what never comes back."""
WARM_LOOKS = 3
FILES_GROWTH = 24
"""File descriptors: each known peer costs some, and connections to the dead are closed late."""
TASKS_GROWTH = 8


@dataclass(frozen=True, slots=True)
class Census:
    """One process at one quiet moment."""

    rss_mb: float
    files: int
    tasks: int


@dataclass(slots=True)
class Leftovers:
    """Compares quiet moments of the same process lives."""

    cluster: Cluster
    first: dict[int, tuple[str, Census]] = field(default_factory=dict)
    warm: dict[int, list[float]] = field(default_factory=dict)
    """Memory in MB at the first WARM_LOOKS quiet moments."""
    last: dict[int, tuple[str, Census]] = field(default_factory=dict)

    async def look(self) -> list[str]:
        """At a quiet moment: what is wrong now. Integrity is checked in every worker."""
        await assert_quiet(self.cluster)
        for address in self.cluster.worker_addresses.values():
            await worker_state(address, check_integrity=True)
        now = {worker.pid: (worker.name, await self._worker(worker)) for worker in self.cluster.workers}
        now |= {router.pid: (router.name, await self._router(router)) for router in self.cluster.routers}
        for pid, found in now.items():
            self.first.setdefault(pid, found)
            looks = self.warm.setdefault(pid, [])
            if len(looks) < WARM_LOOKS:
                looks.append(found[1].rss_mb)
        self.last = now
        return [*self._grown(), *await self._nats()]

    async def _worker(self, worker: ChildProcess) -> Census:
        state = await worker_state(worker.ready[-1])
        return Census(state.rss_bytes / 1e6, state.open_files, state.tasks)

    async def _router(self, router: ChildProcess) -> Census:
        async with AsyncClient(router_doors(router)[0]) as client:
            tasks = (await client.state()).tasks
        process = psutil.Process(router.pid)
        return Census(process.memory_info().rss / 1e6, process.num_fds(), tasks)

    def _grown(self) -> list[str]:
        wrong = []
        for pid, (name, now) in self.last.items():
            before = self.first[pid][1]
            most_mb = max(before.rss_mb + WARM_UP_MB if len(self.warm[pid]) < WARM_LOOKS else 0.0, self._warm_mb(pid))
            if now.rss_mb > most_mb:
                wrong.append(f"{name} grew from {before.rss_mb:.0f} to {now.rss_mb:.0f} MB, at most {most_mb:.0f}")
            if now.files > before.files + FILES_GROWTH:
                wrong.append(f"{name} had {before.files} files open, has {now.files}")
            if now.tasks > before.tasks + TASKS_GROWTH:
                wrong.append(f"{name} had {before.tasks} tasks, has {now.tasks}")
        return wrong

    def _warm_mb(self, pid: int) -> float:
        return max(self.warm[pid][1:], default=0.0) + RSS_GROWTH_MB

    async def _nats(self) -> list[str]:
        """Consumers of the streams: one for each process that watches the registry."""
        watchers = len(self.cluster.workers) + len(self.cluster.routers) + (self.cluster.controller is not None)
        client = await nats.connect(self.cluster.nats_url)
        try:
            async with asyncio.timeout(30):
                while True:
                    streams = await client.jetstream().streams_info()
                    counts = {stream.config.name: stream.state.consumer_count for stream in streams}
                    if sum(counts.values()) <= watchers:
                        return []
                    await asyncio.sleep(0.5)
        except TimeoutError:
            return [f"NATS consumers: {counts}, for {watchers} processes that watch"]
        finally:
            await client.close()

    def table(self) -> list[str]:
        """A line for each process that runs."""
        return [
            f"{name:<12} {' '.join(f'{mb:.0f}' for mb in self.warm[pid])} -> {now.rss_mb:.0f} MB, "
            f"{self.first[pid][1].files:3d} -> {now.files:3d} files, "
            f"{self.first[pid][1].tasks:2d} -> {now.tasks:2d} tasks"
            for pid, (name, now) in self.last.items()
        ]
