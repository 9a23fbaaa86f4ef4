"""One link per worker: both session streams, kept up while the worker is listed.

Whatever breaks one stream breaks the link: the other is cancelled, the owner is told once (``lost``), and the
link is built anew with back-off. Commands gathered while a write is under way travel in one message.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import grpc
import grpc.aio

from weir.clock import Clock
from weir.errors import Unavailable
from weir.ids import WorkerKey
from weir.rpc.channel import channel
from weir.rpc.limits import RpcLimits
from weir.rpc.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    kv_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from weir.services.router.retry import backoff_s

_log = logging.getLogger(__name__)
_EOF: object = getattr(grpc.aio, "EOF")  # noqa: B009 (absent from the type stubs)

MAX_PENDING_COMMANDS = 16_384
MESSAGE_TOKENS = 200_000
"""A new message is begun once the open one holds this many token ids, to stay under the size limit."""
FIRST_BACKOFF_S = 0.05
ASK_TIMEOUT_S = 5.0
LAST_WORDS_S = 1.0
"""When one stream ends in order, so long the other may take to end too."""


class OpenChannel(Protocol):
    """Makes a channel to an address; ``rpc.channel.channel``, or its twin in a simulated network."""

    def __call__(self, address: str, *, limits: RpcLimits) -> grpc.aio.Channel: ...


class LinkOwner(Protocol):
    """Who is told what happens on links. Called on the event loop; must not block."""

    def connected(self, worker: WorkerKey, welcome: prefill_pb2.SessionWelcome) -> None:
        """Both streams of the link are up."""
        ...

    def lost(self, worker: WorkerKey, reason: str) -> None:
        """A link that was up is down: what the worker had of ours is gone."""
        ...

    def prefill_news(self, worker: WorkerKey, message: prefill_pb2.PrefillServiceSessionResponse) -> None:
        """A message of the prefill stream."""
        ...

    def blocks_listed(self, worker: WorkerKey, hashes: Sequence[bytes]) -> None:
        """What the worker's cache has, asked for when the link came up and by ``WorkerLink.ask_blocks``."""
        ...

    def decode_news(self, worker: WorkerKey, message: decode_pb2.DecodeServiceSessionResponse) -> None:
        """A message of the decode stream."""
        ...


class SessionClosed(Unavailable):
    """The worker has ended a stream in order."""


class Outbox:
    """Commands for one stream, gathered into messages; ``overflow`` is set instead of growing on."""

    def __init__(self, new_message: Callable[[], Any]) -> None:
        self.overflow = False
        self.wake = asyncio.Event()
        self._new_message = new_message
        self._messages: deque[Any] = deque()
        self._commands: deque[int] = deque()  # in each of the messages
        self._waiting = 0
        self._open_tokens = 0

    def open(self, tokens: int = 0) -> Any:
        """The message to add one command to, which carries about ``tokens`` token ids."""
        if not self._messages or self._open_tokens + tokens > MESSAGE_TOKENS:
            self._messages.append(self._new_message())
            self._commands.append(0)
            self._open_tokens = 0
        self._open_tokens += tokens
        self._commands[-1] += 1
        self._waiting += 1
        if self._waiting > MAX_PENDING_COMMANDS:
            self.overflow = True
        self.wake.set()
        return self._messages[-1]

    @property
    def empty(self) -> bool:
        """Whether nothing waits to be written."""
        return not self._messages

    async def take(self) -> Any:
        """The oldest message, once there is one; it is closed. Raises Unavailable on overflow."""
        while not self._messages:
            self.wake.clear()
            await self.wake.wait()
        if self.overflow:
            raise Unavailable(f"more than {MAX_PENDING_COMMANDS} commands wait: the worker does not read")
        self._waiting -= self._commands.popleft()
        return self._messages.popleft()


