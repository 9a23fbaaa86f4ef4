"""Workers without a model, for measuring the router alone: a process of its own.

    python -m weir.bench.mock_workers --nats URL --model NAME --step-ms 5

Speaks the session protocol as one prefill and one decode worker do: one message a step with every request's news.
Prefill takes no time; each step gives every sequence a token. Also serves RouterService itself, the same answers
without a router, which is what a client's own cost is measured with, and takes spans as a collector does. Prints
``READY mock door=HOST:PORT``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from weir.clock import SystemClock
from weir.config import NatsConfig
from weir.events.nats_link import NatsLink
from weir.events.nats_registry import NatsRegistry
from weir.rpc.limits import RpcLimits, server_options
from weir.rpc.server import install_stop_signals
from weir.rpc.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    events_pb2,
    kv_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
)

BLOCK_SIZE = 16
CONTEXT_TOKENS = 8192
BLOCKS = 1 << 16
HEARTBEAT_S = 1.0
FIRST_TOKEN_ID = 1000
TOKEN_IDS = 20_000
HOST = "127.0.0.1"
EXPORT_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


def token(index: int) -> int:
    """The token at ``index`` of every answer: an ordinary one."""
    return FIRST_TOKEN_ID + index % TOKEN_IDS


class Outlet:
    """The message that the next step sends to one router."""

    def __init__(self, new: type[Any]) -> None:
        self._new = new
        self.message = new()
        self.wake = asyncio.Event()

    async def take(self) -> Any:
        """The message, once something is in it."""
        await self.wake.wait()
        self.wake.clear()
        message, self.message = self.message, self._new()
        return message


@dataclass(slots=True)
class Sequence:
    """A request on the decode side; it steps once its KV is complete and its first token is known.

    With a local prefill both are so from the start.
    """

    attempt: int
    max_tokens: int
    generated: int
    kv_here: bool
    first_here: bool


class MockPrefill(prefill_pb2_grpc.PrefillServiceServicer):
    """Answers every prompt at once with a ticket and a first token."""

    def __init__(self, welcome: prefill_pb2.SessionWelcome) -> None:
        self._welcome = welcome
        self._leases = itertools.count(1)

    async def Session(
        self, requests: AsyncIterator[prefill_pb2.PrefillServiceSessionRequest], context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillServiceSessionResponse]:
        outlet = Outlet(prefill_pb2.PrefillServiceSessionResponse)
        yield prefill_pb2.PrefillServiceSessionResponse(welcome=self._welcome)
        async with _reading(requests, lambda message: self._take(message, outlet)):
            while True:
                yield await outlet.take()

    def _take(self, message: prefill_pb2.PrefillServiceSessionRequest, outlet: Outlet) -> None:
        for begin in message.begin:
            key: dict[str, Any] = {"request_id": begin.request_id, "attempt": begin.attempt}
            tokens = len(begin.prompt_token_ids) + len(begin.generated_token_ids)
            blocks = range(-(-tokens // BLOCK_SIZE))
            out = outlet.message
            out.started.add(**key)
            ticket = out.kv_ready.add().ticket
            ticket.MergeFrom(
                kv_pb2.KvTicket(
                    **key, lease_id=next(self._leases), source_worker_id=self._welcome.worker_id,
                    source_incarnation=self._welcome.incarnation, blocks=blocks, generations=[1] * len(blocks),
                    num_tokens=tokens, final=True,
                )
            )  # fmt: skip
            index = len(begin.generated_token_ids)
            done = index + 1 >= begin.sampling.max_tokens
            reason = common_pb2.FINISH_REASON_LENGTH if done else common_pb2.FINISH_REASON_UNSPECIFIED
            out.first_tokens.add(
                **key, token_id=token(index), index=index, computed_tokens=tokens, finish_reason=reason
            )
            if done:
                out.ended.add(**key, code="OK")
            outlet.wake.set()


class MockDecode(decode_pb2_grpc.DecodeServiceServicer):
    """Gives each sequence one token a step."""

    def __init__(self, welcome: prefill_pb2.SessionWelcome, step_s: float) -> None:
        self._welcome = welcome
        self._step_s = step_s

    async def Session(
        self, requests: AsyncIterator[decode_pb2.DecodeServiceSessionRequest], context: Any
    ) -> AsyncIterator[decode_pb2.DecodeServiceSessionResponse]:
        outlet = Outlet(decode_pb2.DecodeServiceSessionResponse)
        running: dict[str, Sequence] = {}
        yield decode_pb2.DecodeServiceSessionResponse(welcome=self._welcome)
        stepping = asyncio.create_task(self._step_for_ever(running, outlet))
        try:
            async with _reading(requests, lambda message: self._take(message, running, outlet)):
                while True:
                    yield await outlet.take()
        finally:
            stepping.cancel()

    def _take(
        self, message: decode_pb2.DecodeServiceSessionRequest, running: dict[str, Sequence], outlet: Outlet
    ) -> None:
        for begin in message.begin:
            local = begin.kv_source == decode_pb2.KV_SOURCE_LOCAL
            done = len(begin.generated_token_ids)
            running[begin.request_id] = Sequence(begin.attempt, begin.sampling.max_tokens, done, local, local)
            if local:
                outlet.message.started.add(request_id=begin.request_id, attempt=begin.attempt)
                outlet.wake.set()
        for ready in message.kv_ready:
            ticket = ready.ticket
            sequence = running.get(ticket.request_id)
            if sequence is not None and ticket.final:
                sequence.kv_here = True
                outlet.message.started.add(request_id=ticket.request_id, attempt=ticket.attempt)
                outlet.message.kv_reads.add(
                    request_id=ticket.request_id, attempt=ticket.attempt, lease_id=ticket.lease_id
                )
                outlet.wake.set()
        for first in message.first_tokens:
            if first.request_id in running:
                running[first.request_id].generated = first.index + 1
                running[first.request_id].first_here = True
        for cancel in message.cancel:
            running.pop(cancel.request_id, None)

    async def _step_for_ever(self, running: dict[str, Sequence], outlet: Outlet) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            for request_id, sequence in list(running.items()):
                if sequence.kv_here and sequence.first_here:
                    self._advance(request_id, sequence, running, outlet)

    def _advance(self, request_id: str, sequence: Sequence, running: dict[str, Sequence], outlet: Outlet) -> None:
        index = sequence.generated
        sequence.generated += 1
        batch = outlet.message.tokens.add(
            request_id=request_id, attempt=sequence.attempt, first_index=index, token_ids=(token(index),)
        )
        if sequence.generated >= sequence.max_tokens:
            batch.finish_reason = common_pb2.FINISH_REASON_LENGTH
            outlet.message.ended.add(request_id=request_id, attempt=sequence.attempt, code="OK")
            del running[request_id]
        outlet.wake.set()


class MockDoor(router_pb2_grpc.RouterServiceServicer):
    """The same answers straight to a client, at the same pace."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    async def Generate(
        self, request: router_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        answer = router_pb2.GenerateResponse
        prompt, wanted = len(request.tokens.token_ids), request.sampling.max_tokens
        yield answer(accepted=answer.Accepted(request_id="r-mock", prompt_tokens=prompt, model=request.model))
        for index in range(wanted):
            if index:
                await asyncio.sleep(self._step_s)
            yield answer(delta=answer.Delta(text=" word", token_ids=(token(index),), first_index=index))
        usage = common_pb2.Usage(prompt_tokens=prompt, completion_tokens=wanted)
        yield answer(final=answer.Final(finish_reason=common_pb2.FINISH_REASON_LENGTH, usage=usage))


