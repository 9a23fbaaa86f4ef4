"""The random stream is a fixed function: these values may never change, or moved requests would."""

import numpy as np
import pytest

from weir.engine.randomness import mix64, uniform
from weir.engine.sampling import MAX_SEED


def test_mix64_is_splitmix64() -> None:
    """First outputs of the published generator for seed 1234567."""
    gamma = 0x9E3779B97F4A7C15
    outputs = [mix64(1234567 + (i + 1) * gamma) for i in range(5)]
    assert outputs == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_values_are_pinned() -> None:
    assert [uniform(7, position) for position in range(3)] == [
        0.7215081806049702,
        0.6497043364684557,
        0.5493743249193239,
    ]


@pytest.mark.parametrize("seed", [0, 1, 12345, MAX_SEED])
def test_a_stream_is_uniform_and_in_range(seed: int) -> None:
    draws = np.array([uniform(seed, position) for position in range(20_000)])
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    counts, _ = np.histogram(draws, bins=20, range=(0, 1))
    chi_square = float(((counts - 1000) ** 2 / 1000).sum())
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03


def test_streams_of_neighbouring_seeds_do_not_overlap() -> None:
    streams = [{uniform(seed, position) for position in range(2000)} for seed in range(6)]
    assert len(set.union(*streams)) == 12_000
