"""What is done to the cluster: each event picks a victim that is not in trouble already."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable

from tests.chaos.load import Load
from weir.cli.cluster import Cluster
from weir.cli.process import ChildProcess
from weir.errors import Unavailable

MOST_WORKERS_DOWN = 2
BIND_TRIES, BIND_PAUSE_S = 12, 5.0
STILL_S = (0.05, 0.3, 1.0, 3.0, 7.0)
"""How long something stands still: shorter and longer than what makes others give it up."""


class Trouble:
    """``event`` does one thing and returns; what takes time (to start again, to wake up) goes on behind it."""

    def __init__(self, cluster: Cluster, load: Load, source: random.Random, say: Callable[[str], None]) -> None:
        self.done: Counter[str] = Counter()
        self._cluster = cluster
        self._load = load
        self._source = source
        self._say = say
        self._in_trouble: set[str] = set()
        self._mending: set[asyncio.Task[None]] = set()
        self._starting = 0
        self._kinds: list[tuple[float, str, Callable[[], bool]]] = [
            (0.50, "client leaves", self._client_leaves),
            (0.16, "worker killed", self._kill_worker),
            (0.18, "worker stopped", self._stop_worker),
            (0.04, "router killed", self._kill_router),
            (0.04, "router stopped", self._stop_router),
            (0.04, "NATS killed", self._kill_nats),
            (0.04, "NATS stopped", self._stop_nats),
        ]

    async def event(self) -> None:
        """One event of a random kind, as soon as there is a victim for it."""
        weights, names, acts = zip(*self._kinds, strict=True)
        picked = self._source.choices(range(len(acts)), weights)[0]
        while not acts[picked]():
            self.check()
            await asyncio.sleep(0.05)
        self.done[names[picked]] += 1

    async def mended(self) -> None:
        """Return when nothing is in trouble any more; raises what went wrong with mending."""
        await asyncio.gather(*self._mending)

    def check(self) -> None:
        """Raise what went wrong with mending so far."""
        for task in self._mending:
            if task.done():
                task.result()

    def _client_leaves(self) -> bool:
        self._mend("client", self._load.abort_one())
        return True

    def _kill_worker(self) -> bool:
        return self._worker("killed", lambda worker: self._restart(worker, self._cluster.restart_worker))

    def _stop_worker(self) -> bool:
        return self._worker("stopped", self._still)

    def _worker(self, what: str, act: Callable[[ChildProcess], Awaitable[None]]) -> bool:
        free = [worker for worker in self._cluster.workers if worker.name not in self._in_trouble]
        if len(self._cluster.workers) - len(free) >= MOST_WORKERS_DOWN:
            return False
        worker = self._source.choice(free)
        self._say(f"{worker.name} {what}")
        self._mend(worker.name, act(worker))
        return True

    def _kill_router(self) -> bool:
        return self._router("killed", lambda router: self._restart(router, self._cluster.restart_router))

    def _stop_router(self) -> bool:
        return self._router("stopped", self._still)

    def _router(self, what: str, act: Callable[[ChildProcess], Awaitable[None]]) -> bool:
        if any(router.name in self._in_trouble for router in self._cluster.routers):
            return False
        router = self._source.choice(self._cluster.routers)
        self._say(f"{router.name} {what}")
        self._mend(router.name, act(router))
        return True

    def _kill_nats(self) -> bool:
        return self._nats("killed", self._restart_nats)

    def _stop_nats(self) -> bool:
        return self._nats("stopped", self._still_nats)

    def _nats(self, what: str, act: Callable[[], Awaitable[None]]) -> bool:
        if "NATS" in self._in_trouble or self._starting:
            return False  # nothing starts without it
        self._say(f"NATS {what}")
        self._mend("NATS", act())
        return True

    def _mend(self, name: str, work: Awaitable[None]) -> None:
        async def mend() -> None:
            self._in_trouble.add(name)
            try:
                await work
            finally:
                self._in_trouble.discard(name)

        self._in_trouble.add(name)
        task = asyncio.create_task(mend())
        self._mending.add(task)
        task.add_done_callback(lambda task: self._mending.discard(task) if task.exception() is None else None)

    async def _restart(self, process: ChildProcess, again: Callable[[ChildProcess], Awaitable[ChildProcess]]) -> None:
        process.kill()
        await process.wait()
        await asyncio.sleep(self._source.choice((0.0, 1.0, 4.0)))
        while "NATS" in self._in_trouble:  # noqa: ASYNC110 - it is about to be back
            await asyncio.sleep(0.1)
        self._starting += 1
        try:
            await self._started(process, again)
        finally:
            self._starting -= 1

    async def _started(self, process: ChildProcess, again: Callable[[ChildProcess], Awaitable[ChildProcess]]) -> None:
        """At its old address; while another program's connection has that port, later, as a supervisor would."""
        fleet = self._cluster.workers if process in self._cluster.workers else self._cluster.routers
        place = fleet.index(process)
        for _ in range(BIND_TRIES):
            try:
                await again(process)
                return
            except Unavailable as error:
                if "cannot bind" not in str(error):
                    raise
                self._say(f"{process.name} cannot have its port")
                fleet[place] = process
                await asyncio.sleep(BIND_PAUSE_S)
        raise AssertionError(f"{process.name} did not get its port in {BIND_TRIES} tries")

    async def _still(self, process: ChildProcess) -> None:
        process.kill(signal.SIGSTOP)
        await asyncio.sleep(self._source.choice(STILL_S))
        process.kill(signal.SIGCONT)

    async def _restart_nats(self) -> None:
        nats = self._cluster.nats
        assert nats is not None
        await nats.kill()
        await asyncio.sleep(self._source.choice(STILL_S))
        await nats.start()

    async def _still_nats(self) -> None:
        nats = self._cluster.nats
        assert nats is not None
        assert nats.pid is not None
        os.kill(nats.pid, signal.SIGSTOP)
        await asyncio.sleep(self._source.choice(STILL_S))
        os.kill(nats.pid, signal.SIGCONT)
