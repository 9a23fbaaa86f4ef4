"""A worker without a model behind OpenAI's HTTP API, for measuring other routers: a process of its own.

    python -m weir.bench.mock_http --port 8101 --step-ms 5

Answers ``/v1/completions`` with one token at once and one every step, as a chunk each or as one object. Every GET is
answered with 200 and a small JSON object, which is what routers ask for health and information.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import orjson
import uvicorn

MODEL = "mock"
Scope = dict[str, Any]


def _chunk(index: int, last: bool) -> bytes:
    choice = {"index": 0, "text": f" word{index}", "finish_reason": "length" if last else None}
    return b"data: " + orjson.dumps({"id": "mock", "object": "text_completion", "choices": [choice]}) + b"\n\n"


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}


class MockHttp:
    """An ASGI application."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["method"] == "GET":
            about = {"status": "ok", "model_path": MODEL, "served_model_name": MODEL, "is_generation": True}
            await _whole(send, {**about, "data": [{"id": MODEL, "object": "model"}], "object": "list"})
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        request = orjson.loads(body)
        tokens = int(request.get("max_tokens") or 16)
        if request.get("stream"):
            await self._stream(send, tokens)
        else:
            await asyncio.sleep(self._step_s * (tokens - 1))
            choice = {"index": 0, "text": " word" * tokens, "finish_reason": "length"}
            await _whole(
                send, {"id": "mock", "object": "text_completion", "choices": [choice], "usage": _usage(tokens)}
            )

    async def _stream(self, send: Any, tokens: int) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for index in range(tokens):
            if index:
                await asyncio.sleep(self._step_s)
            await send({"type": "http.response.body", "body": _chunk(index, index + 1 == tokens), "more_body": True})
        end = b"data: " + orjson.dumps({"choices": [], "usage": _usage(tokens)}) + b"\n\ndata: [DONE]\n\n"
        await send({"type": "http.response.body", "body": end})


async def _whole(send: Any, value: dict[str, Any]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": orjson.dumps(value)})


async def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m weir.bench.mock_http")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--step-ms", type=float, default=5.0)
    given = parser.parse_args()
    config = uvicorn.Config(
        MockHttp(given.step_ms / 1e3), host="127.0.0.1", port=given.port, log_level="warning", lifespan="off"
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started and not serving.done():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    if server.started:
        port = server.servers[0].sockets[0].getsockname()[1]
        print(f"READY mock-http port={port}", flush=True)
    await serving


if __name__ == "__main__":
    asyncio.run(_main())
