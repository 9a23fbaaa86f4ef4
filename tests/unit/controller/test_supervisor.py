"""The local end of scaling: one at a time, bounded, not twice, not late."""

from __future__ import annotations

import asyncio
from typing import Any

from weir.cli.supervisor import MAX_WAITING, Supervisor
from weir.clock import ManualClock
from weir.errors import NotFound, Unavailable
from weir.events.memory import MemoryBus, MemoryServer
from weir.events.subjects import SCALE
from weir.lifecycle import Role
from weir.rpc.v1 import common_pb2, events_pb2


class Machine:
    """Workers by name; ``hold`` makes starting take its time."""

    def __init__(self) -> None:
        self.workers = {"w1": Role.PREFILL, "w2": Role.DECODE}
        self.started: list[Role] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.broken = False
        self.at_once = 0

    def worker_count(self) -> int:
        return len(self.workers)

    async def add_worker(self, role: Role) -> str:
        self.at_once += 1
        assert self.at_once == 1, "one at a time"
        self.started.append(role)
        await self.hold.wait()
        self.at_once -= 1
        if self.broken:
            raise Unavailable("no memory")
        name = f"w{2 + len(self.started)}"
        self.workers[name] = role
        return name

    async def stop_worker(self, worker_id: str) -> None:
        if worker_id not in self.workers:
            raise NotFound("worker", worker_id)
        del self.workers[worker_id]


class Stand:
    def __init__(self, max_workers: int = 3) -> None:
        self.clock = ManualClock()
        self.bus = MemoryBus(MemoryServer())
        self.machine = Machine()
        self.lines: list[str] = []
        self.supervisor = Supervisor(self.machine, self.bus, self.clock, max_workers=max_workers, say=self.lines.append)

    async def ask(self, number: int, **fields: Any) -> None:
        fields.setdefault("deadline_unix_s", self.clock.unix_s() + 10)
        event = events_pb2.ScaleEvent(number=number, origin=events_pb2.EventOrigin(publisher_id="c"), **fields)
        await self.bus.publish(SCALE, event.SerializeToString())
        for _ in range(5):
            await asyncio.sleep(0)


async def test_workers_start_and_stop_within_the_budget() -> None:
    stand = Stand()
    await stand.supervisor.open()
    await stand.ask(1, start_role=common_pb2.ROLE_MIXED)
    assert stand.machine.workers == {"w1": Role.PREFILL, "w2": Role.DECODE, "w3": Role.MIXED}
    await stand.ask(2, start_role=common_pb2.ROLE_DECODE)
    assert len(stand.machine.workers) == 3
    assert stand.lines[-1] == "scaling refused: workers = 4: at most 3 on this machine"
    await stand.ask(3, stop_worker_id="w1")
    assert set(stand.machine.workers) == {"w2", "w3"}
    await stand.ask(4, stop_worker_id="w9")
    assert stand.supervisor.refused == 2
    await stand.supervisor.close()
    await stand.supervisor.close()


async def test_repeats_late_ones_and_nonsense_do_nothing() -> None:
    stand = Stand()
    await stand.supervisor.open()
    for _ in range(3):
        await stand.ask(1, start_role=common_pb2.ROLE_DECODE)
    assert stand.machine.started == [Role.DECODE]
    await stand.ask(2, start_role=common_pb2.ROLE_DECODE, deadline_unix_s=stand.clock.unix_s() - 1)
    await stand.ask(3)
    await stand.bus.publish(SCALE, b"\xff\xff")
    assert stand.machine.started == [Role.DECODE]
    assert stand.supervisor.refused == 3
    stand.machine.broken = True
    await stand.ask(4, stop_worker_id="w1")
    await stand.ask(5, start_role=common_pb2.ROLE_DECODE)
    assert stand.lines[-1] == "scaling refused: no memory"
    stand.machine.broken = False
    await stand.ask(6, start_role=common_pb2.ROLE_DECODE)
    assert len(stand.machine.workers) == 3, "a failure ends nothing"
    await stand.supervisor.close()


async def test_the_queue_is_bounded_and_closing_ends_what_runs() -> None:
    stand = Stand(max_workers=100)
    await stand.supervisor.open()
    stand.machine.hold.clear()
    for number in range(1, MAX_WAITING + 4):
        await stand.ask(number, start_role=common_pb2.ROLE_DECODE)
    assert stand.lines[-1] == f"scaling refused: {MAX_WAITING} requests wait"
    assert stand.supervisor.refused == 2
    await asyncio.wait_for(stand.supervisor.close(), 5)
    await stand.ask(99, start_role=common_pb2.ROLE_DECODE)
    assert stand.machine.started == [Role.DECODE]


async def test_it_closes_while_a_worker_is_being_stopped() -> None:
    """Ending a process goes on when it is cancelled, and takes the cancellation for itself."""
    stand = Stand()
    stopping = asyncio.Event()

    async def stop_worker(worker_id: str) -> None:
        stopping.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            del stand.machine.workers[worker_id]

    stand.machine.stop_worker = stop_worker  # type: ignore[method-assign]
    await stand.supervisor.open()
    await stand.ask(1, stop_worker_id="w1")
    await stopping.wait()
    async with asyncio.timeout(10):
        await stand.supervisor.close()
    assert set(stand.machine.workers) == {"w2"}
