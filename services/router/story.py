"""Why a request is not done yet: what went wrong, where, in which attempt; for the error that may end it. Pure."""

from __future__ import annotations

FIRST, LAST = 2, 3
"""Told in full, from the beginning and from the end; what lies between is only counted."""
MAX_CHARS = 200


class Story:
    """As a text: ``attempt 1: decode-1 was lost while transferring; attempt 2: ...``; empty while all went well."""

    __slots__ = ("_between", "_first", "_last")

    def __init__(self) -> None:
        self._first: list[tuple[int, str]] = []
        self._last: list[tuple[int, str]] = []
        self._between = 0

    def add(self, attempt: int, what: str) -> None:
        """``what`` went wrong in ``attempt``; the same thing in the same attempt is told once."""
        assert what, "a reason has words"
        told = (attempt, what if len(what) <= MAX_CHARS else what[: MAX_CHARS - 3] + "...")
        if told in (self._last or self._first)[-1:]:
            return
        if len(self._first) < FIRST:
            self._first.append(told)
            return
        self._last.append(told)
        if len(self._last) > LAST:
            del self._last[0]
            self._between += 1

    def __bool__(self) -> bool:
        return bool(self._first)

    def __str__(self) -> str:
        parts = [_part(told) for told in self._first]
        if self._between:
            parts.append(f"{self._between} more")
        return "; ".join(parts + [_part(told) for told in self._last])


def _part(told: tuple[int, str]) -> str:
    attempt, what = told
    return f"attempt {attempt}: {what}"
