"""Child processes that do not outlive their parent."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

# Runs in the child before the program replaces it. A preexec_fn would run Python between fork and exec, which is unsafe
# beside gRPC's and torch's threads.
_LAUNCHER = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(1, int(sys.argv[2]), 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[3], sys.argv[3:])
"""


def bound_to_parent(argv: Sequence[str], number: signal.Signals) -> list[str]:
    """``argv`` (with an absolute program) such that Linux sends it ``number`` when this process is gone.

    Linux counts the starting thread as the parent: start it from one that lives as long as the child shall.
    """
    assert os.path.isabs(argv[0]), argv[0]
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(int(number)), *argv]
