"""The random stream of a request: a pure function of (seed, position), the same on every worker."""

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators"


def mix64(value: int) -> int:
    """splitmix64's finalizer: a bijection of 64-bit numbers whose output bits all depend on all input bits."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a multiple of 2**-53. ``position`` counts the generated tokens from 0.

    The seed is mixed first, so that the streams of neighbouring seeds do not overlap.
    """
    assert position >= 0, position
    state = mix64(seed + _GAMMA) + (position + 1) * _GAMMA
    return (mix64(state) >> 11) * 2.0**-53
