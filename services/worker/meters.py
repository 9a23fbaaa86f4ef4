"""What a worker counts, as Prometheus metrics. Belongs to the event loop."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from weir.attempts.leg import EnginePort
from weir.clock import Clock
from weir.engine.engine import Engine
from weir.engine.output import EngineLoad, Event, Finished, Started, StepOutput, Usage
from weir.errors import KvReadVoid
from weir.ids import RequestKey
from weir.lifecycle import Role
from weir.services.decode.desk import BeginRead
from weir.services.worker.load import LoadTracker
from weir.telemetry.metrics import WorkerMetrics
from weir.telemetry.metrics_labels import CONCURRENCY
from weir.transfer.lease import LeaseEnd
from weir.transfer.plan import ReadReport
from weir.transfer.ticket import VoidReason

MAX_CANCELS = 1 << 12
S_PER_HOUR = 3_600.0


class WorkerMeters:
    """``stepped``, ``prompt`` and ``read_*`` as it happens; ``refresh`` with each load report.

    ``block_bytes``: KV bytes of a block; ``price_per_hour``: of this worker, in any currency.
    """

    def __init__(
        self, metrics: WorkerMetrics, clock: Clock, role: Role, block_bytes: int, price_per_hour: float
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._role = role.value
        self._block_bytes = block_bytes
        self._price_per_hour = price_per_hour
        self._priced_s = clock.monotonic_s()
        self._exported: dict[str, int] = {}
        self._steps = {kind: metrics.step_seconds.labels(kind) for kind in ("prefill", "decode", "mixed")}
        self._decode_steps = [metrics.decode_step_seconds.labels(label) for label in CONCURRENCY.labels]
        for reason in VoidReason:
            metrics.void_reads.labels(metrics.reasons(reason.value))
        for end in LeaseEnd:
            metrics.leases_ended.labels(end.value)
        metrics.price_per_hour.set(price_per_hour)
        self.cancels = CancelTimes(clock, metrics.cancel_seconds.observe)
        self.role_is(role)

    def role_is(self, role: Role) -> None:
        """The role is another one now: what is counted by pool goes to it."""
        self._charge()
        self._role = role.value
        self._metrics.set_role(role.value)
        self._busy = self._metrics.busy_seconds.labels(role.value)
        self._queue = self._metrics.queue_seconds.labels(role.value)
        self._metrics.cost.labels(role.value)

    def stepped(self, output: StepOutput) -> None:
        """An engine step is done."""
        for event in output.events:
            self._follow(event)
        load = output.load
        if not (load.decodes or load.prefill_tokens):
            return
        step_s = (load.schedule_ms + load.model_ms + load.sample_ms + load.publish_ms) / 1e3
        kind = "decode" if not load.prefill_tokens else "prefill" if not load.decodes else "mixed"
        self._steps[kind].observe(step_s)
        self._busy.inc(step_s)
        if load.decodes:
            self._decode_steps[CONCURRENCY.index(load.decodes)].observe(step_s)

    def _follow(self, event: Event) -> None:
        if isinstance(event, Started):
            self._queue.observe(event.queued_s)
        elif isinstance(event, Finished):
            self.cancels.ended(event.key)

    def prompt(self, usage: Usage) -> None:
        """A prompt's KV is complete here."""
        self._metrics.prompt_sources.add(
            local_compute=usage.local_compute,
            local_cache_hit=usage.local_cache_hit,
            external_kv_transfer=usage.external_kv,
        )
        self._metrics.prefix_queries.inc(usage.prompt)
        self._metrics.prefix_hits.inc(usage.local_cache_hit)

    def read_proven(self, order: BeginRead, report: ReadReport) -> None:
        """A KV read may be used."""
        self._metrics.saw_read(
            tokens=order.read.ticket.num_tokens,
            transport=report.transport,
            num_bytes=report.bytes,
            descriptors=report.descriptors,
            seconds=report.total_s,
        )

    def read_void(self, order: BeginRead, void: KvReadVoid, transport: str) -> None:
        """A KV read that was begun may not be used; ``transport`` is the one last seen to its peer, if any."""
        del void  # counted by reason with those that were refused before they began
        self._metrics.saw_read_error(tokens=order.read.ticket.num_tokens, transport=transport or "unknown")

    def refresh(
        self, load: LoadTracker, *, open_leases: int, outstanding_reads: int,
        voids: Mapping[str, int], leases_ended: Mapping[LeaseEnd, int],
    ) -> None:  # fmt: skip
        """Bring gauges and counters that others keep up to date."""
        engine, metrics = load.engine, self._metrics
        metrics.requests_running.set(engine.running)
        metrics.requests_waiting.set(engine.waiting)
        metrics.open_leases.set(open_leases)
        metrics.outstanding_reads.set(outstanding_reads)
        metrics.prompt_tokens.inc(self._grown("prefilled", load.prefilled_tokens))
        metrics.generation_tokens.inc(self._grown("generated", load.generated_tokens))
        metrics.read_failures.inc(self._grown("failed", voids.get("transport", 0) + voids.get("timeout", 0)))
        for reason, count in voids.items():
            metrics.void_reads.labels(metrics.reasons(reason)).inc(self._grown(f"void {reason}", count))
        for end, count in leases_ended.items():
            metrics.leases_ended.labels(end.value).inc(self._grown(f"lease {end.value}", count))
        self._memory(engine)
        self._charge()

    def _memory(self, engine: EngineLoad) -> None:
        counts = {state.value: count for state, count in engine.blocks.items()}
        self._metrics.set_blocks(counts)
        self._metrics.stock_bytes.set(counts.get("leased", 0) * self._block_bytes)
        self._metrics.headroom_bytes.set((counts.get("free", 0) + counts.get("cached", 0)) * self._block_bytes)

    def _charge(self) -> None:
        """The price of the time since the last charge goes to the role that it was spent in."""
        now_s = self._clock.monotonic_s()
        spent = (now_s - self._priced_s) * self._price_per_hour / S_PER_HOUR
        self._priced_s = now_s
        self._metrics.cost.labels(self._role).inc(max(spent, 0.0))

    def _grown(self, name: str, total: int) -> int:
        """By how much a total that is kept elsewhere has grown since it was last exported."""
        grown = total - self._exported.get(name, 0)
        self._exported[name] = total
        return grown


