"""Numbers of messages per publisher: lost and repeated ones are noticed. Pure."""

from __future__ import annotations

import enum
from collections import OrderedDict

MAX_PUBLISHERS = 4_096


class Order(enum.Enum):
    """What a number says. GAP: messages were lost before this one, which is to be used all the same."""

    OK = "ok"
    GAP = "gap"
    DUPLICATE = "duplicate"


class SequenceCounter:
    """Numbers the messages of this process; 1 is the first."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        """The number of the next message."""
        self._last += 1
        return self._last


class GapDetector:
    """Follows each publisher's numbers. The first message seen of an incarnation sets the start and is OK.

    Older numbers and older incarnations' messages are DUPLICATE. At most MAX_PUBLISHERS are remembered; the
    least recently heard one is forgotten first.
    """

    def __init__(self, max_publishers: int = MAX_PUBLISHERS) -> None:
        assert max_publishers > 0, max_publishers
        self._max_publishers = max_publishers
        self._last: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._retired: OrderedDict[tuple[str, int], None] = OrderedDict()
        self.lost = 0

    def observe(self, publisher: str, incarnation: int, sequence: int) -> Order:
        """Note one message; ``lost`` grows by the width of a gap."""
        if (publisher, incarnation) in self._retired:
            return Order.DUPLICATE
        known = self._last.get(publisher)
        if known is None or known[0] != incarnation:
            if known is not None:
                self._retire(publisher, known[0])
            self._remember(publisher, incarnation, sequence)
            return Order.OK
        if sequence <= known[1]:
            return Order.DUPLICATE
        self.lost += sequence - known[1] - 1
        self._remember(publisher, incarnation, sequence)
        return Order.OK if sequence == known[1] + 1 else Order.GAP

    def forget(self, publisher: str) -> None:
        """Drop what is known of ``publisher`` (it left the registry)."""
        self._last.pop(publisher, None)

    def _remember(self, publisher: str, incarnation: int, sequence: int) -> None:
        self._last[publisher] = (incarnation, sequence)
        self._last.move_to_end(publisher)
        if len(self._last) > self._max_publishers:
            self._last.popitem(last=False)

    def _retire(self, publisher: str, incarnation: int) -> None:
        self._retired[publisher, incarnation] = None
        if len(self._retired) > self._max_publishers:
            self._retired.popitem(last=False)
