"""The processes of a cluster: production objects with simulated edges, started, stopped, killed, started again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from tests.simulation.broker import SimBus, SimLink, SimRegistry
from tests.simulation.clock import SimClock
from tests.simulation.virtual_time import Process
from weir.errors import Unavailable
from weir.rpc.server import serve

if TYPE_CHECKING:
    from tests.simulation.world import World

START_AGAIN_S = 0.5
DRAIN_S = 20.0
GRACE_S = 5.0


class Node:
    """A place in the cluster where one process at a time runs. ``live`` is what the process does, in its context."""

    def __init__(self, world: World, host: str) -> None:
        self.world = world
        self.host = host
        self.random = Random(f"{world.plan.seed}/{host}")
        self.process: Process | None = None
        self.started = 0
        self.ready = False
        self.resumed_s = 0.0
        self._stop = asyncio.Event()
        self._again_s = START_AGAIN_S

    @property
    def alive(self) -> bool:
        """Whether a process is there, paused or not."""
        return self.process is not None

    @property
    def stopping(self) -> bool:
        """Whether it was told to stop and is still there."""
        return self.process is not None and self._stop.is_set()

    def start(self) -> None:
        """Start a new process, unless one is there."""
        if self.process is not None:
            return
        self.started += 1
        process = self.process = Process(f"{self.host}#{self.started}", self.host)
        process.thread_lag_s = lambda: self.random.uniform(0.0, 0.002)
        world = self.world
        self.clock = SimClock(
            world.loop.time,
            rate=1.0 + self.random.uniform(-1e-4, 1e-4),
            offset_s=self.random.uniform(0.0, 1_000.0),
            skew_s=self.random.uniform(-1.0, 1.0) * world.plan.skew_s,
        )
        self.link = SimLink(world.broker, process)
        self._stop = asyncio.Event()
        world.history.note(process, "starts")
        process.spawn(self._main(process, self._stop))

    async def _main(self, process: Process, stop: asyncio.Event) -> None:
        later = self.world.network.later
        try:
            await self.live(process, stop)
        except Unavailable as error:
            # As a supervisor does: the process has ended, and is started again.
            self.world.history.note(process, f"cannot start: {error}")
            later(0.0, self._end, process, START_AGAIN_S)
        else:
            later(0.0, self._end, process, self._again_s)

    async def live(self, process: Process, stop: asyncio.Event) -> None:
        """Compose what runs in ``process`` and ``serve`` it until ``stop``. Unavailable: it cannot start."""
        raise NotImplementedError

    async def serve(
        self,
        stop: asyncio.Event,
        *,
        register: Callable[[Any], Sequence[str]],
        start: Callable[[], Awaitable[None]],
        drain: Callable[[], Awaitable[None]],
        close: Callable[[], Awaitable[None]],
    ) -> None:
        """The production life of a server process, around what is given."""
        process = self.process

        async def on_started(server: Any) -> None:
            await start()
            self.ready = not stop.is_set()
            self.world.history.note(process, "is ready")

        await serve(
            name=self.host,
            bind=self.host,
            register=register,
            on_started=on_started,
            drain=drain,
            close=close,
            grace_s=GRACE_S,
            drain_timeout_s=DRAIN_S,
            stop=stop,
        )

    async def leave_nats(self, bus: SimBus, registry: SimRegistry) -> None:
        """The last thing that a process does."""
        await registry.close()
        await bus.close()

    def terminate(self, again_s: float) -> None:
        """SIGTERM; started again ``again_s`` after its end. A second one ends it at once."""
        process = self.process
        if process is None:
            return
        self.world.history.note(process, "is told to stop")
        self._again_s = again_s
        if self._stop.is_set():
            self.crash(False)
            self.world.network.later(again_s, self.start)
            return
        self.ready = False
        self._stop.set()
        self.world.checks.stops.told(self)

    def _end(self, process: Process, again_s: float) -> None:
        """``process`` has ended by itself."""
        if self.process is process:
            self.world.history.note(process, "has ended")
            self.world.checks.stops.ended(self)
            self._gone(silent=False)
            self.world.network.later(again_s, self.start)

    def crash(self, silent: bool) -> None:
        """The process is gone, as by SIGKILL, or, ``silent``, as by a power cut."""
        if self.process is not None:
            self.world.history.note(self.process, "is killed" + (", silently" if silent else ""))
            self._gone(silent)

    def _gone(self, silent: bool) -> None:
        process, self.process = self.process, None
        assert process is not None
        self.ready = False
        self.world.loop.kill(process)
        self.link.close()
        self.world.network.crashed(process, silent=silent)

    def pause(self) -> None:
        """SIGSTOP."""
        if self.process is not None and not self.process.paused:
            self.world.history.note(self.process, "is stopped")
            self.process.paused = True
            self.world.network.paused(self.process)

    def resume(self) -> None:
        """SIGCONT."""
        if self.process is not None and self.process.paused:
            self.world.history.note(self.process, "goes on")
            self.resumed_s = self.world.loop.time()
            self.world.loop.resume(self.process)
