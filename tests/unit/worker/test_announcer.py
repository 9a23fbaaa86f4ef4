"""What a worker says on the bus, and what it makes of what it hears."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from weir.clock import SystemClock
from weir.events import subjects
from weir.events.bus import Event
from weir.events.memory import MemoryBus, MemoryRegistry, MemoryServer
from weir.events.registry import ChangeKind, RegistryChange
from weir.ids import RequestKey, WorkerKey
from weir.kvcache.blocks import KvChanges
from weir.rpc.v1 import common_pb2, events_pb2
from weir.services.worker.announcer import Announcer

WORKER = WorkerKey("w", 7)


def record() -> events_pb2.WorkerRecord:
    return events_pb2.WorkerRecord(worker_id="w", incarnation=7, role=common_pb2.ROLE_DECODE)


class Heard:
    def __init__(self) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.calls: list[Any] = []


@asynccontextmanager
async def announcing(
    server: MemoryServer, load_report_s: float = 0.01, record: Callable[[], events_pb2.WorkerRecord] = record
) -> AsyncIterator[tuple[Announcer, Heard]]:
    clock, heard = SystemClock(), Heard()
    bus, registry = MemoryBus(server), MemoryRegistry(server, clock)
    announcer = Announcer(
        WORKER,
        bus,
        registry,
        clock,
        record=record,
        load=lambda: common_pb2.WorkerLoad(running=3),
        heartbeat_s=30.0,
        load_report_s=load_report_s,
    )
    listener = MemoryBus(server)
    await listener.subscribe("weir.v1.>", heard.events.put_nowait)
    await announcer.subscribe(
        on_cancel=lambda *args: heard.calls.append(("cancel", *args)),
        on_completed=lambda *args: heard.calls.append(("completed", *args)),
        on_peer_gone=lambda *args: heard.calls.append(("gone", *args)),
    )
    await announcer.start()
    yield announcer, heard
    await announcer.stop()
    await announcer.stop()


async def next_event(heard: Heard) -> Event:
    return await asyncio.wait_for(heard.events.get(), 5)


async def test_a_changed_record_does_not_wait_for_the_heartbeat() -> None:
    server, mine = MemoryServer(), record()
    async with announcing(server, record=lambda: mine) as (announcer, _):
        changes: asyncio.Queue[RegistryChange] = asyncio.Queue()
        await MemoryRegistry(server, SystemClock()).watch(changes.put_nowait)
        while not changes.empty():
            changes.get_nowait()
        mine.draining = True
        announcer.record_changed()
        change = await asyncio.wait_for(changes.get(), 5)  # the heartbeat would take 30 s
        assert (change.kind, change.worker_id) == (ChangeKind.PUT, "w")
        assert change.record is not None
        assert change.record.draining


async def test_load_is_reported_after_changes_at_most_once_per_interval() -> None:
    async with announcing(MemoryServer(), load_report_s=30.0) as (announcer, heard):
        for _ in range(10):
            announcer.load_changed()
        event = await next_event(heard)
        load = events_pb2.LoadEvent.FromString(event.payload)
        assert event.subject == "weir.v1.load.w"
        assert (load.load.running, load.role, load.origin.sequence) == (3, common_pb2.ROLE_DECODE, 1)
        for _ in range(10):
            announcer.load_changed()
            await asyncio.sleep(0)
        assert heard.events.empty()


async def test_numbers_rise_per_family() -> None:
    async with announcing(MemoryServer()) as (announcer, heard):
        announcer.load_changed()
        await next_event(heard)
        announcer.transfer_completed(RequestKey("r-1", 2), 5, WorkerKey("p", 9))
        event = await next_event(heard)
        done = events_pb2.TransferCompletedEvent.FromString(event.payload)
        assert event.subject == "weir.v1.transfer.p"
        assert (done.request_id, done.attempt, done.lease_id, done.source_incarnation) == ("r-1", 2, 5, 9)
        assert done.origin.sequence == 1
        announcer.kv_changed(KvChanges((b"a",), (b"b",), False))
        announcer.kv_changed(KvChanges((b"c",), (), True))
        first = events_pb2.KvBlocksEvent.FromString((await next_event(heard)).payload)
        second = events_pb2.KvBlocksEvent.FromString((await next_event(heard)).payload)
        assert (list(first.stored), list(first.removed), first.origin.sequence) == ([b"a"], [b"b"], 1)
        assert (list(second.stored), second.origin.sequence) == ([b"c"], 3)


async def test_many_changes_are_told_in_small_events() -> None:
    async with announcing(MemoryServer()) as (announcer, heard):
        stored = tuple(number.to_bytes(16, "little") for number in range(4_500))
        announcer.kv_changed(KvChanges(stored, (b"x",) * 10, False))
        got: list[bytes] = []
        for _ in range(3):
            event = events_pb2.KvBlocksEvent.FromString((await next_event(heard)).payload)
            got += event.stored
        assert tuple(got) == stored


async def test_what_is_heard() -> None:
    server = MemoryServer()
    async with announcing(server) as (_, heard):
        bus = MemoryBus(server)
        cancel = events_pb2.CancelEvent(request_id="r-1", attempt=3, reason="left")
        await bus.publish(subjects.cancel_subject("r-1"), cancel.SerializeToString())
        await bus.publish(subjects.cancel_subject("r-2"), b"\xff\xff")
        mine = events_pb2.TransferCompletedEvent(request_id="r-1", attempt=3, lease_id=4, source_incarnation=7)
        await bus.publish(subjects.transfer_subject("w"), mine.SerializeToString())
        other = events_pb2.TransferCompletedEvent(request_id="r-1", attempt=3, lease_id=4, source_incarnation=6)
        await bus.publish(subjects.transfer_subject("w"), other.SerializeToString())
        peers = MemoryRegistry(server, SystemClock())
        await peers.put(events_pb2.WorkerRecord(worker_id="p", incarnation=1))
        await peers.put(events_pb2.WorkerRecord(worker_id="p", incarnation=2))
        assert heard.calls == [
            ("cancel", "r-1", 3, "left"),
            ("completed", RequestKey("r-1", 3), 4),
            ("gone", WorkerKey("p", 1)),
        ]


async def test_it_leaves_the_registry_and_survives_its_absence() -> None:
    server = MemoryServer()
    async with announcing(server) as (announcer, _):
        assert set(server.records) == {"w"}
        server.set_up(False)
        await announcer.publish_record()
        server.set_up(True)
    assert server.records == {}
