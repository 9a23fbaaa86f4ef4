"""A real server and real channels: error mapping, health, limits, ordered stop, streams that are left."""

import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from weir import errors
from weir.errors import WeirError
from weir.rpc.channel import channel, wait_ready
from weir.rpc.limits import RpcLimits
from weir.rpc.server import RpcServer, serve
from weir.rpc.status import abort_with, from_rpc_error

SERVICE = "test.Echo"
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")

Handler = Callable[[Any, Any], Any]


def echo_server(handlers: dict[str, Handler]) -> Callable[[grpc.aio.Server], Sequence[str]]:
    """Registers raw-bytes methods; the part before the dot of a name is its kind."""

    def register(server: grpc.aio.Server) -> Sequence[str]:
        methods = {
            name.replace(".", "_"): getattr(grpc, f"{name.partition('.')[0]}_rpc_method_handler")(handler)
            for name, handler in handlers.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        return (SERVICE,)

    return register


@pytest.fixture
async def started() -> AsyncIterator[Callable[..., Awaitable[grpc.aio.Channel]]]:
    servers: list[RpcServer] = []
    channels: list[grpc.aio.Channel] = []

    async def start(handlers: dict[str, Handler], **options: Any) -> grpc.aio.Channel:
        server = RpcServer(name="test", bind="127.0.0.1:0", **options)
        await server.start(echo_server(handlers))
        servers.append(server)
        channels.append(channel(server.address))
        return channels[-1]

    yield start
    for opened in channels:
        await opened.close(None)
    for server in servers:
        await server.stop(0)


async def call(opened: grpc.aio.Channel, name: str, payload: bytes = b"x") -> list[bytes]:
    kind = name.partition(".")[0]
    made: Any = getattr(opened, kind)(f"/{SERVICE}/{name.replace('.', '_')}")

    async def requests() -> AsyncIterator[bytes]:
        yield payload

    answer = made(requests() if kind.startswith("stream") else payload, timeout=10)
    if kind.endswith("_unary"):
        return [await answer]
    return [message async for message in answer]


def raising(error: BaseException) -> dict[str, Handler]:
    async def unary(request: Any, context: Any) -> bytes:
        raise error

    async def generator(request: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        raise error

    async def writer(request: Any, context: Any) -> None:
        await context.write(b"first")
        raise error

    return {
        "unary_unary": unary,
        "stream_unary": unary,
        "unary_stream": generator,
        "stream_stream": generator,
        "unary_stream.written": writer,
        "stream_stream.written": writer,
    }


def made(cls: type[WeirError]) -> WeirError:
    known: dict[type[WeirError], WeirError] = {
        errors.InvalidArgument: errors.InvalidArgument("top_p", 1.5, "must lie in (0, 1]"),
        errors.NotFound: errors.NotFound("model", "größe\n", "a"),
        errors.ResourceExhausted: errors.ResourceExhausted("full: 8 of 8", retry_after_s=1.25),
        errors.ModelError: errors.ModelError("model.safetensors", "lm_head", "shape [1, 2]"),
        errors.FingerprintMismatch: errors.FingerprintMismatch("rope", "a=1", "b=2"),
        errors.KvReadVoid: errors.KvReadVoid("generation", "block 3"),
    }
    return known.get(cls) or cls(f"why {cls.__name__}")


ALL_ERRORS = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, WeirError) and cls is not WeirError
]


@pytest.mark.parametrize("cls", ALL_ERRORS, ids=lambda cls: cls.__name__)
async def test_errors_come_back_as_they_were_raised(cls: type[WeirError], started: Any) -> None:
    error = made(cls)
    handlers = raising(error)
    opened = await started(handlers)
    for name in handlers:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(opened, name)
        assert caught.value.code().name == cls.code
        back = from_rpc_error(caught.value)
        assert type(back) is cls
        assert str(back) == str(error)
        assert {k: str(v) for k, v in vars(back).items()} == {k: str(v) for k, v in vars(error).items()}


async def test_a_subclass_comes_back_as_the_class_it_extends(started: Any) -> None:
    class OutOfBlocks(errors.ResourceExhausted):
        pass

    opened = await started(raising(OutOfBlocks("9 wanted")))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(opened, "unary_unary")
    back = from_rpc_error(caught.value)
    assert (type(back), str(back)) == (errors.ResourceExhausted, "9 wanted")


async def test_faults_are_logged_and_never_shown(started: Any, caplog: pytest.LogCaptureFixture) -> None:
    handlers = raising(KeyError("secret"))
    opened = await started(handlers)
    with caplog.at_level(logging.ERROR):
        for name in handlers:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(opened, name)
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            assert "secret" not in f"{caught.value.details()} {caught.value.trailing_metadata()}"
            assert type(from_rpc_error(caught.value)) is errors.InternalError
    assert len([record for record in caplog.records if record.exc_info]) == len(handlers)


