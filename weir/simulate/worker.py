"""One worker: batches of prompts, a continuous batch of decodes, or both in one step.

    _next ─► prompts wait, nothing decodes ─► one prefill batch                     ends: prompts are prefilled
          ─► prompts wait, some decode     ─► one mixed step (or prompts first)     ends: a chunk and a token each
          ─► only decodes                  ─► k steps at once, until one finishes   ends: k tokens each
          ─► nothing                       ─► idle until work comes

While a batch does not change its steps grow by the same amount, so k of them are one event and cost no more than one.
Work that comes in the meantime cuts them at the next step's end. Cost: O(log batch) per sequence, not per token.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections import deque
from typing import Protocol

from weir.lifecycle import Role
from weir.simulate.events import EventQueue
from weir.simulate.models import Chunk, WorkerModel
from weir.simulate.request import Request


class Doing(enum.Enum):
    """What a worker is busy with."""

    NOTHING = "nothing"
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Owner(Protocol):
    """Who is told what a worker did. Called inside an event; may give the worker more work."""

    def began(self, worker: Worker, request: Request) -> None:
        """The prefill of ``request`` has begun."""
        ...

    def prefilled(self, worker: Worker, request: Request) -> bool:
        """Its context's KV is complete and a token sampled; whether the KV stays there (``hold`` or ``join``)."""
        ...

    def finished(self, worker: Worker, request: Request) -> None:
        """Its last token is out."""
        ...

    def changed(self, worker: Worker) -> None:
        """Its load is not what it last reported."""
        ...

    def stepped(self, seconds: float, tokens: int) -> None:
        """``tokens`` came ``seconds`` after the one before them."""
        ...


