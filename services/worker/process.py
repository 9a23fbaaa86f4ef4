"""What has to be settled for a worker's process before torch is loaded: its cores, and the size of kernel caches."""

import os

from weir.errors import InvalidArgument

KERNEL_CACHE_ENTRIES = 128
"""Compiled matrix products kept, one per shape. By default 1,024 are, at some 0.7 MB each: prompts of many
lengths make a process grow by hundreds of MB."""


def keep_to_cores(cpus: tuple[int, ...]) -> None:
    """Bind this thread, and those that it will start, to ``cpus`` (none: leave it as it is).

    Raises InvalidArgument when the machine does not have them.
    """
    if not cpus:
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        allowed = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        raise InvalidArgument("worker.cpus", cpus, f"this process may use {allowed} ({error.strerror})") from None


def bound_kernel_caches() -> None:
    """Bound oneDNN's and torch's caches of compiled kernels; they read their size when torch is loaded."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.putenv(name, str(KERNEL_CACHE_ENTRIES))
