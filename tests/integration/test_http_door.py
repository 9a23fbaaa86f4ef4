"""The HTTP door over a real socket, before a router whose answers each test writes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import signal
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import openai
import pytest
import uvloop

from tests.integration.scripted_router import PIECES, Answering, ScriptedRouter, final, logprob, piece
from weir import errors
from weir.lifecycle import FinishReason
from weir.services.router.http_door import HttpDoor, HttpLimits
from weir.services.router.intake import ChatPrompt, TextPrompt, TokenPrompt

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
COMPLETION = {"model": "tiny", "prompt": "hi"}
CHAT = {"model": "tiny", "messages": MESSAGES}
LIMITS = HttpLimits(body_bytes=4_096, body_timeout_s=10.0)
Script = Callable[[Answering], None]


class Served:
    """A door on a free port, its router, and clients for it."""

    def __init__(self, router: ScriptedRouter, door: HttpDoor, address: str) -> None:
        self.router = router
        self.door = door
        self.address = address
        self.url = f"http://{address}"
        self.unhealthy: str | None = None
        self.first_chunk = asyncio.Event()
        self.http = httpx.AsyncClient(base_url=self.url, timeout=20, trust_env=False, verify=False)

    @functools.cached_property
    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="x", max_retries=0, timeout=20)


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """The loop that the router runs on; ``test_security`` opens the door on asyncio's own."""
    policy: asyncio.AbstractEventLoopPolicy = uvloop.EventLoopPolicy()
    return policy


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(LIMITS) as it:
        yield it


@contextlib.asynccontextmanager
async def serving(limits: HttpLimits) -> AsyncIterator[Served]:
    router = ScriptedRouter()
    holder: list[Served] = []
    door = HttpDoor(
        router,
        piece=piece,
        healthy=lambda: holder[0].unhealthy,
        metrics=lambda: (b"weir_up 1\n", "text/plain; version=0.0.4"),
        limits=limits,
    )
    before = asyncio.all_tasks()
    served = Served(router, door, await door.start("127.0.0.1:0"))
    holder.append(served)
    try:
        yield served
    finally:
        await served.http.aclose()
        if "openai" in vars(served):
            await served.openai.close()
        await door.stop(0.0)
    assert door.open_requests == 0
    assert {t for t in asyncio.all_tasks() - before if "http_" in repr(t) or "uvicorn" in repr(t)} == set()


def says(*tokens: int, **ending: Any) -> Script:
    def script(answering: Answering) -> None:
        for token in tokens:
            answering.push(token)
        answering.finish(final(completion=len(tokens), **ending))

    return script


def fails(error: errors.WeirError, *tokens: int) -> Script:
    def script(answering: Answering) -> None:
        if tokens:
            answering.push(*tokens)
        answering.finish(error)

    return script


# whole answers


