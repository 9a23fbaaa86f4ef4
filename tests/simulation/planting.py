"""How a bug is planted, and hunted for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.simulation.plan import Plan
from tests.simulation.schedules import make_plan
from tests.simulation.world import run_plan

Planting = contextlib.AbstractContextManager[Any]


@dataclass(frozen=True, slots=True)
class Mutant:
    """``plant`` breaks the code while it is entered. ``kinds`` of schedules are tried in turn."""

    name: str
    what: str
    plant: Callable[[], Planting]
    kinds: Sequence[str]
    tweak: Callable[[Plan], None] = lambda plan: None


@dataclass(frozen=True, slots=True)
class Caught:
    """``schedules`` it took, or None when it was not caught; ``checker`` and ``how`` are of the first failure."""

    mutant: Mutant
    schedules: int | None
    checker: str = ""
    how: str = ""


def hunt(mutant: Mutant, most: int, first_seed: int = 1) -> Caught:
    """Run schedules until one fails."""
    for number in range(most):
        plan = make_plan(first_seed + number, mutant.kinds[number % len(mutant.kinds)])
        mutant.tweak(plan)
        with mutant.plant():
            outcome = run_plan(plan)
        if outcome.failures:
            checker, _, how = outcome.failures[0].partition(": ")
            return Caught(mutant, number + 1, checker, how)
    return Caught(mutant, None)
