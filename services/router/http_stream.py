"""An answer on its way to a client of the HTTP door, token by token, without a task's turn for each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from weir.services.router.answer import Delta, Final
from weir.services.router.generation import Generation
from weir.services.router.http_exchange import Exchange
from weir.services.router.openai_responses import SseAnswer


class Outflow:
    """Lets all streams that have news write once, when the loop comes round: one callback, one write for each.

    A worker's message has a token for each of many streams, and may have the end of an answer beside its last token.
    """

    def __init__(self) -> None:
        self._due: list[SseStream] = []

    def add(self, stream: SseStream) -> None:
        """``stream`` has something to write."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._flush)
        self._due.append(stream)

    def _flush(self) -> None:
        due, self._due = self._due, []
        for stream in due:
            stream.pump()


class SseStream:
    """Writes what comes, without a task's turn for each token; ``run`` once.

    While the client is slow nothing is taken from the generation, which holds at most one answer.
    """

    def __init__(
        self,
        outflow: Outflow,
        exchange: Exchange,
        generation: Generation,
        answer: SseAnswer,
        headers: Mapping[str, str],
    ) -> None:
        self._outflow = outflow
        self._due = False
        self._exchange = exchange
        self._generation = generation
        self._answer = answer
        self._headers = headers
        self._done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def run(self) -> bool:
        """Return when the answer is complete: True; or when it was left before: False.

        Raises the WeirError that ended the request.
        """
        self._generation.on_news = self._exchange.on_writable = self._has_news
        try:
            self.pump()
            return await self._done
        finally:
            self._generation.on_news = self._exchange.on_writable = None

    def _has_news(self) -> None:
        if not self._due:
            self._due = True
            self._outflow.add(self)

    def pump(self) -> None:
        """Write all there is, at once. What goes wrong is this stream's affair, not of those that come after it."""
        self._due = False
        exchange, done = self._exchange, self._done
        if done.done() or (exchange.paused and exchange.aborted is None):
            return
        new = not exchange.started
        chunk, ending = b"", None
        held: Delta | None = None
        try:
            while (event := self._generation.take()) is not None:
                if held is not None and type(event) is not Final:
                    chunk += self._answer.delta(held)
                    held = None
                if type(event) is Delta:
                    chunk += self._opened()
                    held = event  # the end may lie behind it, and goes into the same chunk
                elif type(event) is Final:
                    exchange.send(chunk + self._opened() + self._answer.final(event, held), last=True)
                    done.set_result(True)
                    return
        except Exception as error:
            ending = error
        if held is not None:
            chunk += self._answer.delta(held)
        if not exchange.complete and (chunk or (new and exchange.started)):
            exchange.send(chunk)
        if isinstance(ending, StopAsyncIteration):
            done.set_result(False)
        elif ending is not None:
            done.set_exception(ending)

    def _opened(self) -> bytes:
        """What precedes the first part of the answer; the status is given with it."""
        if self._exchange.started:
            return b""
        self._exchange.start(200, self._headers)
        return self._answer.opening()
