"""The random stream of a request: a pure function of (seed, position, token), the same on every worker."""

import numpy as np
import numpy.typing as npt

_WEIR = 0x77656972  # in the key beside the seed: other uses of Philox with the same seed stay independent
_UNIT = np.float32(2.0**-32)
_LARGEST = np.float32(1.0 - 2.0**-24)  # the largest float32 below 1


def random_bits(seed: int, position: int, vocab: int) -> npt.NDArray[np.uint32]:
    """[vocab] uniform 32-bit numbers; ``position`` counts the generated tokens from 0.

    Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): key (seed, constant),
    counter starting at (0, 0, position, 0), each 64-bit output giving two numbers, the low half first.
    Number i belongs to token i and depends neither on ``vocab`` nor on what else is drawn.
    """
    assert seed >= 0, seed
    assert position >= 0, position
    counter = np.array([0, 0, position, 0], dtype=np.uint64)
    stream = np.random.Philox(counter=counter, key=np.array([seed, _WEIR], dtype=np.uint64))
    outputs = stream.random_raw((vocab + 1) // 2)
    return outputs.astype("<u8", copy=False).view("<u4")[:vocab]


def exponentials(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    """-log((bits + 1/2) / 2**32), elementwise: exponential variates of mean 1, from 2**-33 to 22.9, float32.

    Small ones decide who wins a race, and there u lies so close to 1 that float32 has lost most of its bits.
    But log(u) / (u - 1) is smooth at 1, so it may be taken at the rounded u, and 1 - u comes from the
    complement of the bits, to full precision.
    """
    u = bits.astype(np.float32)
    u += np.float32(0.5)
    u *= _UNIT
    np.minimum(u, _LARGEST, out=u)
    rest = np.invert(bits).astype(np.float32)  # 1 - u
    rest += np.float32(0.5)
    rest *= _UNIT
    rest *= np.log(u)
    u -= np.float32(1.0)
    rest /= u
    return rest
