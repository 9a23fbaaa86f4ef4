"""How the C library keeps memory between steps."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT_BYTES = 1 << 30
_LARGEST_KEPT_BYTES = 256 << 20


def keep_freed_memory() -> bool:
    """Have the process keep up to 1 GiB of freed memory for its next step; False where that is not glibc's.

    A prefill step frees and takes hundreds of MB of activations. By default glibc gives each large piece back to
    the kernel, which zeroes it again page by page: 8 to 11 % of a 1,024-token prefill. Call it after the model is
    loaded, so that what loading frees is still given back.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    trim = mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    return bool(trim and mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES))
