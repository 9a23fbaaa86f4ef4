"""A request book with hand-made workers, and what is needed to tell it facts and look at its commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from weir.engine.sampling import SamplingParams
from weir.ids import WorkerKey
from weir.lifecycle import FinishReason, Role
from weir.services.router.book import RequestBook
from weir.services.router.commands import (
    Admission,
    Command,
    Emit,
    End,
    PublishCancel,
    PublishState,
    SendBeginPrefill,
)
from weir.services.router.entry import NEVER_S
from weir.services.router.facts import BookLimits, EndedNews, FirstTokenNews
from weir.services.router.fleet import Fleet, Load, WorkerInfo
from weir.services.router.policy import LeastLoaded
from weir.services.router.retry import RetryBudget

MODEL = "toy"
P1, P2 = WorkerKey("prefill-1", 1), WorkerKey("prefill-2", 1)
D1, D2 = WorkerKey("decode-1", 1), WorkerKey("decode-2", 1)
M1, M2 = WorkerKey("mixed-1", 1), WorkerKey("mixed-2", 1)
ROLES = {
    P1: Role.PREFILL,
    P2: Role.PREFILL,
    D1: Role.DECODE,
    D2: Role.DECODE,
    M1: Role.MIXED,
    M2: Role.MIXED,
}
LEASE = 7
PROMPT = (1, 2, 3, 4, 5)

C = TypeVar("C")


def info(worker: WorkerKey, role: Role | None = None, **changes: Any) -> WorkerInfo:
    """A worker's registry entry."""
    values: dict[str, Any] = {
        "key": worker,
        "role": ROLES[worker] if role is None else role,
        "role_epoch": 1,
        "address": "",
        "draining": False,
        "model": MODEL,
        "fingerprint": b"same",
        "block_size": 4,
        "num_blocks": 100,
        "context_tokens": 400,
    }
    return WorkerInfo(**{**values, **changes})


