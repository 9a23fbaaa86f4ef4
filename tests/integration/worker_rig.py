"""Workers in this process, reached over real gRPC, with an in-memory KV fabric; and a router that a test drives."""

import asyncio
import functools
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from tests.unit.worker.pool_model import PoolRunner, make_parts
from weir.clock import SystemClock
from weir.config import WorkerConfig
from weir.events.memory import MemoryBus, MemoryRegistry, MemoryServer
from weir.ids import WorkerKey, mint_incarnation
from weir.lifecycle import Role
from weir.rpc.channel import channel
from weir.rpc.server import RpcServer
from weir.rpc.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    kv_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from weir.services.worker.host import WorkerEdges, WorkerHost
from weir.telemetry.spans import Tracer
from weir.transfer.local import LocalFabric, LocalTransfer

PATIENCE_S = 15.0
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined, unused-ignore]


@dataclass
class Bench:
    """What the workers of one test share."""

    fabric: LocalFabric = field(default_factory=LocalFabric)
    events: MemoryServer = field(default_factory=MemoryServer)


@dataclass
class RemoteWorker:
    """A worker, wherever it runs."""

    channel: grpc.aio.Channel

    @property
    def admin(self) -> Any:
        """Its WorkerService."""
        return worker_pb2_grpc.WorkerServiceStub(self.channel)

    async def state(self, *, check_integrity: bool = False) -> worker_pb2.GetStateResponse:
        """Its state."""
        answer: worker_pb2.GetStateResponse = await self.admin.GetState(
            worker_pb2.GetStateRequest(check_integrity=check_integrity)
        )
        return answer

    async def at_baseline(self) -> None:
        """Return when nothing of any request is left; fails with the state when that does not come."""
        state = None
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not _is_baseline(state := await self.state()):  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"not at baseline:\n{state}") from None
        await self.state(check_integrity=True)


@dataclass
class RunningWorker(RemoteWorker):
    """A worker of this process."""

    host: WorkerHost
    server: RpcServer
    runner: PoolRunner


def _is_baseline(state: worker_pb2.GetStateResponse) -> bool:
    load = state.load
    idle = load.blocks.free + load.blocks.cached == load.blocks.total > 0
    return idle and load.running == load.waiting == load.open_leases == load.outstanding_reads == 0


@asynccontextmanager
async def running_worker(
    bench: Bench, role: Role, worker_id: str, *, tracer: Tracer | None = None, **settings: Any
) -> AsyncIterator[RunningWorker]:
    """A worker with the pool model. Leaves nothing behind, and checks that the step thread did not die."""
    given: dict[str, Any] = {"num_blocks": 128, "session_grace_s": 0.05, "load_report_s": 0.01, "heartbeat_s": 0.2}
    config = WorkerConfig(role=role, worker_id=worker_id, **{**given, **settings})
    clock = SystemClock()
    parts, runner = make_parts(config, clock)
    key = WorkerKey(worker_id, mint_incarnation(random.SystemRandom().getrandbits))
    transfer = LocalTransfer(bench.fabric, parts.pool, key, parts.fingerprint, clock=clock)
    bus, registry = MemoryBus(bench.events), MemoryRegistry(bench.events, clock)
    host = WorkerHost(key, config, parts, WorkerEdges(transfer, bus, registry), clock, tracer=tracer)
    server = RpcServer(name="worker", bind="127.0.0.1:0", reflection=False)
    await server.start(host.register)
    try:
        await host.start(server.address)
        await server.set_ready(True)
        async with channel(server.address) as opened:
            yield RunningWorker(opened, host, server, runner)
    finally:
        runner.gate.set()
        await server.stop(0)
        await host.close()
        await registry.close()
        await bus.close()


class Session:
    """One stream to a worker; messages are kept in order and looked for by predicate."""

    def __init__(self, call: Any, hello: Any) -> None:
        self._call = call
        self._hello = hello
        self.seen: list[Any] = []
        self.error: BaseException | None = None
        self._arrived = asyncio.Condition()
        self._writing = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None

    async def open(self) -> prefill_pb2.SessionWelcome:
        """Say hello; the worker's welcome."""
        await self._call.write(self._hello)
        first = await self._call.read()
        self._reader = asyncio.create_task(self._read())
        welcome: prefill_pb2.SessionWelcome = first.welcome
        return welcome

    async def _read(self) -> None:
        try:
            while (message := await self._call.read()) is not _EOF:
                async with self._arrived:
                    self.seen.append(message)
                    self._arrived.notify_all()
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            async with self._arrived:
                self.error = error
                self._arrived.notify_all()

    async def send(self, message: Any) -> None:
        """Write one message."""
        async with self._writing:
            await self._call.write(message)

    async def expect(self, find: Callable[[Any], Any]) -> Any:
        """The first truthy ``find(message)`` over all messages, seen or to come."""
        looked = 0
        try:
            async with asyncio.timeout(PATIENCE_S), self._arrived:
                while True:
                    for message in self.seen[looked:]:
                        if found := find(message):
                            return found
                    looked = len(self.seen)
                    await self._arrived.wait()
        except TimeoutError:
            raise AssertionError(f"not among {self.seen}") from None

    async def ended(self, request_id: str, attempt: int = 1) -> prefill_pb2.AttemptEnded:
        """The end of an attempt."""

        def find(message: Any) -> Any:
            matching = [e for e in message.ended if e.request_id == request_id and e.attempt == attempt]
            return matching[0] if matching else None

        over: prefill_pb2.AttemptEnded = await self.expect(find)
        return over

    async def close(self) -> None:
        """Cancel the stream, as a router that dies."""
        self._call.cancel()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)


