"""An answer on its way to a client of the HTTP door, token by token, without a task's turn for each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from weir.services.router.answer import Delta, Final
from weir.services.router.generation import Generation
from weir.services.router.http_exchange import Exchange
from weir.services.router.openai_responses import SseAnswer


class SseStream:
    """Writes what comes when it comes, as part of the router's taking it; ``run`` once.

    While the client is slow nothing is taken from the generation, which holds at most one answer.
    """

    def __init__(
        self, exchange: Exchange, generation: Generation, answer: SseAnswer, headers: Mapping[str, str]
    ) -> None:
        self._exchange = exchange
        self._generation = generation
        self._answer = answer
        self._headers = headers
        self._done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def run(self) -> bool:
        """Return when the answer is complete: True; or when it was left before: False.

        Raises the WeirError that ended the request.
        """
        self._generation.on_news = self._exchange.on_writable = self._pump
        try:
            self._pump()
            return await self._done
        finally:
            self._generation.on_news = self._exchange.on_writable = None

    def _pump(self) -> None:
        """Whatever goes wrong here is the stream's affair, not of those who bring the tokens of others too."""
        done = self._done
        try:
            while not done.done() and (not self._exchange.paused or self._exchange.aborted is not None):
                event = self._generation.take()
                if event is None:
                    return
                if type(event) is Delta:
                    self._write(self._answer.delta(event))
                elif type(event) is Final:
                    self._write(self._answer.final(event), last=True)
                    done.set_result(True)
        except StopAsyncIteration:
            done.set_result(False)
        except Exception as error:
            done.set_exception(error)

    def _write(self, chunk: bytes, *, last: bool = False) -> None:
        exchange = self._exchange
        if not exchange.started:
            exchange.start(200, self._headers)
            exchange.send(self._answer.opening() + chunk, last=last)
        elif chunk or last:
            exchange.send(chunk, last=last)
