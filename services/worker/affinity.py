"""Keeping a process to the cores it is given; before anything that starts threads is imported."""

import os

from weir.errors import InvalidArgument


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
