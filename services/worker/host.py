"""A worker, put together: engine and step thread, both legs, the role, and what it announces.

Everything here runs on the event loop, except what ``StepLoop`` runs on its thread. The process around it is
``app.py``; tests run several hosts in one process.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc.aio
import psutil

from weir.attempts.wire import WorkerFacts
from weir.clock import Clock
from weir.config import WorkerConfig
from weir.engine.engine import Engine
from weir.engine.output import EngineLoad, StepOutput
from weir.errors import FailedPrecondition, InternalError, KvReadVoid, WeirError
from weir.events.bus import EventBus
from weir.events.registry import Registry
from weir.ids import RequestKey, WorkerKey
from weir.lifecycle import Role
from weir.rpc import convert
from weir.rpc.descriptors import Descriptors
from weir.rpc.v1 import (
    common_pb2,
    decode_pb2_grpc,
    events_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from weir.services.decode.desk import BeginRead, DecodeDesk, TransferCompleted
from weir.services.decode.leg import DecodeLeg
from weir.services.decode.servicer import DecodeServicer
from weir.services.decode.traces import DecodeTraces
from weir.services.prefill.desk import PrefillDesk
from weir.services.prefill.leg import PrefillLeg
from weir.services.prefill.servicer import PrefillServicer
from weir.services.prefill.traces import PrefillTraces
from weir.services.worker.announcer import Announcer
from weir.services.worker.load import LoadTracker
from weir.services.worker.meters import WorkerMeters
from weir.services.worker.parts import WorkerParts
from weir.services.worker.profile import profile_to_pb
from weir.services.worker.role_gate import RoleGate
from weir.services.worker.servicer import WorkerServicer
from weir.services.worker.step_loop import StepLoop
from weir.telemetry.metrics import WorkerMetrics
from weir.telemetry.spans import Tracer
from weir.transfer.lease import LeaseEnd, LeaseTable
from weir.transfer.plan import Completion, KvTransfer, ReadReport

_log = logging.getLogger(__name__)

MAX_IDLE_CHECK_BLOCKS = 1 << 14
END_GRACE_S = 5.0
PEER_GRACE_S = 3.0
"""A worker that left the registry is held for dead after this: a registry that restarts empty is no massacre."""


@dataclass(frozen=True, slots=True)
class WorkerEdges:
    """What connects a worker to the others; each has an in-memory twin. ``descriptors`` None: as many as there are."""

    transfer: KvTransfer
    bus: EventBus
    registry: Registry
    descriptors: Descriptors | None = None


class WorkerHost:
    """``register`` on a server, ``start`` once it has its address; ``drain``, then ``close``."""

    def __init__(
        self,
        key: WorkerKey,
        config: WorkerConfig,
        parts: WorkerParts,
        edges: WorkerEdges,
        clock: Clock,
        *,
        metrics: WorkerMetrics | None = None,
        tracer: Tracer | None = None,
        on_fault: Callable[[WeirError], None] = lambda error: None,
        step_loop: type[StepLoop] = StepLoop,
    ) -> None:
        self.key = key
        self.config = config
        self.parts = parts
        self.edges = edges
        self.clock = clock
        self.metrics = metrics or WorkerMetrics(parts.model_name)
        self.tracer = tracer
        self.gate = RoleGate(key.worker_id, config.role)
        self.address = ""
        self.started_unix_s = clock.unix_s()
        self.transports: dict[str, str] = {}
        self.load = LoadTracker(parts.engine.load(), self._context_to_compute)
        self._on_fault = on_fault
        self._load_sequence = 0
        self._leases_expected = False
        self._stepped = 0
        self._gone: dict[WorkerKey, asyncio.TimerHandle] = {}
        self._loop = asyncio.get_running_loop()
        self.step_loop = step_loop(
            parts.engine,
            clock,
            deliver=self._on_step,
            crashed=self._on_crash,
            settled=self._on_settled,
            idle_check=self._idle_check if parts.blocks.num_blocks <= MAX_IDLE_CHECK_BLOCKS else None,
        )
        block_bytes = parts.pool.layout.block_bytes
        self.meters = WorkerMeters(self.metrics, clock, config.role, block_bytes, config.price_per_hour)
        self.prefill = self._prefill_leg()
        self.decode = self._decode_leg()
        self.announcer = Announcer(
            key,
            edges.bus,
            edges.registry,
            clock,
            record=self.record,
            load=self.load_report,
            heartbeat_s=config.heartbeat_s,
            load_report_s=config.load_report_s,
            on_report=self._on_report,
            on_end=self._on_task_end,
        )
        self._listening: asyncio.Task[None] | None = None

    def _prefill_leg(self) -> PrefillLeg:
        desk = PrefillDesk(
            self.key,
            self.parts.fingerprint.digest(),
            LeaseTable(),
            block_size=self.parts.blocks.block_size,
            max_lease_s=self.config.lease_s,
        )
        return PrefillLeg(
            desk,
            self.meters.cancels.watching(self.step_loop),
            self.clock,
            session_grace_s=self.config.session_grace_s,
            leases_open=self._expect_completions,
            traces=PrefillTraces(self.tracer, self.clock) if self.tracer is not None else None,
        )

    def _decode_leg(self) -> DecodeLeg:
        return DecodeLeg(
            DecodeDesk(self.parts.fingerprint, vocab_size=self.parts.vocab_size),
            self.meters.cancels.watching(self.step_loop),
            self.edges.transfer,
            self.clock,
            session_grace_s=self.config.session_grace_s,
            read_timeout_s=self.config.read_timeout_s,
            max_outstanding_reads=self.config.max_outstanding_reads,
            on_read=self._on_read,
            on_void=self._on_void,
            on_completed=self._on_transfer_completed,
            check_room=self._check_room,
            traces=DecodeTraces(self.tracer, self.clock) if self.tracer is not None else None,
        )

    # -- life -------------------------------------------------------------------------------------------

    def register(self, server: grpc.aio.Server) -> list[str]:
        """Add the three services; returns their full names."""
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(
            PrefillServicer(self.prefill, self._facts(self.gate.check_prefills)), server
        )
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(
            DecodeServicer(self.decode, self._facts(self.gate.check_decodes)), server
        )
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerServicer(self), server)
        return [
            "weir.rpc.v1.PrefillService",
            "weir.rpc.v1.DecodeService",
            "weir.rpc.v1.WorkerService",
        ]

    def _facts(self, check_open: Callable[[], None]) -> WorkerFacts:
        return WorkerFacts(
            worker=self.key,
            clock=self.clock,
            eos_token_ids=self.parts.eos_token_ids,
            context_tokens=self.parts.context_tokens,
            welcome=self.welcome,
            load=self.load_report,
            check_open=check_open,
        )

    async def start(self, address: str) -> None:
        """Begin to step, to listen and to be found at ``address``. Raises Unavailable without a registry."""
        self.address = address
        self.step_loop.start()
        self._listening = asyncio.create_task(self._listen(), name="lease-completions")
        self._listening.add_done_callback(self._on_task_end)
        await self.announcer.subscribe(
            on_cancel=self._on_cancel, on_completed=self._on_completed, on_peer_gone=self._on_peer_gone
        )
        self.metrics.watch_bus(self.edges.bus.stats)
        self.metrics.cache_config_info.labels(self.parts.blocks.block_size, self.parts.blocks.num_blocks).set(1)
        await self.announcer.start()

    async def drain(self) -> None:
        """Take nothing new, send away what waits, let the rest end; then leave the registry and the sessions.

        Work still running after the configured drain time ends with UNAVAILABLE.
        """
        self.gate.stopping = True
        await self.announcer.publish_record()
        message = f"worker {self.key.worker_id} is stopping"
        self.prefill.end_waiting(message)
        self.decode.end_waiting(message)
        await self._settle(self.config.role_drain_timeout_s, message, LeaseEnd.SHUTDOWN, Role.MIXED)
        await self.announcer.stop()
        self.prefill.close_sessions(self.gate.fault)
        self.decode.close_sessions(self.gate.fault)

    async def close(self) -> None:
        """End everything at once; nothing of the worker is left. Idempotent."""
        await self.announcer.stop()
        for timer in self._gone.values():
            timer.cancel()
        await self.decode.close()
        self.prefill.close()
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        await self.step_loop.stop()
        await self.edges.transfer.close()

    async def _settle(self, timeout_s: float, message: str, reason: LeaseEnd, leaving: Role) -> None:
        """Wait until the legs of ``leaving`` are idle; after ``timeout_s`` end what is left."""
        waits: list[Callable[[], Awaitable[None]]] = []
        if leaving.prefills:
            waits.append(self.prefill.wait_idle)
        if leaving.decodes:
            waits.append(self.decode.wait_idle)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(wait() for wait in waits))
            return
        except TimeoutError:
            _log.warning("work is still running after %g s of drain; it ends now", timeout_s)
        if leaving.prefills:
            self.prefill.end_everything(message, reason)
        if leaving.decodes:
            self.decode.end_everything(message)
        try:
            async with asyncio.timeout(END_GRACE_S):
                await asyncio.gather(*(wait() for wait in waits))
        except TimeoutError:
            _log.error("work did not end within %g s", END_GRACE_S)

    # -- role -------------------------------------------------------------------------------------------

    async def set_role(self, role: Role, expected_epoch: int, drain_timeout_s: float | None) -> None:
        """Change the role in place; weights, cache and what the new role also does stay.

        Raises FailedPrecondition for a stale epoch or a change under way; InternalError when the engine does not answer
        or its blocks do not add up, and then the role stays. Returns at once if ``role`` is the role already.
        """
        if role is self.gate.role and expected_epoch == self.gate.epoch and not self.gate.draining:
            return
        leaving = _leaving(self.gate.role, role)
        self.gate.begin_change(role, expected_epoch)
        try:
            await self.announcer.publish_record()
            if leaving is not None:
                message = f"worker {self.key.worker_id} is becoming a {role.value} worker"
                if leaving.prefills:
                    self.prefill.end_waiting(message)
                if leaving.decodes:
                    self.decode.end_waiting(message)
                timeout_s = self.config.role_drain_timeout_s if drain_timeout_s is None else drain_timeout_s
                await self._settle(timeout_s, message, LeaseEnd.ROLE_CHANGE, leaving)
            await self._verify_ready()
        except BaseException:
            self.gate.abandon_change()
            raise
        self.gate.finish_change()
        self.meters.role_is(role)
        _log.info("role is %s now, epoch %d", role.value, self.gate.epoch)
        await self.announcer.publish_record()

    async def _verify_ready(self) -> None:
        """The engine answers, and when nothing is left in it, its blocks add up: only then is a new role told."""

        def check(engine: Engine) -> None:
            load = engine.load()
            if self.parts.blocks.num_blocks <= MAX_IDLE_CHECK_BLOCKS and not (load.running or load.waiting):
                self._idle_check()

        try:
            self.prefill.desk.leases.check_integrity()
            await self.step_loop.call(check)
        except AssertionError as error:
            raise InternalError(f"integrity: {error}") from error

    # -- what others are told ---------------------------------------------------------------------------

    def record(self) -> events_pb2.WorkerRecord:
        """The registry entry now."""
        return events_pb2.WorkerRecord(
            worker_id=self.key.worker_id,
            incarnation=self.key.incarnation,
            role=convert.role_to_pb(self.gate.role),
            role_epoch=self.gate.epoch,
            address=self.address,
            draining=self.gate.draining,
            model=self.parts.model_name,
            fingerprint=convert.fingerprint_to_pb(self.parts.fingerprint),
            num_blocks=self.parts.blocks.num_blocks,
            block_size=self.parts.blocks.block_size,
            context_tokens=self.parts.context_tokens,
            model_path=self.parts.model_path,
            started_unix_s=self.started_unix_s,
            max_running=self.config.max_running,
            heartbeat_s=self.config.heartbeat_s + self.config.load_report_s,
            profile=None if self.parts.profile is None else profile_to_pb(self.parts.profile),
        )

    def welcome(self) -> prefill_pb2.SessionWelcome:
        """The first message of a session."""
        return prefill_pb2.SessionWelcome(
            worker_id=self.key.worker_id,
            incarnation=self.key.incarnation,
            role=convert.role_to_pb(self.gate.role),
            role_epoch=self.gate.epoch,
            descriptor=convert.descriptor_to_pb(self.edges.transfer.descriptor()),
            model=self.parts.model_name,
            context_tokens=self.parts.context_tokens,
        )

    def load_report(self) -> common_pb2.WorkerLoad:
        """The load after the last step."""
        self._load_sequence += 1
        engine = self.load.engine
        return common_pb2.WorkerLoad(
            sequence=self._load_sequence,
            running=engine.running,
            waiting=engine.waiting,
            pending_prefill_tokens=self.load.pending_prefill_tokens,
            blocks=convert.block_counts_to_pb({state.value: count for state, count in engine.blocks.items()}),
            open_leases=self.prefill.desk.leases.open_count,
            outstanding_reads=self.edges.transfer.outstanding(),
            decode_step_ms=self.load.decode_step_ms,
            prefill_tokens_per_s=self.load.prefill_tokens_per_s,
            generated_tokens=self.load.generated_tokens,
            prefilled_tokens=self.load.prefilled_tokens,
            routers=max(self.prefill.open_sessions, self.decode.open_sessions),
            kv_read_bytes=self.load.kv_read_bytes,
        )

    async def state(self, *, check_integrity: bool) -> worker_pb2.GetStateResponse:
        """Everything the worker knows of itself, after all commands given so far.

        Raises FailedPrecondition if integrity is to be checked while the engine has work.
        """
        if self.step_loop.dead is None:
            self.load.engine = await self.step_loop.call(lambda engine: engine.load())
            if check_integrity:
                await self._check_integrity()
        process = psutil.Process()
        return worker_pb2.GetStateResponse(
            worker_id=self.key.worker_id,
            incarnation=self.key.incarnation,
            role=convert.role_to_pb(self.gate.role),
            role_epoch=self.gate.epoch,
            draining=self.gate.draining,
            load=self.load_report(),
            open_sessions=self.prefill.open_sessions + self.decode.open_sessions,
            tasks=len(asyncio.all_tasks()),
            open_files=process.num_fds(),
            rss_bytes=process.memory_info().rss,
            leases_ended={end.value: count for end, count in self.prefill.desk.leases.ended_total.items()},
            void_reads=self.decode.desk.void_reads,
            transports=self.transports,
            model=self.parts.model_name,
            fingerprint=convert.fingerprint_to_pb(self.parts.fingerprint),
            pid=os.getpid(),
            prefills_completed=self.prefill.desk.prefills_completed,
            prompt_tokens_by_source=self.load.prompt_tokens_by_source,
        )

    async def _check_integrity(self) -> None:
        if self.load.engine.running or self.load.engine.waiting or self.edges.transfer.outstanding():
            raise FailedPrecondition("integrity is checked when the worker is idle; it has work")
        try:
            self.prefill.desk.leases.check_integrity()
            await self.step_loop.call(lambda engine: self._idle_check())
        except AssertionError as error:
            raise InternalError(f"integrity: {error}") from error

    # -- what comes in ----------------------------------------------------------------------------------

    def _on_step(self, output: StepOutput) -> None:
        try:
            self._tell(output)
        except Exception as error:
            # Whose news this was would wait for ever, and nobody would know. The event loop logs the traceback.
            self._on_crash(InternalError(f"the news of a step were lost: {type(error).__name__}: {error}"))
            raise

    def _tell(self, output: StepOutput) -> None:
        for usage in self.load.update(output):
            self.meters.prompt(usage)
        self.prefill.on_events(output.events)
        self.decode.on_events(output.events)
        self.meters.stepped(output)
        self.announcer.load_changed()

    def _context_to_compute(self, key: RequestKey) -> int:
        return self.prefill.desk.context_to_compute(key) or self.decode.desk.context_to_compute(key)

    def _on_settled(self, load: EngineLoad) -> None:
        self.load.engine = load
        self.announcer.load_changed()

    def _on_crash(self, error: WeirError) -> None:
        _log.critical("the engine is of no use any more: %s", error)
        self.gate.fault = error
        self._on_fault(error)
        self.prefill.engine_lost(error)
        self.decode.engine_lost(error)
        self.announcer.record_changed()

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """Unheard or unseen a worker is of no use either; what runs may end, unlike without an engine."""
        if not task.cancelled() and (error := task.exception()) is not None:
            fault = InternalError(f"task {task.get_name()} died: {type(error).__name__}: {error}")
            _log.critical("%s", fault, exc_info=error)
            self._on_fault(fault)

    def _idle_check(self) -> None:
        """Runs on the step thread."""
        self.parts.blocks.check_integrity()

    def _on_cancel(self, request_id: str, attempt: int, reason: str) -> None:
        self.prefill.cancel(request_id, attempt, reason)
        self.decode.cancel(request_id, attempt, reason)
        self.prefill.pump()
        self.decode.pump()

    def _on_completed(self, key: RequestKey, lease_id: int) -> None:
        self.prefill.completed(Completion(lease_id, key))

    def _on_peer_gone(self, worker: WorkerKey) -> None:
        timer = self._gone.pop(worker, None)
        if timer is not None:
            timer.cancel()
        self._gone[worker] = self._loop.call_later(PEER_GRACE_S, self._drop_peer, worker)

    def _drop_peer(self, worker: WorkerKey) -> None:
        del self._gone[worker]
        record = self.edges.registry.snapshot().get(worker.worker_id)
        if record is not None and record.incarnation == worker.incarnation:
            return
        self.decode.peer_gone(worker)
        if self.transports.pop(worker.worker_id, None) is not None:
            self.metrics.forget_peer(worker.worker_id)

    async def _listen(self) -> None:
        async for done in self.edges.transfer.notifications():
            self.prefill.completed(done)

    def _expect_completions(self, expected: bool) -> None:
        if expected != self._leases_expected:
            self._leases_expected = expected
            self.edges.transfer.expect_completions(expected)

    def _on_read(self, order: BeginRead, report: ReadReport) -> None:
        peer = order.peer.worker.worker_id
        self.meters.read_proven(order, report)
        self.load.kv_read_bytes += report.bytes
        if self.transports.get(peer) != report.transport:
            self.transports[peer] = report.transport
            self.metrics.set_transport(peer, report.transport)
            _log.info("KV from %s comes by %s", peer, report.transport)

    def _on_void(self, order: BeginRead, void: KvReadVoid) -> None:
        self.meters.read_void(order, void, self.transports.get(order.peer.worker.worker_id, ""))

    def _check_room(self, peer: WorkerKey) -> None:
        """Raises ResourceExhausted when there are no descriptors for a connection to ``peer``."""
        if self.edges.descriptors is not None:
            self.edges.descriptors.check("kv", f"a connection to {peer.worker_id}")

    def _on_transfer_completed(self, order: TransferCompleted) -> None:
        self.announcer.transfer_completed(order.key, order.lease_id, order.source)

    # -- metrics ----------------------------------------------------------------------------------------

    def _on_report(self) -> None:
        """With each load report: export what need not be current at every step, and what the cache changed."""
        self.meters.refresh(
            self.load,
            open_leases=self.prefill.desk.leases.open_count,
            outstanding_reads=self.edges.transfer.outstanding(),
            voids=self.decode.desk.void_reads,
            leases_ended=self.prefill.desk.leases.ended_total,
        )
        if self._stepped != self.step_loop.steps:
            # An idle engine is left asleep.
            self._stepped = self.step_loop.steps
            self.step_loop.submit(lambda engine: self._drain_changes())

    def _drain_changes(self) -> None:
        """Runs on the step thread."""
        changes = self.parts.blocks.drain_changes()
        if changes.stored or changes.removed or changes.overflowed:
            self.step_loop.post(self.announcer.kv_changed, changes)


def _leaving(old: Role, new: Role) -> Role | None:
    """The work of ``old`` that ``new`` does not do, as a role; None when it does all of it."""
    prefills = old.prefills and not new.prefills
    decodes = old.decodes and not new.decodes
    assert not (prefills and decodes), "no role does nothing"
    if prefills:
        return Role.PREFILL
    return Role.DECODE if decodes else None
