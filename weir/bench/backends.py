"""How a prompt reaches the system under test, and how its tokens are seen: Weir's gRPC door or OpenAI's HTTP API."""

from __future__ import annotations

import itertools
from typing import Any, Protocol

import orjson

from weir.bench.http_stream import HttpAnswer, HttpClient
from weir.bench.plan import LoadPlan, Prompt
from weir.bench.sse import SseReader
from weir.client import AsyncClient, Delta, Final
from weir.client.types import Options
from weir.clock import Clock
from weir.errors import InvalidArgument, Unavailable
from weir.lifecycle import FinishReason

MAX_ERROR_BYTES = 400


class RequestFailed(Exception):
    """The system under test answered with a failure: ``kind`` groups it, the text says more."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class Answer:
    """Filled while an answer streams: a time for each token (gRPC) or chunk (HTTP), and what the server counted."""

    def __init__(self, clock: Clock, keep_text: bool) -> None:
        self._clock = clock
        self._keep_text = keep_text
        self.times_s: list[float] = []
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.text = ""

    def add(self, tokens: int, text: str) -> None:
        """``tokens`` have arrived just now."""
        self.times_s.extend([self._clock.monotonic_s()] * tokens)
        if self._keep_text:
            self.text += text


class Backend(Protocol):
    """One way to the system under test."""

    async def send(self, prompt: Prompt, answer: Answer) -> None:
        """Stream one answer into ``answer``; raises RequestFailed or a WeirError when it does not complete."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


class WeirBackend:
    """gRPC, through the client library, with token ids where the prompt has them."""

    def __init__(self, plan: LoadPlan) -> None:
        self._client = AsyncClient(plan.target.address, token=plan.target.api_key or None)
        self._options: Options = {
            "temperature": plan.temperature,
            "top_p": plan.top_p,
            "ignore_eos": plan.ignore_eos,
            "model": plan.target.model,
        }
        if plan.seed is not None:
            self._options["seed"] = plan.seed

    async def send(self, prompt: Prompt, answer: Answer) -> None:
        final: Final | None = None
        asked = prompt.token_ids or prompt.text
        options: Options = {**self._options, "max_tokens": prompt.output_tokens}
        async for event in self._client.generate(asked, **options):
            if isinstance(event, Delta):
                answer.add(len(event.token_ids), event.text)
            elif isinstance(event, Final):
                final = event
        if final is None:
            raise RequestFailed("truncated", "the stream ended without its last message")
        if final.finish_reason not in {FinishReason.STOP, FinishReason.LENGTH}:
            raise RequestFailed(final.finish_reason.value, "the request did not finish")
        answer.prompt_tokens = final.usage.prompt_tokens
        answer.output_tokens = final.usage.completion_tokens

    async def close(self) -> None:
        await self._client.close()


class OpenAiBackend:
    """``/v1/completions`` or ``/v1/chat/completions`` with server-sent events; drives vLLM and others too.

    Several base URLs, separated by commas, take turns: what a plain load balancer does.
    """

    def __init__(self, plan: LoadPlan) -> None:
        self._chat = plan.target.backend == "openai-chat"
        self._doors = itertools.cycle([HttpClient(url) for url in plan.target.address.split(",")])
        self._count = plan.target.address.count(",") + 1
        self._path = plan.target.endpoint or ("/v1/chat/completions" if self._chat else "/v1/completions")
        self._headers = openai_headers(plan)
        self._fields = openai_fields(plan) | {"stream": True, "stream_options": {"include_usage": True}}

    async def send(self, prompt: Prompt, answer: Answer) -> None:
        body = orjson.dumps({**self._fields, **self._prompt(prompt), "max_tokens": prompt.output_tokens})
        async with next(self._doors).post(self._path, body, self._headers) as reply:
            await stream_answer(reply, answer)

    async def close(self) -> None:
        for _ in range(self._count):
            await next(self._doors).close()

    def _prompt(self, prompt: Prompt) -> dict[str, Any]:
        if not self._chat:
            return {"prompt": list(prompt.token_ids) or prompt.text}
        if not prompt.text:
            raise InvalidArgument("--backend", "openai-chat", "needs prompts of text: give --tokenizer")
        return {"messages": [{"role": "user", "content": prompt.text}]}


def openai_headers(plan: LoadPlan) -> dict[str, str]:
    """Credentials, if there are any."""
    return {"Authorization": f"Bearer {plan.target.api_key}"} if plan.target.api_key else {}


def openai_fields(plan: LoadPlan) -> dict[str, Any]:
    """What all requests of a plan have in common."""
    fields: dict[str, Any] = {"model": plan.target.model, "temperature": plan.temperature, "top_p": plan.top_p}
    fields |= {"ignore_eos": True} if plan.ignore_eos else {}
    return fields | ({"seed": plan.seed} if plan.seed is not None else {})


async def stream_answer(reply: HttpAnswer, answer: Answer) -> None:
    """Read a whole event stream into ``answer``; RequestFailed for a status, an error event or a missing end."""
    await check_status(reply)
    reader, done = SseReader(), False
    async for piece in reply.pieces():
        for data in reader.feed(piece):
            done = done or data == b"[DONE]"
            if not done:
                _take(orjson.loads(data), answer)
    if not done:
        raise RequestFailed("truncated", "the stream ended without [DONE]")
    answer.output_tokens = answer.output_tokens or len(answer.times_s)


async def check_status(reply: HttpAnswer) -> None:
    """RequestFailed unless the status is 200."""
    if reply.status != 200:
        raise RequestFailed(f"HTTP {reply.status}", await _error_text(reply))


def _take(chunk: dict[str, Any], answer: Answer) -> None:
    """One chunk. Chunks that only open or end the answer carry no token; one with an empty text does."""
    if "error" in chunk:
        error = chunk["error"]
        told = error if isinstance(error, dict) else {"message": error}
        raise RequestFailed(str(told.get("code") or "error event"), str(told.get("message"))[:MAX_ERROR_BYTES])
    if usage := chunk.get("usage"):
        answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta", {})
        text = choice.get("text") or delta.get("content") or ""
        if text or not (choice.get("finish_reason") or "role" in delta):
            answer.add(1, text)


async def _error_text(reply: HttpAnswer) -> str:
    try:
        body = b"".join([piece async for piece in reply.pieces()])
    except Unavailable as error:
        return str(error)
    return body[:MAX_ERROR_BYTES].decode(errors="replace")
