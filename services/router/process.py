"""The process that a router has to itself: its event loop, its garbage collector."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Coroutine
from typing import Any

_log = logging.getLogger(__name__)

GC_THRESHOLDS = (10_000, 20, 20)
"""Python's own, 700 allocations, cost a sixth of a request. A request leaves some hundred objects and no cycles; what
cycles there are wait for at most 10,000 new objects, some megabytes."""


def run_process(main: Coroutine[Any, Any, None]) -> None:
    """Run ``main`` on uvloop's event loop, or on asyncio's with a warning where uvloop is not installed."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(main)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        _log.warning("uvloop is not installed: asyncio's own event loop costs the router more for each request")
        return None
    return uvloop.new_event_loop


def settle_memory() -> None:
    """Call once all that lives as long as the process is there: it is not looked at for garbage again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
