"""Carrying decisions out: one interface, and what is behind it.

Flips        roles change in place, through the workers' own service          FLIP, ALL_MIXED
LocalScale   whoever runs this machine's workers starts or stops one          SCALE_UP, SCALE_DOWN
(kubernetes) the Deployment of a role grows or shrinks                        SCALE_UP, SCALE_DOWN
Actuators    sends each action where it belongs
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from weir.balance.decision import Action, Decision
from weir.clock import Clock
from weir.errors import FailedPrecondition, WeirError
from weir.events.bus import EventBus
from weir.events.subjects import SCALE
from weir.rpc.convert import role_to_pb
from weir.rpc.v1 import events_pb2
from weir.services.controller.roles import RoleChanges


class Actuator(Protocol):
    """Does what was decided. Whether it is done is seen in the registry, not told."""

    async def carry_out(self, decision: Decision) -> None:
        """Begin ``decision`` and, if it is quick, wait for it; raises WeirError when it could not be done.

        Cancelled when the decision is given up: then nothing new is begun.
        """
        ...


class Flips:
    """Changes roles through the workers. Of several, those that succeed stay when others fail."""

    def __init__(self, changes: RoleChanges, *, drain_ms: float) -> None:
        self._changes = changes
        self._drain_ms = drain_ms

    async def carry_out(self, decision: Decision) -> None:
        """See Actuator. Raises the first error after all have ended."""
        results = await asyncio.gather(
            *(
                self._changes.change(
                    flip.worker_id, flip.role, expected_epoch=flip.expected_epoch, drain_ms=self._drain_ms
                )
                for flip in decision.flips
            ),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result


class LocalScale:
    """Asks by event; the supervisor of ``weir up`` answers by doing it."""

    def __init__(self, bus: EventBus, clock: Clock, origin: Callable[[], events_pb2.EventOrigin]) -> None:
        self._bus = bus
        self._clock = clock
        self._origin = origin

    async def carry_out(self, decision: Decision) -> None:
        """See Actuator."""
        left_s = decision.expires_s - self._clock.monotonic_s()
        event = events_pb2.ScaleEvent(
            origin=self._origin(), number=decision.number, deadline_unix_s=self._clock.unix_s() + left_s
        )
        if decision.action is Action.SCALE_UP:
            assert decision.role is not None
            event.start_role = role_to_pb(decision.role)
        else:
            event.stop_worker_id = decision.worker_id
        await self._bus.publish(SCALE, event.SerializeToString(), msg_id=f"scale-{decision.number}")


class Actuators:
    """Flips to ``flips``, scaling to ``scale`` if there is one."""

    def __init__(self, flips: Actuator, scale: Actuator | None = None) -> None:
        self._flips = flips
        self._scale = scale

    async def carry_out(self, decision: Decision) -> None:
        """See Actuator; FailedPrecondition for scaling where nothing scales."""
        assert decision.action.lasting, decision.action
        if decision.flips:
            await self._flips.carry_out(decision)
        elif self._scale is not None:
            await self._scale.carry_out(decision)
        else:
            raise FailedPrecondition(f"{decision.action.value}: nothing here starts or stops workers")


class RecordingActuator:
    """The twin for tests: remembers what it was asked; raises ``error`` if it is set."""

    def __init__(self) -> None:
        self.asked: list[Decision] = []
        self.error: WeirError | None = None

    async def carry_out(self, decision: Decision) -> None:
        """See Actuator."""
        self.asked.append(decision)
        if self.error is not None:
            raise self.error
