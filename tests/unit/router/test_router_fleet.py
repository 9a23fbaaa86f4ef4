"""What the router knows of its workers when registry and links tell their news in any order."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from tests.unit.router.stage import P1, Stage, info
from weir.clock import ManualClock
from weir.rpc.v1 import events_pb2, prefill_pb2
from weir.services.router.router import Router, RouterParts


class FakeLinks:
    """One link, up or not."""

    def __init__(self) -> None:
        self.link = SimpleNamespace(up=False)
        self.up = 0

    def get(self, worker: object) -> Any:
        return self.link

    def want(self, worker: object, address: str) -> None:
        pass

    def unwant(self, worker: object) -> None:
        pass


async def test_a_link_that_came_up_while_the_worker_was_not_listed_is_used_when_it_is() -> None:
    stage, links = Stage(), FakeLinks()
    parts: dict[str, Any] = {name: Mock() for name in RouterParts.__dataclass_fields__}
    parts |= {"clock": ManualClock(), "fleet": stage.fleet, "book": stage.book, "links": lambda owner: links}
    router = Router(RouterParts(**parts))
    router.worker_listed(info(P1), events_pb2.WorkerRecord())
    links.link.up = True
    router.connected(P1, prefill_pb2.SessionWelcome(role_epoch=1))
    router.worker_gone(P1)  # its registry entry expired, its session is up
    links.link.up = False
    router.lost(P1, "broken")
    links.link.up = True
    router.connected(P1, prefill_pb2.SessionWelcome(role_epoch=1))
    assert stage.fleet.get(P1) is None
    router.worker_listed(info(P1), events_pb2.WorkerRecord())
    view = stage.fleet.get(P1)
    assert view is not None
    assert view.usable
    await asyncio.sleep(0)
