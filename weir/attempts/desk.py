"""The attempts of one leg, without any I/O: who is here, what their routers hear, what the engine shall do.

An attempt comes in once, however often it is told; older attempts of a request make way for newer ones; a cancel is
remembered, because it may overtake what it stops. The router hears ``AttemptOver`` exactly once.
"""

from __future__ import annotations

import abc
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from weir.engine.request import EngineRequest
from weir.engine.sampling import LENGTH
from weir.errors import InvalidArgument, ResourceExhausted, WeirError
from weir.ids import RequestKey

MAX_ATTEMPTS = 1 << 14
MAX_NEWS = 1 << 16
MAX_REMEMBERED_CANCELS = 1 << 12


@dataclass(frozen=True, slots=True)
class AttemptStarted:
    """It began to run; ``cached_tokens`` of its context were in the prefix cache; it waited ``queued_s``."""

    key: RequestKey
    cached_tokens: int
    queued_s: float


@dataclass(frozen=True, slots=True)
class AttemptOver:
    """Nothing of the attempt is left here. ``code`` is a gRPC status name, OK when it ended as it should."""

    key: RequestKey
    code: str
    message: str = ""
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class AddRequest:
    """The engine shall take the request; a refusal comes back through ``refused``."""

    request: EngineRequest


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """The engine shall stop the attempt; its Finished event is awaited."""

    key: RequestKey


@dataclass(slots=True)
class Attempt:
    """One attempt. ``closing`` is what its router will hear, once the engine has let go of it."""

    request: EngineRequest
    session: str
    started: bool = False
    closing: AttemptOver | None = None

    @property
    def key(self) -> RequestKey:
        """Request and attempt."""
        return self.request.key


A = TypeVar("A", bound=Attempt)
N = TypeVar("N")
O = TypeVar("O")  # noqa: E741  # beside A(ttempt) and N(ews): O(rder)


@dataclass(slots=True)
class _Session(Generic[N]):
    news: list[N] = field(default_factory=list)
    overflowed: bool = False


