"""Five hundred schedules of the production cluster; a failure prints its seed and what happened.

``python -m tests.simulation --seed N`` runs one of them again.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.__main__ import report
from tests.simulation.kinds import KINDS
from tests.simulation.schedules import make_plan
from tests.simulation.world import run_plan

SCHEDULES = 500
RANGE = 25
WHICH: list[tuple[Any, ...]] = [(2017,), (5,), (5, "balance"), (5, "drains")]


@pytest.mark.parametrize("first", range(1, SCHEDULES + 1, RANGE))
def test_every_check_holds(first: int, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(first, first + RANGE):
        outcome = run_plan(make_plan(seed))
        if outcome.failures:
            report(outcome, history=True)
        assert outcome.failures == (), f"python -m tests.simulation --seed {seed}"
    with capsys.disabled():
        print(f"[seeds {first}-{first + RANGE - 1}]", end="")


def test_all_kinds_are_drawn() -> None:
    assert {make_plan(seed).kind for seed in range(1, SCHEDULES + 1)} == set(KINDS)


@pytest.mark.parametrize(
    ("seed", "kind"), [(3, None), (17, None), (2017, None), (4, "drains"), (4, "steps"), (4, "balance"), (4, "weights")]
)
def test_a_seed_is_one_history(seed: int, kind: str | None) -> None:
    first, second = run_plan(make_plan(seed, kind)), run_plan(make_plan(seed, kind))
    assert first.history == second.history
    assert (first.digest, first.turns, first.virtual_s) == (second.digest, second.turns, second.virtual_s)


def test_a_seed_is_one_history_in_another_process() -> None:
    """Nothing depends on the order of hashed sets, on addresses or on what ran before."""
    code = (
        "from tests.simulation.schedules import make_plan; from tests.simulation.world import run_plan;"
        f"print([run_plan(make_plan(*which)).digest for which in {WHICH}])"
    )
    here = str([run_plan(make_plan(*which)).digest for which in WHICH])
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
            env={"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1", "PATH": ""},
        )
        assert done.stdout.strip() == here