class Worker:
    """See the module. ``prompts_first``: never mix, prompts go before decodes (vLLM before its chunked prefill)."""

    def __init__(
        self,
        worker_id: str,
        role: Role,
        model: WorkerModel,
        events: EventQueue,
        owner: Owner,
        *,
        prompts_first: bool = False,
    ) -> None:
        self.worker_id = worker_id
        self.role = role
        self.model = model
        self.epoch = 1
        self.alive = True
        self.draining = False
        self.prompts_first = prompts_first
        self.doing = Doing.NOTHING
        self.prompts: deque[Request] = deque()
        """Waiting for prefill, the first of them perhaps part of the way."""
        self.prompt_tokens = 0
        """Context tokens that are still to be prefilled here."""
        self.reserved: set[Request] = set()
        """Bound to decode here; their KV is not here yet."""
        self.stock: set[Request] = set()
        """Prefilled here; their KV waits for a reader or is being read."""
        self.kept_tokens = 0
        """KV tokens of reserved, prefilling, stock and joining sequences."""
        self.prefill_busy_s = 0.0
        self.decode_busy_s = 0.0
        self.preemptions = 0
        self.link_free_s = 0.0
        self._events = events
        self._owner = owner
        self._joining: deque[Request] = deque()
        self._batch: list[tuple[int, int, Request]] = []
        self._steps = 0
        self._context = 0
        self._joined = 0
        self._work: list[tuple[Request, int]] = []
        self._version = 0
        self._began_s = 0.0
        self._planned = 0

    # looking

    @property
    def running(self) -> int:
        """Sequences that decode or prefill, or whose KV is on its way."""
        return len(self._batch) + len(self._work) + len(self.reserved)

    @property
    def decoding(self) -> int:
        """Sequences in the batch."""
        return len(self._batch)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a place in the batch, or for prefill."""
        return len(self._joining) + len(self.prompts)

    @property
    def stock_tokens(self) -> int:
        """Tokens of finished KV that waits for a reader."""
        return sum(request.context for request in self.stock)

    @property
    def kv_tokens_used(self) -> int:
        """Tokens of KV that are or will be here, as of the last event."""
        return self.kept_tokens + self._context

    @property
    def empty(self) -> bool:
        """Nothing runs, waits or is expected; stock may be left."""
        return not (self.prompts or self._batch or self._joining or self.reserved or self._work)

    def check_integrity(self) -> None:
        """A worker without work holds no memory and owes no tokens."""
        assert self.empty, self.worker_id
        assert not self.stock, self.worker_id
        held = (self.kept_tokens, self._context, self.prompt_tokens)
        assert held == (0, 0, 0), (self.worker_id, held)

    # work comes and goes

    def add_prompt(self, request: Request) -> None:
        """Queue its context for prefill."""
        assert self.alive
        if request.attempt > 1:
            request.cached = 0
        request.computed = request.cached
        self.prompt_tokens += request.context - request.computed
        self.prompts.append(request)
        self._wake()

    def reserve(self, request: Request) -> None:
        """Keep room for a sequence whose KV will be read from elsewhere."""
        self.reserved.add(request)
        self.kept_tokens += request.context + 1
        self._owner.changed(self)

    def kv_arrived(self, request: Request) -> None:
        """Its KV is here: it joins the batch at the next step."""
        self.reserved.remove(request)
        self._joining.append(request)
        self._wake()

    def join(self, request: Request) -> None:
        """A sequence that was prefilled here decodes here."""
        self._joining.append(request)
        self.kept_tokens += 1

    def hold(self, request: Request) -> None:
        """A sequence that was prefilled here waits for a reader."""
        self.stock.add(request)

    def release(self, request: Request) -> None:
        """The KV of a sequence that was prefilled here is read, or not wanted any more."""
        if request in self.stock:
            self.stock.remove(request)
            self.kept_tokens -= request.context
            self._wake()

    def unreserve(self, request: Request) -> None:
        """A reserved sequence does not come."""
        if request in self.reserved:
            self.reserved.remove(request)
            self.kept_tokens -= request.context + 1
            self._wake()

    def take_queued(self) -> list[Request]:
        """Prompts that have not begun leave the queue, for another worker."""
        begun = {request for request, _ in self._work}
        left = [one for one in self.prompts if one.computed <= one.cached and one not in begun]
        for request in left:
            self.prompts.remove(request)
            self.prompt_tokens -= request.context - request.computed
        return left

    def take_decodes(self) -> list[Request]:
        """Every decoding sequence leaves now, with what it has generated as part of its context."""
        self._cut_now()
        left = [self._leave(entry[2]) for entry in self._batch]
        self._batch.clear()
        self._context = 0
        for request in self._joining:
            self.kept_tokens -= request.context + 1
            request.context += 1
        left += self._joining
        self._joining.clear()
        if self.alive and self.doing is Doing.NOTHING:
            self._next()
        return left

    def die(self) -> list[Request]:
        """The process is gone; returns what it was working on or was to receive."""
        self.alive = False
        decodes = self.take_decodes()
        self._version += 1
        lost = [*(request for request, _ in self._work), *self.prompts, *decodes, *self.reserved, *self.stock]
        self.prompts.clear()
        self.reserved.clear()
        self.stock.clear()
        self._work.clear()
        self.doing = Doing.NOTHING
        return list(dict.fromkeys(lost))

    def _leave(self, request: Request) -> Request:
        made = self._steps - request.joined_step
        request.context += made + 1
        request.left -= made
        return request

    # steps

    def _wake(self) -> None:
        if self.doing is Doing.NOTHING:
            self._next()
        elif self.doing is Doing.DECODE and (self._joining or self.prompts):
            self._cut()
        self._owner.changed(self)

    def _next(self) -> None:
        """Begin what is to be done now."""
        if self._joining:
            self._admit()
        if self.prompts and self._take_prompts():
            return
        if self._batch:
            self._decode()
        else:
            self.doing = Doing.NOTHING

    def _admit(self) -> None:
        model, batch = self.model, self._batch
        cap = model.max_step_tokens
        while self._joining and len(batch) < model.max_batch:
            request = self._joining[0]
            size = request.context + 1
            if cap and batch and self._context + size > cap:
                break
            self._joining.popleft()
            self.kept_tokens -= size
            self._context += size
            request.joined_step = self._steps
            self._joined += 1
            heapq.heappush(batch, (self._steps + request.left, self._joined, request))

    def _take_prompts(self) -> bool:
        """Form and begin a prefill batch or a mixed step; False when memory does not allow any."""
        model = self.model
        mixed = bool(self._batch) and not self.prompts_first
        budget = model.batch_tokens - (len(self._batch) if mixed else 0)
        taken, chunks = self._work, []
        room = (model.kv_tokens or 1 << 60) - self.kept_tokens - self._context
        while self.prompts and budget > 0 and len(taken) < model.max_prefill_batch:
            request = self.prompts[0]
            left = request.context - request.computed
            fresh = request.computed <= request.cached
            if fresh and request.context > room and (taken or self.kept_tokens or self._batch):
                break
            size = min(left, budget) if mixed else left
            if not mixed and taken and size > budget:
                break
            if fresh:
                room -= request.context
                self.kept_tokens += request.context
                self._owner.began(self, request)
            chunks.append((size, request.computed))
            taken.append((request, size))
            budget -= size
            if size < left:
                break
            self.prompts.popleft()
        if taken:
            self._begin_prompts(mixed, chunks)
        return bool(taken)

    def _begin_prompts(self, mixed: bool, chunks: list[Chunk]) -> None:
        model, now_s = self.model, self._events.now_s
        if mixed:
            self._planned = 1
            seconds = model.mixed_s(len(self._batch), self._context, chunks)
            plain = model.step_s(len(self._batch), self._context)
            self.decode_busy_s += min(plain, seconds)
            self.prefill_busy_s += max(0.0, seconds - plain)
        else:
            seconds = model.prefill_s(chunks)
            self.prefill_busy_s += seconds
        self.doing = Doing.MIXED if mixed else Doing.PREFILL
        self._began_s = now_s
        self._until(now_s + seconds)

    def _decode(self) -> None:
        batch = self._batch
        size = len(batch)
        steps = batch[0][0] - self._steps
        assert steps > 0, steps
        limit = self.model.kv_tokens
        if limit and self._context + self.kept_tokens + size * steps > limit:
            fits = (limit - self._context - self.kept_tokens) // size
            if fits < 1 and size > 1:
                self._preempt()
                self._next()
                return
            steps = max(1, min(steps, fits))
        self.doing = Doing.DECODE
        self._planned = steps
        self._began_s = self._events.now_s
        self._until(self._began_s + self._steps_s(steps))

    def _steps_s(self, steps: int) -> float:
        """Time of the next ``steps`` steps of this batch."""
        size = len(self._batch)
        base, slope = self.model.line(size)
        return steps * (base + slope * (self._context + size * (steps - 1) / 2))

    def _steps_begun(self, elapsed_s: float) -> int:
        """Steps that have begun ``elapsed_s`` after the first one did: the positive root of ``_steps_s``."""
        size = len(self._batch)
        base, slope = self.model.line(size)
        first = base + slope * self._context
        growth = slope * size
        if growth * self._planned < 1e-9 * first:
            exact = elapsed_s / first
        else:
            middle = first - growth / 2
            exact = (math.sqrt(middle * middle + 2 * growth * elapsed_s) - middle) / growth
        return min(self._planned, math.ceil(exact - 1e-9))

    def _cut(self) -> None:
        """End the decode at the next step's end."""
        steps = self._steps_begun(self._events.now_s - self._began_s)
        if steps < self._planned:
            self._planned = steps
            self._until(max(self._events.now_s, self._began_s + self._steps_s(steps)))

    def _cut_now(self) -> None:
        """Count the steps that are done, and drop the one under way."""
        if self.doing is Doing.DECODE:
            elapsed_s = self._events.now_s - self._began_s
            steps = self._steps_begun(elapsed_s)
            if steps and self._steps_s(steps) > elapsed_s + 1e-12:
                steps -= 1
            self._planned = steps
            self._count_steps()
            self._version += 1
            self.doing = Doing.NOTHING

    def _until(self, when_s: float) -> None:
        self._version += 1
        self._events.at(when_s, self._end, self._version)

    def _end(self, version: int) -> None:
        if version != self._version or not self.alive:
            return
        doing = self.doing
        if doing is not Doing.PREFILL:
            if doing is Doing.DECODE:
                self._count_steps()
            else:
                self._owner.stepped(self._events.now_s - self._began_s, len(self._batch))
                self._advance(1)
            self._finish()
        if doing is not Doing.DECODE:
            self._end_prompts()
        self._next()
        self._owner.changed(self)

    def _count_steps(self) -> None:
        steps = self._planned
        if steps:
            seconds = self._steps_s(steps)
            self.decode_busy_s += seconds
            self._owner.stepped(seconds / steps, steps * len(self._batch))
            self._advance(steps)

    def _advance(self, steps: int) -> None:
        self._steps += steps
        self._context += steps * len(self._batch)

    def _finish(self) -> None:
        batch, steps = self._batch, self._steps
        while batch and batch[0][0] <= steps:
            request = heapq.heappop(batch)[2]
            self._context -= request.context + 1 + steps - request.joined_step
            request.left = 0
            self._owner.finished(self, request)

    def _end_prompts(self) -> None:
        work, self._work = self._work, []
        for request, size in work:
            request.computed += size
            self.prompt_tokens -= size
            if request.computed >= request.context:
                context = request.context
                if not self._owner.prefilled(self, request):
                    self.kept_tokens -= context

    def _preempt(self) -> None:
        """The youngest sequence gives its memory up; its tokens are computed again when there is room."""
        place = max(range(len(self._batch)), key=lambda index: self._batch[index][1])
        request = self._batch.pop(place)[2]
        heapq.heapify(self._batch)
        self._context -= request.context + 1 + self._steps - request.joined_step
        self._leave(request)
        request.local = True
        request.computed = request.cached = 0
        self.prompt_tokens += request.context
        self.prompts.appendleft(request)
        self.preemptions += 1
