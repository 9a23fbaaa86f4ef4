"""What the balance controller advises routers, heeded while it is fresh and about the workers that are there. Pure.

    decision ─► take ─► an older one, or a dry run? ─► ignored
                   └─► the advice, until it expires, until another decision comes, or until a role changes

``local_share`` of the prompt tokens shall be prefilled by decode workers: what is owed is counted in tokens, so long
and short prompts do alike. Of ``admit_per_s`` each router takes an equal part, by a bucket that holds some
seconds' worth; whoever is refused is told when as many as were refused before it could have been admitted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from weir.events.sequence import GapDetector, Order

MAX_LASTS_S = 120.0
"""No advice is heeded for longer, whatever it says."""
MAX_OWED_TOKENS = 8_192.0
"""What no decode worker had the slack for is not made up for later, beyond this."""
BURST_S, BURST = 5.0, 8.0
"""What may come at once: so many seconds' worth, and this many at least. It is lasting overload that is held back."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A decision as routers need it. ``lasts_s`` from its arrival; 0: it advises routers nothing.

    ``epochs``: sum of the role epochs of the workers that it is about. ``admit_per_s`` inf: as many as come.
    """

    publisher: str
    incarnation: int
    sequence: int
    number: int
    lasts_s: float = 0.0
    epochs: int = 0
    local_share: float = 0.0
    admit_per_s: float = math.inf
    dry_run: bool = False


class Counsel:
    """``take`` each decision; ask at each request. ``epochs``: the sum of the role epochs now."""

    def __init__(self, epochs: Callable[[], int]) -> None:
        self.ignored: Counter[str] = Counter()
        """Advice that did not count, by why: ``dry_run``, ``old``, ``other_roles``."""
        self._epochs = epochs
        self._order = GapDetector()
        self._advice: Advice | None = None
        self._until_s = -math.inf
        self._owed_tokens = 0.0
        self._credit = 0.0
        self._credit_s = -math.inf
        self._promised_s = -math.inf

    def take(self, advice: Advice, now_s: float) -> None:
        """A decision came: the advice before it is void, whatever this one says."""
        if advice.dry_run:
            self.ignored["dry_run"] += 1
            return
        order = self._order.observe(advice.publisher, advice.incarnation, advice.sequence)
        if order is Order.DUPLICATE:
            self.ignored["old"] += 1
            return
        sound = 0.0 <= advice.local_share <= 1.0 and advice.admit_per_s > 0.0 and advice.lasts_s > 0.0
        if not sound:
            self._advice = None
            return
        if self._advice is None:
            self._owed_tokens = 0.0
        self._advice = advice
        self._until_s = now_s + min(advice.lasts_s, MAX_LASTS_S)

    def current(self, now_s: float) -> Advice | None:
        """The advice that counts now."""
        advice = self._advice
        if advice is None:
            return None
        if now_s >= self._until_s:
            self._advice = None
            return None
        if advice.epochs != self._epochs():
            self.ignored["other_roles"] += 1
            self._advice = None
            return None
        return advice

    # local prefill

    def local_due(self, now_s: float) -> bool:
        """Whether the next prompt should be prefilled where it is decoded, slack permitting."""
        advice = self.current(now_s)
        return advice is not None and advice.local_share > 0.0 and self._owed_tokens > 0.0

    def placed(self, tokens: int, *, local: bool, now_s: float) -> None:
        """A prompt of ``tokens`` was placed; ``local``: a decode worker prefills it."""
        advice = self.current(now_s)
        if advice is None or not advice.local_share:
            return
        owed = self._owed_tokens + advice.local_share * tokens - (tokens if local else 0)
        self._owed_tokens = min(owed, MAX_OWED_TOKENS)

    # back-pressure

    def wait_s(self, routers: int, now_s: float) -> float:
        """0: one more request may be admitted, and is counted; else when to come again.

        ``routers``: how many there are, this one included.
        """
        advice = self.current(now_s)
        if advice is None or math.isinf(advice.admit_per_s):
            return 0.0
        rate = advice.admit_per_s / max(routers, 1)
        burst = max(BURST, BURST_S * rate)
        self._credit = min(burst, self._credit + rate * (now_s - self._credit_s))
        self._credit_s = now_s
        if self._credit >= 1.0:
            self._credit -= 1.0
            return 0.0
        free_s = now_s + (1.0 - self._credit) / rate
        self._promised_s = max(self._promised_s + 1.0 / rate, free_s)
        return self._promised_s - now_s