class CancelTimes:
    """How long a cancel takes: from the order to the engine until the sequence is gone.

    ``watching(port)`` is the legs' way to the engine; it looks at what passes and changes nothing.
    """

    def __init__(self, clock: Clock, observe: Callable[[float], None]) -> None:
        self._clock = clock
        self._observe = observe
        self._begun: OrderedDict[RequestKey, float] = OrderedDict()

    def begun(self, key: RequestKey) -> None:
        """The engine is being told. The oldest of too many is forgotten."""
        self._begun.setdefault(key, self._clock.monotonic_s())
        if len(self._begun) > MAX_CANCELS:
            self._begun.popitem(last=False)

    def ended(self, key: RequestKey) -> None:
        """The sequence is gone, cancelled or not."""
        begun_s = self._begun.pop(key, None)
        if begun_s is not None:
            self._observe(self._clock.monotonic_s() - begun_s)

    def watching(self, port: EnginePort) -> EnginePort:
        """``port``, watched."""
        return _WatchedPort(port, self)


class _WatchedPort:
    def __init__(self, port: EnginePort, times: CancelTimes) -> None:
        self._port = port
        self._times = times

    def submit(self, command: Callable[[Engine], None]) -> None:
        """See EnginePort."""
        self._port.submit(command)

    def interrupt(self, key: RequestKey) -> None:
        """See EnginePort. It announces a cancel."""
        self._times.begun(key)
        self._port.interrupt(key)
