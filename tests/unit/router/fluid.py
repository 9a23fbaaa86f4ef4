"""The request book under virtual time, with workers that take as long as their profile says: a small fluid model.

P  one prompt after the other, each for prefill_s; then its KV is ready and its first token out
D  steps of step_s over all sequences that have their KV; a read takes read_s; a local prefill delays the step
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.unit.router.slo_fleet import BLOCK, PROFILE, key
from tests.unit.router.stage import MODEL, info
from weir.balance.profile import Profile
from weir.engine.sampling import SamplingParams
from weir.errors import ResourceExhausted
from weir.ids import WorkerKey
from weir.lifecycle import FinishReason, RequestState, Role
from weir.services.router.book import RequestBook
from weir.services.router.commands import (
    Admission,
    Emit,
    End,
    SendBeginDecode,
    SendBeginPrefill,
    SendCancel,
    SendFirstToken,
    SendKvReady,
)
from weir.services.router.facts import BookLimits, FirstTokenNews
from weir.services.router.fleet import Fleet, Load
from weir.services.router.policy import Policy
from weir.services.router.prefixes import PrefixMap
from weir.services.router.retry import RetryBudget
from weir.services.router.slo_policy import SloOptions, SloPolicy

REPORT_S = 0.25
BLOCKS = 10_000
KV_BYTES = 20_000.0


@dataclass
class Job:
    """One attempt at one worker."""

    request_id: str
    attempt: int
    tokens: int
    output: int
    done: int = 0
    kv: bool = False
    first: bool = False
    source: WorkerKey | None = None


@dataclass
class Outcome:
    """What became of the requests."""

    ttft_ms: dict[str, float] = field(default_factory=dict)
    tpot_ms: dict[str, float] = field(default_factory=dict)
    refused: dict[str, float] = field(default_factory=dict)
    """Retry-after by request."""
    ended: Counter[str] = field(default_factory=Counter)
    by_tenant: Counter[str] = field(default_factory=Counter)

    def good(self, slo_ttft_ms: float, slo_tpot_ms: float) -> int:
        """Requests that finished and met both."""
        return sum(self.ttft_ms[r] <= slo_ttft_ms and self.tpot_ms[r] <= slo_tpot_ms for r in self.tpot_ms)


class Worker:
    """What both kinds have: a name, a report, a slowness that may change."""

    role = Role.MIXED

    def __init__(self, sim: Fluid, name: str) -> None:
        self.sim = sim
        self.key = key(name)
        self.slowness = 1.0
        self.busy = False
        self.prefilled = 0
        self.generated = 0

    def report(self) -> Load:
        raise NotImplementedError


class PrefillWorker(Worker):
    role = Role.PREFILL

    def __init__(self, sim: Fluid, name: str) -> None:
        super().__init__(sim, name)
        self.queue: deque[Job] = deque()

    def begin(self, job: Job) -> None:
        self.queue.append(job)
        if not self.busy:
            self._next()

    def _next(self) -> None:
        self.busy = bool(self.queue)
        if self.queue:
            job, sim = self.queue[0], self.sim
            took_s = sim.profile.prefill_s(job.tokens) * self.slowness
            sim.book.prefill_started(self.key, job.request_id, job.attempt, 0, 0.0, sim.now_s)
            sim.later(took_s, self._done, job, took_s)

    def _done(self, job: Job, took_s: float) -> None:
        sim = self.sim
        self.queue.popleft()
        self.prefilled += job.tokens
        sim.book.kv_ready(self.key, job.request_id, job.attempt, 1, True, job)
        news = FirstTokenNews(0, 1, (), None, 0, took_s * 1e3, job)
        sim.book.first_token(self.key, job.request_id, job.attempt, news, sim.now_s)
        self._next()

    def report(self) -> Load:
        pending = sum(job.tokens for job in self.queue)
        rate = 256 / (self.sim.profile.prefill_s(256) * self.slowness)
        return Load(
            self.sim.number(), 0, 0, pending, BLOCKS, BLOCKS, prefilled_tokens=self.prefilled, prefill_tokens_per_s=rate
        )


class DecodeWorker(Worker):
    role = Role.DECODE

    def __init__(self, sim: Fluid, name: str) -> None:
        super().__init__(sim, name)
        self.jobs: dict[str, Job] = {}
        self.active: list[Job] = []
        self.local: deque[Job] = deque()

    def begin(self, job: Job) -> None:
        self.jobs[job.request_id] = job
        if job.source is None:
            self.local.append(job)
        self._step()

    def kv_ready(self, job: Job) -> None:
        mine = self.jobs.get(job.request_id)
        if mine is not None and not mine.kv:
            self.sim.later(self.sim.profile.read_s(mine.tokens * KV_BYTES) * self.slowness, self._read, mine)

    def first_token(self, job: Job) -> None:
        mine = self.jobs.get(job.request_id)
        if mine is not None:
            mine.first, mine.done = True, 1
            self._join(mine)

    def _read(self, job: Job) -> None:
        if self.jobs.get(job.request_id) is job:
            job.kv = True
            self.sim.book.kv_read_done(self.key, job.request_id, job.attempt, 1, "", "", None, self.sim.now_s)
            self._join(job)

    def _join(self, job: Job) -> None:
        if job.kv and job.first:
            self.active.append(job)
            self._step()

    def cancel(self, request_id: str) -> None:
        job = self.jobs.pop(request_id, None)
        if job is not None:
            self.active = [one for one in self.active if one is not job]
            self.local = deque(one for one in self.local if one is not job)

    def _step(self) -> None:
        if self.busy or not (self.active or self.local):
            return
        self.busy = True
        profile = self.sim.profile
        new = self.local.popleft() if self.local else None
        context = sum(job.tokens + job.done for job in self.active)
        took_s = profile.step_s(len(self.active), context)
        if new is not None:
            took_s += profile.prefill_s(new.tokens)
        self.sim.later(took_s * self.slowness, self._stepped, list(self.active), new)

    def _stepped(self, jobs: list[Job], new: Job | None) -> None:
        self.busy = False
        if new is not None and self.jobs.get(new.request_id) is new:
            self.active.append(new)
            jobs = [*jobs, new]
        for job in jobs:
            if self.jobs.get(job.request_id) is not job:
                continue
            finish = FinishReason.STOP if job.done + 1 >= job.output else None
            if finish:
                del self.jobs[job.request_id]
                self.active.remove(job)
            sim = self.sim
            sim.book.tokens(self.key, job.request_id, job.attempt, job.done, (1,), (), finish, None, 0.0, sim.now_s)
            job.done += 1
            self.generated += 1
        self._step()

    def report(self) -> Load:
        context = sum(job.tokens + job.done for job in self.active)
        used = sum(-(-(job.tokens + job.done) // BLOCK) for job in self.jobs.values())
        step_ms = self.sim.profile.step_s(len(self.active), context) * 1e3 * self.slowness
        return Load(
            self.sim.number(), len(self.jobs), 0, sum(job.tokens for job in self.local), BLOCKS - used, BLOCKS,
            decode_step_ms=step_ms, used_blocks=used, generated_tokens=self.generated,
        )  # fmt: skip


class Fluid:
    """``offer`` requests, ``run``, look at ``outcome``."""

    def __init__(
        self,
        prefills: int,
        decodes: int,
        *,
        seed: int = 1,
        profile: Profile = PROFILE,
        options: SloOptions | None = None,
        policy: Policy | None = None,
        **limits: Any,
    ) -> None:
        rng = random.Random(seed)
        self.random, self.profile = rng, profile
        self.now_s = 0.0
        self.outcome = Outcome()
        self.emitted_s: dict[str, list[float]] = {}
        """Moments of each request's tokens."""
        self._sequence = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sent_s: dict[str, float] = {}
        self._outputs: dict[str, int] = {}
        self._tenants: dict[str, str] = {}
        self.fleet = Fleet(lambda worker: rng.random())
        policy = policy or SloPolicy(PrefixMap(1000), options or SloOptions(), rng.random)
        self.book = RequestBook(self.fleet, policy, BookLimits(**limits), RetryBudget(0.2, 10), rng.random)
        self.workers: dict[WorkerKey, Worker] = {}
        for number in range(prefills):
            self._add(PrefillWorker(self, f"p{number}"))
        for number in range(decodes):
            self._add(DecodeWorker(self, f"d{number}"))
        self.later(0.0, self._report)

    def _add(self, worker: Worker) -> None:
        self.workers[worker.key] = worker
        view = self.fleet.put(
            info(
                worker.key, worker.role, profile=self.profile, block_size=BLOCK, num_blocks=BLOCKS,
                context_tokens=BLOCK * BLOCKS,
                kv_bytes_per_token=KV_BYTES,
            )
        )  # fmt: skip
        view.connected = True

    def number(self) -> int:
        self._sequence += 1
        return self._sequence

    def later(self, wait_s: float, what: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._heap, (self.now_s + wait_s, self.number(), what, args))

    def _report(self) -> None:
        for worker in self.workers.values():
            view = self.fleet.get(worker.key)
            assert view is not None
            view.take_report(worker.report(), self.now_s)
        self.book.fleet_changed(self.now_s)
        self.later(REPORT_S, self._report)

    def offer(self, at_s: float, request_id: str, tokens: int, output: int, **admission: Any) -> None:
        """A request arrives at ``at_s``."""
        heapq.heappush(self._heap, (at_s, self.number(), self._arrive, (request_id, tokens, output, admission)))

    def _arrive(self, request_id: str, tokens: int, output: int, admission: dict[str, Any]) -> None:
        self._sent_s[request_id] = self.now_s
        self._outputs[request_id] = output
        self._tenants[request_id] = admission.get("tenant", "")
        sampling = SamplingParams(max_tokens=4_000, seed=1)
        prompt = tuple(self.random.randrange(30_000) for _ in range(tokens))
        request = Admission(request_id, MODEL, prompt, sampling, self.now_s, self.now_s + 600.0, **admission)
        try:
            self.book.admit(request, self.now_s)
        except ResourceExhausted as error:
            self.outcome.refused[request_id] = error.retry_after_s or 0.0

    def run(self, until_s: float) -> Outcome:
        """Let time pass."""
        while True:
            due_s = min(self._heap[0][0], self.book.next_due_s())
            if due_s > until_s:
                self.now_s = until_s
                return self.outcome
            self.now_s = max(self.now_s, due_s)
            if self._heap[0][0] <= self.now_s:
                _, _, what, args = heapq.heappop(self._heap)
                what(*args)
            self.book.tick(self.now_s)
            self._act()

    def _act(self) -> None:
        while commands := self.book.drain():
            for command in commands:
                self._do(command)

    def _do(self, command: Any) -> None:
        if isinstance(command, SendBeginPrefill | SendBeginDecode):
            admission = command.admission
            name = admission.request_id
            source = getattr(command, "source", None)
            job = Job(name, command.attempt, len(admission.prompt), self._outputs[name], source=source)
            self.workers[command.worker].begin(job)  # type: ignore[attr-defined]
        elif isinstance(command, SendKvReady):
            self.workers[command.worker].kv_ready(command.ticket)  # type: ignore[attr-defined]
        elif isinstance(command, SendFirstToken):
            self.workers[command.worker].first_token(command.token)  # type: ignore[attr-defined]
        elif isinstance(command, SendCancel):
            if not command.prefill:
                self.workers[command.worker].cancel(command.request_id)  # type: ignore[attr-defined]
        elif isinstance(command, Emit):
            self.emitted_s.setdefault(command.request_id, []).append(self.now_s)
            if command.first_index == 0:
                self.outcome.ttft_ms[command.request_id] = (self.now_s - self._sent_s[command.request_id]) * 1e3
        elif isinstance(command, End):
            self._ended(command)

    def _ended(self, end: End) -> None:
        self.outcome.ended[end.state.value] += 1
        if end.state is RequestState.FINISHED:
            self.outcome.by_tenant[self._tenants[end.request_id]] += 1
            self.outcome.tpot_ms[end.request_id] = end.timings.tpot_ms
        elif end.state is RequestState.REJECTED:
            self.outcome.refused[end.request_id] = getattr(end.error, "retry_after_s", None) or 0.0