class WorkerLink:
    """The link to one process lifetime of a worker. ``start`` once, ``close`` once."""

    def __init__(
        self,
        worker: WorkerKey,
        address: str,
        hello: prefill_pb2.SessionHello,
        owner: LinkOwner,
        *,
        clock: Clock,
        limits: RpcLimits,
        connect_timeout_s: float,
        random: Callable[[], float],
        open_channel: OpenChannel = channel,
    ) -> None:
        self.worker = worker
        self.address = address
        self.up = False
        self.descriptor: kv_pb2.PeerDescriptor | None = None
        self.heard_s = 0.0
        """When the worker last said anything."""
        self.keep = True
        """Whether to connect again after a loss."""
        self._hello = hello
        self._owner = owner
        self._clock = clock
        self._limits = limits
        self._connect_timeout_s = connect_timeout_s
        self._random = random
        self._open_channel = open_channel
        self._prefill_out = Outbox(prefill_pb2.PrefillServiceSessionRequest)
        self._decode_out = Outbox(decode_pb2.DecodeServiceSessionRequest)
        self._task: asyncio.Task[None] | None = None
        self._line: grpc.aio.Channel | None = None
        self._asking: asyncio.Task[None] | None = None

    # what is sent

    def prefill_message(self, tokens: int = 0) -> prefill_pb2.PrefillServiceSessionRequest | None:
        """The message under construction for the prefill stream; None when the link is down."""
        return self._prefill_out.open(tokens) if self.up else None

    def decode_message(self, tokens: int = 0) -> decode_pb2.DecodeServiceSessionRequest | None:
        """The same for the decode stream."""
        return self._decode_out.open(tokens) if self.up else None

    @property
    def unsent(self) -> bool:
        """Whether the link is up and commands wait to be written."""
        return self.up and not (self._prefill_out.empty and self._decode_out.empty)

    def ask_blocks(self) -> None:
        """Ask what the worker's cache has; the owner hears ``blocks_listed``. One question at a time."""
        if self.up and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._list_blocks(), name=f"blocks of {self.worker}")

    async def _list_blocks(self) -> None:
        assert self._line is not None
        stub = worker_pb2_grpc.WorkerServiceStub(self._line)
        try:
            answer = await stub.ListBlocks(worker_pb2.ListBlocksRequest(), timeout=ASK_TIMEOUT_S)
        except (grpc.RpcError, TimeoutError) as error:
            # Nothing depends on it: hits are predicted from what the worker announces from now on.
            _log.debug("blocks of %s not listed: %s", self.worker, error)
            return
        self._owner.blocks_listed(self.worker, answer.hashes)

    # its life

    def start(self) -> None:
        """Begin to connect."""
        assert self._task is None, "a link starts once"
        self._task = asyncio.create_task(self._run(), name=f"link {self.worker}")

    async def close(self) -> None:
        """Break the link; the owner hears ``lost`` if it was up."""
        self.keep = False
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def break_off(self) -> None:
        """As ``close``, without waiting for the end of it."""
        self.keep = False
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        failures = 0
        while self.keep:
            was_up = await self._connect_and_serve()
            failures = 1 if was_up else failures + 1
            if self.keep:
                await asyncio.sleep(backoff_s(failures, FIRST_BACKOFF_S, self._random()))

    async def _connect_and_serve(self) -> bool:
        """One life of the link; whether it was up at all."""
        reason = "closed"
        was_up = False
        line = self._line = self._open_channel(self.address, limits=self._limits)
        prefill = prefill_pb2_grpc.PrefillServiceStub(line).Session()
        decode = decode_pb2_grpc.DecodeServiceStub(line).Session()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                welcome = await self._greet(prefill, decode)
            self._come_up(welcome)
            was_up = True
            await self._serve(prefill, decode)
        except TimeoutError:
            reason = f"no welcome within {self._connect_timeout_s:g} s"
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except (Unavailable, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            reason = str(error) or type(error).__name__
        except Exception as error:
            # A worker's message must not end the upkeep of its link, whatever it does to the book.
            _log.exception("link to %s failed", self.worker)
            reason = f"internal error: {type(error).__name__}"
        finally:
            self.up = False
            prefill.cancel()
            decode.cancel()
            if self._asking is not None:
                self._asking.cancel()
            if was_up:
                self._owner.lost(self.worker, reason)
            await line.close(None)
        level = logging.WARNING if was_up else logging.DEBUG
        _log.log(level, "link to %s at %s: %s", self.worker, self.address, reason)
        return was_up

    async def _greet(self, prefill: Any, decode: Any) -> prefill_pb2.SessionWelcome:
        await prefill.write(prefill_pb2.PrefillServiceSessionRequest(hello=self._hello))
        await decode.write(decode_pb2.DecodeServiceSessionRequest(hello=self._hello))
        welcome = self._welcome(await prefill.read())
        self._welcome(await decode.read())
        return welcome

    def _welcome(self, message: Any) -> prefill_pb2.SessionWelcome:
        if message is _EOF or not message.HasField("welcome"):
            raise Unavailable("the worker did not answer the hello")
        welcome: prefill_pb2.SessionWelcome = message.welcome
        found = WorkerKey(welcome.worker_id, welcome.incarnation)
        if found != self.worker:
            raise Unavailable(f"{self.address} is {found}, not {self.worker}")
        return welcome

    def _come_up(self, welcome: prefill_pb2.SessionWelcome) -> None:
        self._prefill_out = Outbox(prefill_pb2.PrefillServiceSessionRequest)
        self._decode_out = Outbox(decode_pb2.DecodeServiceSessionRequest)
        self.descriptor = welcome.descriptor
        self.heard_s = self._clock.monotonic_s()
        self.up = True
        self._owner.connected(self.worker, welcome)
        self.ask_blocks()

    async def _serve(self, prefill: Any, decode: Any) -> None:
        """Until any of the four directions ends. Raises what ended it."""
        tasks = [
            asyncio.create_task(self._read(prefill, self._owner.prefill_news)),
            asyncio.create_task(self._read(decode, self._owner.decode_news)),
            asyncio.create_task(self._write(prefill, self._prefill_out)),
            asyncio.create_task(self._write(decode, self._decode_out)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if any(isinstance(task.exception(), SessionClosed) for task in done):
                # The worker leaves: the last words of the other stream are of requests that it has finished.
                await asyncio.wait(tasks[:2], timeout=LAST_WORDS_S)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, call: Any, take: Callable[[WorkerKey, Any], None]) -> None:
        worker, clock = self.worker, self._clock
        while True:
            message = await call.read()
            if message is _EOF:
                raise SessionClosed(f"the worker closed the session: {await call.details()}")
            self.heard_s = clock.monotonic_s()
            take(worker, message)

    @staticmethod
    async def _write(call: Any, outbox: Outbox) -> None:
        while True:
            await call.write(await outbox.take())