class Stage:
    """The book under test at a time that moves when told; ``seen`` keeps what was not asked for yet."""

    def __init__(self, *workers: WorkerKey, **limits: Any) -> None:
        self.fleet = Fleet()
        self.now_s = 100.0
        self.reports = 0
        self.seen: list[Command] = []
        self.prefills_begin = True
        self.book = RequestBook(self.fleet, LeastLoaded(), BookLimits(**limits), RetryBudget(0.2, 10), lambda: 0.5)
        for worker in workers:
            self.up(worker)

    # the fleet

    def up(self, worker: WorkerKey, **changes: Any) -> None:
        self.fleet.put(info(worker, **changes)).connected = True
        self.book.fleet_changed(self.now_s)

    def lose(self, worker: WorkerKey) -> None:
        self.book.worker_lost(worker, self.now_s)

    def report(self, worker: WorkerKey, **load: int) -> None:
        """A load report long after all that was sent."""
        self.now_s += 1.0
        self.reports += 1
        values = {
            "running": 0, "waiting": 0, "pending_prefill_tokens": 0, "free_blocks": 100, "total_blocks": 100,
        }  # fmt: skip
        view = self.fleet.get(worker)
        assert view is not None
        view.take_report(Load(self.reports, **{**values, **load}), self.now_s)
        self.book.fleet_changed(self.now_s)

    # facts

    def admit(
        self,
        request_id: str = "r",
        *,
        max_tokens: int = 8,
        deadline_s: float = NEVER_S,
        prompt: tuple[int, ...] = PROMPT,
        priority: int = 0,
    ) -> None:
        self.book.admit(
            Admission(
                request_id=request_id,
                model=MODEL,
                prompt=prompt,
                sampling=SamplingParams(max_tokens=max_tokens, seed=1),
                received_s=self.now_s - 0.001,
                deadline_s=deadline_s,
                priority=priority,
            ),
            self.now_s,
        )

    def ticket(
        self, worker: WorkerKey, name: str, *, attempt: int = 1, final: bool = False, lease: int = LEASE
    ) -> None:
        self.book.kv_ready(worker, "r", attempt, lease, final, name)

    def first(
        self, worker: WorkerKey, token: int, *, attempt: int = 1, index: int = 0, finish: FinishReason | None = None
    ) -> None:
        news = FirstTokenNews(index, token, (), finish, 2, 3.0, f"first {token}")
        self.book.first_token(worker, "r", attempt, news, self.now_s)

    def read(self, worker: WorkerKey, void: str = "", *, attempt: int = 1) -> None:
        self.book.kv_read_done(worker, "r", attempt, LEASE, void, "", "timings", self.now_s)

    def tokens(
        self,
        worker: WorkerKey,
        tokens: Sequence[int],
        *,
        attempt: int = 1,
        index: int,
        finish: FinishReason | None = None,
    ) -> None:
        self.book.tokens(worker, "r", attempt, index, tokens, (), finish, None, 0.0, self.now_s)

    def ended(self, worker: WorkerKey, code: str, *, attempt: int = 1, retry_after_ms: float = 0.0) -> None:
        prefill = ROLES[worker] is Role.PREFILL
        self.book.attempt_ended(worker, prefill, "r", attempt, EndedNews(code, "", retry_after_ms), self.now_s)

    def advance(self, seconds: float) -> None:
        """Let time pass, waking the book when it wants to be."""
        end_s = self.now_s + seconds
        while (due_s := self.book.next_due_s()) <= end_s:
            self.now_s = max(self.now_s, due_s)
            self.book.tick(self.now_s)
        self.now_s = end_s

    # commands

    def sent(self) -> list[Command]:
        """What workers are sent since the last call, in order; the rest is kept for the other questions.

        Prefills begin at once, unless ``prefills_begin`` is off.
        """
        self.book.check_integrity()
        commands = self.book.drain()
        for begin in [command for command in commands if isinstance(command, SendBeginPrefill)]:
            if self.prefills_begin:
                self.book.prefill_started(begin.worker, begin.admission.request_id, begin.attempt, 2, 1.5, self.now_s)
        commands += self.book.drain()
        self.book.check_integrity()
        others = (Emit, End, PublishState, PublishCancel)
        self.seen += [command for command in commands if isinstance(command, others)]
        return [command for command in commands if not isinstance(command, others)]

    def names(self) -> list[str]:
        """As ``sent``, as words: class without Send, worker, attempt or payload."""
        return [_name(command) for command in self.sent()]

    def all(self, kind: type[C]) -> list[C]:
        """All commands of a kind, so far."""
        self.seen += self.sent_all()
        return [command for command in self.seen if isinstance(command, kind)]

    def sent_all(self) -> list[Command]:
        return self.book.drain()

    @property
    def emitted(self) -> list[int]:
        """Tokens passed on; asserts that each position came once and in order."""
        tokens: list[int] = []
        for emit in self.all(Emit):
            assert emit.first_index == len(tokens)
            tokens.extend(emit.tokens)
        return tokens

    @property
    def end(self) -> End:
        """The one end."""
        ends = self.all(End)
        assert len(ends) == 1, ends
        return ends[0]

    @property
    def states(self) -> list[str]:
        """States published, in order."""
        return [f"{state.state.value}.{state.attempt}" for state in self.all(PublishState)]


def _name(command: Any) -> str:
    kind = type(command).__name__.removeprefix("Send")
    for attribute in ("ticket", "token", "attempt"):
        value = getattr(command, attribute, None)
        if value is not None:
            break
    return f"{kind} {command.worker.worker_id} {value}"


def transferring(stage: Stage) -> Stage:
    """Brings the request to TRANSFERRING, D1 reading, token 10 sent."""
    stage.admit()
    stage.sent()
    stage.ticket(P1, "t1", final=True)
    stage.first(P1, 10)
    stage.sent()
    return stage
