"""Router and workers under virtual time. Placement is the production ``Policy``, fed by the production ``Fleet``.

    arrive ─► choose ─► prefill on P ─► KV read ─► decode on D ─► finished
                │           │ D bound when P begins (then only the last chunk's KV is read after prefill),
                │           │ or later, when one has room: the KV waits in P's memory
                └─► waits   └─► a mixed worker, or D itself, decodes what it has prefilled

What the policy sees is as old as in production: load reports come every ``report_s``, work sent since is noted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from weir.ids import WorkerKey
from weir.lifecycle import Role
from weir.services.router.fleet import Fleet, Load, WorkerInfo, WorkerView
from weir.services.router.lengths import OutputLengths
from weir.services.router.policy import Demand, Policy
from weir.services.router.slo_policy import SloPolicy
from weir.simulate.events import EventQueue
from weir.simulate.metrics import Metrics
from weir.simulate.models import WorkerModel
from weir.simulate.request import NEVER_S, Request
from weir.simulate.traffic import Arrival
from weir.simulate.watch import NOBODY, Watcher
from weir.simulate.worker import Worker

MODEL = "simulated"
BLOCK_TOKENS = 16
MOST_OUTPUT = 4096
"""What every client asks for."""
TENANT = "simulated"


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """``report_s`` between load reports. ``patience_s``: a request that no worker was found for by then is rejected.

    ``retries`` after lost workers. ``early``: D is bound when P begins. ``lengths``: how long answers will be is learnt
    from those that ended, for policies that use it.
    """

    report_s: float = 0.25
    patience_s: float = math.inf
    retries: int = 3
    early: bool = True
    lengths: bool = False
    prompts_first: bool = False


class Cluster:
    """``add`` workers, ``feed`` arrivals, then run the events."""

    def __init__(
        self,
        events: EventQueue,
        policy: Policy,
        metrics: Metrics,
        options: ClusterOptions | None = None,
        watcher: Watcher = NOBODY,
    ) -> None:
        self.events = events
        self.options = options or ClusterOptions()
        self.metrics = metrics
        self.fleet = Fleet()
        if isinstance(policy, SloPolicy):
            policy.counsel = self.fleet.counsel
        self.workers: dict[str, Worker] = {}
        self.views: dict[Worker, WorkerView] = {}
        self.live = 0
        """Requests that have arrived and are not over."""
        self.on_finished: Callable[[int], None] | None = None
        self._policy = policy
        self._watcher = watcher
        self._waiting: deque[Request] = deque()
        self._unbound: dict[Request, None] = {}
        self._dirty: dict[Worker, None] = {}
        self._reporting = False
        self._by_key: dict[WorkerKey, Worker] = {}
        self._sequence = 0
        self._made = 0
        self._soon = False
        self._most_tokens = 0
        self._lengths = OutputLengths()
        self._arrivals: Iterator[Arrival] = iter(())

    # members

    def add(self, role: Role, model: WorkerModel, worker_id: str = "") -> Worker:
        """A worker that is ready now."""
        self._made += 1
        name = worker_id or f"w{self._made:04d}"
        worker = Worker(name, role, model, self.events, self, prompts_first=self.options.prompts_first)
        info = WorkerInfo(
            key=WorkerKey(name, self._made),
            role=role,
            role_epoch=1,
            address="",
            draining=False,
            model=MODEL,
            fingerprint=b"simulated",
            block_size=BLOCK_TOKENS,
            num_blocks=model.kv_tokens // BLOCK_TOKENS,
            context_tokens=1 << 30,
            max_running=model.max_batch,
            kv_bytes_per_token=model.bytes_per_token,
            profile=model.profile(),
        )
        view = self.fleet.put(info)
        view.connected = True
        self.workers[name] = worker
        self.views[worker] = view
        self._by_key[info.key] = worker
        if model.kv_tokens:
            self._most_tokens = min(self._most_tokens or model.kv_tokens, model.kv_tokens)
        self._report(worker)
        self._dispatch()
        return worker

    def remove(self, worker: Worker) -> None:
        """A worker is gone; what it had is tried again elsewhere."""
        view = self.views.pop(worker)
        del self.workers[worker.worker_id]
        del self._by_key[view.key]
        self._dirty.pop(worker, None)
        self.fleet.remove(view.key)
        for request in worker.die():
            self._lost(worker, request)
        self._dispatch()

    def renew(self, worker: Worker, *, role: Role, epoch: int, draining: bool) -> None:
        """What the registry says of a worker changes."""
        worker.role, worker.epoch, worker.draining = role, epoch, draining
        view = self.views[worker]
        self.fleet.put(replace(view.info, role=role, role_epoch=epoch, draining=draining))
        self.changed(worker)
        self._dispatch()

    def give_back(self, requests: Iterable[Request]) -> None:
        """Requests go back to the router and are placed anew, first in the queue."""
        for request in requests:
            self._forget(request)
            self._waiting.appendleft(request)
        self._dispatch()

    def hand_over(self, worker: Worker) -> None:
        """Every decode leaves ``worker`` with its KV, which waits there until another D has read it."""
        for request in worker.take_decodes():
            view = self.views[worker]
            view.settle(request.name)
            view.unbind(request.name)
            request.source, request.target, request.local = worker, None, False
            worker.kept_tokens += request.context
            worker.hold(request)
            self._bind(request)

    # arrivals

    def feed(self, arrivals: Iterator[Arrival]) -> None:
        """Take requests from ``arrivals``, in order of time, as virtual time reaches them."""
        self._arrivals = arrivals
        self._schedule_arrival()

    def _schedule_arrival(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self.events.at(max(arrival.at_s, self.events.now_s), self._arrive, arrival)

    def _arrive(self, arrival: Arrival) -> None:
        self._schedule_arrival()
        metrics = self.metrics
        metrics.arrived += 1
        self.live += 1
        request = Request(str(metrics.arrived), arrival.at_s, arrival.prompt, arrival.output, arrival.cached)
        if self._most_tokens and arrival.prompt + arrival.output > self._most_tokens:
            self._reject(request)
            return
        if self.fleet.counsel.wait_s(1, self.events.now_s) > 0.0:
            self._reject(request)
            return
        request.demand = self._demand(request)
        self._watcher.arrived(self.events.now_s, arrival.prompt)
        if self._waiting or not self._place(request):
            self._waiting.append(request)
            if self.options.patience_s < math.inf:
                self.events.at(self.events.now_s + self.options.patience_s, self._out_of_patience, request)

    def _demand(self, request: Request) -> Demand:
        """The client's bound says nothing about the answer's length."""
        most, slo = max(MOST_OUTPUT, request.left), self.metrics.slo
        expected = self._lengths.expect(TENANT, request.context, most) if self.options.lengths else 0
        return Demand(
            request.context,
            most,
            expected_tokens=expected,
            slo_ttft_ms=slo.ttft_s * 1e3,
            slo_tpot_ms=slo.tpot_s * 1e3,
            received_s=request.arrival_s,
        )

    def _out_of_patience(self, request: Request) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
            self._reject(request)

    def _reject(self, request: Request) -> None:
        self.live -= 1
        self.metrics.rejected += 1
        self._watcher.refused(self.events.now_s)

    def check_integrity(self) -> None:
        """When no request is left, no worker holds anything of one."""
        assert self.live == 0, self.live
        assert not self._waiting
        assert not self._unbound
        for worker in self.workers.values():
            worker.check_integrity()

    # placing

    def _dispatch(self) -> None:
        """Place and bind what waits, as far as there is room."""
        waiting = self._waiting
        while waiting and self._place(waiting[0]):
            waiting.popleft()
        while self._unbound and self._bind(next(iter(self._unbound))):
            pass

    def _place(self, request: Request) -> bool:
        now_s = self.events.now_s
        assert request.demand is not None
        choice = self._policy.choose(self.fleet.serving(MODEL), request.demand, now_s)
        if choice is None:
            return False
        request.attempt += 1
        request.ready = False
        if choice.prefill is None:
            assert choice.decode is not None, "a choice names a worker"
            view, request.local = choice.decode, True
            view.note(request.name, now_s, request.context, 1, view.blocks_for(request.context + 1))
            view.bind(request.name, request.demand.slo_tpot_ms, request.demand.expected_tokens)
        else:
            view, request.local = choice.prefill, False
            view.note(request.name, now_s, request.context, 0, 0)
        self.fleet.used(view)
        local = request.local and view.info.role is Role.DECODE
        self.fleet.counsel.placed(request.context, local=local, now_s=now_s)
        worker = self._by_key[view.key]
        request.source = worker
        worker.add_prompt(request)
        return True

    def _bind(self, request: Request) -> bool:
        """Give a request whose prefill has begun to a D; False when none has room."""
        source = request.source
        assert source is not None
        assert request.demand is not None
        now_s = self.events.now_s
        source_view = self.views.get(source)
        if source_view is None:
            self._unbound.pop(request, None)
            return True
        view = self._policy.choose_decode(self.fleet.serving(MODEL), source_view, request.demand, now_s)
        if view is None:
            self._unbound[request] = None
            return False
        self._unbound.pop(request, None)
        view.note(request.name, now_s, 0, 1, view.blocks_for(request.context + 1))
        view.bind(request.name, request.demand.slo_tpot_ms, request.demand.expected_tokens)
        self.fleet.used(view)
        request.target = self._by_key[view.key]
        request.target.reserve(request)
        if request in source.stock:
            self._read(request, request.context)
        return True

    # what workers say

    def began(self, worker: Worker, request: Request) -> None:
        """See Owner."""
        if not request.local and self.options.early:
            self._bind(request)

    def prefilled(self, worker: Worker, request: Request) -> bool:
        """See Owner."""
        now_s = self.events.now_s
        if request.first_s == NEVER_S:
            request.first_s = now_s
            self._watcher.prefilled(now_s, request.prompt, request.cached)
        request.left -= 1
        request.ready = True
        if request.left <= 0:
            self.finished(worker, request)
            return False
        if request.local:
            self._watcher.decode_began(now_s, request.prompt)
            self.views[worker].joined(request.name)
            worker.join(request)
            return True
        self.views[worker].settle(request.name)
        worker.hold(request)
        if request.target is None:
            self._bind(request)
        else:
            self._read(request, min(request.context, worker.model.batch_tokens))
        return True

    def finished(self, worker: Worker, request: Request) -> None:
        """See Owner."""
        now_s = self.events.now_s
        self.live -= 1
        self._forget(request)
        if self.options.lengths:
            self._lengths.learn(TENANT, request.prompt, request.output)
        self.metrics.finished(request.arrival_s, request.first_s, now_s, request.output)
        self._watcher.finished(now_s, request.output, request.first_s - request.arrival_s, now_s - request.first_s)
        if self.on_finished is not None:
            self.on_finished(len(self.metrics.ends_s))

    def changed(self, worker: Worker) -> None:
        """See Owner."""
        self._dirty[worker] = None
        if not self._reporting:
            self._reporting = True
            self.events.at(self.events.now_s + self.options.report_s, self._report_all, None)
        if self._waiting or self._unbound:
            self._dispatch_soon()

    def stepped(self, seconds: float, tokens: int) -> None:
        """See Owner."""
        self.metrics.gap(seconds, tokens)

    # KV

    def _read(self, request: Request, tokens: int) -> None:
        """Read the last ``tokens`` of a prompt's KV; reads from one source take turns on its link."""
        source = request.source
        assert source is not None
        model, now_s = source.model, self.events.now_s
        num_bytes = tokens * model.bytes_per_token
        begins_s = max(now_s, source.link_free_s)
        source.link_free_s = begins_s + num_bytes / model.read_bytes_per_s
        self.events.at(begins_s + model.read_s(num_bytes), self._read_done, (request, request.attempt))

    def _read_done(self, read: tuple[Request, int]) -> None:
        request, attempt = read
        source, target = request.source, request.target
        if attempt != request.attempt or source is None or target is None or request not in target.reserved:
            return
        now_s = self.events.now_s
        source.release(request)
        self._watcher.decode_began(now_s, request.prompt)
        self.views[target].joined(request.name)
        target.kv_arrived(request)

    # losses

    def _lost(self, worker: Worker, request: Request) -> None:
        """A worker died with ``request``: read again, prefill again, or give up."""
        source, target = request.source, request.target
        if source is not None and source is not worker and source.alive and target is worker:
            # P has the KV or is still making it: another D takes it over, without a second prefill.
            if request in source.stock:
                request.target = None
                self._bind(request)
                return
            if not request.ready:
                request.target = None
                return
        self.metrics.retried += 1
        self._forget(request)
        if request.attempt > self.options.retries:
            self._reject(request)
        else:
            self._waiting.appendleft(request)

    def _forget(self, request: Request) -> None:
        """No worker has it any more."""
        self._unbound.pop(request, None)
        if request.target is not None:
            request.target.unreserve(request)
        for worker in (request.source, request.target):
            if worker is not None and worker in self.views:
                view = self.views[worker]
                view.settle(request.name)
                view.unbind(request.name)
        request.source = request.target = None
        if request.demand is not None and request.context != request.demand.prompt_tokens:
            request.demand = self._demand(request)

    # reports

    def _report_all(self, _: None) -> None:
        dirty, self._dirty = self._dirty, {}
        self._reporting = False
        for worker in dirty:
            self._report(worker)
        if self._waiting or self._unbound:
            self._dispatch()

    def _report(self, worker: Worker) -> None:
        self._sequence += 1
        total = worker.model.kv_tokens // BLOCK_TOKENS
        used = worker.kv_tokens_used // BLOCK_TOKENS
        free = max(0, total - used) if total else 0
        load = Load(self._sequence, worker.running, worker.waiting, worker.prompt_tokens, free, total, used_blocks=used)
        self.views[worker].take_report(load, self.events.now_s)

    def _dispatch_soon(self) -> None:
        """Once at this moment, after what is under way."""
        if not self._soon:
            self._soon = True
            self.events.at(self.events.now_s, self._dispatch_now, None)

    def _dispatch_now(self, _: None) -> None:
        self._soon = False
        self._dispatch()
