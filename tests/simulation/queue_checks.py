"""What must hold at a router's door and in its queue: bounds of tenants, and who is served before whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from weir.errors import ResourceExhausted
from weir.services.router.commands import Admission
from weir.services.router.entry import Entry
from weir.services.router.router import Router

if TYPE_CHECKING:
    from tests.simulation.world import World


class QueueChecks:
    """Watches each router's book: ``admit`` and what is placed."""

    def __init__(self, world: World) -> None:
        self._world = world

    def watch(self, host: str, router: Router) -> None:
        """From now on."""
        book, placing = router._book, router._book._placing
        book.admit = self._admit(host, router, book.admit)  # type: ignore[method-assign]
        placing.bind_elsewhere = self._bind(placing.bind_elsewhere)  # type: ignore[method-assign]
        placing._place = self._place(host, router, placing._place)  # type: ignore[method-assign]

    def _admit(self, host: str, router: Router, admit: Callable[..., None]) -> Callable[..., None]:
        plan = self._world.plan

        def admitted(admission: Admission, now_s: float) -> None:
            mine = [entry for entry in router._book.entries() if entry.admission.tenant == admission.tenant]
            active, waiting = len(mine), sum(entry.waiting for entry in mine)
            full = 0 < plan.tenant_max_active <= active or 0 < plan.tenant_max_queued <= waiting
            try:
                admit(admission, now_s)
            except ResourceExhausted as error:
                if "tenant" in str(error) and not full:
                    self._world.checks.fail("tenants", f"{host}: {active} active, {waiting} waiting, yet: {error}")
                raise
            if full:
                self._world.checks.fail("tenants", f"{host}: {admission.request_id} is one too many of its tenant")

        return admitted

    def _bind(self, bind: Callable[..., bool]) -> Callable[..., bool]:
        def bound(entry: Entry, now_s: float) -> bool:
            self._world.checks.read_elsewhere(entry.request_id)
            return bind(entry, now_s)

        return bound

    def _place(self, host: str, router: Router, place: Callable[..., None]) -> Callable[..., None]:
        def placed(entry: Entry, *rest: Any) -> None:
            queue = router._book._placing.queue_of(entry.admission.model)
            before = [one.request_id for one in queue or () if one.priority > entry.admission.priority]
            if before:
                self._world.checks.fail("priority", f"{host}: {entry.request_id} is placed before {before}")
            place(entry, *rest)

        return placed