class AttemptDesk(abc.ABC, Generic[A, N, O]):
    """All attempts of one leg of a worker process. Single-threaded; every method may add news and orders."""

    def __init__(self, *, max_attempts: int, max_news: int) -> None:
        self._max_attempts = max_attempts
        self._max_news = max_news
        self._attempts: dict[RequestKey, A] = {}
        self._by_request: dict[str, dict[int, A]] = {}
        self._cancelled: OrderedDict[str, int] = OrderedDict()
        self._sessions: dict[str, _Session[N | AttemptOver]] = {}
        self._orders: list[O | AddRequest] = []

    # -- looking ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Attempts that are not over."""
        return len(self._attempts)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._attempts

    def take_orders(self) -> list[O | AddRequest]:
        """What is to be done, in order; each is handed out once."""
        orders, self._orders = self._orders, []
        return orders

    def has_news(self, session: str) -> bool:
        """Whether ``take_news`` would return anything."""
        found = self._sessions.get(session)
        return found is not None and bool(found.news)

    def take_news(self, session: str) -> list[N | AttemptOver]:
        """News of the session since the last call; ResourceExhausted when its reader fell too far behind."""
        found = self._sessions.get(session)
        if found is None:
            return []
        if found.overflowed:
            raise ResourceExhausted(f"session {session}: more than {self._max_news} messages wait for the router")
        news, found.news = found.news, []
        return news

    # -- commands ---------------------------------------------------------------------------------------

    def open_session(self, session: str) -> None:
        """News for ``session`` are kept from now on."""
        assert session not in self._sessions, session
        self._sessions[session] = _Session()

    def drop_news(self, session: str) -> None:
        """The stream is gone: its news are no longer kept; its attempts go on until ``end_session``."""
        self._sessions.pop(session, None)

    def refuse(self, session: str, key: RequestKey, error: WeirError) -> None:
        """One that was not even begun: tell the router why."""
        if key not in self._attempts:
            self._tell(session, ended_by(key, error))

    def cancel(self, request_id: str, attempt: int, reason: str = "") -> None:
        """Stop this attempt and older ones, also such as come later: cancels travel on more than one way and may
        overtake what they stop. Harmless if they are over.
        """
        self._remember_cancel(request_id, attempt)
        mine = self._by_request.get(request_id, {})
        for one in [one for number, one in mine.items() if number <= attempt]:
            self._stop(one, AttemptOver(one.key, "CANCELLED", reason or "cancelled"))

    @abc.abstractmethod
    def end_session(self, session: str) -> None:
        """The router is gone for good: stop its attempts."""

    @abc.abstractmethod
    def refused(self, key: RequestKey, error: WeirError) -> None:
        """The engine did not take the request."""

    @abc.abstractmethod
    def engine_lost(self, error: WeirError) -> None:
        """The engine is gone: no event will come any more; all attempts are over."""

    # -- for the legs -----------------------------------------------------------------------------------

    @abc.abstractmethod
    def _stop(self, attempt: A, over: AttemptOver) -> None:
        """A cancel has come for it."""

    def _is_old(self, session: str, key: RequestKey) -> bool:
        """Whether ``key`` is to be left alone: a repeat, an older attempt, or one whose cancel came first."""
        if any(known >= key.attempt for known in self._by_request.get(key.request_id, ())):
            return True
        if self._cancelled.get(key.request_id, -1) >= key.attempt:
            self._tell(session, AttemptOver(key, "CANCELLED", "cancelled before it began"))
            return True
        return False

    def _is_full(self, session: str, key: RequestKey) -> bool:
        """Whether no attempt more is taken; the router hears of it."""
        if len(self._attempts) < self._max_attempts:
            return False
        error = ResourceExhausted(f"{len(self._attempts)} attempts are here, the limit is {self._max_attempts}")
        self._tell(session, ended_by(key, error))
        return True

    def _enter(self, attempt: A) -> None:
        """Take it in; older attempts of its request are stopped."""
        key = attempt.key
        if key.attempt > 0:
            self.cancel(key.request_id, key.attempt - 1, "a newer attempt began")
        self._attempts[key] = attempt
        self._by_request.setdefault(key.request_id, {})[key.attempt] = attempt
        self._orders.append(AddRequest(attempt.request))

    def _leave(self, attempt: A, over: AttemptOver) -> None:
        """It is over: forget it and tell its router."""
        key = attempt.key
        del self._attempts[key]
        mine = self._by_request[key.request_id]
        del mine[key.attempt]
        if not mine:
            del self._by_request[key.request_id]
        self._tell(attempt.session, over)

    def _all(self) -> list[A]:
        return list(self._attempts.values())

    def _of_session(self, session: str) -> Iterable[A]:
        return [one for one in self._attempts.values() if one.session == session]

    def _waiting(self) -> Iterable[A]:
        """Those that have not begun to run."""
        return [one for one in self._attempts.values() if not one.started]

    def _remember_cancel(self, request_id: str, attempt: int) -> None:
        self._cancelled[request_id] = max(attempt, self._cancelled.pop(request_id, attempt))
        if len(self._cancelled) > MAX_REMEMBERED_CANCELS:
            self._cancelled.popitem(last=False)

    def _tell(self, session: str, news: N | AttemptOver) -> None:
        found = self._sessions.get(session)
        if found is None:
            return
        if len(found.news) >= self._max_news:
            found.overflowed = True
            return
        found.news.append(news)


def ended_by(key: RequestKey, error: WeirError) -> AttemptOver:
    """The end of ``key`` by ``error``."""
    retry_after_s = error.retry_after_s if isinstance(error, ResourceExhausted) else None
    # A worker with more room may take what this one can never hold: that is not the request's fault.
    too_large = isinstance(error, InvalidArgument) and error.field == LENGTH
    return AttemptOver(key, "OUT_OF_RANGE" if too_large else error.code, str(error), retry_after_s)