async def test_whole_chat(served: Served) -> None:
    served.router.script = says(1, 2, 3, 6)
    answer = await served.openai.chat.completions.with_raw_response.create(model="tiny", messages=MESSAGES)
    assert json.loads(answer.text) == {
        "id": "chatcmpl-r1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "A weir holds水", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 4,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
    assert "水".encode() in answer.content
    assert answer.headers["x-request-id"] == "r1"
    assert answer.headers["x-weir-ttft-ms"] == "10.000"
    assert answer.parse().choices[0].message.content == "A weir holds水"
    ask = served.router.asks[0]
    assert ask.prompt == ChatPrompt(MESSAGES)
    assert ask.max_tokens is None


async def test_whole_completion(served: Served) -> None:
    served.router.script = says(1, 4, 5, reason=FinishReason.LENGTH)
    answer = await served.openai.completions.create(model="tiny", prompt="hi", max_tokens=3)
    assert answer.id == "cmpl-r1"
    assert answer.object == "text_completion"
    assert answer.choices[0].text == "Aü"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 8
    assert served.router.asks[0].prompt == TextPrompt("hi")
    assert served.router.asks[0].max_tokens == 3


async def test_stop_string_is_named(served: Served) -> None:
    served.router.script = says(1, stop="\n\n")
    answer = await served.http.post("/v1/completions", json={**COMPLETION, "stop": ["\n\n"]})
    assert answer.json()["choices"][0] == {
        "index": 0,
        "text": "A",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": "\n\n",
    }


# streams


async def raw_stream(served: Served, path: str, body: dict[str, Any]) -> httpx.Response:
    answer = await served.http.post(path, json={**body, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    return answer


async def test_exact_chat_stream(served: Served) -> None:
    served.router.script = says(1, 8, 7, 6)
    answer = await raw_stream(served, "/v1/chat/completions", CHAT)
    head = (
        '{"id":"chatcmpl-r1","object":"chat.completion.chunk","created":1700000000,"model":"tiny",'
        '"choices":[{"index":0,'
    )
    ending = '"logprobs":null,"finish_reason":"stop","stop_reason":null'
    assert answer.content.decode() == (
        f'data: {head}"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'data: {head}"delta":{{"content":"A\\"\\n水"}},{ending}}}]}}\n\n'
        "data: [DONE]\n\n"
    )
    assert answer.headers["x-request-id"] == "r1"
    assert "x-weir-ttft-ms" not in answer.headers


async def test_exact_completion_stream_with_usage(served: Served) -> None:
    served.router.script = says(1, 2)
    body = {**COMPLETION, "stream_options": {"include_usage": True}}
    answer = await raw_stream(served, "/v1/completions", body)
    head = '{"id":"cmpl-r1","object":"text_completion","created":1700000000,"model":"tiny","choices":'
    usage = '{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7,"prompt_tokens_details":{"cached_tokens":2}}'
    ending = '"logprobs":null,"finish_reason":"stop","stop_reason":null'
    assert answer.content.decode() == (
        f'data: {head}[{{"index":0,"text":"A weir",{ending}}}],"usage":null}}\n\n'
        f'data: {head}[],"usage":{usage}}}\n\n'
        "data: [DONE]\n\n"
    )


async def test_openai_client_reads_a_stream_as_it_comes(served: Served) -> None:
    stream_task = asyncio.create_task(
        served.openai.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    answering = await served.router.requests.get()
    assert not stream_task.done()
    answering.push(1)
    stream = await stream_task
    role, first = await anext(stream), await anext(stream)
    assert (role.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "A")
    for token in (2, 3):
        answering.push(token)
        assert (await anext(stream)).choices[0].delta.content == PIECES[token].decode()
    answering.push(4)  # half a character: nothing to show, but its chunk is counted by clients
    assert (await anext(stream)).choices[0].delta.content == ""
    answering.push(5)
    assert (await anext(stream)).choices[0].delta.content == "ü"
    answering.finish(final(completion=5))
    last, usage = await anext(stream), await anext(stream)
    assert last.choices[0].finish_reason == "stop"
    assert usage.choices == []
    assert usage.usage is not None
    assert (usage.usage.completion_tokens, usage.usage.total_tokens) == (5, 10)
    assert usage.usage.prompt_tokens_details is not None
    assert usage.usage.prompt_tokens_details.cached_tokens == 2
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert not answering.left.is_set()


async def test_first_token_that_ends_the_answer(served: Served) -> None:
    served.router.script = says()
    chunks = [
        c async for c in await served.openai.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    ]
    assert [(c.choices[0].delta.content, c.choices[0].finish_reason) for c in chunks] == [("", None), (None, "stop")]


async def test_many_streams_at_once(served: Served) -> None:
    tokens = [1, 2, 3, 6, 7, 8]

    async def run(number: int) -> str:
        body = {"model": "tiny", "prompt": [number], "stream": True}
        texts = []
        async with served.http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    texts.append(json.loads(line[6:])["choices"][0]["text"])
        return "".join(texts)

    runs = [asyncio.create_task(run(number)) for number in range(40)]
    requests = [await served.router.requests.get() for _ in runs]
    assert served.door.open_requests == 40
    for step in range(12):
        for request in requests:
            assert isinstance(request.ask.prompt, TokenPrompt)
            request.push(tokens[(request.ask.prompt.token_ids[0] + step) % len(tokens)])
        await asyncio.sleep(0)
    for request in requests:
        request.finish(final(completion=12))
    expected = ["".join(PIECES[tokens[(n + s) % 6]].decode() for s in range(12)) for n in range(40)]
    assert await asyncio.gather(*runs) == expected


# log-probabilities


async def test_chat_logprobs(served: Served) -> None:
    def script(answering: Answering) -> None:
        answering.push(4, logprobs=[logprob(4, -0.5, (4, -0.5), (1, float("-inf")))])
        answering.push(5, logprobs=[logprob(5, -0.25, (5, -0.25), (1, -3.0))])
        answering.finish(final(completion=2))

    served.router.script = script
    answer = await served.openai.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2)
    assert served.router.asks[0].sampling.logprobs == 2
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.model_dump() for entry in logprobs.content] == [
        {
            "token": "�",
            "logprob": -0.5,
            "bytes": [0xC3],
            "top_logprobs": [
                {"token": "�", "logprob": -0.5, "bytes": [0xC3]},
                {"token": "A", "logprob": -9999.0, "bytes": [65]},
            ],
        },
        {
            "token": "�",
            "logprob": -0.25,
            "bytes": [0xBC],
            "top_logprobs": [
                {"token": "�", "logprob": -0.25, "bytes": [0xBC]},
                {"token": "A", "logprob": -3.0, "bytes": [65]},
            ],
        },
    ]


async def test_completion_logprobs_stream_keeps_offsets(served: Served) -> None:
    running = asyncio.create_task(served.openai.completions.create(model="tiny", prompt="hi", logprobs=1, stream=True))
    answering = await served.router.requests.get()
    answering.push(1, logprobs=[logprob(1, -1.0, (2, -0.5))])
    stream = await running
    chunks = [await anext(stream)]
    for token in (4, 5, 3):  # half a character carries its log-probability although it shows no text yet
        answering.push(token, logprobs=[logprob(token, -1.0, (token, -1.0))])
        chunks.append(await anext(stream))
    answering.finish(final(completion=4))
    chunks += [chunk async for chunk in stream]
    assert [c.choices[0].text for c in chunks] == ["A", "", "ü", " holds", ""]
    logprobs = [c.choices[0].logprobs for c in chunks]
    assert [p.text_offset for p in logprobs if p] == [[0], [1], [2], [2]]
    assert logprobs[0] is not None
    assert logprobs[0].model_dump() == {
        "text_offset": [0],
        "token_logprobs": [-1.0],
        "tokens": ["A"],
        "top_logprobs": [{" weir": -0.5, "A": -1.0}],
    }


# errors


STATUSES: list[tuple[errors.WeirError, int, str, str | None]] = [
    (errors.InvalidArgument("top_p", 2.0, "must lie in (0, 1]"), 400, "invalid_value", None),
    (errors.InvalidArgument("prompt + max_tokens", 200, "too long"), 400, "context_length_exceeded", None),
    (errors.Unauthenticated("no token"), 401, "unauthenticated", None),
    (errors.NotFound("model", "x"), 404, "not_found", None),
    (errors.FailedPrecondition("wrong moment"), 409, "failed_precondition", None),
    (errors.ResourceExhausted("queue full", 2.1), 429, "rate_limit_exceeded", "3"),
    (errors.ResourceExhausted("queue full"), 429, "rate_limit_exceeded", "1"),
    (errors.RequestCancelled("cancelled"), 499, "cancelled", None),
    (errors.InternalError("fault"), 500, "internal", None),
    (errors.KvReadVoid("torn"), 503, "aborted", "1"),
    (errors.Unavailable("no worker"), 503, "unavailable", "1"),
    (errors.DeadlineExceeded("too late"), 504, "deadline_exceeded", None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("admitted", [False, True])
async def test_errors_before_the_first_token_are_statuses(served: Served, stream: bool, admitted: bool) -> None:
    for number, (error, status, code, retry_after) in enumerate(STATUSES, start=1):
        if admitted:
            served.router.script = fails(error)
        else:
            served.router.refuse = error
        answer = await served.http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
        param = error.field if isinstance(error, errors.InvalidArgument) else None
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
            status, "server_error" if status >= 500 else "invalid_request_error"
        )
        assert answer.status_code == status
        assert answer.json() == {"error": {"message": str(error), "type": kind, "param": param, "code": code}}
        assert answer.headers.get("retry-after") == retry_after
        assert answer.headers.get("x-request-id") == (f"r{number}" if admitted else None)


async def test_unknown_model_is_openais_404(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await served.openai.chat.completions.create(model="huge", messages=MESSAGES)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_unexpected_fault_is_a_500_without_details(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    served.router.refuse = RuntimeError("secret")
    answer = await served.http.post("/v1/completions", json=COMPLETION)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal"
    assert "secret" not in answer.text
    assert "secret" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
async def test_error_after_the_first_token(served: Served, stream: bool) -> None:
    served.router.script = fails(errors.Unavailable("both workers are gone"), 1)
    answer = await served.http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    body = {"error": {"message": "both workers are gone", "type": "server_error", "param": None, "code": "unavailable"}}
    if not stream:
        assert (answer.status_code, answer.json()) == (503, body)
        return
    lines = [line for line in answer.text.split("\n\n") if line]
    assert answer.status_code == 200
    assert [json.loads(line.removeprefix("data: ")) for line in lines][2:] == [body]
    assert "[DONE]" not in answer.text


async def test_openai_client_raises_the_error_in_mid_stream(served: Served) -> None:
    served.router.script = fails(errors.InternalError("lost"), 1, 2)
    stream = await served.openai.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    chunks = [await anext(stream), await anext(stream)]
    with pytest.raises(openai.APIError, match=r"^lost$") as caught:
        await anext(stream)
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "A weir"]
    assert caught.value.code == "internal"


# clients that leave


async def open_request(served: Served, body: dict[str, Any]) -> asyncio.StreamWriter:
    host, _, port = served.address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    await writer.drain()
    return writer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 2])
async def test_client_that_leaves_is_noticed(served: Served, stream: bool, tokens: int) -> None:
    writer = await open_request(served, {**COMPLETION, "stream": stream})
    answering = await served.router.requests.get()
    if tokens:
        answering.push(*range(1, tokens + 1))
    writer.close()
    await asyncio.wait_for(answering.left.wait(), 10)
    await writer.wait_closed()


async def test_client_that_leaves_while_the_router_admits(served: Served) -> None:
    served.router.gate = asyncio.Event()
    writer = await open_request(served, COMPLETION)
    answering = await served.router.requests.get()
    writer.close()
    await asyncio.wait_for(answering.left.wait(), 10)
    served.router.gate.set()
    await writer.wait_closed()


async def test_openai_client_that_closes_its_stream(served: Served) -> None:
    running = asyncio.create_task(served.openai.completions.create(model="tiny", prompt="hi", stream=True))
    answering = await served.router.requests.get()
    answering.push(1)
    stream = await running
    assert (await anext(stream)).choices[0].text == "A"
    await stream.close()
    await asyncio.wait_for(answering.left.wait(), 10)


async def stalled_stream(served: Served) -> tuple[Answering, socket.socket]:
    """A client that takes nothing, and more text than the sockets between can hold."""
    host, _, port = served.address.rpartition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    client.connect((host, int(port)))
    raw = json.dumps({**COMPLETION, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
    client.sendall(head.encode() + raw)
    answering = await served.router.requests.get()
    answering.push(*[1] * 8_000_000)
    return answering, client


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the kernel must know TCP_USER_TIMEOUT")
async def test_client_that_takes_nothing_is_dropped() -> None:
    async with serving(HttpLimits(stalled_client_s=0.2)) as served:
        answering, client = await stalled_stream(served)
        await asyncio.wait_for(answering.left.wait(), 30)
        client.close()


async def test_stop_does_not_wait_for_a_client_that_takes_nothing(served: Served) -> None:
    answering, client = await stalled_stream(served)
    answering.push(1)
    await asyncio.wait_for(served.door.stop(0.0), 30)
    assert answering.left.is_set()
    client.close()


async def test_finished_requests_are_not_left(served: Served) -> None:
    served.router.script = says(1)
    for stream in (False, True):
        answer = await served.http.post("/v1/completions", json={**COMPLETION, "stream": stream})
        assert answer.status_code == 200
    while not served.router.requests.empty():
        assert not served.router.requests.get_nowait().left.is_set()


# what is wrong with the request itself

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("completions", {"model": None}, "model"),
    ("completions", {"model": 5}, "model"),
    ("completions", {"model": ""}, "model"),
    ("completions", {"prompt": None}, "prompt"),
    ("completions", {"prompt": ["a", "b"]}, "prompt"),
    ("completions", {"prompt": [[1], [2]]}, "prompt"),
    ("completions", {"prompt": [1, "a"]}, "prompt"),
    ("completions", {"prompt": [True]}, "prompt"),
    ("completions", {"prompt": {}}, "prompt"),
    ("completions", {"logprobs": True}, "logprobs"),
    ("completions", {"suffix": "x"}, "suffix"),
    ("completions", {"echo": True}, "echo"),
    ("completions", {"messages": MESSAGES}, "messages"),
    ("completions", {"max_tokens": 0}, "max_tokens"),
    ("completions", {"max_tokens": 1.0}, "max_tokens"),
    ("completions", {"max_tokens": True}, "max_tokens"),
    ("completions", {"temperature": "hot"}, "temperature"),
    ("completions", {"temperature": True}, "temperature"),
    ("completions", {"top_k": 1.5}, "top_k"),
    ("completions", {"seed": 1e30}, "seed"),
    ("completions", {"stop": [1]}, "stop"),
    ("completions", {"stop_token_ids": [True]}, "stop_token_ids"),
    ("completions", {"ignore_eos": 1}, "ignore_eos"),
    ("completions", {"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
    ("completions", {"logit_bias": [1]}, "logit_bias"),
    ("completions", {"logit_bias": {"x": 1}}, "logit_bias"),
    ("completions", {"logit_bias": {"5": "x"}}, "logit_bias[5]"),
    ("completions", {"n": 2}, "n"),
    ("completions", {"n": True}, "n"),
    ("completions", {"best_of": 2}, "best_of"),
    ("completions", {"use_beam_search": True}, "use_beam_search"),
    ("completions", {"skip_special_tokens": False}, "skip_special_tokens"),
    ("completions", {"add_special_tokens": False}, "add_special_tokens"),
    ("completions", {"response_format": {"type": "json_object"}}, "response_format"),
    ("completions", {"priority": 1 << 40}, "priority"),
    ("completions", {"stream": "true"}, "stream"),
    ("completions", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("completions", {"stream": True, "stream_options": []}, "stream_options"),
    ("completions", {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ("completions", {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    (
        "completions",
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
    ),
    ("completions", {"prompt_logprobs": 1}, "prompt_logprobs"),
    ("completions", {"temprature": 1}, "temprature"),
    ("completions", {"temprature": None}, "temprature"),
    ("chat/completions", {"messages": None}, "messages"),
    ("chat/completions", {"messages": "hi"}, "messages"),
    ("chat/completions", {"messages": ["hi"]}, "messages[0]"),
    ("chat/completions", {"prompt": "hi"}, "prompt"),
    ("chat/completions", {"tools": [{"type": "function"}]}, "tools"),
    ("chat/completions", {"tool_choice": "required"}, "tool_choice"),
    ("chat/completions", {"functions": [{}]}, "functions"),
    ("chat/completions", {"logprobs": 1}, "logprobs"),
    ("chat/completions", {"top_logprobs": 1}, "top_logprobs"),
    ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
    ("chat/completions", {"max_completion_tokens": 3, "max_tokens": 4}, "max_completion_tokens"),
    ("chat/completions", {"modalities": ["text", "audio"]}, "modalities"),
    ("chat/completions", {"reasoning_effort": "low"}, "reasoning_effort"),
    ("chat/completions", {"add_generation_prompt": 1}, "add_generation_prompt"),
    ("chat/completions", {"chat_template_kwargs": "x"}, "chat_template_kwargs"),
    ("chat/completions", {"continue_final_message": True}, "continue_final_message"),
]


async def test_wrong_field_is_named(served: Served) -> None:
    for path, change, field in WRONG:
        base = CHAT if path.startswith("chat") else COMPLETION
        answer = await served.http.post(f"/v1/{path}", json={**base, **change})
        assert answer.status_code == 400, (path, change)
        error = answer.json()["error"]
        seen = (error["param"], error["type"], error["code"], error["message"].partition(": ")[0].partition(" = ")[0])
        assert seen == (field, "invalid_request_error", "invalid_value", field), (path, change)
    assert served.router.asks == []


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b'{"model": "\xff"}', 400, "invalid_json"),
        (b'{"model": "tiny", "temperature": NaN}', 400, "invalid_json"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', 400, "invalid_json"),
        (b"[" * 4_000, 400, "invalid_json"),
        (b"[]", 400, "invalid_value"),
        (b"null", 400, "invalid_value"),
        (b" " * 5_000, 413, "body_too_large"),
    ],
)
@pytest.mark.parametrize("chunked", [False, True])
async def test_wrong_body(served: Served, body: bytes, status: int, code: str, chunked: bool) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 1_000):
            yield body[start : start + 1_000]

    content = parts() if chunked else body
    answer = await served.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    served.router.script = says(1)
    assert (await served.http.post("/v1/completions", json=COMPLETION)).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status", "param"),
    [
        ({"content-type": "text/plain"}, 415, "content-type"),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415, "content-encoding"),
        ({"x-slo-ttft-ms": "fast"}, 400, "x-slo-ttft-ms"),
        ({"x-slo-ttft-ms": "nan"}, 400, "x-slo-ttft-ms"),
        ({"x-slo-tpot-ms": "-1"}, 400, "x-slo-tpot-ms"),
        ({"x-slo-tpot-ms": "inf"}, 400, "x-slo-tpot-ms"),
        ({"x-request-id": "r" * 257}, 400, "x-request-id"),
        ({"x-weir-tenant": b"\xff"}, 400, "x-weir-tenant"),
    ],
)
async def test_wrong_header(served: Served, headers: dict[str, Any], status: int, param: str) -> None:
    answer = await served.http.post("/v1/completions", content=json.dumps(COMPLETION), headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


async def test_body_that_does_not_come() -> None:
    async with serving(HttpLimits(body_timeout_s=0.01)) as served:
        host, _, port = served.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()
        await writer.wait_closed()


async def test_too_many_open_requests() -> None:
    async with serving(HttpLimits(open_requests=1)) as served:
        first = asyncio.create_task(served.http.post("/v1/completions", json=COMPLETION))
        answering = await served.router.requests.get()
        second = await served.http.post("/v1/completions", json=COMPLETION)
        assert (second.status_code, second.headers["retry-after"]) == (429, "1")
        answering.push(1)
        answering.finish(final())
        assert (await first).status_code == 200


# the other routes, start and stop


async def test_models_health_metrics(served: Served) -> None:
    assert [m.id for m in (await served.openai.models.list()).data] == ["org/other", "tiny"]
    assert (await served.http.get("/v1/models/org/other")).json() == {
        "id": "org/other",
        "object": "model",
        "created": 8,
        "owned_by": "weir",
        "max_model_len": 64,
    }
    assert (await served.openai.models.retrieve("tiny")).created == 7
    with pytest.raises(openai.NotFoundError) as caught:
        await served.openai.models.retrieve("x")
    assert caught.value.code == "model_not_found"
    health = await served.http.get("/health")
    assert (health.status_code, health.json()) == (200, {"status": "ok"})
    served.unhealthy = "no decode worker"
    health = await served.http.get("/health")
    assert health.status_code == 503
    assert health.json() == {"status": "unavailable", "reason": "no decode worker"}
    metrics = await served.http.get("/metrics")
    assert (metrics.text, metrics.headers["content-type"]) == ("weir_up 1\n", "text/plain; version=0.0.4")
    assert (await served.http.head("/health")).content == b""


async def test_unknown_path_and_method(served: Served) -> None:
    answer = await served.http.get("/v2/x")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")
    answer = await served.http.get("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["code"] == "method_not_allowed"


async def test_taken_port_is_named(served: Served) -> None:
    other = HttpDoor(served.router, piece=piece, healthy=lambda: None, metrics=lambda: (b"", ""))
    with pytest.raises(errors.Unavailable, match=served.address):
        await other.start(served.address)


async def test_stop_lets_requests_finish(served: Served) -> None:
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    running = asyncio.create_task(served.http.post("/v1/completions", json={**COMPLETION, "stream": True}))
    answering = await served.router.requests.get()
    answering.push(1)
    stopping = asyncio.create_task(served.door.stop(10.0))
    answering.push(2)
    answering.finish(final())
    answer = await running
    await stopping
    assert answer.text.endswith("data: [DONE]\n\n")
    assert handlers == [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(httpx.ConnectError):
        await served.http.get("/health")


async def read_stream(served: Served) -> str:
    text = ""
    async with served.http.stream("POST", "/v1/completions", json={**COMPLETION, "stream": True}) as answer:
        async for part in answer.aiter_text():
            text += part
            served.first_chunk.set()
    return text


async def test_stop_ends_what_does_not_finish(served: Served) -> None:
    waiting = asyncio.create_task(served.http.post("/v1/completions", json=COMPLETION))
    requests = [await served.router.requests.get()]
    streaming = asyncio.create_task(read_stream(served))
    requests.append(await served.router.requests.get())
    requests[1].push(1)
    await served.first_chunk.wait()
    await served.door.stop(0.0)
    assert [request.left.is_set() for request in requests] == [True, True]
    assert (await waiting).status_code == 503
    assert (await waiting).json()["error"]["message"] == "the router is stopping"
    chunks = [json.loads(line.removeprefix("data: ")) for line in (await streaming).split("\n\n") if line]
    assert chunks[0]["choices"][0]["text"] == "A"
    assert [chunk["error"]["message"] for chunk in chunks[1:]] == ["the router is stopping"]
