"""The simulation has teeth: each planted bug is caught."""

from __future__ import annotations

import pytest

from tests.simulation.mutants import MUTANTS
from tests.simulation.planting import Mutant, hunt

MOST = 60


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_caught(mutant: Mutant) -> None:
    caught = hunt(mutant, MOST)
    assert caught.schedules is not None, f"{mutant.what}: not caught in {MOST} schedules of {mutant.kinds}"
