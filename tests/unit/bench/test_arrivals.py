from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from weir.bench.arrivals import arrival_times_s, trace_times_s
from weir.bench.plan import Prompt
from weir.errors import InvalidArgument

SEED = 5


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times_s(3, math.inf, 1.0, np.random.default_rng(SEED)) == (0.0, 0.0, 0.0)
    assert arrival_times_s(0, 2.0, 1.0, np.random.default_rng(SEED)) == ()


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_spread_of_the_gamma_distribution(burstiness: float) -> None:
    times = arrival_times_s(20_000, 8.0, burstiness, np.random.default_rng(SEED))
    assert times[-1] == pytest.approx(20_000 / 8.0), "the offered rate is exact"
    assert list(times) == sorted(times)
    gaps = np.diff([0.0, *times])
    assert gaps.mean() == pytest.approx(1 / 8.0)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05), f"seed {SEED}"
    skewness = float(((gaps - gaps.mean()) ** 3).mean() / gaps.std() ** 3)
    assert skewness == pytest.approx(2 / math.sqrt(burstiness), rel=0.15), "of a gamma distribution"


def test_the_seed_decides() -> None:
    one, same, other = (arrival_times_s(50, 3.0, 1.0, np.random.default_rng(s)) for s in (1, 1, 2))
    assert one == same
    assert one != other


@pytest.mark.parametrize(
    ("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0), (1.0, math.inf)]
)
def test_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(InvalidArgument):
        arrival_times_s(3, rate, burstiness, np.random.default_rng(SEED))


def test_a_trace_starts_at_its_first_request_and_can_be_played_faster() -> None:
    prompts = [Prompt(1, (1,), at_s=at) for at in (10.0, 11.0, 14.0)]
    assert trace_times_s(prompts, 1.0) == (0.0, 1.0, 4.0)
    assert trace_times_s(prompts, 2.0) == (0.0, 0.5, 2.0)
    assert all(b >= a for a, b in itertools.pairwise(trace_times_s(prompts, 0.5)))
    with pytest.raises(InvalidArgument, match="trace-speed"):
        trace_times_s(prompts, 0.0)
