"""CPU time of another process."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil


def process_cpu_s(pid: int) -> float:
    """Seconds of CPU that process ``pid`` has used, by all its threads that live.

    Linux counts nanoseconds for each thread; elsewhere it is psutil's figure, in steps of 10 ms. Raises
    psutil.NoSuchProcess when it has ended.
    """
    threads = Path(f"/proc/{pid}/task")
    used_ns = 0
    with contextlib.suppress(OSError):
        for thread in threads.iterdir():
            with contextlib.suppress(FileNotFoundError):  # one that ended just now
                used_ns += int((thread / "schedstat").read_text().split()[0])
    if used_ns:
        return used_ns / 1e9
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
