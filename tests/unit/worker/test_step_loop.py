"""The step thread: woken by commands and deadlines, never by polling; a crash is told once."""

import asyncio
import threading
from typing import Any, cast

import pytest

from weir.clock import SystemClock
from weir.engine.output import EngineLoad, StepOutput
from weir.errors import InternalError, WeirError
from weir.kvcache.blocks import BlockState
from weir.services.worker import step_loop
from weir.services.worker.step_loop import StepLoop

LOAD = EngineLoad(0, 0, 0, 0, dict.fromkeys(BlockState, 0))


class FakeEngine:
    """Has ``work`` steps to do; ``asked`` counts how often the loop looked."""

    def __init__(self) -> None:
        self.work = 0
        self.asked = 0
        self.deadline_s: float | None = None
        self.broken = False
        self.threads: set[int] = set()

    def has_work(self) -> bool:
        self.asked += 1
        if self.deadline_s is not None and self.deadline_s <= SystemClock().monotonic_s():
            self.deadline_s = None
            self.work += 1
        return self.work > 0

    def next_deadline_s(self) -> float | None:
        return self.deadline_s

    def load(self) -> EngineLoad:
        return LOAD

    def step(self) -> StepOutput:
        self.threads.add(threading.get_ident())
        if self.broken:
            raise RuntimeError("planted")
        self.work -= 1
        return StepOutput((), LOAD)


class Rig:
    def __init__(self, **options: Any) -> None:
        self.engine = FakeEngine()
        self.delivered: asyncio.Queue[StepOutput] = asyncio.Queue()
        self.crashes: asyncio.Queue[WeirError] = asyncio.Queue()
        self.loop = StepLoop(
            self.engine,  # type: ignore[arg-type]
            SystemClock(),
            deliver=self.delivered.put_nowait,
            crashed=self.crashes.put_nowait,
            **options,
        )

    def give_work(self, steps: int) -> None:
        def add(engine: Any) -> None:
            engine.work += steps

        self.loop.submit(add)


async def test_a_command_wakes_it_and_each_step_is_delivered_once() -> None:
    rig = Rig()
    rig.loop.start()
    rig.give_work(3)
    for _ in range(3):
        await asyncio.wait_for(rig.delivered.get(), 5)
    assert await rig.loop.call(lambda engine: rig.loop.steps) == 3
    await rig.loop.stop()
    assert rig.delivered.empty()
    assert rig.engine.threads == {rig.loop._thread.ident}


async def test_it_sleeps_while_there_is_nothing_to_do() -> None:
    rig = Rig()
    rig.loop.start()
    await rig.loop.call(lambda engine: None)
    await asyncio.sleep(0.1)
    asked = rig.engine.asked
    await asyncio.sleep(0.1)
    assert rig.engine.asked == asked
    await rig.loop.stop()


async def test_a_deadline_wakes_it() -> None:
    rig = Rig()
    rig.loop.start()

    def set_deadline(engine: Any) -> None:
        engine.deadline_s = SystemClock().monotonic_s() + 0.05

    rig.loop.submit(set_deadline)
    await asyncio.wait_for(rig.delivered.get(), 5)
    await rig.loop.stop()


async def test_a_call_returns_what_it_returns_and_raises_what_it_raises() -> None:
    rig = Rig()
    rig.loop.start()
    assert await rig.loop.call(id) == id(rig.engine)

    def fail(engine: object) -> None:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        await rig.loop.call(fail)
    await rig.loop.stop()
    with pytest.raises(InternalError, match="stopped"):
        await rig.loop.call(lambda engine: None)


async def test_a_crash_is_told_once_and_nothing_is_run_after_it() -> None:
    rig = Rig()
    rig.engine.broken = True
    rig.loop.start()
    rig.give_work(1)
    error = await asyncio.wait_for(rig.crashes.get(), 5)
    assert str(error) == "the step thread died: RuntimeError: planted"
    assert rig.loop.dead is error
    rig.give_work(1)
    with pytest.raises(InternalError, match="planted"):
        await rig.loop.call(lambda engine: None)
    await rig.loop.stop()
    assert rig.crashes.empty()
    assert rig.delivered.empty()


async def test_a_thread_that_hangs_is_a_crash() -> None:
    rig = Rig(max_commands=3)
    released = threading.Event()
    entered = threading.Event()

    def hang(engine: object) -> None:
        entered.set()
        released.wait()

    rig.loop.start()
    rig.loop.submit(hang)
    await asyncio.to_thread(entered.wait)
    for _ in range(4):
        rig.give_work(1)
    error = await asyncio.wait_for(rig.crashes.get(), 5)
    assert str(error) == "3 commands wait for the engine: it does not step"
    released.set()
    await rig.loop.stop()


async def test_integrity_is_checked_once_per_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_loop, "IDLE_CHECK_S", 0.02)
    checks: asyncio.Queue[int] = asyncio.Queue()
    here = asyncio.get_running_loop()
    rig = Rig(idle_check=lambda: here.call_soon_threadsafe(checks.put_nowait, 1))
    rig.loop.start()
    await asyncio.wait_for(checks.get(), 5)
    await asyncio.sleep(0.1)
    assert checks.empty()
    rig.give_work(1)
    await asyncio.wait_for(checks.get(), 5)
    assert rig.loop.idle_checks >= 1
    await rig.loop.stop()


async def test_a_failed_idle_check_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_loop, "IDLE_CHECK_S", 0.01)

    def check() -> None:
        raise AssertionError("block 3 is lost")

    rig = Rig(idle_check=check)
    rig.loop.start()
    error = await asyncio.wait_for(rig.crashes.get(), 5)
    assert "block 3 is lost" in str(error)
    await rig.loop.stop()


async def test_commands_without_a_step_tell_the_load() -> None:
    told: asyncio.Queue[EngineLoad] = asyncio.Queue()
    loop = StepLoop(
        cast(Any, FakeEngine()),
        SystemClock(),
        deliver=lambda output: None,
        crashed=lambda error: None,
        settled=told.put_nowait,
    )
    loop.start()
    loop.submit(lambda engine: None)
    async with asyncio.timeout(10):
        assert await told.get() is LOAD
    await loop.stop()
