"""The step thread: the only one that touches the engine.

    event loop ── submit(command) ──► [queue] ──► commands, then one step, while there is work
        ▲                                                   │
        └────────── call_soon_threadsafe(deliver) ◄─────────┘  one hand-over per step

Without work the thread sleeps on a condition until a command comes or a deadline is due; nothing is polled.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar

from weir.clock import Clock
from weir.engine.engine import Engine
from weir.engine.output import EngineLoad, Started, StepOutput
from weir.errors import InternalError, WeirError
from weir.ids import RequestKey

_log = logging.getLogger(__name__)

MAX_COMMANDS = 1 << 16
IDLE_CHECK_S = 1.0
HUNG_S = 2.0
"""A thread that is held for dead may still be inside a step: it is waited for so long."""

T = TypeVar("T")
Command = Callable[[Engine], None]


class IdleCheck(Protocol):
    """What is verified when the engine has been idle for a while; AssertionError when it does not hold."""

    def __call__(self) -> None: ...


class StepLoop:
    """Owns the thread and, from ``start`` on, the engine.

    ``deliver(output)``, ``settled(load)`` (commands without a step after them) and ``crashed(error)`` run on the event
    loop; ``crashed`` at most once, and nothing is delivered after it. ``idle_check`` runs on the step thread, once each
    time the engine has been idle for IDLE_CHECK_S.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        *,
        deliver: Callable[[StepOutput], None],
        crashed: Callable[[WeirError], None],
        idle_check: IdleCheck | None = None,
        settled: Callable[[EngineLoad], None] = lambda load: None,
        max_commands: int = MAX_COMMANDS,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._deliver = deliver
        self._crashed = crashed
        self._idle_check = idle_check
        self._settled = settled
        self._max_commands = max_commands
        self._loop = asyncio.get_running_loop()
        self._commands: deque[Command] = deque()
        self._awake = threading.Condition()
        self._stopping = False
        self._dead: WeirError | None = None
        self._thread = threading.Thread(target=self._main, name="engine-step", daemon=True)
        self.steps = 0
        self.idle_checks = 0
        self._checked_at = -1

    @property
    def dead(self) -> WeirError | None:
        """Why the thread ended, if it crashed."""
        return self._dead

    def start(self) -> None:
        """Begin to step. Once."""
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Run ``command`` on the step thread before its next step. Dropped once the thread is gone.

        More than ``max_commands`` waiting means that the thread hangs: that is a crash.
        """
        with self._awake:
            if self._stopping or self._dead is not None:
                return
            if len(self._commands) >= self._max_commands:
                self._fail(InternalError(f"{len(self._commands)} commands wait for the engine: it does not step"))
                return
            self._commands.append(command)
            self._awake.notify()

    def interrupt(self, key: RequestKey) -> None:
        """Give up the step under way if it works mostly for ``key``, whose cancel was submitted before."""
        self._engine.interrupt(key)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """The result of ``function``, run on the step thread between two steps, after all earlier commands."""
        answer: asyncio.Future[T] = self._loop.create_future()

        def run(engine: Engine) -> None:
            try:
                result = function(engine)
            except Exception as error:
                self.post(_reject, answer, error)
            else:
                self.post(_resolve, answer, result)

        if self._stopping or self._dead is not None:
            raise self._dead or InternalError("the engine is stopped")
        self.submit(run)
        return await answer

    async def stop(self) -> None:
        """End the thread after the step under way; one that hangs is left behind after HUNG_S. Idempotent."""
        with self._awake:
            self._stopping = True
            self._awake.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, None if self._dead is None else HUNG_S)

    # -- step thread ------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while (commands := self._next_commands()) is not None:
                for command in commands:
                    command(self._engine)
                if self._engine.has_work():
                    self._step()
                elif commands:
                    # No step will tell what they changed, for example blocks that a lease gave back.
                    self.post(self._settled, self._engine.load())
        except BaseException as error:
            _log.exception("the step thread died")
            with self._awake:
                self._fail(InternalError(f"the step thread died: {type(error).__name__}: {error}"))

    def _step(self) -> None:
        output = self._engine.step()
        self.steps += 1
        for event in output.events:
            if isinstance(event, Started):
                # Before anybody learns of the blocks: from here on a read may be posted into them at any time.
                self._engine.reads_started(event.key)
        self.post(self._deliver, output)

    def _next_commands(self) -> list[Command] | None:
        """What waits; blocks while there is neither a command nor work. None: stop."""
        while True:
            checked = self._idle_check is None or self._checked_at == self.steps
            with self._awake:
                if self._stopping or self._dead is not None:
                    return None
                if self._commands:
                    commands = list(self._commands)
                    self._commands.clear()
                    return commands
                if self._engine.has_work():
                    return []
                woken = self._awake.wait(self._wait_s(checked))
            if not woken and not checked and not self._engine.has_work():
                # Outside the lock: whoever brings a command meanwhile does not wait for it.
                self._check_idle()

    def _wait_s(self, checked: bool) -> float | None:
        deadline_s = self._engine.next_deadline_s()
        waits = [] if checked else [IDLE_CHECK_S]
        if deadline_s is not None:
            waits.append(max(0.0, deadline_s - self._clock.monotonic_s()))
        return min(waits, default=None)

    def _check_idle(self) -> None:
        assert self._idle_check is not None
        self._checked_at = self.steps
        self._idle_check()
        self.idle_checks += 1

    def _fail(self, error: WeirError) -> None:
        if self._dead is None:
            self._dead = error
            self._awake.notify()
            self.post(self._crashed, error)

    def post(self, callback: Callable[..., None], *args: object) -> None:
        """Run ``callback(*args)`` on the event loop."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            _log.debug("the event loop is closed; nobody is left to tell")


def _resolve(answer: "asyncio.Future[T]", result: T) -> None:
    if not answer.done():
        answer.set_result(result)


def _reject(answer: "asyncio.Future[T]", error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
