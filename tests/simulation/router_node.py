"""A router as a process of the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.simulation.broker import SimBus, SimRegistry
from tests.simulation.model import CONTEXT, MODEL, TOKENIZER, VOCAB, text_of
from tests.simulation.nodes import Node
from tests.simulation.virtual_time import Process
from weir.config import LimitsConfig, NatsConfig, RouterConfig, TelemetryConfig
from weir.services.router.app import RouterApp, RouterSettings
from weir.services.router.catalog import ServedModel
from weir.services.router.commands import SendBeginPrefill

if TYPE_CHECKING:
    from tests.simulation.world import World


class RouterNode(Node):
    """A router, with a door that the clients of the schedule use."""

    def __init__(self, world: World, host: str, config: RouterConfig, limits: LimitsConfig) -> None:
        super().__init__(world, host)
        self.config = config
        self.limits = limits
        self.app: RouterApp | None = None

    async def live(self, process: Process, stop: asyncio.Event) -> None:
        """See Node."""
        settings = RouterSettings(self.config, NatsConfig(), self.limits, TelemetryConfig())
        bus, registry = SimBus(self.link), SimRegistry(self.link, self.clock)
        app = RouterApp(
            settings,
            bus,
            registry,
            self.clock,
            random_bits=self.random.getrandbits,
            open_channel=self.world.network.open_channel(process),
        )
        app.router._catalog.add(_served_model())
        self._watch(app)

        async def start() -> None:
            await app.open()
            self.app = app

        async def close() -> None:
            await app.close()
            await self.leave_nats(bus, registry)

        await self.serve(stop, register=app.register, start=start, drain=app.drain, close=close)

    def _watch(self, app: RouterApp) -> None:
        send = app.router._do[SendBeginPrefill]

        def watched(command: SendBeginPrefill) -> None:
            self.world.checks.begins(command.admission.request_id, command.attempt)
            send(command)

        app.router._do[SendBeginPrefill] = watched
        self.world.checks.queues.watch(self.host, app.router)

    def _gone(self, silent: bool) -> None:
        super()._gone(silent)
        self.app = None


class _Tokenizer:
    """One character a token."""

    decoder = SimpleNamespace(strip_left=0)
    special_token_ids: frozenset[int] = frozenset()

    def token_bytes(self, skip_special_tokens: bool) -> Sequence[bytes]:
        """By token id."""
        return _PIECES

    def digest(self) -> str:
        """As in the fingerprint."""
        return TOKENIZER


_PIECES = [text_of(token).encode() for token in range(VOCAB)]


def _served_model() -> ServedModel:
    tokenizer: Any = _Tokenizer()
    template: Any = None
    return ServedModel(MODEL, tokenizer, template, CONTEXT, "SimModel", VOCAB, 0)
