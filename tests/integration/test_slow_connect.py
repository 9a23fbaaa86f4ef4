"""A connection over a long way, or to a loaded machine: it takes a moment, and is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from weir.rpc.channel import channel
from weir.rpc.server import RpcServer

DELAY_S = 0.4
"""One way. Longer than the wait before another try, shorter than what a try may take."""


@pytest.fixture
async def far() -> AsyncIterator[str]:
    """The address of a server whose bytes take DELAY_S in each direction."""
    server = RpcServer(name="test", bind="127.0.0.1:0")
    port = await server.start(lambda server: ())
    carrying: set[asyncio.Task[None]] = set()

    async def carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while data := await source.read(1 << 16):
            loop.call_later(DELAY_S, target.write, data)
        loop.call_later(DELAY_S, target.close)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection("127.0.0.1", port)
        carrying.update(asyncio.ensure_future(carry(*way)) for way in ((reader, forth), (back, writer)))

    proxy = await asyncio.start_server(accept, "127.0.0.1", 0)
    yield f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    proxy.close()
    for task in carrying:
        task.cancel()
    await asyncio.gather(*carrying, return_exceptions=True)
    await server.stop(0)


async def test_the_first_call_over_a_long_way_succeeds(far: str) -> None:
    async with channel(far) as line:
        answer = await health_pb2_grpc.HealthStub(line).Check(health_pb2.HealthCheckRequest(), timeout=30)
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
