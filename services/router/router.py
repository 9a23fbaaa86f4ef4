"""The router's inside as its doors (gRPC, HTTP) see it: drives the book, between generations and links."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from weir.clock import Clock
from weir.errors import DeadlineExceeded, NotFound, Unavailable, WeirError
from weir.ids import RequestIdMint, WorkerKey
from weir.lifecycle import FinishReason
from weir.models.detokenize import IncrementalDetokenizer
from weir.rpc.convert import role_from_pb
from weir.rpc.v1 import decode_pb2, events_pb2, kv_pb2, prefill_pb2
from weir.services.router.advice import Advice
from weir.services.router.answer import Accepted, ActiveRequest, Final, ModelInfo, RouterState
from weir.services.router.book import RequestBook
from weir.services.router.catalog import Catalog
from weir.services.router.commands import (
    Admission,
    Command,
    Emit,
    End,
    PublishCancel,
    PublishState,
    SendBeginDecode,
    SendBeginPrefill,
    SendCancel,
    SendFirstToken,
    SendKvReady,
    SendRelease,
)
from weir.services.router.entry import NEVER_S
from weir.services.router.events import LifecyclePublisher
from weir.services.router.fleet import Fleet, Load, WorkerInfo
from weir.services.router.generation import Generation
from weir.services.router.intake import Ask, Checked, Intake
from weir.services.router.links import Links
from weir.services.router.meters import Meters
from weir.services.router.models import ModelLoader
from weir.services.router.outliers import Outliers
from weir.services.router.prefixes import PrefixMap
from weir.services.router.sessions import LinkOwner
from weir.services.router.traces import RequestTraces, TraceRecord
from weir.services.router.view import load_of
from weir.services.router.wire import (
    BeginWriter,
    cancel_message,
    release_message,
    take_decode_news,
    take_prefill_news,
)

_log = logging.getLogger(__name__)

OnLeave = Callable[[Callable[[], None]], object]


@dataclass(frozen=True, slots=True)
class RouterParts:
    """What a Router is put together from; ``links`` makes the links, given their owner."""

    clock: Clock
    fleet: Fleet
    prefixes: PrefixMap
    book: RequestBook
    catalog: Catalog
    intake: Intake
    publisher: LifecyclePublisher
    meters: Meters
    traces: RequestTraces
    models: ModelLoader
    mint: RequestIdMint
    links: Callable[[LinkOwner], Links]
    request_timeout_s: float


class Router:
    """Takes requests, gives answers. All methods belong to one event loop; none blocks it."""

    def __init__(self, parts: RouterParts) -> None:
        self._clock = parts.clock
        self._fleet = parts.fleet
        self._prefixes = parts.prefixes
        self._outliers = Outliers()
        self._book = parts.book
        self._catalog = parts.catalog
        self._intake = parts.intake
        self._publisher = parts.publisher
        self._meters = parts.meters
        self._traces = parts.traces
        self._models = parts.models
        self._mint = parts.mint
        self._timeout_s = parts.request_timeout_s
        self._links = parts.links(self)
        self._begin = BeginWriter()
        self._generations: dict[str, Generation] = {}
        self._refusing = ""
        self._idle = asyncio.Event()
        self._idle.set()
        self._acting = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = NEVER_S
        self._do: dict[type, Callable[[Any], None]] = {
            Emit: self._emit,
            End: self._end,
            SendBeginPrefill: self._send_begin_prefill,
            SendBeginDecode: self._send_begin_decode,
            SendKvReady: self._send_kv_ready,
            SendFirstToken: self._send_first_token,
            SendCancel: self._send_cancel,
            SendRelease: self._send_release,
            PublishState: self._publisher.put,
            PublishCancel: self._publisher.put,
        }

    # for the doors

    async def generate(self, ask: Ask, *, on_leave: OnLeave | None = None) -> Generation:
        """Check, tokenise and admit ``ask``; then iterate the result: Accepted, Deltas, Final.

        Raises InvalidArgument, ResourceExhausted or Unavailable before anything is started. Later errors are
        raised by the iteration. ``on_leave`` is called once with a function to be called when the client has
        left (``lambda leave: context.add_done_callback(lambda _: leave())``); ``Generation.leave`` and
        ``aclose`` do the same. A request that nobody reads still runs to its end: leave it.
        """
        received_s = self._clock.monotonic_s()
        self._check_open()
        checked = await self._intake.check(ask)
        self._check_open()
        generation = self._start(ask, checked, received_s)
        if on_leave is not None:
            on_leave(generation.leave)
        return generation

    def cancel(self, request_id: str, reason: str = "cancelled by the client") -> bool:
        """Stop a request; whether it was running here. Its Generation raises RequestCancelled."""
        was_running = self._book.cancel(request_id, reason, self._clock.monotonic_s())
        self._act()
        return was_running

    def models(self) -> list[ModelInfo]:
        """Models that are served, by name."""
        return self._catalog.models()

    @property
    def fleet(self) -> Fleet:
        """The workers; to be read only."""
        return self._fleet

    def state(self) -> RouterState:
        """Requests, sessions and tasks now."""
        now_s = self._clock.monotonic_s()
        entries = self._book.entries()
        return RouterState(
            active_requests=len(entries),
            queued_requests=self._book.waiting,
            open_sessions=2 * self._links.up,
            tasks=len(asyncio.all_tasks()),
            ended=dict(self._book.ended),
            requests=tuple(
                ActiveRequest(
                    request_id=entry.request_id,
                    state=entry.state.value,
                    attempt=entry.attempt,
                    prefill_worker=entry.prefill_name,
                    decode_worker=entry.decode_name,
                    tokens_sent=len(entry.generated),
                    age_ms=(now_s - entry.stamps.received_s) * 1e3,
                )
                for entry in entries
            ),
        )

    def trace(self, request_id: str) -> TraceRecord:
        """The record of a request that has ended; "last" or empty is the last. Raises NotFound."""
        found = self._traces.find(request_id)
        if found is not None:
            return found
        state = (
            "this one is still running" if request_id in self._generations else f"{len(self._traces)} that have ended"
        )
        raise NotFound("trace of request", request_id or "last", state)

    def recent_traces(self, count: int) -> list[TraceRecord]:
        """The records of the ``count`` requests that ended last, the last one first."""
        return self._traces.recent(count)

    def unready_reason(self) -> str | None:
        """Why no request can be served now; None when one can."""
        if self._refusing:
            return self._refusing
        if not self._catalog.models():
            return "no model is known yet"
        if not any(view.usable for view in self._fleet):
            return "no worker is connected"
        return None

    def token_piece(self, model: str, token_id: int) -> bytes:
        """The bytes of one token of ``model``, special tokens spelled out."""
        return self._catalog.find(model).tokenizer.token_bytes(False)[token_id]

    def refresh_metrics(self) -> None:
        """Bring what is not counted as it happens up to date."""
        self._meters.refresh(self._book, self._fleet, self._links.up, self._clock.monotonic_s())

    def render_metrics(self) -> bytes:
        """The body of ``/metrics``."""
        self.refresh_metrics()
        return self._meters.metrics.render()

    # its life

    async def drain(self) -> None:
        """Take nothing new; return when all requests have ended."""
        self._refusing = "the router is draining"
        await self._idle.wait()

    async def close(self) -> None:
        """End what still runs, tell the workers, break the links. Idempotent."""
        self._refusing = "the router is stopping"
        self._book.close(self._clock.monotonic_s(), self._refusing)
        self._act()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._links.close()
        await self._models.close()
        await self._publisher.close()

    def _check_open(self) -> None:
        if self._refusing:
            raise Unavailable(self._refusing)

    def _start(self, ask: Ask, checked: Checked, received_s: float) -> Generation:
        now_s = self._clock.monotonic_s()
        timeout_s = self._timeout_s if ask.timeout_s is None else ask.timeout_s
        if now_s - received_s >= timeout_s:
            raise DeadlineExceeded(f"{timeout_s:.3f} s passed before the request was admitted")
        request_id = self._mint.mint()
        created_unix_s = self._clock.unix_s() - (now_s - received_s)
        generation = Generation(
            Accepted(request_id, len(checked.prompt), checked.model.name, created_unix_s),
            checked.sampling,
            IncrementalDetokenizer(checked.model.tokenizer, checked.prompt),
            partial(self.cancel, request_id, "the client left"),
        )
        trace = generation.trace = self._traces.open(ask, checked.sampling.max_tokens, received_s)
        admission = Admission(
            request_id=request_id,
            model=checked.model.name,
            prompt=checked.prompt,
            sampling=checked.sampling,
            received_s=received_s,
            deadline_s=received_s + timeout_s,
            tenant=ask.tenant,
            tenant_salt=checked.tenant_salt,
            priority=ask.priority,
            traceparent=trace.span.traceparent,
            slo_ttft_ms=checked.slo_ttft_ms,
            slo_tpot_ms=checked.slo_tpot_ms,
        )
        try:
            self._book.admit(admission, now_s)
            self._generations[request_id] = generation
            self._idle.clear()
        except WeirError as error:
            self._traces.refused(trace, generation.accepted, error)
            raise
        finally:
            self._act()
        return generation

    # driving the book

    def _act(self) -> None:
        """Do what the book asks, until it asks nothing more."""
        if self._acting:
            return
        self._acting = True
        try:
            while commands := self._book.drain():
                self._do_all(commands)
        finally:
            self._acting = False
        self._arm()

    def _do_all(self, commands: list[Command]) -> None:
        do = self._do
        for command in commands:
            do[type(command)](command)

    def _arm(self) -> None:
        due_s = self._book.next_due_s()
        if due_s >= self._timer_due_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due_s = due_s
        wait_s = max(0.0, due_s - self._clock.monotonic_s())
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._timer_due_s = NEVER_S
        self._book.tick(self._clock.monotonic_s())
        self._act()

    def _emit(self, command: Emit) -> None:
        generation = self._generations[command.request_id]
        now_s = self._clock.monotonic_s()
        if generation.last_token_s:
            self._meters.gap(generation.accepted.model, len(self._generations), now_s - generation.last_token_s)
        generation.last_token_s = now_s
        try:
            stopped = generation.push(command.tokens, command.logprobs)
        except Exception:
            _log.exception("tokens of %s cannot be made into text", command.request_id)
            self._book.cancel(command.request_id, "internal error", now_s)
            return
        if stopped is not None:
            taken, stop_string = stopped
            self._book.stop(command.request_id, command.first_index + taken, stop_string, now_s)

    def _end(self, command: End) -> None:
        generation = self._generations.pop(command.request_id)
        if not self._generations:
            self._idle.set()
        self._meters.ended(command, generation.accepted.model, len(self._generations) + 1)
        reason, usage = command.finish_reason, command.usage
        if command.error is not None:
            self._traces.ended(generation.trace, generation.accepted, command, reason, usage)
            generation.finish(command.error)
            return
        stop_string = generation.flush()
        if stop_string:
            reason = FinishReason.STOP
            usage = replace(usage, completion_tokens=generation.tokens_taken)
        self._traces.ended(generation.trace, generation.accepted, command, reason, usage)
        generation.finish(Final(reason, stop_string, usage, command.timings))

    # commands to workers: a link that is down needs none, the book hears ``lost``

    def _send_begin_prefill(self, command: SendBeginPrefill) -> None:
        link = self._links.get(command.worker)
        size = len(command.admission.prompt) + len(command.generated)
        message = link.prefill_message(size) if link is not None else None
        if message is not None:
            message.begin.append(self._begin.prefill(command))

    def _send_begin_decode(self, command: SendBeginDecode) -> None:
        source: kv_pb2.PeerDescriptor | None = None
        if command.source is not None:
            peer = self._links.get(command.source)
            source = peer.descriptor if peer is not None else None
            if source is None:
                return  # its link is gone: the book is about to hear it, and to begin anew
        link = self._links.get(command.worker)
        size = len(command.admission.prompt) + len(command.generated)
        message = link.decode_message(size) if link is not None else None
        if message is not None:
            message.begin.append(self._begin.decode(command, source))

    def _send_kv_ready(self, command: SendKvReady) -> None:
        message = self._decode_message(command.worker)
        if message is not None:
            message.kv_ready.append(command.ticket)

    def _send_first_token(self, command: SendFirstToken) -> None:
        message = self._decode_message(command.worker)
        if message is not None:
            message.first_tokens.append(command.token)

    def _send_cancel(self, command: SendCancel) -> None:
        link = self._links.get(command.worker)
        if link is None:
            return
        message = link.prefill_message() if command.prefill else link.decode_message()
        if message is not None:
            message.cancel.append(cancel_message(command))

    def _send_release(self, command: SendRelease) -> None:
        link = self._links.get(command.worker)
        message = link.prefill_message() if link is not None else None
        if message is not None:
            message.release.append(release_message(command))

    def _decode_message(self, worker: WorkerKey) -> decode_pb2.DecodeServiceSessionRequest | None:
        link = self._links.get(worker)
        return link.decode_message() if link is not None else None

    # LinkOwner

    def connected(self, worker: WorkerKey, welcome: prefill_pb2.SessionWelcome) -> None:
        """See LinkOwner."""
        view = self._fleet.get(worker)
        if view is None:
            return
        view.connected = True
        view.heard_s = self._clock.monotonic_s()
        if welcome.role_epoch > view.info.role_epoch:
            view.info = replace(view.info, role=role_from_pb(welcome.role), role_epoch=welcome.role_epoch)
        self._fleet_changed()

    def lost(self, worker: WorkerKey, reason: str) -> None:
        """See LinkOwner."""
        self._book.worker_lost(worker, self._clock.monotonic_s())
        view = self._fleet.get(worker)
        if view is not None and not view.listed:
            self._remove(worker)
        self._act()

    def prefill_news(self, worker: WorkerKey, message: prefill_pb2.PrefillServiceSessionResponse) -> None:
        """See LinkOwner."""
        now_s = self._clock.monotonic_s()
        self._fleet.heard(worker, now_s)
        take_prefill_news(self._book, worker, message, now_s)
        if message.HasField("load"):
            self._take_load(worker, load_of(message.load), now_s)
        self._act()

    def decode_news(self, worker: WorkerKey, message: decode_pb2.DecodeServiceSessionResponse) -> None:
        """See LinkOwner."""
        now_s = self._clock.monotonic_s()
        self._fleet.heard(worker, now_s)
        take_decode_news(self._book, worker, message, now_s)
        if message.HasField("load"):
            self._take_load(worker, load_of(message.load), now_s)
        self._act()

    # ViewOwner

    def worker_listed(self, info: WorkerInfo, record: events_pb2.WorkerRecord) -> None:
        """See ViewOwner."""
        view = self._fleet.put(info)
        view.heard_s = self._clock.monotonic_s()
        self._links.want(info.key, info.address)
        # A link may have come up while the worker was not listed: nobody will say so again.
        link = self._links.get(info.key)
        view.connected = link is not None and link.up
        self._models.learn(record, self._clock.unix_s())
        self._fleet_changed()

    def worker_gone(self, worker: WorkerKey) -> None:
        """See ViewOwner."""
        view = self._fleet.get(worker)
        if view is None:
            return
        view.listed = False
        if not view.connected:
            self._remove(worker)
        self._links.unwant(worker)

    def load_reported(self, worker: WorkerKey, load: Load) -> None:
        """See ViewOwner."""
        self._take_load(worker, load, self._clock.monotonic_s())
        self._act()

    def blocks_changed(self, worker: WorkerKey, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """See ViewOwner."""
        self._prefixes.removed(worker, removed)
        if self._fleet.get(worker) is not None:
            self._prefixes.stored(worker, stored)

    def blocks_unknown(self, worker: WorkerKey) -> None:
        """See ViewOwner. The worker is asked for all that its cache has."""
        self._prefixes.forget(worker)
        link = self._links.get(worker)
        if link is not None:
            link.ask_blocks()

    def blocks_listed(self, worker: WorkerKey, hashes: Sequence[bytes]) -> None:
        """See LinkOwner."""
        self.blocks_changed(worker, hashes, ())

    def cancel_seen(self, request_id: str, reason: str) -> None:
        """See ViewOwner."""
        if request_id in self._generations:
            self.cancel(request_id, reason or "cancelled")

    def advised(self, advice: Advice) -> None:
        """See ViewOwner."""
        self._fleet.counsel.take(advice, self._clock.monotonic_s())

    def stale_changed(self, stale: bool) -> None:
        """See ViewOwner."""
        self._fleet.stale = stale

    def _take_load(self, worker: WorkerKey, load: Load, now_s: float) -> None:
        view = self._fleet.get(worker)
        if view is None:
            return
        view.heard_s = now_s
        if view.take_report(load, now_s):
            self._outliers.look(view.info.model, self._fleet.serving(view.info.model), now_s)
            self._book.fleet_changed(now_s)

    def _remove(self, worker: WorkerKey) -> None:
        self._fleet.remove(worker)
        self._prefixes.forget(worker)

    def _fleet_changed(self) -> None:
        self._book.fleet_changed(self._clock.monotonic_s())
        self._act()