async def test_an_abort_of_the_handler_is_left_alone(started: Any) -> None:
    async def aborts(request: Any, context: Any) -> bytes:
        await abort_with(context, errors.Unavailable("gone"))

    opened = await started({"unary_unary": aborts})
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(opened, "unary_unary")
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAVAILABLE, "gone")


async def test_all_kinds_and_forms_work(started: Any) -> None:
    async def unary(request: Any, context: Any) -> bytes:
        return bytes(request) if isinstance(request, bytes) else b"".join([part async for part in request])

    async def generator(request: Any, context: Any) -> AsyncIterator[bytes]:
        yield await unary(request, context)
        yield b"end"

    async def reader(request: Any, context: Any) -> None:
        await context.write(await context.read())
        await context.write(b"end")

    handlers: dict[str, Handler] = {
        "unary_unary": unary,
        "stream_unary": unary,
        "unary_stream": generator,
        "stream_stream": generator,
        "stream_stream.read": reader,
    }
    opened = await started(handlers)
    for name in handlers:
        expected = [b"x"] if name.endswith("_unary") else [b"x", b"end"]
        assert await call(opened, name) == expected, name


@pytest.mark.parametrize("kind", ["unary_stream", "stream_stream"])
@pytest.mark.parametrize("waits_in", ["yield", "await"])
async def test_a_client_that_leaves_closes_the_generator(started: Any, kind: str, waits_in: str) -> None:
    closed = asyncio.Event()

    async def endless(request: Any, context: Any) -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x" * 1_000_000
                if waits_in == "await":
                    await asyncio.Event().wait()
        finally:
            closed.set()

    opened = await started({kind: endless})
    method: Any = getattr(opened, kind)(f"/{SERVICE}/{kind}")
    stream = method(b"" if kind == "unary_stream" else None)
    await stream.read()
    stream.cancel()
    await asyncio.wait_for(closed.wait(), 10)


async def test_too_large_messages_are_refused_both_ways(started: Any) -> None:
    async def grow(request: bytes, context: Any) -> bytes:
        return request * 4

    opened = await started({"unary_unary": grow}, limits=RpcLimits(message_bytes=2_000))
    for size in (2_001, 600):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(opened, "unary_unary", b"x" * size)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert isinstance(from_rpc_error(caught.value), errors.ResourceExhausted)
    assert await call(opened, "unary_unary", b"x" * 400) == [b"x" * 1_600]


async def test_foreign_statuses_become_the_class_that_means_the_same(started: Any) -> None:
    opened = await started({})
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(opened, "unary_unary")
    assert isinstance(from_rpc_error(caught.value), errors.FailedPrecondition)
    async with channel("127.0.0.1:1") as nowhere:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(nowhere, "unary_unary")
        assert isinstance(from_rpc_error(caught.value), errors.Unavailable)


async def test_health_follows_readiness_for_every_watcher() -> None:
    server = RpcServer(name="test", bind="127.0.0.1:0")
    await server.start(echo_server({}))
    with pytest.raises(errors.Unavailable, match=r"not ready after 0\.2 s: NOT_SERVING"):
        await wait_ready(server.address, SERVICE, timeout_s=0.2)
    async with channel(server.address) as opened:
        stub = health_pb2_grpc.HealthStub(opened)
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        leaving, staying = stub.Watch(request), stub.Watch(request)
        assert (await leaving.read()).status == (await staying.read()).status == 2
        leaving.cancel()
        waiting = asyncio.create_task(wait_ready(server.address, SERVICE, timeout_s=10))
        await server.set_ready(True)
        await waiting
        await wait_ready(server.address, timeout_s=10)
        assert (await staying.read()).status == 1
        assert (await stub.Check(request)).status == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        await server.set_ready(False)
        assert (await staying.read()).status == 2
        await server.stop(0)
    await server.stop(0)


async def test_wait_ready_waits_for_a_server_that_comes_later() -> None:
    first = RpcServer(name="test", bind="127.0.0.1:0")
    port = await first.start(echo_server({}))
    await first.stop(0)
    waiting = asyncio.create_task(wait_ready(f"127.0.0.1:{port}", timeout_s=20))
    second = RpcServer(name="test", bind=f"127.0.0.1:{port}")
    await second.start(echo_server({}))
    await second.set_ready(True)
    await waiting
    await second.stop(0)


