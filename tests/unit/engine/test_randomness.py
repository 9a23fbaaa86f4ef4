"""The random stream is a fixed function: these values may never change, or moved requests would."""

import numpy as np
import pytest

from weir.engine.randomness import exponentials, random_bits
from weir.engine.sampling import MAX_SEED

MASK = (1 << 64) - 1


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Philox4x64-10 as published, one block."""
    a, b, c, d = counter
    for turn in range(10):
        left, right = a * 0xD2E7470EE14C6C93, c * 0xCA5A826395121157
        k0, k1 = key[0] + turn * 0x9E3779B97F4A7C15, key[1] + turn * 0xBB67AE8584CAA73B
        a, b, c, d = (right >> 64) ^ b ^ (k0 & MASK), right & MASK, (left >> 64) ^ d ^ (k1 & MASK), left & MASK
    return [a, b, c, d]


def test_the_reference_is_philox4x64_10() -> None:
    """The generator's published known answer for zeros."""
    assert philox((0, 0, 0, 0), (0, 0)) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (7, 1), (MAX_SEED, 123_456)])
def test_bits_are_those_of_philox(seed: int, position: int) -> None:
    want = []
    for block in range(1, 4):
        for output in philox((block, 0, position, 0), (seed, 0x77656972)):
            want += [output & 0xFFFFFFFF, output >> 32]
    assert random_bits(seed, position, 24).tolist() == want


def test_values_are_pinned() -> None:
    assert random_bits(7, 0, 5).tolist() == [1594568057, 2692786647, 1633883454, 2164688230, 3816148790]
    assert random_bits(7, 1, 5).tolist() == [3533182488, 1646706747, 929636511, 1007205475, 2379559443]
    assert random_bits(MAX_SEED, 123_456, 4).tolist() == [465203029, 1528956970, 99191276, 718925158]
    assert random_bits(7, 0, 49_152)[-3:].tolist() == [921440722, 2977955543, 445725222]


@pytest.mark.parametrize("vocab", [1, 2, 7, 1000])
def test_a_token_keeps_its_number_whatever_the_vocabulary(vocab: int) -> None:
    bits = random_bits(3, 5, vocab)
    assert bits.shape == (vocab,)
    assert bits.tolist() == random_bits(3, 5, 1001)[:vocab].tolist()


@pytest.mark.parametrize("seed", [0, 1, 12345, MAX_SEED])
def test_bits_are_uniform_and_not_correlated(seed: int) -> None:
    rows = np.stack([random_bits(seed, position, 1000) for position in range(20)]).astype(np.float64)
    counts, _ = np.histogram(rows, bins=20, range=(0, 2.0**32))
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 43.8  # 19 degrees of freedom, p = 0.001
    for first, second in ((rows[:-1], rows[1:]), (rows[:, :-1], rows[:, 1:])):  # positions, tokens
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.03


def test_streams_of_neighbouring_seeds_and_positions_do_not_overlap() -> None:
    rows = [random_bits(seed, position, 64).view(np.uint64) for seed in range(20) for position in range(100)]
    assert np.unique(np.concatenate(rows)).size == 20 * 100 * 32


def test_exponentials_are_precise_at_both_ends() -> None:
    ends = [0, 1, 127, 128, 129, 2**31 - 1, 2**31, 2**32 - 300, 2**32 - 129, 2**32 - 128, 2**32 - 2, 2**32 - 1]
    bits = np.concatenate([np.array(ends, dtype=np.uint32), random_bits(1, 2, 50_000)])
    want = -np.log((bits.astype(np.float64) + 0.5) / 2.0**32)
    got = exponentials(bits)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=6e-7)
