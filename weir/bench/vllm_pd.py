"""vLLM's own prefill and decode pair (NixlConnector): the two calls that its proxy makes for a request."""

from __future__ import annotations

from typing import Any

import orjson

from weir.bench.backends import (
    Answer,
    RequestFailed,
    check_status,
    openai_fields,
    openai_headers,
    stream_answer,
)
from weir.bench.http_stream import HttpClient
from weir.bench.plan import LoadPlan, Prompt
from weir.errors import InvalidArgument

PATH = "/v1/completions"
ASK_PREFILL: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class VllmPdBackend:
    """``address`` is the prefill server's base URL, a comma, the decode server's. TTFT ends at the decode server's
    first token, which is the first that a client of vLLM's proxy sees."""

    def __init__(self, plan: LoadPlan) -> None:
        urls = plan.target.address.split(",")
        if len(urls) != 2:
            raise InvalidArgument("--base-url", plan.target.address, "must be PREFILL_URL,DECODE_URL for vllm-pd")
        self._prefill, self._decode = map(HttpClient, urls)
        self._headers = openai_headers(plan)
        self._fields = openai_fields(plan)

    async def send(self, prompt: Prompt, answer: Answer) -> None:
        asked = {**self._fields, "prompt": list(prompt.token_ids) or prompt.text}
        ticket = await self._prefilled(asked)
        streamed = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": prompt.output_tokens}
        body = orjson.dumps({**asked, **streamed, "kv_transfer_params": ticket})
        async with self._decode.post(PATH, body, self._headers) as reply:
            await stream_answer(reply, answer)

    async def _prefilled(self, asked: dict[str, Any]) -> dict[str, Any]:
        body = orjson.dumps({**asked, "max_tokens": 1, "stream": False, "kv_transfer_params": ASK_PREFILL})
        async with self._prefill.post(PATH, body, self._headers) as reply:
            await check_status(reply)
            ticket = orjson.loads(b"".join([piece async for piece in reply.pieces()])).get("kv_transfer_params")
        if not isinstance(ticket, dict):
            raise RequestFailed("no ticket", "the prefill server sent no kv_transfer_params")
        return ticket

    async def close(self) -> None:
        await self._prefill.close()
        await self._decode.close()
