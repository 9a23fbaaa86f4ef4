"""The router's process: which event loop, and a heap that is settled once."""

from __future__ import annotations

import asyncio
import gc
import sys

import pytest
import uvloop

from weir.services.router.process import GC_THRESHOLDS, run_process, settle_memory


def loops_used() -> list[asyncio.AbstractEventLoop]:
    seen: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        seen.append(asyncio.get_running_loop())

    run_process(main())
    return seen


def test_it_runs_on_uvloop() -> None:
    assert [type(loop) for loop in loops_used()] == [uvloop.Loop]


def test_without_uvloop_it_runs_all_the_same_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    (loop,) = loops_used()
    assert isinstance(loop, asyncio.SelectorEventLoop)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["uvloop is not installed"]


def test_what_is_there_when_it_is_ready_is_not_looked_at_again() -> None:
    before = gc.get_threshold()
    try:
        settle_memory()
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold() == GC_THRESHOLDS
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
