"""Stop strings over text that comes in pieces: pure, and blind to how the text was cut."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Cuts a text at the first occurrence of any stop string.

    First means: the earliest start; of those that start together, the shortest (it is complete first).
    Text that may still turn out to begin a stop string is held back, and nothing else. So a finished match is
    reported late in one case: a longer stop string that began before it could still be completed.
    """

    __slots__ = ("_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """``include``: the stop string itself is emitted too. No stop string may be empty."""
        assert all(stops), "a stop string must not be empty"
        self._stops = tuple(sorted(set(stops), key=len))
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text; returns what may be shown, and the stop string once one ends the text."""
        assert self.matched is None, "text after the stop"
        if not self._stops:
            return text, None
        text = self._held + text
        start, stop = self._first_match(text)
        candidate = self._first_candidate(text, before=start)
        if stop is not None and candidate >= start:
            return self._finish(text, start, stop)
        self._held = text[candidate:]
        return text[:candidate], None

    def flush(self) -> tuple[str, str | None]:
        """End of the text: returns what was held back, cut at a stop string if a match was still open."""
        if self.matched is not None:
            return "", self.matched
        text, self._held = self._held, ""
        start, stop = self._first_match(text)
        return (text, None) if stop is None else self._finish(text, start, stop)

    def _finish(self, text: str, start: int, stop: str) -> tuple[str, str]:
        self._held = ""
        self.matched = stop
        return text[: start + len(stop) * self._include], stop

    def _first_match(self, text: str) -> tuple[int, str | None]:
        """Start and stop string of the first whole match; (len(text), None) if there is none."""
        start, found = len(text), None
        for stop in self._stops:  # shortest first, so that a tie keeps the shorter one
            position = text.find(stop, 0, start + len(stop) - 1)
            if position >= 0:
                start, found = position, stop
        return start, found

    def _first_candidate(self, text: str, before: int) -> int:
        """Start of the longest end of ``text`` that may begin a stop string; ``before`` if not less."""
        first = before
        for stop in self._stops:
            position = text.find(stop[0], max(0, len(text) - len(stop) + 1), first)
            while position >= 0:
                if stop.startswith(text[position:]):
                    first = position
                    break
                position = text.find(stop[0], position + 1, first)
        return first
