"""The production step loop without its thread: each step takes virtual time, then happens at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tests.simulation.model import PLANTED
from weir.engine.engine import Engine
from weir.errors import InternalError, WeirError
from weir.services.worker.step_loop import Command, StepLoop


class SimStepLoop(StepLoop):
    """``step_s(engine)`` is what the next step costs; ``after_step(engine)`` looks at the result."""

    step_s: Callable[[Engine], float]
    after_step: Callable[[Engine], None]
    hangs_s: float = 0.0
    """The next step takes so much longer."""
    dies: str = ""
    """The thread ends ``before`` or ``after`` its next step, by a fault that nobody expects."""

    def __init__(self, engine: Engine, *args: Any, **kwargs: Any) -> None:
        super().__init__(engine, *args, **kwargs)
        self._news = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._driver = asyncio.create_task(self._drive(), name="engine-step")

    def submit(self, command: Command) -> None:
        super().submit(command)
        self._news.set()

    async def stop(self) -> None:
        self._stopping = True
        self._news.set()
        if self._driver is not None:
            await self._driver

    async def _drive(self) -> None:
        try:
            checked = self._idle_check is None
            while not self._stopping and self._dead is None:
                self._news.clear()
                commands = list(self._commands)
                self._commands.clear()
                for command in commands:
                    command(self._engine)
                if self._engine.has_work():
                    await asyncio.sleep(self._next_step_s())
                    if not self._stopping:
                        self._planted_death("before")
                        self._step()
                        self.after_step(self._engine)
                        self._planted_death("after")
                    checked = self._idle_check is None
                elif commands:
                    self.post(self._settled, self._engine.load())
                else:
                    checked = await self._rest(checked)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                raise
            self._fault(error)

    async def _rest(self, checked: bool) -> bool:
        """Until there is something to do; whether the idle engine has been checked."""
        try:
            async with asyncio.timeout(self._wait_s(checked)):
                await self._news.wait()
        except TimeoutError:
            if not checked and not self._engine.has_work():
                self._check_idle()
                return True
        return checked

    def _next_step_s(self) -> float:
        cls = type(self)
        hangs_s, cls.hangs_s = self.hangs_s, 0.0
        return self.step_s(self._engine) + hangs_s

    def _planted_death(self, moment: str) -> None:
        if self.dies == moment:
            type(self).dies = ""
            raise RuntimeError(f"{PLANTED} death of the step thread")

    def _fault(self, error: BaseException) -> None:
        if PLANTED not in str(error):
            self._report(error)
        with self._awake:
            self._fail(InternalError(f"the step thread died: {type(error).__name__}: {error}"))

    def _report(self, error: BaseException) -> None:
        fault = {"message": "the step thread died", "exception": error}
        asyncio.get_running_loop().call_exception_handler(fault)

    def _fail(self, error: WeirError) -> None:
        super()._fail(error)
        self._news.set()
