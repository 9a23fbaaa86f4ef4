"""A worker like any other, until SIGUSR1: its next engine step raises what a step never may."""

from __future__ import annotations

import signal
import sys

from weir.engine.engine import Engine
from weir.engine.output import StepOutput
from weir.services.worker.__main__ import main

CAUSE = "planted: the device fell off the bus"


def arm() -> None:
    """Let SIGUSR1 break the engine."""
    step, broken = Engine.step, False

    def break_engine(number: int, frame: object) -> None:
        nonlocal broken
        broken = True

    def fragile_step(engine: Engine) -> StepOutput:
        if broken:
            raise OSError(CAUSE)
        return step(engine)

    setattr(Engine, "step", fragile_step)  # noqa: B010 - a method of the class, for this process only
    signal.signal(signal.SIGUSR1, break_engine)


if __name__ == "__main__":
    arm()
    sys.exit(main())
