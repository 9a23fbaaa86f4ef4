"""Doors of a process that runs out of file descriptors: who is connected is served, who is new hears why not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.integration.scripted_router import ScriptedRouter
from weir.clock import ManualClock
from weir.errors import ResourceExhausted, Unavailable
from weir.rpc.channel import channel
from weir.rpc.descriptors import SAMPLE_S, Descriptors
from weir.rpc.server import RpcServer
from weir.rpc.status import from_rpc_error
from weir.services.router import http_server
from weir.services.router.http_door import HttpDoor

SERVICE, METHOD = "test.Echo", "Echo"
LIMIT = 128


class House:
    """A server whose process seems to have ``open`` descriptors; time stands still between questions."""

    def __init__(self) -> None:
        self.open = 10
        self.clock = ManualClock()
        self.descriptors = Descriptors(self.clock, count=lambda: self.open, limit=lambda: LIMIT)
        self.server = RpcServer(name="test", bind="127.0.0.1:0", reflection=False, descriptors=self.descriptors)

    def fill(self, count: int) -> None:
        self.open = count
        self.clock.advance(SAMPLE_S)


def register(server: grpc.aio.Server) -> Sequence[str]:
    async def echo(request: Any, context: Any) -> bytes:
        return bytes(request)

    handler = grpc.method_handlers_generic_handler(SERVICE, {METHOD: grpc.unary_unary_rpc_method_handler(echo)})
    server.add_generic_rpc_handlers((handler,))
    return (SERVICE,)


@asynccontextmanager
async def running() -> AsyncIterator[House]:
    house = House()
    await house.server.start(register)
    await house.server.set_ready(True)
    try:
        yield house
    finally:
        await house.server.stop(0)


async def ask(opened: grpc.aio.Channel, *, wait: bool = False) -> bytes:
    try:
        call: Any = opened.unary_unary(f"/{SERVICE}/{METHOD}", None, None)
        answer: bytes = await call(b"x", timeout=10, wait_for_ready=wait)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    return answer


async def test_known_clients_are_served_and_new_ones_are_refused_by_name() -> None:
    async with running() as house, channel(house.server.address) as known, channel(house.server.address) as new:
        assert await ask(known) == b"x"
        house.fill(LIMIT - 20)
        assert await ask(known) == b"x"
        with pytest.raises(ResourceExhausted) as refused:
            await ask(new)
        assert str(refused.value) == "108 of 128 file descriptors are open: no room for a new client"
        assert refused.value.retry_after_s == 1.0
        health = await health_pb2_grpc.HealthStub(new).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        assert house.descriptors.stats().refused == {"grpc": 1}
        house.fill(10)
        assert await ask(new) == b"x"


async def test_beyond_the_bound_of_connections_a_new_one_is_closed_at_once() -> None:
    """What gRPC's core does by itself: no status of ours, but no waiting for a timeout either."""
    async with running() as house, AsyncExitStack() as stack:
        bound = house.descriptors.connections
        opened = [await stack.enter_async_context(channel(house.server.address)) for _ in range(bound + 1)]
        for one in opened[:bound]:
            assert await ask(one) == b"x"
        with pytest.raises(Unavailable):
            await ask(opened[bound])
        assert await ask(opened[0]) == b"x"
        await opened[0].close(None)
        assert await ask(opened[bound], wait=True) == b"x"


@asynccontextmanager
async def http_door(house: House) -> AsyncIterator[str]:
    """The address of a door with no models; it closes with nothing left."""
    door = HttpDoor(
        ScriptedRouter(),
        piece=lambda model, token: b"",
        healthy=lambda: None,
        metrics=lambda: (b"", "text/plain"),
        descriptors=house.descriptors,
    )
    address = await door.start("127.0.0.1:0")
    try:
        yield address
    finally:
        await door.stop(0.0)


async def test_http_clients_that_are_connected_are_served_and_new_ones_told_when_to_come_again() -> None:
    house = House()
    async with http_door(house) as address, httpx.AsyncClient(base_url=f"http://{address}") as known:
        assert (await known.get("/v1/models")).status_code == 200
        house.fill(LIMIT - 20)
        assert (await known.get("/v1/models")).status_code == 200
        for _ in range(2 * http_server._MAX_UNWELCOME):
            async with httpx.AsyncClient(base_url=f"http://{address}") as new:
                refused = await new.post("/v1/completions", json={"prompt": "x"})
                assert refused.status_code == 503
                assert refused.headers["retry-after"] == "1"
                assert refused.headers["connection"] == "close"
                assert refused.json()["error"] == {
                    "message": "108 of 128 file descriptors are open: no room for a new client",
                    "type": "server_error",
                    "param": None,
                    "code": "no_room",
                }
        async with httpx.AsyncClient(base_url=f"http://{address}") as probe:
            assert (await probe.get("/health")).status_code == 200
            house.fill(10)
        async with httpx.AsyncClient(base_url=f"http://{address}") as new:
            assert (await new.get("/v1/models")).status_code == 200


async def test_http_clients_that_come_and_say_nothing_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a few may still ask, and hear why; they are closed if they do not, further ones are cut at once."""
    monkeypatch.setattr(http_server, "_UNWELCOME_S", 0.0)
    monkeypatch.setattr(http_server, "_TICK_S", 0.2)
    house = House()
    house.fill(LIMIT - 20)
    async with http_door(house) as address:
        host, port = address.split(":")
        ways = [await asyncio.open_connection(host, int(port)) for _ in range(http_server._MAX_UNWELCOME + 5)]
        async with asyncio.timeout(10):
            for reader, writer in ways:
                try:
                    assert await reader.read() == b""
                except ConnectionResetError:
                    pass
                writer.close()
        async with httpx.AsyncClient(base_url=f"http://{address}") as new:
            assert (await new.get("/v1/models")).status_code == 503
