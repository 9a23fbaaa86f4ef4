"""The HTTP back end against a real socket, and the event-stream reader against every way to cut its bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable

import pytest

from weir.bench.backends import Answer, OpenAiBackend, RequestFailed
from weir.bench.http_stream import HttpClient
from weir.bench.plan import LoadPlan, Prompt, Target
from weir.bench.sse import SseReader
from weir.bench.vllm_pd import VllmPdBackend
from weir.clock import ManualClock
from weir.errors import InvalidArgument, Unavailable

STREAM = b': hi\n\ndata: {"a": 1}\n\ndata:x\r\ndata: y\r\n\r\nevent: z\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
def test_events_do_not_depend_on_how_bytes_are_cut(size: int) -> None:
    reader = SseReader()
    events = [e for at in range(0, len(STREAM), size) for e in reader.feed(STREAM[at : at + size])]
    assert events == [b'{"a": 1}', b"x\ny", b"[DONE]"]


def chunk(text: str, reason: str | None = None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": reason}]}).encode() + b"\n\n"


def usage(prompt: int, completion: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
GOOD = [chunk("a"), chunk(""), chunk("bc"), chunk("", "length"), usage(5, 3), DONE]


def chunked(pieces: list[bytes]) -> bytes:
    body = b"".join(f"{len(p):x}\r\n".encode() + p + b"\r\n" for p in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


def whole(status: int, body: bytes) -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class Server:
    """Answers each request with the next of ``answers``; keeps what it was sent."""

    def __init__(self, answers: list[bytes]) -> None:
        self.answers = answers
        self.bodies: list[dict[str, object]] = []
        self.heads: list[str] = []
        self.connections = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError):
            while self.answers:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                self.heads.append(head)
                self.bodies.append(json.loads(await reader.readexactly(length)))
                writer.write(self.answers.pop(0))
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def running(answers: list[bytes], **fields: object) -> AsyncIterator[tuple[Server, OpenAiBackend]]:
    server = Server(answers)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    server.url = f"http://127.0.0.1:{port}"
    target = Target(str(fields.pop("backend", "openai")), server.url, "m", api_key="k")
    backend = OpenAiBackend(LoadPlan(target, (), (), **fields))  # type: ignore[arg-type]
    try:
        yield server, backend
    finally:
        await backend.close()
        listening.close()
        await listening.wait_closed()


def answer() -> Answer:
    return Answer(ManualClock(), keep_text=True)


async def test_a_completion_is_sent_and_counted() -> None:
    async with running([chunked(GOOD), chunked(GOOD)], ignore_eos=True, seed=4, temperature=0.5) as (server, backend):
        for _ in range(2):
            got = answer()
            await backend.send(Prompt(3, (7, 8, 9)), got)
            assert (got.text, len(got.times_s)) == ("abc", 3), "an empty text in mid-answer is a token, the end is none"
            assert (got.prompt_tokens, got.output_tokens) == (5, 3)
    assert server.connections == 1, "the connection is used again"
    assert server.heads[0].startswith("POST /v1/completions HTTP/1.1\r\n")
    assert "Authorization: Bearer k\r\n" in server.heads[0]
    assert server.bodies[0] == {
        "model": "m",
        "prompt": [7, 8, 9],
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 1.0,
        "seed": 4,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_a_chat_counts_neither_its_opening_nor_its_end() -> None:
    def delta(value: dict[str, str], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": value, "finish_reason": reason}
        return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"

    pieces = [delta({"role": "assistant", "content": ""}), delta({"content": "x"}), delta({"content": "y"})]
    async with running([chunked([*pieces, delta({}, "stop"), DONE])], backend="openai-chat") as (server, backend):
        got = answer()
        await backend.send(Prompt(9, text="hello"), got)
        assert (got.text, len(got.times_s), got.output_tokens) == ("xy", 2, 2)
        assert server.bodies[0]["messages"] == [{"role": "user", "content": "hello"}]
        with pytest.raises(InvalidArgument, match="tokenizer"):
            await backend.send(Prompt(9, (1,)), answer())


@pytest.mark.parametrize(
    ("reply", "check"),
    [
        (whole(429, b'{"error": "busy"}'), lambda e: e.kind == "HTTP 429" and "busy" in str(e)),
        (chunked([chunk("a")]), lambda e: e.kind == "truncated"),
        (
            chunked([chunk("a"), b'data: {"error": {"code": "UNAVAILABLE", "message": "gone"}}\n\n']),
            lambda e: e.kind == "UNAVAILABLE" and str(e) == "gone",
        ),
    ],
)
async def test_failures_have_kinds(reply: bytes, check: Callable[[RequestFailed], bool]) -> None:
    async with running([reply]) as (_, backend):
        with pytest.raises(RequestFailed) as failure:
            await backend.send(Prompt(3, (1,)), answer())
    assert check(failure.value)


async def test_a_connection_that_breaks_is_unavailable() -> None:
    async with running([chunked(GOOD)[:150]]) as (_, backend):
        with pytest.raises(Unavailable, match="mid-answer"):
            await backend.send(Prompt(3, (1,)), answer())
    with pytest.raises(Unavailable):
        await backend.send(Prompt(3, (1,)), answer())


async def test_a_connection_that_the_server_closed_while_idle_is_not_used_again() -> None:
    async with running([chunked(GOOD)]) as (server, _):
        client = HttpClient(server.url)
        for number in (1, 2):
            async with client.post("/", b"{}", {}) as reply:
                assert b"".join([piece async for piece in reply.pieces()]).endswith(DONE)
            assert server.connections == number
            server.answers.append(chunked(GOOD))  # it has closed the connection for want of one
            assert await client._idle[0].reader.read() == b""
        await client.close()


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:80", "http://"])
def test_only_http_urls(url: str) -> None:
    with pytest.raises(InvalidArgument, match="--base-url"):
        OpenAiBackend(LoadPlan(Target("openai", url), (), ()))


async def test_several_servers_take_turns() -> None:
    async with running([chunked(GOOD)] * 2) as (first, _), running([chunked(GOOD)] * 2) as (second, _):
        urls = f"{first.url},{second.url}"
        backend = OpenAiBackend(LoadPlan(Target("openai", urls), (), ()))
        for _ in range(4):
            await backend.send(Prompt(3, (1,)), answer())
        await backend.close()
    assert (len(first.bodies), len(second.bodies)) == (2, 2)


async def test_a_vllm_pair_gets_the_two_calls_of_its_proxy() -> None:
    ticket = {"remote_block_ids": [1, 2], "do_remote_prefill": True}
    prefilled = whole(200, json.dumps({"choices": [], "kv_transfer_params": ticket}).encode())
    async with running([prefilled, whole(200, b"{}")]) as (prefill, _), running([chunked(GOOD)]) as (decode, _):
        plan = LoadPlan(Target("vllm-pd", f"{prefill.url},{decode.url}", "m"), (), (), ignore_eos=True)
        backend = VllmPdBackend(plan)
        got = answer()
        await backend.send(Prompt(3, (7, 8)), got)
        with pytest.raises(RequestFailed, match="kv_transfer_params"):
            await backend.send(Prompt(3, (7, 8)), answer())
        await backend.close()
    assert (got.text, got.output_tokens) == ("abc", 3)
    assert (prefill.bodies[0]["max_tokens"], prefill.bodies[0]["stream"]) == (1, False)
    assert prefill.bodies[0]["kv_transfer_params"]["do_remote_decode"] is True  # type: ignore[index]
    assert (decode.bodies[0]["prompt"], decode.bodies[0]["max_tokens"]) == ([7, 8], 3)
    assert decode.bodies[0]["kv_transfer_params"] == ticket
    with pytest.raises(InvalidArgument, match="PREFILL_URL"):
        VllmPdBackend(LoadPlan(Target("vllm-pd", "http://x"), (), ()))
