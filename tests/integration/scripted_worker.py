"""A worker without an engine, over real gRPC: its next token is a function of all tokens before it.

Both services, all requests of one session each. ``hold_prefill`` and ``hold_decode_at`` stop it at a chosen
moment; ``refuse_decode`` and ``void_reads`` make it refuse or doubt. ``left`` is what it still has of anybody.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from weir.events.registry import Registry
from weir.ids import WorkerKey
from weir.lifecycle import Role
from weir.rpc.convert import fingerprint_to_pb, role_to_pb
from weir.rpc.limits import RpcLimits, server_options
from weir.rpc.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    events_pb2,
    kv_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from weir.transfer.fingerprint import Fingerprint

MODEL = "toy"
BLOCK_SIZE = 4
FINGERPRINT = Fingerprint(
    "w", "LlamaForCausalLM", "float32", "float32", 1, 1, 8, BLOCK_SIZE, 1, "tokenizer", "", "rope"
)  # fmt: skip

Message = Any


def next_token(context: Sequence[int]) -> int:
    """Depends on every token and its place; never an end-of-sequence token."""
    return sum((place + 7) * (token + 3) for place, token in enumerate(context)) % 200


def expected(prompt: Sequence[int], tokens: int) -> list[int]:
    """What a worker answers to ``prompt``."""
    context = list(prompt)
    for _ in range(tokens):
        context.append(next_token(context))
    return context[len(prompt) :]


@dataclass
class Running:
    """A request on the decode side."""

    begin: decode_pb2.BeginDecode
    context: list[int]
    final_ticket: bool = False
    read: bool = False
    started: bool = False


@dataclass
class Script:
    """What the worker does at which moment."""

    hold_prefill: bool = False
    hold_decode_at: int = 1 << 30
    refuse_decode: int = 0
    void_reads: int = 0
    logprobs: bool = False
    end_at: int = 1 << 30
    begun: list[Message] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    released: list[int] = field(default_factory=list)


class Outlet:
    """Messages to one router on one stream."""

    def __init__(self, new: Callable[[], Message]) -> None:
        self._new = new
        self.message = new()
        self.wake = asyncio.Event()
        self.closed = False

    def take(self) -> Message:
        message, self.message = self.message, self._new()
        return message


class ScriptedWorker(
    prefill_pb2_grpc.PrefillServiceServicer,
    decode_pb2_grpc.DecodeServiceServicer,
    worker_pb2_grpc.WorkerServiceServicer,
):
    """``start`` serves and registers; ``kill`` is what SIGKILL would look like."""

    def __init__(self, name: str, role: Role, registry: Registry, incarnation: int = 1) -> None:
        self.key = WorkerKey(name, incarnation)
        self.role = role
        self.script = Script()
        self.changed = asyncio.Event()
        self.address = ""
        self.profile: events_pb2.WorkerProfile | None = None
        self.cached: list[bytes] = []
        """Hashes of blocks that it says its cache has."""
        self._registry = registry
        self._server = grpc.aio.server(options=server_options(RpcLimits()))
        self._prefills: dict[tuple[str, int], prefill_pb2.BeginPrefill] = {}
        self._leases: dict[tuple[str, int], int] = {}
        self._sequences: dict[tuple[str, int], Running] = {}
        self._prefill_out: Outlet | None = None
        self._decode_out: Outlet | None = None
        self._last_lease = 0

    @property
    def left(self) -> int:
        """Prefills, leases and sequences that it still holds."""
        return len(self._prefills) + len(self._leases) + len(self._sequences)

    async def start(self) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, self._server)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, self._server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await self._server.start()
        await self.register()

    async def register(self, *, draining: bool = False) -> None:
        await self._registry.put(
            events_pb2.WorkerRecord(
                worker_id=self.key.worker_id,
                incarnation=self.key.incarnation,
                role=role_to_pb(self.role),
                role_epoch=1 + draining,
                address=self.address,
                draining=draining,
                model=MODEL,
                fingerprint=fingerprint_to_pb(FINGERPRINT),
                num_blocks=64,
                block_size=BLOCK_SIZE,
                context_tokens=200,
                profile=self.profile,
            )
        )

    async def ListBlocks(self, request: worker_pb2.ListBlocksRequest, context: object) -> worker_pb2.ListBlocksResponse:
        return worker_pb2.ListBlocksResponse(hashes=self.cached)

    async def kill(self) -> None:
        """Gone at once: streams break, nobody is told."""
        await self._server.stop(None)
        self._prefills.clear()
        self._leases.clear()
        self._sequences.clear()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something to become true of this worker."""
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def go_on(self) -> None:
        """Hold nothing any more."""
        self.script.hold_prefill = False
        self.script.hold_decode_at = 1 << 30
        self._run()

    def close_stream(self, *, prefill: bool) -> None:
        """End one stream in order, after what it still has to say."""
        outlet = self._prefill_out if prefill else self._decode_out
        assert outlet is not None
        outlet.closed = True
        outlet.wake.set()

    # sessions

    def _welcome(self) -> prefill_pb2.SessionWelcome:
        return prefill_pb2.SessionWelcome(
            worker_id=self.key.worker_id,
            incarnation=self.key.incarnation,
            role=role_to_pb(self.role),
            role_epoch=1,
            descriptor=kv_pb2.PeerDescriptor(worker_id=self.key.worker_id, incarnation=self.key.incarnation),
            model=MODEL,
            context_tokens=200,
        )

    async def Session(self, requests: AsyncIterator[Message], context: Any) -> AsyncIterator[Message]:
        """Both services call it so; the hello's type says which one this is."""
        first = await anext(requests)
        assert first.HasField("hello")
        prefill = isinstance(first, prefill_pb2.PrefillServiceSessionRequest)
        new = prefill_pb2.PrefillServiceSessionResponse if prefill else decode_pb2.DecodeServiceSessionResponse
        outlet = Outlet(new)
        if prefill:
            self._prefill_out = outlet
        else:
            self._decode_out = outlet
        yield new(welcome=self._welcome())
        take = self._take_prefill if prefill else self._take_decode
        reader = asyncio.create_task(self._read(requests, take))
        try:
            while not outlet.closed:
                await outlet.wake.wait()
                outlet.wake.clear()
                yield outlet.take()
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[Message], take: Callable[[Message], None]) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for message in requests:
                take(message)
                self._run()

    # commands

    def _take_prefill(self, message: prefill_pb2.PrefillServiceSessionRequest) -> None:
        for begin in message.begin:
            self.script.begun.append(begin)
            self._prefills[begin.request_id, begin.attempt] = begin
            self._tell_started(begin)
        for cancel in message.cancel:
            self.script.cancelled.append(cancel.request_id)
            self._prefills.pop((cancel.request_id, cancel.attempt), None)
            self._leases.pop((cancel.request_id, cancel.attempt), None)
        for release in message.release:
            self.script.released.append(release.lease_id)
            self._leases.pop((release.request_id, release.attempt), None)

    def _take_decode(self, message: decode_pb2.DecodeServiceSessionRequest) -> None:
        for begin in message.begin:
            self._begin_decode(begin)
        for ready in message.kv_ready:
            sequence = self._sequences.get((ready.ticket.request_id, ready.ticket.attempt))
            if sequence is not None and ready.ticket.final:
                sequence.final_ticket = True
        for first in message.first_tokens:
            sequence = self._sequences.get((first.request_id, first.attempt))
            if sequence is not None:
                sequence.context.append(first.token_id)
                sequence.started = True
        for cancel in message.cancel:
            self.script.cancelled.append(cancel.request_id)
            self._sequences.pop((cancel.request_id, cancel.attempt), None)

    def _begin_decode(self, begin: decode_pb2.BeginDecode) -> None:
        self.script.begun.append(begin)
        if self.script.refuse_decode > 0:
            self.script.refuse_decode -= 1
            assert self._decode_out is not None
            self._decode_out.message.ended.add(
                request_id=begin.request_id, attempt=begin.attempt, code="RESOURCE_EXHAUSTED", message="no room"
            )
            self._decode_out.wake.set()
            return
        local = begin.kv_source == decode_pb2.KV_SOURCE_LOCAL
        context = [*begin.prompt_token_ids, *begin.generated_token_ids]
        self._sequences[begin.request_id, begin.attempt] = Running(begin, context, read=local, started=local)

    def _tell_started(self, begin: prefill_pb2.BeginPrefill) -> None:
        out = self._prefill_out
        assert out is not None
        out.message.started.add(request_id=begin.request_id, attempt=begin.attempt, queue_ms=0.25)
        out.wake.set()

    # work

    def _run(self) -> None:
        """Do all that can be done now, one token of each sequence at a time."""
        if not self.script.hold_prefill:
            for key in list(self._prefills):
                self._prefill(self._prefills.pop(key))
        while sum(self._decode(key) for key in list(self._sequences)):
            pass
        self.changed.set()

    def _prefill(self, begin: prefill_pb2.BeginPrefill) -> None:
        out = self._prefill_out
        assert out is not None
        key: dict[str, Any] = {"request_id": begin.request_id, "attempt": begin.attempt}
        context = [*begin.prompt_token_ids, *begin.generated_token_ids]
        self._last_lease += 1
        self._leases[begin.request_id, begin.attempt] = self._last_lease
        blocks = -(-len(context) // BLOCK_SIZE)
        for final in (False, True):
            out.message.kv_ready.add(
                ticket=kv_pb2.KvTicket(
                    **key, lease_id=self._last_lease, source_worker_id=self.key.worker_id,
                    source_incarnation=self.key.incarnation, blocks=range(blocks), num_tokens=len(context),
                    final=final,
                )
            )  # fmt: skip
        first = out.message.first_tokens.add(
            **key, token_id=next_token(context), index=len(begin.generated_token_ids), prefill_ms=0.5,
            computed_tokens=len(context),
        )  # fmt: skip
        if begin.sampling.HasField("logprobs"):
            first.logprobs.chosen.token_id = first.token_id
            first.logprobs.chosen.logprob = -0.5
        out.wake.set()

    def _decode(self, key: tuple[str, int]) -> bool:
        """One step of a sequence; whether it did anything."""
        sequence, out = self._sequences.get(key), self._decode_out
        assert out is not None
        if sequence is None:
            return False
        if not sequence.read and sequence.final_ticket:
            return self._finish_read(key, sequence, out)
        generated = len(sequence.context) - len(sequence.begin.prompt_token_ids)
        if not sequence.read or not sequence.started or generated >= self.script.hold_decode_at:
            return False
        token = next_token(sequence.context)
        sequence.context.append(token)
        last = generated + 1 >= min(sequence.begin.sampling.max_tokens, self.script.end_at)
        batch = out.message.tokens.add(
            request_id=key[0], attempt=key[1], first_index=generated, token_ids=[token], prefill_ms=0.5
        )
        if sequence.begin.sampling.HasField("logprobs"):
            entry = batch.logprobs.add()
            entry.chosen.token_id, entry.chosen.logprob = token, -0.25
        if last:
            batch.finish_reason = common_pb2.FINISH_REASON_LENGTH
            del self._sequences[key]
            out.message.ended.add(request_id=key[0], attempt=key[1], code="OK")
        out.wake.set()
        return True

    def _finish_read(self, key: tuple[str, int], sequence: Running, out: Outlet) -> bool:
        void = self.script.void_reads > 0
        self.script.void_reads -= void
        sequence.read = not void
        sequence.final_ticket = False
        out.message.started.add(request_id=key[0], attempt=key[1])
        out.message.kv_reads.add(
            request_id=key[0], attempt=key[1], void_reason="checksum" if void else "",
            timings=common_pb2.KvReadTimings(bytes=4096, transport="memory"),
        )  # fmt: skip
        out.wake.set()
        return True
