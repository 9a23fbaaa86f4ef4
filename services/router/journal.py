"""What happened to a request and when, for its trace. Pure.

The book writes a mark at each turn that the stage stamps do not show; who draws the trace reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_MARKS = 96
"""Marks of one request; further ones are left out, so that a request that is tried for hours stays small."""

ROUTED = "route"
BOUND = "bind"
READ = "kv_read"
READ_VOID = "kv_void"
RETRY = "retry"
REBIND = "rebind"
REFUSED = "refused"


@dataclass(slots=True)
class Mark:
    """One turn: when (router's monotonic clock, seconds), what, in which attempt, and what belongs to it.

    Not modified once written.
    """

    at_s: float
    what: str
    attempt: int
    facts: Mapping[str, Any]


class Journal:
    """The marks of one request, in order."""

    __slots__ = ("marks",)

    def __init__(self) -> None:
        self.marks: list[Mark] = []

    def note(self, at_s: float, what: str, attempt: int, **facts: Any) -> None:
        """Write a mark, if there is room."""
        if len(self.marks) < MAX_MARKS:
            self.marks.append(Mark(at_s, what, attempt, facts))
