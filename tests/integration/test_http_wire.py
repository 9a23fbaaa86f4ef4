"""HTTP/1.1 itself at the door: framing, keeping, pipelining, bounds; byte by byte over a socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from tests.integration.scripted_router import final
from tests.integration.test_http_door import COMPLETION, LIMITS, Served, event_loop_policy, says, serving
from weir.services.router.http_connection import MAX_HEAD_BYTES, MAX_PIPELINED
from weir.services.router.http_door import HttpLimits
from weir.services.router.http_exchange import DISCARDED_BYTES

__all__ = ["event_loop_policy"]  # the tests run on the router's loop too

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(LIMITS) as it:
        yield it


@contextlib.asynccontextmanager
async def connected(served: Served) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = served.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(20):
            yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def answer_of(reader: asyncio.StreamReader) -> tuple[bytes, dict[bytes, bytes], bytes]:
    """Status line, headers and body of a response that has a length."""
    head = (await reader.readuntil(b"\r\n\r\n"))[:-4]
    status, *lines = head.split(b"\r\n")
    headers = dict(line.split(b": ", 1) for line in lines)
    return status, headers, await reader.readexactly(int(headers[b"content-length"]))


def post(body: bytes, *, more: bytes = b"", version: bytes = b"1.1") -> bytes:
    head = b"POST /v1/completions HTTP/%b\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n" % (version, more, len(body))
    return head + body


async def test_requests_on_one_connection_are_answered_in_order(served: Served) -> None:
    """Sent at once: the second waits for the first."""
    body = json.dumps(COMPLETION).encode()
    async with connected(served) as (reader, writer):
        writer.write(post(body) + GET + GET.replace(b"health", b"nothing"))
        answering = await served.router.requests.get()
        assert served.door.open_requests == 1
        answering.push(1)
        answering.finish(final())
        first, second, third = [await answer_of(reader) for _ in range(3)]
        assert (first[0], json.loads(first[2])["choices"][0]["text"]) == (b"HTTP/1.1 200 OK", "A")
        assert (second[0], second[2]) == (b"HTTP/1.1 200 OK", b'{"status":"ok"}')
        assert third[0] == b"HTTP/1.1 404 Not Found"
        assert first[1][b"date"].endswith(b" GMT")
        writer.write(GET)  # reading goes on after that
        assert (await answer_of(reader))[0] == b"HTTP/1.1 200 OK"


async def test_a_request_in_single_bytes(served: Served) -> None:
    served.router.script = says(1)
    body = json.dumps(COMPLETION).encode()
    chunked = b"POST /v1/completions?x=1 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunked += b"%x\r\n%b\r\n%x;a=b\r\n%b\r\n0\r\n\r\n" % (5, body[:5], len(body) - 5, body[5:])
    async with connected(served) as (reader, writer):
        for raw in (post(body), chunked):
            for byte in raw:
                writer.write(bytes([byte]))
                await writer.drain()
            assert (await answer_of(reader))[0] == b"HTTP/1.1 200 OK"


async def test_a_stream_is_chunked_and_its_parts_are_whole(served: Served) -> None:
    async with connected(served) as (reader, writer):
        writer.write(post(json.dumps({**COMPLETION, "stream": True}).encode()))
        answering = await served.router.requests.get()
        answering.push(1)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"\r\ntransfer-encoding: chunked\r\n" in head
        assert b"content-length" not in head
        size = int(await reader.readuntil(b"\r\n"), 16)
        chunk = await reader.readexactly(size + 2)
        assert (chunk[:6], chunk[-4:]) == (b"data: ", b"\n\n\r\n")
        answering.finish(final())
        rest = await reader.readuntil(b"0\r\n\r\n")
        assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.write(GET)
        assert (await answer_of(reader))[0] == b"HTTP/1.1 200 OK"


async def test_an_old_client_gets_a_plain_body_and_a_closed_connection(served: Served) -> None:
    served.router.script = says(1)
    async with connected(served) as (reader, writer):
        writer.write(post(json.dumps({**COMPLETION, "stream": True}).encode(), version=b"1.0"))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        assert body.startswith(b"data: {")
        assert body.endswith(b"data: [DONE]\n\n")


async def test_close_is_kept_and_said(served: Served) -> None:
    async with connected(served) as (reader, writer):
        writer.write(GET.replace(b"host: x", b"host: x\r\nconnection: close") + GET)
        status, headers, _ = await answer_of(reader)
        assert (status, headers[b"connection"]) == (b"HTTP/1.1 200 OK", b"close")
        assert await reader.read() == b""


async def test_a_client_that_waits_to_be_asked_for_its_body(served: Served) -> None:
    served.router.script = says(1)
    body = json.dumps(COMPLETION).encode()
    async with connected(served) as (reader, writer):
        head = post(body, more=b"expect: 100-continue\r\n")[: -len(body)]
        writer.write(head)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await answer_of(reader))[0] == b"HTTP/1.1 200 OK"
        # It was not asked for and may never send it: only a new connection is sure to begin with a request.
        writer.write(head.replace(b"/v1/completions", b"/v1/nothing"))
        status, headers, _ = await answer_of(reader)
        assert (status, headers[b"connection"]) == (b"HTTP/1.1 404 Not Found", b"close")
        assert await reader.read() == b""


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"hello\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\n\r\n", b"400"),  # no host
        (b"GET /health HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n", b"400"),
        (post(b"{}", more=b"transfer-encoding: chunked\r\n"), b"400"),  # two lengths: nobody may choose
        (b"GET /health HTTP/1.1\r\nhost: x\r\na: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n", b"431"),
        (b"GET /" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nhost: x\r\n\r\n", b"431"),
        (b"GET /" + b"x" * MAX_HEAD_BYTES + b"x", b"431"),  # never ends
    ],
)
async def test_what_is_no_request_is_refused(served: Served, raw: bytes, status: bytes) -> None:
    async with connected(served) as (reader, writer):
        writer.write(raw)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 " + status)
    assert served.router.asks == []


async def test_nonsense_behind_a_request_does_not_spoil_it(served: Served) -> None:
    async with connected(served) as (reader, writer):
        writer.write(post(json.dumps(COMPLETION).encode()))
        answering = await served.router.requests.get()
        writer.write(b"hello\r\n\r\n")
        answering.push(1)
        answering.finish(final())
        assert (await answer_of(reader))[0] == b"HTTP/1.1 200 OK"
        assert await reader.read() == b""


async def test_a_body_that_breaks_off_ends_its_request(served: Served) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    async with connected(served) as (reader, writer):
        writer.write(head + b"5\r\n{\r\nhello\r\n")
        assert await reader.read() == b""
    async with connected(served) as (reader, writer):
        writer.write(GET + head + b"hello")
        assert (await answer_of(reader))[0] == b"HTTP/1.1 200 OK"
        assert await reader.read() == b""
    assert served.door.open_requests == 0


async def test_requests_sent_at_once_are_bounded(served: Served) -> None:
    async with connected(served) as (reader, writer):
        writer.write(post(json.dumps(COMPLETION).encode()) + GET * (MAX_PIPELINED + 9))
        answering = await served.router.requests.get()
        answering.push(1)
        answering.finish(final())
        for _ in range(1 + MAX_PIPELINED):
            assert (await answer_of(reader))[0] == b"HTTP/1.1 200 OK"
        assert await reader.read() == b""


async def test_a_body_without_end_is_cut(served: Served) -> None:
    async with connected(served) as (reader, writer):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        part = b"1000\r\n" + b"x" * 0x1000 + b"\r\n"
        with contextlib.suppress(ConnectionError):
            for _ in range(2 * (DISCARDED_BYTES + LIMITS.body_bytes) // 0x1000 + 1_000):
                writer.write(part)
                await writer.drain()
            assert await reader.read() == b"never"
    assert served.door.open_requests == 0


async def test_another_protocol_is_not_taken_up(served: Served) -> None:
    async with connected(served) as (reader, writer):
        writer.write(GET.replace(b"host: x", b"host: x\r\nconnection: upgrade\r\nupgrade: h2c"))
        assert (await answer_of(reader))[0] == b"HTTP/1.1 200 OK"


async def test_idle_connections_are_closed() -> None:
    """Also one that has sent half a head; the tick comes once a second."""
    async with serving(HttpLimits(keep_alive_s=0.05)) as served:
        async with connected(served) as (reader, writer), connected(served) as (other, half):
            writer.write(GET)
            half.write(GET[:20])
            await answer_of(reader)
            assert (await reader.read(), await other.read()) == (b"", b"")


async def test_a_slow_client_holds_up_only_itself(served: Served) -> None:
    """Its tokens wait in its generation, one answer at most; another stream goes on. When it reads, all is there."""
    body = json.dumps({**COMPLETION, "stream": True}).encode()
    async with connected(served) as (slow, writer), connected(served) as (reader, other):
        writer.write(post(body))
        answering = await served.router.requests.get()
        pushed = 0
        while True:  # until the sockets between are full
            answering.push(*[1] * 50_000)
            pushed += 50_000
            await asyncio.sleep(0)
            if answering.generation.waiting_tokens:
                break
        answering.push(1)
        other.write(post(body))
        quick = await served.router.requests.get()
        quick.push(2)
        quick.finish(final())
        assert b" weir" in await reader.readuntil(b"0\r\n\r\n")
        answering.finish(final())
        raw = b""
        while not raw.endswith(b"\r\n0\r\n\r\n"):
            raw += await slow.read(1 << 20)
        texts = [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: {")]
        assert sum(len(chunk["choices"][0]["text"]) for chunk in texts) == pushed + 1
