"""A short run of ``make chaos``: random kills, stops and clients that leave, under load."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.run import run
from tests.e2e.faults.tiny import TinyLlama

SEED = 4
EVENTS = 25


@pytest.mark.filterwarnings("ignore::FutureWarning")
async def test_twenty_five_random_events(tiny: TinyLlama, tmp_path: Path) -> None:
    """Every token exact, every pool at its baseline, nothing left over. The seed is printed."""
    outcome = await run(tiny, tmp_path, events=EVENTS, seed=SEED)
    assert outcome.wrong == []
    assert sum(outcome.events.values()) == EVENTS
    assert outcome.ended["finished"] > 0
