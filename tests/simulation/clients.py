"""The clients of a schedule: each asks once, reads at its own pace, and may leave."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.simulation.checks import STOPS_S
from tests.simulation.plan import RequestSpec
from weir.errors import Unavailable, WeirError
from weir.events.subjects import cancel_subject
from weir.rpc.v1 import events_pb2
from weir.services.router.answer import Accepted, Delta, Final
from weir.services.router.generation import Generation
from weir.services.router.intake import Ask, TokenPrompt

if TYPE_CHECKING:
    from tests.simulation.router_node import RouterNode
    from tests.simulation.virtual_time import Process
    from tests.simulation.world import World

ASKS_AGAIN_S = 0.1


class Client:
    """One request and what came of it."""

    def __init__(self, world: World, spec: RequestSpec) -> None:
        self.world = world
        self.spec = spec
        self.request_id = ""
        self.tokens: list[int] = []
        self.text = ""
        self.final: Final | None = None
        self.error: WeirError | None = None
        self.begun_s: float | None = None
        self.left_s: float | None = None
        self.over_s: float | None = None
        self.paused_s = 0.0
        self.faults: list[str] = []
        self._generation: Generation | None = None
        self._router: RouterNode | None = None
        self._process: Process | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more comes: an end, or the death of the router."""
        return self.over_s is not None or self.lost

    @property
    def lost(self) -> bool:
        """Whether its router has died under it."""
        return self._process is not None and not self._process.alive

    def begin(self) -> None:
        """Ask, once the router can be reached and knows of workers."""
        router = self.world.routers[self.spec.router]
        if not router.ready or router.process is None or router.process.paused:
            self.world.network.later(ASKS_AGAIN_S, self.begin)
            return
        self._router, self._process = router, router.process
        self._process.spawn(self._ask())
        if self.spec.leaves_s is not None:
            self.world.network.later(self.spec.leaves_s, self._leave)

    async def _ask(self) -> None:
        assert self._router is not None
        assert self._router.app is not None
        assert self._process is not None
        spec = self.spec
        ask = Ask(
            TokenPrompt(spec.prompt),
            sampling=replace(spec.sampling),
            max_tokens=spec.sampling.max_tokens,
            tenant=spec.tenant,
            client_request_id="the same for all",
            timeout_s=spec.timeout_s,
            priority=spec.priority,
        )
        self.begun_s = self.world.loop.time()
        self._process.open_calls += 1
        try:
            self._generation = await self._router.app.router.generate(ask)
            await self._read(self._generation)
        except WeirError as error:
            if self._generation is None and self._router.stopping and isinstance(error, Unavailable):
                # It began to stop at this moment: as a load balancer does, ask again.
                self.world.network.later(ASKS_AGAIN_S, self.begin)
                return
            self.error = error
            self.world.history.note(spec.name, f"ends with {error.code}: {error}")
        finally:
            self._process.open_calls -= 1
        self.over_s = self.world.loop.time()
        self.world.checks.ended(self)

    async def _read(self, generation: Generation) -> None:
        async for event in generation:
            if isinstance(event, Accepted):
                self.request_id = event.request_id
                self.world.checks.accepted(self)
                self.world.history.note(self.spec.name, f"is {event.request_id}")
            elif isinstance(event, Delta):
                self._take(event)
            else:
                self.final = event
                self.world.history.note(
                    self.spec.name, f"ends, {event.finish_reason.value}, {event.timings.attempts} attempts"
                )
            if self.spec.reads_every_s:
                await asyncio.sleep(self.spec.reads_every_s)

    def _take(self, delta: Delta) -> None:
        if delta.token_ids and delta.first_index != len(self.tokens):
            self.faults.append(f"tokens start at {delta.first_index}, {len(self.tokens)} were read")
        self.tokens += delta.token_ids
        self.text += delta.text
        self.world.history.note(self.spec.name, f"gets {delta.token_ids}")

    # -- leaving ----------------------------------------------------------------------------------------

    def _leave(self) -> None:
        if self.over or self._process is None:
            return
        self.left_s = self.world.loop.time()
        self.world.history.note(self.spec.name, f"is left, by {self.spec.leaves_by}")
        self._process.call(self._leave_now)
        if self.world.plan.kind == "leaving" and self.spec.leaves_by != "event":
            self.world.network.later(STOPS_S, self.world.checks.left, self)

    def _leave_now(self) -> None:
        assert self._router is not None
        if self._router.app is None or self._generation is None:
            return
        if self.spec.leaves_by == "leave":
            self._generation.leave()
        elif self.spec.leaves_by == "cancel":
            self._router.app.router.cancel(self.request_id)
        else:
            self._cancel_by_event()

    def _cancel_by_event(self) -> None:
        assert self._router is not None
        assert self._process is not None
        bus = self._router.link.bus
        if bus is None or not self.request_id:
            return
        event = events_pb2.CancelEvent(request_id=self.request_id, attempt=1 << 20, reason="by event")
        self._process.spawn(bus.publish(cancel_subject(self.request_id), event.SerializeToString()))
