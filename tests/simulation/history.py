"""What happened in a schedule: who, when, what. Its digest tells whether two runs were the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable


class History:
    """Lines in order of time. Only the last ``kept`` are shown; all count for the digest."""

    def __init__(self, true_time: Callable[[], float], kept: int = 4_000) -> None:
        self._true_time = true_time
        self._kept = kept
        self._digest = hashlib.blake2b(digest_size=8)
        self.lines: list[str] = []
        self.count = 0

    def note(self, who: object, what: str) -> None:
        """Add a line."""
        line = f"{self._true_time():10.6f}  {who!s:<10} {what}"
        self._digest.update(line.encode())
        self._digest.update(b"\n")
        self.count += 1
        self.lines.append(line)
        if len(self.lines) > 2 * self._kept:
            del self.lines[: self._kept]

    def digest(self) -> str:
        """Equal for equal runs."""
        return self._digest.hexdigest()

    def about(self, *words: str) -> list[str]:
        """The lines that hold any of ``words``."""
        return [line for line in self.lines if any(word in line for word in words)]