if TYPE_CHECKING:
    _GenericRpcHandler = grpc.GenericRpcHandler[Any, Any]
else:  # generic in the type stubs only
    _GenericRpcHandler = grpc.GenericRpcHandler


class SpanSink(_GenericRpcHandler):
    """A collector of traces that throws them away, unread."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See GenericRpcHandler."""
        if handler_call_details.method != EXPORT_METHOD:
            return None
        return grpc.unary_unary_rpc_method_handler(_take_spans)


async def _take_spans(request: bytes, context: Any) -> bytes:
    return b""  # an ExportTraceServiceResponse without a complaint


@contextlib.asynccontextmanager
async def _reading(requests: AsyncIterator[Any], take: Any) -> AsyncIterator[None]:
    async def read() -> None:
        with contextlib.suppress(grpc.RpcError):
            async for message in requests:
                take(message)

    task = asyncio.create_task(read())
    try:
        yield
    finally:
        task.cancel()


def _records(model: str, addresses: dict[common_pb2.Role, str]) -> Iterator[events_pb2.WorkerRecord]:
    for role, address in addresses.items():
        yield events_pb2.WorkerRecord(
            worker_id=_worker_id(role), incarnation=1, role=role, role_epoch=1, address=address, model=model,
            fingerprint=kv_pb2.KvFingerprint(weights="mock", block_size=BLOCK_SIZE, tp_degree=1),
            num_blocks=BLOCKS, block_size=BLOCK_SIZE, context_tokens=CONTEXT_TOKENS, max_running=4096,
        )  # fmt: skip


def _worker_id(role: common_pb2.Role) -> str:
    return "prefill-mock" if role == common_pb2.ROLE_PREFILL else "decode-mock"


def _welcome(role: common_pb2.Role, model: str) -> prefill_pb2.SessionWelcome:
    descriptor = kv_pb2.PeerDescriptor(worker_id=_worker_id(role), incarnation=1)
    return prefill_pb2.SessionWelcome(
        worker_id=_worker_id(role), incarnation=1, role=role, role_epoch=1, descriptor=descriptor, model=model,
        context_tokens=CONTEXT_TOKENS,
    )  # fmt: skip


async def _serve(nats_url: str, model: str, step_s: float, stop: asyncio.Event) -> None:
    link = await NatsLink.connect(NatsConfig(url=nats_url), name="mock-workers")
    registry = await NatsRegistry.open(link, SystemClock())
    servers: list[grpc.aio.Server] = []
    addresses: dict[common_pb2.Role, str] = {}
    for role in (common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE):
        server = grpc.aio.server(options=server_options(RpcLimits()))
        welcome = _welcome(role, model)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(MockPrefill(welcome), server)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(MockDecode(welcome, step_s), server)
        if role == common_pb2.ROLE_PREFILL:
            router_pb2_grpc.add_RouterServiceServicer_to_server(MockDoor(step_s), server)
            server.add_generic_rpc_handlers((SpanSink(),))
        addresses[role] = f"{HOST}:{server.add_insecure_port(f'{HOST}:0')}"
        await server.start()
        servers.append(server)
    try:
        print(f"READY mock door={addresses[common_pb2.ROLE_PREFILL]}", flush=True)
        while not stop.is_set():
            for record in _records(model, addresses):
                await registry.put(record)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), HEARTBEAT_S)
    finally:
        await asyncio.gather(*(server.stop(0.0) for server in servers))
        await registry.close()
        await link.close()


async def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m weir.bench.mock_workers")
    parser.add_argument("--nats", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--step-ms", type=float, default=5.0)
    given = parser.parse_args()
    stop = asyncio.Event()
    install_stop_signals(stop)
    await _serve(given.nats, given.model, given.step_ms / 1e3, stop)


if __name__ == "__main__":
    asyncio.run(_main())
