"""The router's inside as its doors (gRPC, HTTP) see it."""

from __future__ import annotations

from collections.abc import Callable

from weir.services.router.answer import ModelInfo, RouterState
from weir.services.router.generation import Generation
from weir.services.router.intake import Ask


class Router:
    """Takes requests, gives answers. All methods belong to one event loop; none blocks it."""

    async def generate(
        self, ask: Ask, *, on_leave: Callable[[Callable[[], None]], object] | None = None
    ) -> Generation:
        """Check, tokenise and admit ``ask``; then iterate the result: Accepted, Deltas, Final.

        Raises InvalidArgument, ResourceExhausted or Unavailable before anything is started. Later errors are
        raised by the iteration. ``on_leave`` is called once with a function to be called when the client has
        left (``lambda leave: context.add_done_callback(lambda _: leave())``); ``Generation.leave`` and
        ``aclose`` do the same. A request that nobody reads still runs to its end: leave it.
        """
        raise NotImplementedError

    def cancel(self, request_id: str, reason: str = "cancelled by the client") -> bool:
        """Stop a request; whether it was running here. Its Generation raises RequestCancelled."""
        raise NotImplementedError

    def models(self) -> list[ModelInfo]:
        """Models that are served, by name."""
        raise NotImplementedError

    def state(self) -> RouterState:
        """Requests, sessions and tasks now."""
        raise NotImplementedError
