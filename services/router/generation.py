"""One request as its consumer sees it: text is made and stop strings are found when tokens arrive, not when
the consumer gets round to reading, so a slow client neither delays the end nor makes memory grow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from weir.engine.sampling import SamplingParams
from weir.errors import WeirError
from weir.models.detokenize import IncrementalDetokenizer
from weir.models.stops import StopMatcher
from weir.services.router.answer import Accepted, Delta, Event, Final
from weir.services.router.traces import RequestTrace


class Generation:
    """An async iterator: Accepted, then Deltas, then Final. Raises the WeirError that ended the request.

    What arrives between two reads becomes one Delta, so what waits is bounded by max_tokens. Leaving early
    (``leave``, ``aclose``, or the iterator's consumer being cancelled and closing it) cancels the request.
    One consumer only.
    """

    __slots__ = (
        "_accepted_given",
        "_detokenizer",
        "_end",
        "_first_index",
        "_leave",
        "_logprobs",
        "_matcher",
        "_text",
        "_tokens",
        "_waiter",
        "accepted",
        "last_token_s",
        "on_news",
        "over",
        "tokens_taken",
        "trace",
    )

    def __init__(
        self,
        accepted: Accepted,
        sampling: SamplingParams,
        detokenizer: IncrementalDetokenizer,
        leave: Callable[[], object],
    ) -> None:
        self.accepted = accepted
        self.over = False
        """Whether the request has ended, read or not."""
        self.last_token_s = 0.0
        """When tokens last came; the router's."""
        self.trace: RequestTrace | None = None
        """Where it stands in a trace; the router's."""
        self.tokens_taken = 0
        """Generated tokens up to now, none of them after a stop string."""
        self.on_news: Callable[[], None] | None = None
        """Called when ``take`` has something new; for a consumer that does not iterate. Must not raise."""
        self._accepted_given = False
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(sampling.stop, sampling.include_stop) if sampling.stop else None
        self._leave = leave
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[Any] = []
        self._first_index = 0
        self._end: Final | WeirError | None = None
        self._waiter: asyncio.Future[None] | None = None

    # what the router puts in

    def push(self, tokens: Sequence[int], logprobs: Sequence[Any]) -> tuple[int, str] | None:
        """Take new tokens; returns (tokens taken, stop string) when a stop string is complete.

        The token that completed it is the last one taken; what follows it is dropped.
        """
        if self.over:
            return None
        matcher = self._matcher
        if matcher is None:
            self._tokens.extend(tokens)
            self.tokens_taken += len(tokens)
            if logprobs:
                self._logprobs.extend(logprobs)
            text = self._detokenizer.push(tokens)
            if text:
                self._text.append(text)
            self._wake()
            return None
        return self._push_matching(matcher, tokens, logprobs)

    def _push_matching(
        self, matcher: StopMatcher, tokens: Sequence[int], logprobs: Sequence[Any]
    ) -> tuple[int, str] | None:
        if matcher.matched is not None:
            return None
        for taken, token in enumerate(tokens, start=1):
            self._tokens.append(token)
            self.tokens_taken += 1
            if logprobs:
                self._logprobs.append(logprobs[taken - 1])
            text, matched = matcher.push(self._detokenizer.push((token,)))
            if text:
                self._text.append(text)
            if matched is not None:
                return taken, matched
        self._wake()
        return None

    def flush(self) -> str:
        """End of the tokens: release what was held back; returns the stop string that ended the text, or ""."""
        matcher = self._matcher
        if matcher is None:
            text = self._detokenizer.flush()
        elif matcher.matched is not None:
            return matcher.matched
        else:
            text, matched = matcher.push(self._detokenizer.flush())
            if matched is None:
                text += matcher.flush()[0]
        if text:
            self._text.append(text)
        return "" if matcher is None else matcher.matched or ""

    def finish(self, end: Final | WeirError) -> None:
        """The request is over; what was pushed before is still delivered first."""
        assert self._end is None, "a request ends once"
        self._end = end
        self.over = True
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)
        elif self.on_news is not None:
            self.on_news()

    # what the consumer takes out

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Event:
        while True:
            event = self.take()
            if event is not None:
                return event
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    @property
    def waiting_tokens(self) -> int:
        """Tokens that the consumer has not taken yet."""
        return len(self._tokens)

    def take(self) -> Event | None:
        """The next event; None when there is none yet. Raises as the iteration does, StopAsyncIteration at its end."""
        if not self._accepted_given:
            self._accepted_given = True
            return self.accepted
        if self._tokens or self._text:
            return self._take()
        return None if self._end is None else self._take_end(self._end)

    def _take(self) -> Delta:
        delta = Delta("".join(self._text), self._tokens, self._first_index, self._logprobs)
        self._first_index += len(self._tokens)
        self._text, self._tokens, self._logprobs = [], [], []
        return delta

    def _take_end(self, end: Final | WeirError) -> Final:
        if isinstance(end, WeirError):
            raise end
        if self._leave is _no_leave:
            raise StopAsyncIteration
        self._leave = _no_leave
        return end

    def leave(self) -> None:
        """The consumer has left: cancel the request if it still runs. Idempotent, immediate."""
        leave, self._leave = self._leave, _no_leave
        if not self.over:
            leave()

    async def aclose(self) -> None:
        """As ``leave``; for ``contextlib.aclosing``."""
        self.leave()


def _no_leave() -> None:
    """Nothing is left to cancel."""
