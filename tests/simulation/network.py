"""The network between routers and workers: serialized messages, in order per connection, late, cut or lost with it.

``SimChannel`` stands in for a gRPC channel on the client side, ``SimServer`` for a gRPC server: production stubs
and servicers are registered with them and see nothing else. A connection behaves as TCP does: it delivers in
order or breaks. A cut holds back what is under way; it breaks the connection when it outlasts the keepalive.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import Callable
from random import Random
from typing import Any

import grpc

from tests.simulation.calls import ClientCall, ServerCall, UnaryCall
from tests.simulation.history import History
from tests.simulation.virtual_time import Process, VirtualLoop

_NOWHERE = contextvars.Context()
"""Wires and switches belong to no process."""


class SimServer:
    """What a process serves. Takes handlers as ``grpc.aio.Server`` does."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.handlers: dict[str, Any] = {}
        self.stopping = False

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Only the registered ones are used."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Remember the handlers of ``service``."""
        for name, handler in handlers.items():
            self.handlers[f"/{service}/{name}"] = handler


class Network:
    """Hosts by name, servers by address. ``keepalive_s``: a connection that is silent for longer breaks."""

    def __init__(
        self, loop: VirtualLoop, random: Random, history: History, *, spikes: float, keepalive_s: float
    ) -> None:
        self.loop = loop
        self.random = random
        self.history = history
        self.servers: dict[str, SimServer] = {}
        self.connections: dict[Connection, None] = {}
        self.numbers = itertools.count(1)
        self._spikes = spikes
        self._keepalive_s = keepalive_s
        self._cuts: dict[frozenset[str], int] = {}
        self._epochs = itertools.count(1)

    def delay_s(self) -> float:
        """How long a message takes."""
        if self.random.random() < self._spikes:
            return self.random.uniform(0.005, 0.12)
        return self.random.uniform(0.0001, 0.0015)

    def later(self, delay_s: float, callback: Callable[..., object], *args: object) -> None:
        """Run ``callback`` whatever becomes of any process."""
        self.loop.call_later(delay_s, callback, *args, context=_NOWHERE)

    def is_cut(self, one: str, other: str) -> bool:
        """Whether nothing gets from one host to the other."""
        return frozenset((one, other)) in self._cuts

    def cut(self, one: str, other: str) -> None:
        """Let nothing pass between two hosts."""
        if one == other or self.is_cut(one, other):
            return
        pair = frozenset((one, other))
        epoch = self._cuts[pair] = next(self._epochs)
        for connection in self._between(pair):
            self.later(self._patience_s(), self._break_if_cut, connection, pair, epoch)

    def heal(self, one: str, other: str) -> None:
        """Let messages pass again; what was held back is sent again."""
        pair = frozenset((one, other))
        if self._cuts.pop(pair, None) is not None:
            for connection in self._between(pair):
                connection.flush()

    def heal_all(self) -> None:
        """Mend every cut."""
        for pair in list(self._cuts):
            self.heal(*pair)

    def paused(self, process: Process) -> None:
        """``process`` does not answer pings from now on."""
        for connection in self.connections:
            if process in (connection.client, connection.server):
                self.later(self._patience_s(), self._break_if_paused, connection, process, process.backlog)

    def crashed(self, process: Process, *, silent: bool) -> None:
        """``process`` is gone. Its peers hear of it at once, or, when ``silent``, by the keepalive."""
        self.servers = {at: server for at, server in self.servers.items() if server.process is not process}
        for connection in list(self.connections):
            if process in (connection.client, connection.server):
                late = silent or (connection.server is not None and self.is_cut(*connection.hosts))
                self.later(self._patience_s() if late else self.delay_s(), connection.fail, f"{process} is gone")

    def calls_served_by(self, process: Process) -> int:
        """How many calls are open at the server of ``process``."""
        return sum(len(one.served) for one in self.connections if one.server is process)

    def stopped(self, process: Process) -> None:
        """The server of ``process`` has stopped: nobody listens there, what is open ends."""
        self.servers = {at: server for at, server in self.servers.items() if server.process is not process}
        for connection in [one for one in self.connections if one.server is process]:
            connection.stop()

    def reset(self, one: str, other: str) -> None:
        """Break the connections between two hosts, as a middlebox might."""
        for connection in self._between(frozenset((one, other))):
            connection.fail("connection reset")

    def open_channel(self, process: Process) -> Callable[..., Any]:
        """How ``process`` makes channels."""

        def open_channel(address: str, *, limits: Any = None) -> SimChannel:
            return SimChannel(self, process, address)

        return open_channel

    def _between(self, pair: frozenset[str]) -> list[Connection]:
        return [one for one in self.connections if one.server is not None and frozenset(one.hosts) == pair]

    def _patience_s(self) -> float:
        return self._keepalive_s * self.random.uniform(0.5, 1.0)

    def _break_if_cut(self, connection: Connection, pair: frozenset[str], epoch: int) -> None:
        if self._cuts.get(pair) == epoch:
            connection.fail("keepalive timed out")

    def _break_if_paused(self, connection: Connection, process: Process, backlog: list[Any]) -> None:
        if process.paused and process.backlog is backlog:
            connection.fail("keepalive timed out")


