"""Giving up a step under way whose work is no longer wanted, so that a cancel does not wait for a long chunk.

The step thread calls ``begin``, ``check`` (between layers) and ``end``; any thread may call ``request``. A request is
followed by the command that ends the sequence, which calls ``forget``.
"""

from collections.abc import Mapping

from weir.ids import RequestKey

MIN_SHARE = 0.5
"""Only a step that works for the unwanted by at least half is given up: the others' part is computed again."""


class StepInterrupted(Exception):
    """The step under way is given up; nothing of it counts."""


class StepInterrupt:
    """Which keys are unwanted, and whether the step under way is worth finishing."""

    def __init__(self) -> None:
        self._unwanted: set[RequestKey] = set()
        self._shares: Mapping[RequestKey, float] = {}
        self._given_up = False

    def begin(self, tokens: Mapping[RequestKey, int]) -> None:
        """A step starts that computes so many tokens for each key."""
        total = sum(tokens.values())
        self._given_up = False
        self._shares = {key: count / total for key, count in tokens.items()}
        self._weigh()

    def end(self) -> None:
        """The step is over, one way or the other."""
        self._shares = {}
        self._given_up = False

    def request(self, key: RequestKey) -> None:
        """``key`` is about to be cancelled. From any thread; harmless for a key that is not in the step."""
        self._unwanted.add(key)
        self._weigh()

    def forget(self, key: RequestKey) -> None:
        """``key`` has ended."""
        self._unwanted.discard(key)

    def check(self) -> None:
        """Raise StepInterrupted when the step under way is to be given up."""
        if self._given_up:
            raise StepInterrupted

    def _weigh(self) -> None:
        shares = self._shares
        if shares and sum(share for key, share in shares.items() if key in self._unwanted) >= MIN_SHARE:
            self._given_up = True