@pytest.mark.parametrize("wanted", [True, False])
async def test_reflection_can_be_switched_off(started: Any, wanted: bool) -> None:
    opened = await started({}, reflection=wanted)
    stub = reflection_pb2_grpc.ServerReflectionStub(opened)
    stream = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    if not wanted:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        return
    names = {service.name for service in (await stream.read()).list_services_response.service}
    assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    stream.cancel()


async def test_a_taken_port_is_an_error() -> None:
    server = RpcServer(name="one", bind="127.0.0.1:0")
    await server.start(echo_server({}))
    with pytest.raises(errors.Unavailable, match=f"two cannot bind 127.0.0.1:{server.port}"):
        await RpcServer(name="two", bind=server.address).start(echo_server({}))
    await server.stop(0)


async def test_the_stop_is_ordered_and_open_calls_finish() -> None:
    order: list[str] = []
    stop, go_on, opened_call = asyncio.Event(), asyncio.Event(), asyncio.Event()
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def slow(request: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"1"
        opened_call.set()
        await go_on.wait()
        order.append("call ends")
        yield b"2"

    async def on_started(server: RpcServer) -> None:
        await server.set_ready(True)
        address.set_result(server.address)

    async def drain() -> None:
        async with channel(await address) as probe:
            status = await health_pb2_grpc.HealthStub(probe).Check(health_pb2.HealthCheckRequest())
        order.append(f"drain with health {status.status}")
        asyncio.get_running_loop().call_later(0.05, go_on.set)

    async def close() -> None:
        order.append("close")

    serving = asyncio.create_task(
        serve(
            name="test",
            bind="127.0.0.1:0",
            register=echo_server({"unary_stream": slow}),
            on_started=on_started,
            drain=drain,
            close=close,
            grace_s=10,
            stop=stop,
        )
    )
    async with channel(await address) as opened:
        calling = asyncio.create_task(call(opened, "unary_stream"))
        await opened_call.wait()
        stop.set()
        assert await calling == [b"1", b"2"]
    await serving
    assert order == ["drain with health 2", "call ends", "close"]


@pytest.mark.parametrize("fails", ["drain raises", "drain hangs", "start raises"])
async def test_back_ends_are_closed_whatever_happens(fails: str) -> None:
    closed: list[bool] = []
    stop = asyncio.Event()
    stop.set()

    async def on_started(server: RpcServer) -> None:
        if fails == "start raises":
            raise errors.Unavailable("no back end")

    async def drain() -> None:
        if fails == "drain raises":
            raise ValueError("drain")
        if fails == "drain hangs":
            await asyncio.Event().wait()

    async def close() -> None:
        closed.append(True)

    running = serve(
        name="test",
        bind="127.0.0.1:0",
        register=echo_server({}),
        on_started=on_started,
        drain=drain,
        close=close,
        drain_timeout_s=0.05,
        stop=stop,
    )
    if fails == "start raises":
        with pytest.raises(errors.Unavailable, match="no back end"):
            await running
    else:
        await running
    assert closed == [True]


_PROGRAM = """
import asyncio, sys
from weir.rpc.server import serve
async def main():
    async def on_started(server):
        await server.set_ready(True)
        print("ready", flush=True)
    async def drain():
        print("drain", flush=True)
        if sys.argv[1] == "hang":
            await asyncio.Event().wait()
    async def close():
        print("close", flush=True)
    await serve(name="t", bind="127.0.0.1:0", register=lambda s: (), on_started=on_started, drain=drain, close=close)
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_in_order_and_a_second_one_at_once(number: signal.Signals) -> None:
    for mode, signals, lines, status in (
        ("end", 1, [b"ready", b"drain", b"close"], 0),
        ("hang", 2, [b"ready", b"drain"], 128 + number),
    ):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _PROGRAM, mode, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        seen = []
        for _ in range(signals):
            seen.append((await asyncio.wait_for(process.stdout.readline(), 30)).strip())
            process.send_signal(number)
        rest = (await asyncio.wait_for(process.stdout.read(), 30)).split()
        assert seen + rest == lines
        assert await process.wait() == status


async def test_a_stop_during_a_long_start_cancels_the_start() -> None:
    stop, starting = asyncio.Event(), asyncio.Event()
    events: list[str] = []

    async def on_started(server: RpcServer) -> None:
        starting.set()
        try:
            await asyncio.Event().wait()
        finally:
            events.append("start cancelled")

    async def drain() -> None:
        events.append("drain")

    async def close() -> None:
        events.append("close")

    serving = asyncio.create_task(
        serve(
            name="test",
            bind="127.0.0.1:0",
            register=echo_server({}),
            on_started=on_started,
            drain=drain,
            close=close,
            stop=stop,
        )
    )
    await starting.wait()
    stop.set()
    await asyncio.wait_for(serving, 10)
    assert events == ["start cancelled", "drain", "close"]
