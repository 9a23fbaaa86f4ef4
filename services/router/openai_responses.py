"""Answers in OpenAI's shapes: server-sent events while tokens come, or one object at the end. Pure.

What is the same in all chunks of an answer is encoded once; a Delta costs one JSON string.
"""

from __future__ import annotations

from typing import Any

import orjson

from weir.services.router.answer import Accepted, Delta, Final, ModelInfo, Usage
from weir.services.router.openai_logprobs import LogprobWriter, Piece
from weir.services.router.openai_requests import Call

_DONE = b"data: [DONE]\n\n"


class SseAnswer:
    """One streamed answer: ``opening``, then ``delta`` for each Delta, then ``final``; each gives bytes to send.

    Every token has its chunk, and the last one carries the reason: what clients count as vLLM's is counted here.
    """

    def __init__(self, call: Call, accepted: Accepted, piece: Piece) -> None:
        head = _head(call, accepted, streamed=True)
        self._frame = b"data: " + orjson.dumps(head)[:-1] + b',"choices":'
        self._tail = b',"usage":null}\n\n' if call.include_usage else b"}\n\n"
        self._include_usage = call.include_usage
        self._logprobs = LogprobWriter(piece, accepted.model, chat=call.chat) if call.logprobs else None
        self._chat = call.chat
        before, after = (b'"delta":{"content":', b"}") if call.chat else (b'"text":', b"")
        self._before_text = self._frame + b'[{"index":0,' + before
        self._after_text = after + b',"logprobs":'
        self._end = b',"finish_reason":null}]' + self._tail
        self._plain_end = self._after_text + b"null" + self._end

    def opening(self) -> bytes:
        """What precedes the text: a chat's role; nothing for a completion."""
        if not self._chat:
            return b""
        return self._frame + b'[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null' + self._end

    def delta(self, delta: Delta) -> bytes:
        """The chunk of ``delta``, whose text may be empty: half a character, or a token that is not shown."""
        if self._logprobs is None or not delta.logprobs:
            return self._before_text + orjson.dumps(delta.text) + self._plain_end
        logprobs = orjson.dumps(self._logprobs.write(delta.logprobs))
        return self._before_text + orjson.dumps(delta.text) + self._after_text + logprobs + self._end

    def final(self, final: Final, last: Delta | None = None) -> bytes:
        """The chunk with the reason, and the ``last`` Delta if it came along; then usage, if asked for, and end."""
        content: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        logprobs = None
        if last is not None:
            content = {"delta": {"content": last.text}} if self._chat else {"text": last.text}
            if self._logprobs is not None and last.logprobs:
                logprobs = self._logprobs.write(last.logprobs)
        choice = {"index": 0, **content, "logprobs": logprobs, **_ending(final)}
        chunk = self._frame + orjson.dumps([choice]) + self._tail
        if not self._include_usage:
            return chunk + _DONE
        return chunk + self._frame + b'[],"usage":' + orjson.dumps(_usage(final.usage)) + b"}\n\n" + _DONE


def sse_error(body: bytes) -> bytes:
    """An error, ``{"error": ...}`` in JSON, in the midst of a stream; no end mark follows it."""
    return b"data: " + body + b"\n\n"


class WholeAnswer:
    """One answer given at once: ``add`` every Delta, then ``body``."""

    def __init__(self, call: Call, accepted: Accepted, piece: Piece) -> None:
        self._head = _head(call, accepted, streamed=False)
        self._logprobs = LogprobWriter(piece, accepted.model, chat=call.chat) if call.logprobs else None
        self._chat = call.chat
        self._texts: list[str] = []
        self._positions: list[Any] = []

    def add(self, delta: Delta) -> None:
        """Take the next part."""
        self._texts.append(delta.text)
        if self._logprobs is not None:
            self._positions.extend(delta.logprobs)

    def body(self, final: Final) -> bytes:
        """The response's JSON."""
        text = "".join(self._texts)
        content: dict[str, Any] = {"text": text}
        if self._chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        logprobs = None if self._logprobs is None else self._logprobs.write(self._positions)
        choice = {"index": 0, **content, "logprobs": logprobs, **_ending(final)}
        return orjson.dumps({**self._head, "choices": [choice], "usage": _usage(final.usage)})


def _head(call: Call, accepted: Accepted, *, streamed: bool) -> dict[str, Any]:
    prefix, kind = ("chatcmpl-", "chat.completion") if call.chat else ("cmpl-", "text_completion")
    return {
        "id": prefix + accepted.request_id,
        "object": kind + ".chunk" if streamed and call.chat else kind,
        "created": int(accepted.created_unix_s),
        "model": accepted.model,
    }


def _ending(final: Final) -> dict[str, str | None]:
    return {"finish_reason": final.finish_reason.value, "stop_reason": final.stop_string or None}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def model_body(model: ModelInfo) -> dict[str, Any]:
    """An entry of /v1/models; ``max_model_len`` as in vLLM."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_unix_s,
        "owned_by": "weir",
        "max_model_len": model.context_tokens,
    }
