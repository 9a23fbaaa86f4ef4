"""What must hold in every schedule, while it runs and when nothing is left to happen."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.simulation.broker import MAX_PENDING
from tests.simulation.model import answer, text_of
from tests.simulation.queue_checks import QueueChecks
from tests.simulation.role_checks import RoleChecks
from tests.simulation.stop_checks import StopChecks
from weir.errors import WeirError
from weir.kvcache.blocks import BlockState
from weir.lifecycle import RequestState
from weir.services.worker.parts import WorkerParts

if TYPE_CHECKING:
    from tests.simulation.clients import Client
    from tests.simulation.router_node import RouterNode
    from tests.simulation.worker_node import WorkerNode
    from tests.simulation.world import World

PATIENCE_S = 5.0
"""Nothing waits for longer than it must by more than this."""
MAX_FAILURES = 20
FORGIVING = frozenset({"calm", "leaving", "decode deaths", "deaths", "drains", "steps", "weights"})
"""Kinds of schedules in which no request may fail: fewer workers die than a request has attempts."""
LEASE_LATE_S = 0.5
STOPS_S = 0.5
"""Both legs stop within a step; this is many of them, and a slow network."""


class Checks:
    """Collects failures as "checker: what"."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.failures: list[str] = []
        self.counts: Counter[str] = Counter()
        self.mended_s = 0.0
        self._no_second_prefill: dict[str, int] = {}
        self._by_id: dict[str, Client] = {}
        self._attempts: dict[str, int] = {}
        self.roles = RoleChecks(world)
        self.stops = StopChecks(world)
        self.queues = QueueChecks(world)

    def fail(self, checker: str, what: str) -> None:
        """A check did not hold."""
        if len(self.failures) < MAX_FAILURES:
            self.failures.append(f"{checker}: {what}")
            self._world.history.note("CHECK", f"{checker}: {what}")

    # -- while it runs ----------------------------------------------------------------------------------

    def after_step(self, worker: str, parts: WorkerParts) -> None:
        """The pool adds up after every step."""
        counts = parts.blocks.counts()
        if sum(counts.values()) != parts.blocks.num_blocks:
            self.fail("blocks", f"{worker}: {counts}")

    def while_it_runs(self) -> None:
        """Looked at from time to time: leases end in time, queues stay within bounds, books add up."""
        for node in self._world.workers.values():
            if node.worker is None or node.process is None or node.process.paused:
                continue
            for lease_id, lease in node.worker.prefill.desk.leases._open.items():
                late_s = node.clock.unix_s() - lease.deadline_unix_s
                if late_s > LEASE_LATE_S and node.resumed_s + LEASE_LATE_S < self._world.loop.time():
                    self.fail("lease", f"{node.host}: lease {lease_id} lives {late_s:.3f} s after its deadline")
            waiting = node.worker.load.engine.waiting
            if waiting > node.config.max_waiting + node.config.max_running:
                self.fail("bounds", f"{node.host}: {waiting} wait, the limit is {node.config.max_waiting}")
            if node.link.bus is not None and node.link.bus.pending > MAX_PENDING:
                self.fail("bounds", f"{node.host}: {node.link.bus.pending} events wait")
        for router in self._world.routers:
            if router.app is not None and router.process is not None and not router.process.paused:
                try:
                    router.app.router._book.check_integrity()
                except AssertionError as error:
                    self.fail("book", f"{router.host}: {error}")

    def begins(self, request_id: str, attempt: int) -> None:
        """A prompt is sent to a prefill worker: the number of its attempt is new, and the highest."""
        if attempt <= self._attempts.get(request_id, 0):
            self.fail("attempt", f"{request_id}: attempt {attempt} begins after {self._attempts[request_id]}")
        self._attempts[request_id] = attempt

    def left(self, client: Client) -> None:
        """Some time after its client has left nothing of a request is on any worker."""
        for node in self._world.workers.values():
            if node.worker is not None:
                for leg in (node.worker.prefill, node.worker.decode):
                    if client.request_id in leg.desk._by_request:
                        self.fail("cancel", f"{client.spec.name} is still on {node.host}")

    def accepted(self, client: Client) -> None:
        """A request has its identity."""
        if client.request_id in self._by_id:
            self.fail("identity", f"{client.request_id} is given twice")
        self._by_id[client.request_id] = client

    def worker_dies(self, node: WorkerNode) -> None:
        """Note which requests must be decoded elsewhere from the KV that is still leased."""
        if self._world.plan.kind != "decode deaths" or node.worker is None:
            return
        for router in self._world.routers:
            if router.app is None:
                continue
            for entry in router.app.router._book.entries():
                if entry.decode == node.worker.key:
                    self._no_second_prefill.pop(entry.request_id, None)
                    if self._kv_is_kept(entry):
                        self._no_second_prefill[entry.request_id] = entry.attempt

    def read_elsewhere(self, request_id: str) -> None:
        """A reader was too slow and was left. It may be the only one that is left later, and takes no attempt twice."""
        self._no_second_prefill.pop(request_id, None)

    def _kv_is_kept(self, entry: object) -> bool:
        from weir.ids import RequestKey
        from weir.services.router.entry import Entry

        assert isinstance(entry, Entry)
        source = self._world.workers.get(entry.prefill.worker_id) if entry.prefill is not None else None
        if source is None or source.worker is None or entry.dropped:
            return False
        if entry.read_done or entry.state is RequestState.DECODING:
            return False
        key = RequestKey(entry.request_id, entry.attempt)
        attempt = source.worker.prefill.desk._attempts.get(key)
        return attempt is not None and attempt.started and key not in self._world.fabric_faults.proven

    # -- at the end of a request ------------------------------------------------------------------------

    def ended(self, client: Client) -> None:
        """A client has heard the last of its request."""
        for fault in client.faults:
            self.fail("positions", f"{client.spec.name}: {fault}")
        self._tokens(client)
        if client.final is not None:
            self.counts["finished"] += 1
            self._final(client)
        else:
            self._error(client)
        self._in_time(client)

    def _tokens(self, client: Client) -> None:
        spec, complete = client.spec, client.final is not None
        versions = range(1 + max(node.weights for node in self._world.workers.values()))
        answers = [answer(spec.prompt, spec.sampling, weights) for weights in versions]
        fitting = [
            reason
            for expected, reason in answers
            if client.tokens == (expected if complete else expected[: len(client.tokens)])
        ]
        if not fitting:
            must = " or ".join(str(expected) for expected, _ in answers)
            self.fail("tokens", f"{spec.name}: got {client.tokens}, must be {must}")
        elif client.final is not None and client.final.finish_reason not in fitting:
            self.fail("end", f"{spec.name}: ends by {client.final.finish_reason}, must be {fitting}")

    def _final(self, client: Client) -> None:
        assert client.final is not None
        spec, usage, timings = client.spec, client.final.usage, client.final.timings
        if spec.tokens - 1 > self._world.plan.room() and self._world.plan.forgiving:
            self.fail("size", f"{spec.name} finishes, and no worker can hold it")
        sources = usage.local_compute_tokens + usage.local_cache_hit_tokens + usage.external_kv_tokens
        if usage.prompt_tokens != len(spec.prompt) or sources != len(spec.prompt):
            self.fail("usage", f"{spec.name}: {usage} for {len(spec.prompt)} prompt tokens")
        if usage.completion_tokens != len(client.tokens):
            self.fail("usage", f"{spec.name}: {usage} for {len(client.tokens)} tokens")
        stages = timings.admit_ms + timings.queue_ms + timings.prefill_ms + timings.first_token_ms
        if abs(stages - timings.ttft_ms) > 1e-3:
            self.fail("timings", f"{spec.name}: {timings}")
        if abs(timings.ttft_ms + timings.second_token_ms + timings.decode_ms - timings.e2e_ms) > 1e-3:
            self.fail("timings", f"{spec.name}: {timings}")
        attempt = self._no_second_prefill.get(client.request_id)
        if attempt is not None:
            self.counts["taken over"] += 1
            if timings.attempts != attempt:
                self.fail("second prefill", f"{spec.name}: {timings.attempts} attempts, its KV was kept in {attempt}")
        self.counts["attempts"] += timings.attempts
        self._text(client)

    def _text(self, client: Client) -> None:
        visible = "".join(text_of(token) for token in client.tokens)
        for stop in client.spec.sampling.stop:
            at = visible.find(stop)
            visible = visible if at < 0 else visible[:at]
        if client.text != visible:
            self.fail("text", f"{client.spec.name}: {client.text!r}, must be {visible!r}")

    def _error(self, client: Client) -> None:
        error, spec, plan = client.error, client.spec, self._world.plan
        if error is None and client.left_s is not None:
            self.counts["left"] += 1  # it had ended when the client left; nobody reads the end
            return
        assert isinstance(error, WeirError), error
        self.counts[error.code] += 1
        allowed = set()
        if client.left_s is not None:
            allowed.add("CANCELLED")
        if spec.timeout_s is not None:
            allowed.add("DEADLINE_EXCEEDED")
            if plan.skew_s > 0.1:
                allowed.add("UNAVAILABLE")  # leases that end with it look lapsed to a reader whose clock is ahead
        if self._troubled:
            allowed |= {"UNAVAILABLE", "RESOURCE_EXHAUSTED"}
        if client.tokens and "with the weights that its answer began with" in str(error):
            allowed.add("UNAVAILABLE")
        if not client.tokens and plan.balance is not None and "more are asked" in str(error):
            allowed.add("RESOURCE_EXHAUSTED")  # as the controller advises
        if not client.tokens and "tenant" in str(error):
            allowed.add("RESOURCE_EXHAUSTED")
        if not client.tokens and spec.tokens > plan.room(everywhere=self._troubled):
            allowed.add("INVALID_ARGUMENT")
        if error.code not in allowed:
            self.fail("error", f"{spec.name}: {error.code}: {error}")

    @property
    def _troubled(self) -> bool:
        plan = self._world.plan
        if plan.kind in FORGIVING or plan.forgiving:
            return False
        return bool(plan.faults or plan.flips or plan.lease_s < 1.0 or plan.slow_read_s > plan.read_timeout_s)

    def _in_time(self, client: Client) -> None:
        spec, over_s = client.spec, client.over_s
        assert over_s is not None
        assert client.begun_s is not None
        trouble_s = max([fault.at_s + fault.for_s for fault in self._world.plan.faults], default=0.0)
        slow_s = spec.reads_every_s * (len(client.tokens) + 3)
        if spec.timeout_s is not None:
            late_s = over_s - max(client.begun_s + spec.timeout_s, trouble_s if self._pauses else 0.0) - slow_s
            if late_s > 0.2:
                self.fail("deadline", f"{spec.name}: ends {late_s:.3f} s after its deadline")
        if client.left_s is not None and spec.leaves_by != "event" and not self._pauses:
            late_s = over_s - client.left_s - slow_s
            if late_s > 0.2:
                self.fail("cancel", f"{spec.name}: ends {late_s:.3f} s after its client left")

    @property
    def _pauses(self) -> bool:
        return any(fault.what == "pause" for fault in self._world.plan.faults)

    # -- at the end of all ------------------------------------------------------------------------------

    def at_the_end(self) -> None:
        """Everything has ended and nothing is left."""
        for client in self._world.clients:
            if not client.over:
                self.fail("hang", f"{client.spec.name} ({client.request_id or 'never begun'}) has not ended")
            self.counts["lost"] += client.lost and client.over_s is None
        for worker in self._world.workers.values():
            self._worker_is_idle(worker)
        for router in self._world.routers:
            self._router_is_idle(router)
        self.roles.at_the_end()

    def _worker_is_idle(self, node: WorkerNode) -> None:
        worker, parts = node.worker, node.parts
        assert worker is not None
        assert parts is not None
        name = node.host
        load = parts.engine.load()
        left = {
            "running": load.running,
            "waiting": load.waiting,
            "holding": load.holding,
            "leases": worker.prefill.desk.leases.open_count,
            "prefill attempts": len(worker.prefill.desk),
            "decode attempts": len(worker.decode.desk),
            "reads landing": worker.decode.desk.landing,
            "reads": worker.edges.transfer.outstanding(),
            "sessions lost": len(worker.prefill._lost) + len(worker.decode._lost),
        }
        if any(left.values()):
            self.fail("left over", f"{name}: { {what: count for what, count in left.items() if count} }")
        counts = parts.blocks.counts()
        if counts[BlockState.FREE] + counts[BlockState.CACHED] != parts.blocks.num_blocks:
            self.fail("blocks", f"{name}: { {state.value: count for state, count in counts.items()} } at the end")
        try:
            parts.blocks.check_integrity()
            worker.prefill.desk.leases.check_integrity()
        except AssertionError as error:
            self.fail("blocks", f"{name}: {error}")
        leases = worker.prefill.desk.leases
        if sum(leases.ended_total.values()) != leases._next_id - 1:
            self.fail("leases", f"{name}: {leases.ended_total} of {leases._next_id - 1} leases")
        if worker.step_loop.dead is not None:
            self.fail("crash", f"{name}: {worker.step_loop.dead}")

    def _router_is_idle(self, router: RouterNode) -> None:
        app = router.app
        assert app is not None
        state = app.router.state()
        if state.active_requests or state.queued_requests:
            self.fail("left over", f"{router.host}: {state.requests}")
        book = app.router._book
        if self._world.plan.kind == "calm" and (book.retries or book.void_reads):
            self.fail("work twice", f"{router.host}: retries {book.retries}, void reads {book.void_reads}")
        if not self._sees_all(router):
            known = sorted(str(view.key) for view in app.router.fleet if view.usable)
            wanted = sorted(str(node.key) for node in self._world.workers.values())
            self.fail("fleet", f"{router.host} knows {known}, there are {wanted}")
        try:
            book.check_integrity()
        except AssertionError as error:
            self.fail("book", str(error))

    def fleets_agree(self) -> bool:
        """Whether every router is connected with every worker, and with nothing else."""
        return all(self._sees_all(router) for router in self._world.routers)

    def _sees_all(self, router: RouterNode) -> bool:
        assert router.app is not None
        fleet = router.app.router.fleet
        wanted = {node.key for node in self._world.workers.values()}
        return {view.key for view in fleet} == wanted and all(view.usable for view in fleet)

    def loop_faults(self) -> None:
        """What was raised where nobody could catch it."""
        for fault in self._world.loop.faults:
            self.fail("crash", fault)
        for task in self._world.loop.kept:
            if task.done() and not task.cancelled() and task._log_traceback:
                error = task.exception()
                if not isinstance(error, WeirError):
                    self.fail("crash", f"task {task.get_name()}: {type(error).__name__}: {error}")
