"""A router whose answers a test writes: real Generations, no workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

from weir.errors import InvalidArgument, RequestCancelled, WeirError
from weir.lifecycle import FinishReason
from weir.models.detokenize import IncrementalDetokenizer
from weir.services.router.answer import Accepted, Final, ModelInfo, Usage
from weir.services.router.generation import Generation
from weir.services.router.intake import Ask
from weir.services.router.router import Router
from weir.services.router.timings import Timings

PIECES: dict[int, bytes] = {
    1: b"A",
    2: b" weir",
    3: b" holds",
    4: "ü".encode()[:1],
    5: "ü".encode()[1:],
    6: "水".encode(),
    7: b"\n",
    8: b'"',
}
CREATED_UNIX_S = 1_700_000_000.9
TIMINGS = Timings(1.0, 2.0, 3.0, 4.0, 10.0, 5.0, 6.0, 21.0, 5.5, None, "p", "d", 1)


def piece(model: str, token: int) -> bytes:
    """The bytes of a scripted token."""
    assert model == "tiny"
    return PIECES[token]


class ScriptedDetokenizer:
    """Bytes of ``PIECES``; keeps half a character back."""

    def __init__(self) -> None:
        self._pending = b""

    def push(self, ids: Iterable[int]) -> str:
        data = self._pending + b"".join(PIECES[i] for i in ids)
        cut = len(data) - 1 if data.endswith(PIECES[4]) else len(data)
        self._pending = data[cut:]
        return data[:cut].decode()

    def flush(self) -> str:
        return self._pending.decode("utf-8", "replace")


def logprob(token: int, value: float, *top: tuple[int, float]) -> Any:
    """A PositionLogprobs message, as far as the door reads it."""
    return SimpleNamespace(
        chosen=SimpleNamespace(token_id=token, logprob=value),
        top=[SimpleNamespace(token_id=t, logprob=v) for t, v in top],
    )


def final(
    prompt: int = 5, completion: int = 3, cached: int = 2, reason: FinishReason = FinishReason.STOP, stop: str = ""
) -> Final:
    """The end of an answer."""
    return Final(reason, stop, Usage(prompt, completion, cached, prompt - cached, cached, 0), TIMINGS)


class Answering:
    """One request in the hands of a test."""

    def __init__(self, ask: Ask, number: int) -> None:
        self.ask = ask
        self.left = asyncio.Event()
        self.generation = Generation(
            Accepted(f"r{number}", 5, "tiny", CREATED_UNIX_S),
            ask.sampling,
            cast(IncrementalDetokenizer, ScriptedDetokenizer()),
            self.leave,
        )

    def leave(self) -> None:
        """As the router's: nothing when the request is over."""
        if not self.generation.over:
            self.left.set()
            self.generation.finish(RequestCancelled("the client left"))

    def push(self, *tokens: int, logprobs: Iterable[Any] = ()) -> None:
        self.generation.push(tokens, list(logprobs))

    def finish(self, end: Final | WeirError) -> None:
        if isinstance(end, Final):
            self.generation.flush()
        self.generation.finish(end)


class ScriptedRouter(Router):
    """Gives each request to ``script``, at once, and keeps it in ``requests`` for the test."""

    def __init__(self, script: Callable[[Answering], None] | None = None) -> None:
        self.script = script
        self.refuse: Exception | None = None
        self.requests: asyncio.Queue[Answering] = asyncio.Queue()
        self.asks: list[Ask] = []
        self.gate: asyncio.Event | None = None
        self.waiting = asyncio.Event()

    async def generate(self, ask: Ask, *, on_leave: Callable[[Callable[[], None]], object] | None = None) -> Generation:
        self.asks.append(ask)
        if ask.model != "tiny":
            raise InvalidArgument("model", ask.model, "must be one of: tiny")
        if self.refuse is not None:
            raise self.refuse
        answering = Answering(ask, len(self.asks))
        if on_leave is not None:
            on_leave(answering.leave)
        self.requests.put_nowait(answering)
        self.waiting.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.script is not None:
            self.script(answering)
        return answering.generation

    def models(self) -> list[ModelInfo]:
        return [ModelInfo("org/other", 64, "llama", 8), ModelInfo("tiny", 128, "llama", 7)]