async def eventually(true: Callable[[], bool]) -> None:
    """Return when a condition on the state of this process holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def prefill_session(worker: RemoteWorker, router_id: str = "router") -> Session:
    """A session with a worker's prefill side."""
    hello = prefill_pb2.PrefillServiceSessionRequest(hello=prefill_pb2.SessionHello(router_id=router_id))
    session = Session(prefill_pb2_grpc.PrefillServiceStub(worker.channel).Session(), hello)
    await session.open()
    return session


async def decode_session(worker: RemoteWorker, router_id: str = "router") -> Session:
    """A session with a worker's decode side."""
    hello = decode_pb2.DecodeServiceSessionRequest(hello=prefill_pb2.SessionHello(router_id=router_id))
    session = Session(decode_pb2_grpc.DecodeServiceStub(worker.channel).Session(), hello)
    await session.open()
    return session


def greedy(max_tokens: int) -> common_pb2.SamplingParams:
    """Sampling without chance."""
    return common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0)


def begin_prefill(request_id: str, prompt: list[int], max_tokens: int = 8, **fields: Any) -> Any:
    """A message that starts a prefill."""
    begin = prefill_pb2.BeginPrefill(
        request_id=request_id,
        attempt=fields.pop("attempt", 1),
        prompt_token_ids=prompt,
        sampling=fields.pop("sampling", None) or greedy(max_tokens),
    )
    begin.MergeFrom(prefill_pb2.BeginPrefill(**fields))
    return prefill_pb2.PrefillServiceSessionRequest(begin=[begin])


def begin_decode(
    request_id: str,
    prompt: list[int],
    max_tokens: int = 8,
    source: kv_pb2.PeerDescriptor | None = None,
    **fields: Any,
) -> Any:
    """A message that starts a sequence, remote if ``source`` is given."""
    begin = decode_pb2.BeginDecode(
        request_id=request_id,
        attempt=fields.pop("attempt", 1),
        kv_source=decode_pb2.KV_SOURCE_LOCAL if source is None else decode_pb2.KV_SOURCE_REMOTE,
        prompt_token_ids=prompt,
        sampling=fields.pop("sampling", None) or greedy(max_tokens),
        source=source,
    )
    begin.MergeFrom(decode_pb2.BeginDecode(**fields))
    return decode_pb2.DecodeServiceSessionRequest(begin=[begin])


def cancel(kind: Any, request_id: str, attempt: int = 1) -> Any:
    """A message of ``kind`` that stops an attempt."""
    return kind(cancel=[prefill_pb2.CancelAttempt(request_id=request_id, attempt=attempt, reason="test")])


class Pair:
    """A router's two sessions, and the star between them: tickets and first tokens are passed on by ``relay``."""

    def __init__(self, p: RemoteWorker, d: RemoteWorker) -> None:
        self.p_worker = p
        self.d_worker = d
        self.resend_after_void = False
        self.hold_tickets = False
        self.tickets: list[prefill_pb2.KvReady] = []
        self.releases = False
        """Whether a lease is released when D says that it has read everything, as the router does."""

    async def open(self) -> "Pair":
        """Open both sessions."""
        self.p = await prefill_session(self.p_worker)
        self.d = await decode_session(self.d_worker)
        answer = await self.p_worker.admin.GetDescriptor(worker_pb2.GetDescriptorRequest())
        self.source = answer.descriptor
        self._relay = asyncio.gather(self._forward(), self._release())
        return self

    async def close(self) -> None:
        """Close both sessions."""
        self._relay.cancel()
        await asyncio.gather(self._relay, return_exceptions=True)
        await self.p.close()
        await self.d.close()

    async def _forward(self) -> None:
        passed = 0
        while True:
            async with self.p._arrived:
                await self.p._arrived.wait_for(functools.partial(self._has_more, passed))
                messages = self.p.seen[passed:]
            passed += len(messages)
            for message in messages:
                self.tickets += message.kv_ready
                out = decode_pb2.DecodeServiceSessionRequest(first_tokens=message.first_tokens)
                if not self.hold_tickets:
                    out.kv_ready.extend(message.kv_ready)
                await self.d.send(out)

    async def _release(self) -> None:
        passed = 0
        while self.releases:
            async with self.d._arrived:
                await self.d._arrived.wait_for(lambda passed=passed: len(self.d.seen) > passed)  # type: ignore[misc]
                messages = self.d.seen[passed:]
            passed += len(messages)
            done = [read for message in messages for read in message.kv_reads if not read.void_reason]
            leases = [
                prefill_pb2.ReleaseLease(request_id=read.request_id, attempt=read.attempt, lease_id=read.lease_id)
                for read in done
            ]
            if leases:
                await self.p.send(prefill_pb2.PrefillServiceSessionRequest(release=leases))

    def _has_more(self, passed: int) -> bool:
        return len(self.p.seen) > passed

    async def begin(self, request_id: str, prompt: list[int], max_tokens: int = 8, **fields: Any) -> None:
        """Start both legs of a request."""
        await self.d.send(begin_decode(request_id, prompt, max_tokens, self.source, **fields))
        await self.p.send(begin_prefill(request_id, prompt, max_tokens, **fields))

    async def tokens(self, request_id: str) -> list[int]:
        """All tokens of a request, the first from the prefill side, once it has finished."""
        first = await self.p.expect(
            lambda message: next((f for f in message.first_tokens if f.request_id == request_id), None)
        )
        assert first.index == 0
        if first.finish_reason:
            await self.d.send(cancel(decode_pb2.DecodeServiceSessionRequest, request_id))
            return [first.token_id]
        await self.d.ended(request_id)
        tokens = [first.token_id]
        for message in self.d.seen:
            for batch in message.tokens:
                if batch.request_id == request_id:
                    assert batch.first_index == len(tokens)
                    tokens += batch.token_ids
        return tokens