class Connection:
    """One TCP connection, made with the first message."""

    def __init__(self, network: Network, client: Process, address: str) -> None:
        self.network = network
        self.client = client
        self.address = address
        self.server: Process | None = None
        self._listening: SimServer | None = None
        self.closed = False
        self.calls: dict[int, ClientCall | UnaryCall] = {}
        self.served: dict[int, ServerCall] = {}
        self._to_server = _Lane(self, self._arrived_at_server)
        self._to_client = _Lane(self, self._arrived_at_client)
        network.connections[self] = None

    @property
    def hosts(self) -> tuple[str, str]:
        """Where its ends are; before it is made, where they will be."""
        return self.client.host, self.address

    def to_server(self, kind: str, call: int, payload: Any = None) -> None:
        """Send to the server side."""
        self._to_server.send((kind, call, payload))

    def to_client(self, kind: str, call: int, payload: Any = None) -> None:
        """Send to the client side."""
        self._to_client.send((kind, call, payload))

    def flush(self) -> None:
        """A cut is mended."""
        self._to_server.flush()
        self._to_client.flush()

    def fail(self, reason: str) -> None:
        """Both ends learn that it is broken."""
        if self.closed:
            return
        self.closed = True
        self.network.connections.pop(self, None)
        for call in list(self.calls.values()):
            self.client.call(call.failed, reason)
        if self.server is not None:
            for served in list(self.served.values()):
                self.server.call(served.client_gone)

    def stop(self) -> None:
        """The server goes: its handlers are cancelled, the client learns of it when the news arrives."""
        for served in list(self.served.values()):
            served.stop()
        self.to_client("bye", 0)

    def close(self) -> None:
        """The client closes it: its calls are over here, and there once the news arrives."""
        if self.closed:
            return
        for call in list(self.calls.values()):
            call.failed("channel closed")
        self.calls.clear()
        self.to_server("bye", 0)

    def _arrived_at_server(self, message: tuple[str, int, Any]) -> None:
        kind, number, payload = message
        if self._listening is None:
            self._listening = self.network.servers.get(self.address)
            if self._listening is None:
                self.fail("connection refused")
                return
            self.server = self._listening.process
        assert self.server is not None
        if kind == "bye":
            self.fail("closed by the client")
        elif kind == "begin":
            if self._listening.stopping:
                self.to_client("status", number, (grpc.StatusCode.UNAVAILABLE, "the server is stopping"))
                return
            path, request = payload
            handler = self._listening.handlers[path]
            self.served[number] = ServerCall(self, number, handler, self.network.random.random() < 0.5)
            self.server.call(self.served[number].begin, request)
        elif number in self.served:
            served = self.served[number]
            if kind == "message":
                self.server.call(served.take, payload)
            else:
                self.server.call(served.client_gone)

    def _arrived_at_client(self, message: tuple[str, int, Any]) -> None:
        kind, number, payload = message
        if kind == "bye":
            self.fail("closed by the server")
            return
        call = self.calls.get(number)
        if call is not None:
            self.client.call(call.take, kind, payload)


class _Lane:
    """One direction of a connection."""

    def __init__(self, connection: Connection, arrived: Callable[[tuple[str, int, Any]], None]) -> None:
        self._connection = connection
        self._arrived = arrived
        self._held: list[tuple[str, int, Any]] = []
        self._last_s = 0.0

    def send(self, message: tuple[str, int, Any]) -> None:
        network = self._connection.network
        now_s = network.loop.time()
        self._last_s = max(self._last_s + 1e-6, now_s + network.delay_s())
        network.later(self._last_s - now_s, self._arrive, message)

    def _arrive(self, message: tuple[str, int, Any]) -> None:
        if self._connection.closed:
            return
        if self._held or self._connection.network.is_cut(*self._connection.hosts):
            self._held.append(message)
        else:
            self._arrived(message)

    def flush(self) -> None:
        """What was held back arrives soon, before anything that was sent later."""
        network = self._connection.network
        network.later(network.delay_s(), self._drain)

    def _drain(self) -> None:
        while self._held and not self._connection.closed:
            if self._connection.network.is_cut(*self._connection.hosts):
                return
            self._arrived(self._held.pop(0))


class SimChannel:
    """As much of ``grpc.aio.Channel`` as stubs and links use."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self._network = network
        self._process = process
        self._address = address
        self._connection: Connection | None = None

    def connection(self) -> Connection:
        """The connection, made when it is needed or the last one broke."""
        if self._connection is None or self._connection.closed:
            self._connection = Connection(self._network, self._process, self._address)
        return self._connection

    def stream_stream(self, path: str, *, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        """A multicallable, as stubs ask for."""
        return lambda: ClientCall(self.connection(), path, request_serializer, response_deserializer)

    def unary_unary(self, path: str, *, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        """The same for one message each way."""

        async def call(request: Any, timeout: float | None = None) -> Any:
            made = UnaryCall(self.connection(), path, request_serializer(request))
            async with asyncio.timeout(timeout):
                return response_deserializer(await made.answer)

        return call

    async def close(self, grace: float | None = None) -> None:
        """Break the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
