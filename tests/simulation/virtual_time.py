"""An event loop whose time is a counter: waiting costs nothing, and every run of a seed is the same run.

Processes of the simulated cluster share the loop. What runs is attributed to a process by a context variable
that tasks, timers and callbacks inherit, so that a process can be killed (nothing of it runs any more, not even
a ``finally``) or paused (everything of it waits) in the middle of anything, as by SIGKILL and SIGSTOP.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

TICK_S = 1e-6
"""Every turn of the loop takes this long: code that polls makes time pass, as it does on a machine."""


class Stuck(AssertionError):
    """Nothing can happen any more (a deadlock), or too much does (a live-lock)."""


class Process:
    """A process of the cluster. Its callbacks run while it is ``alive`` and not ``paused``."""

    def __init__(self, name: str, host: str) -> None:
        self.name = name
        self.host = host
        """Where it runs; the network is cut between hosts, and a restarted process is on the same one."""
        self.alive = True
        self.paused = False
        self.backlog: list[asyncio.Handle] = []
        self.context = contextvars.Context()
        self.context.run(_PROCESS.set, self)
        self.thread_lag_s: Callable[[], float] = lambda: 0.0
        """How long a call from another thread takes to reach the loop; first in, first out."""
        self.last_call_s = 0.0
        self.open_calls = 0
        """Calls of clients that are no part of the network."""

    def __repr__(self) -> str:
        return self.name

    def call(self, callback: Callable[..., object], *args: object) -> None:
        """Run ``callback`` as part of the process, soon."""
        asyncio.get_running_loop().call_soon(callback, *args, context=self.context)

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str = "") -> asyncio.Task[Any]:
        """Run ``coroutine`` as part of the process."""
        loop = asyncio.get_running_loop()
        return loop.create_task(coroutine, name=name or None, context=self.context.copy())


_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


def current_process() -> Process:
    """The process whose code runs now."""
    process = _PROCESS.get()
    assert process is not None, "this is no code of a process"
    return process


class _Handle(asyncio.Handle):
    def _run(self) -> None:
        if _may_run(self):
            super()._run()


class _TimerHandle(asyncio.TimerHandle):
    def _run(self) -> None:
        if _may_run(self):
            super()._run()


def _may_run(handle: asyncio.Handle) -> bool:
    process: Process | None = handle._context.get(_PROCESS)  # type: ignore[attr-defined]
    if process is None:
        return True
    if process.paused:
        process.backlog.append(handle)
        return False
    return process.alive


class _Task(asyncio.Task[Any]):
    """Sets of tasks are walked in the same order in every run."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class _Leap(selectors.BaseSelector):
    """A selector that moves the clock instead of waiting."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        self._loop.leap(timeout)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> Any:
        raise NotImplementedError("there is no I/O under virtual time")

    def unregister(self, fileobj: Any) -> Any:
        raise NotImplementedError

    def get_map(self) -> Any:
        return {}

    def close(self) -> None:
        pass


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module. ``faults`` collects what was raised in callbacks; ``kept`` all tasks, dead ones too."""

    def __init__(self, *, max_turns: int = 3_000_000, max_time_s: float = 3_600.0) -> None:
        super().__init__()
        self._now_s = 0.0
        self._selector = _Leap(self)
        self._clock_resolution = 1e-9
        self._max_turns = max_turns
        self._max_time_s = max_time_s
        self._timers_made = 0
        self.turns = 0
        self.faults: list[str] = []
        self.kept: list[_Task] = []
        self._over = False
        self.set_exception_handler(self._note_fault)
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        return self._now_s

    def leap(self, timeout_s: float | None) -> None:
        """Move the clock to the next timer."""
        self.turns += 1
        if timeout_s is None:
            raise Stuck("deadlock: nothing is ready and no timer is pending")
        self._now_s += max(timeout_s, TICK_S)
        if self.turns > self._max_turns or self._now_s > self._max_time_s:
            raise Stuck(f"no end after {self.turns} turns and {self._now_s:.1f} s")

    def kill(self, process: Process) -> None:
        """Nothing of ``process`` runs any more."""
        process.alive = False
        process.paused = False
        process.backlog.clear()

    def resume(self, process: Process) -> None:
        """Let ``process`` run again; what waited runs first, in order."""
        process.paused = False
        backlog, process.backlog = process.backlog, []
        self._ready.extend(backlog)

    def dispose(self) -> None:
        """Let go of everything without running any of it further."""
        self._over = True
        self._ready: deque[asyncio.Handle] = deque()
        for task in self.kept:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            if not task.done():
                with contextlib.suppress(BaseException):
                    task.get_coro().close()
        self.kept.clear()
        self.close()

    # -- what asyncio calls -----------------------------------------------------------------------------

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        if not self._over:
            self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        # Timers of one moment run in the order in which they were made: a heap alone would not promise it.
        self._timers_made += 1
        timer = _TimerHandle(when + 1e-12 * (self._timers_made % 1000), callback, args, self, context)
        if not self._over:
            heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
            timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """From a step thread: it arrives a little later, in order."""
        process = _PROCESS.get()
        if process is None or self._over:
            return self.call_soon(callback, *args, context=context)
        process.last_call_s = max(process.last_call_s + TICK_S, self._now_s + process.thread_lag_s())
        return self.call_at(process.last_call_s, callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """There are no other threads: it is done at once."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        pass

    def _make_task(self, loop: asyncio.AbstractEventLoop, coro: Any, context: Any = None) -> _Task:
        task = _Task.__new__(_Task)
        task.number = len(self.kept) + 1
        task.__init__(coro, loop=loop, context=context)  # type: ignore[misc]
        self.kept.append(task)
        return task

    def _note_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if self._over:
            return
        error = context.get("exception")
        self.faults.append(f"{context.get('message')}: {type(error).__name__}: {error}")
