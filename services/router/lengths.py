"""How long answers will be: from those of the past, never from what a client asks for alone. Pure, bounded.

Answers are kept by tenant and length of the prompt (in powers of two); a tenant without enough of them takes those
of all tenants. ``max_tokens`` only bounds the estimate: clients set it to anything.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict, deque

MAX_KEYS = 1_024
SAMPLES = 64
ENOUGH = 8
FIRST_GUESS = 128
_ALL = ""


class _History:
    """The last answers of one kind, in order of arrival and of length."""

    __slots__ = ("arrived", "ordered")

    def __init__(self) -> None:
        self.arrived: deque[int] = deque()
        self.ordered: list[int] = []

    def add(self, tokens: int) -> None:
        self.arrived.append(tokens)
        insort(self.ordered, tokens)
        if len(self.arrived) > SAMPLES:
            oldest = self.arrived.popleft()
            del self.ordered[bisect_right(self.ordered, oldest) - 1]


class OutputLengths:
    """``learn`` from every answer that ended by itself; ``expect`` for a new request, ``left`` for a running one."""

    def __init__(self) -> None:
        self._histories: OrderedDict[tuple[str, int], _History] = OrderedDict()

    def __len__(self) -> int:
        return len(self._histories)

    def learn(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        """An answer of ``output_tokens`` ended."""
        bucket = prompt_tokens.bit_length()
        histories = self._histories
        for key in dict.fromkeys(((tenant, bucket), (_ALL, bucket), (_ALL, -1))):
            history = histories.get(key)
            if history is None:
                history = histories[key] = _History()
            else:
                histories.move_to_end(key)
            history.add(output_tokens)
        while len(self._histories) > MAX_KEYS:
            self._histories.popitem(last=False)

    def expect(self, tenant: str, prompt_tokens: int, max_tokens: int, quantile: float = 0.5) -> int:
        """Tokens that the answer will have, by this quantile of the past; between 1 and ``max_tokens``."""
        return self.left(tenant, prompt_tokens, max_tokens, 0, quantile)

    def left(self, tenant: str, prompt_tokens: int, max_tokens: int, done: int, quantile: float = 0.5) -> int:
        """Tokens that an answer still needs once it has ``done``: among those of the past that were longer.

        One longer than all of them is expected to be half as long again.
        """
        history = self._history(tenant, prompt_tokens)
        if history is None:
            guess = max(FIRST_GUESS - done, done // 2)
        else:
            longer = history.ordered[bisect_right(history.ordered, done) :]
            guess = longer[int(quantile * (len(longer) - 1))] - done if longer else done // 2
        return max(1, min(guess, max_tokens - done))

    def _history(self, tenant: str, prompt_tokens: int) -> _History | None:
        bucket = prompt_tokens.bit_length()
        for key in ((tenant, bucket), (_ALL, bucket), (_ALL, -1)):
            history = self._histories.get(key)
            if history is not None and len(history.ordered) >= ENOUGH:
                return history
        return None
