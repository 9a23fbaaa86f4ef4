"""Keeping freed memory is a request to the C library, granted on glibc."""

import platform
import subprocess
import sys


def test_granted_on_glibc() -> None:
    """In a process of its own: the setting cannot be taken back."""
    code = "from weir.models.memory import keep_freed_memory; print(keep_freed_memory())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str(platform.libc_ver()[0] == "glibc")
