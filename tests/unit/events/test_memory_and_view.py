"""The twins keep the contracts of the real bus and registry."""

import pytest

from weir.clock import ManualClock
from weir.errors import InvalidArgument, Unavailable
from weir.events.bus import MAX_EVENT_BYTES, Event, EventBus
from weir.events.memory import MemoryBus, MemoryRegistry, MemoryServer
from weir.events.outbox import MAX_TRIES, Outbox, Outgoing
from weir.events.registry import ChangeKind, Registry, RegistryChange
from weir.events.view import RegistryView
from weir.rpc.v1.events_pb2 import WorkerRecord


def record(worker_id: str = "w", incarnation: int = 1, **fields: object) -> WorkerRecord:
    return WorkerRecord(worker_id=worker_id, incarnation=incarnation, **fields)  # type: ignore[arg-type]


async def test_memory_bus_delivers_to_all_members() -> None:
    server = MemoryServer()
    one: EventBus = MemoryBus(server)
    two: EventBus = MemoryBus(server)
    seen: list[Event] = []
    subscription = await two.subscribe("weir.v1.load.*", seen.append)
    await one.publish("weir.v1.load.w", b"1", headers={"k": "v"})
    await subscription.unsubscribe()
    await one.publish("weir.v1.load.w", b"2")
    assert seen == [Event("weir.v1.load.w", b"1", {"k": "v"})]
    assert (one.stats().published, two.stats().received) == (2, 1)
    await one.close()
    await two.close()


async def test_memory_bus_drops_repetitions_failures_and_what_is_too_large() -> None:
    server = MemoryServer()
    bus = MemoryBus(server)
    seen: list[bytes] = []

    def handler(event: Event) -> None:
        seen.append(event.payload)
        raise ValueError

    states: list[bool] = []
    bus.on_state_change(states.append)
    await bus.subscribe("a.>", handler)
    for _ in range(2):
        await bus.publish("a.b", b"x", msg_id="m", durable=True)
    assert (seen, len(server.durable), bus.stats().handler_errors) == ([b"x"], 1, 1)
    server.set_up(False)
    await bus.publish("a.b", b"y")
    server.set_up(True)
    assert (seen, bus.stats().dropped, states) == ([b"x"], 1, [False, True])
    with pytest.raises(InvalidArgument):
        await bus.publish("a.b", b"x" * (MAX_EVENT_BYTES + 1))


async def test_memory_registry_follows_expires_and_goes_stale() -> None:
    server, clock = MemoryServer(), ManualClock()
    registry: Registry = MemoryRegistry(server, clock, ttl_s=3.0)
    changes: list[RegistryChange] = []
    await registry.put(record("a"))
    await registry.watch(changes.append)
    await registry.put(record("b"))
    await registry.delete("a", 99)
    clock.advance(2.0)
    await registry.put(record("b"))
    clock.advance(1.5)
    assert isinstance(registry, MemoryRegistry)
    registry.expire()
    server.set_up(False)
    assert registry.stale
    with pytest.raises(Unavailable):
        await registry.put(record("a"))
    server.set_up(True)
    await registry.delete("b", 1)
    assert [(change.kind.value, change.worker_id) for change in changes] == [
        ("put", "a"),
        ("put", "b"),
        ("gone", "a"),
        ("stale", ""),
        ("synced", ""),
        ("gone", "b"),
    ]
    assert registry.snapshot() == {}
    await registry.close()


def test_view_tells_a_restart_as_gone_then_put_and_survives_bad_watchers() -> None:
    view = RegistryView()
    changes: list[RegistryChange] = []

    def bad(change: RegistryChange) -> None:
        raise ValueError

    view.add(bad)
    view.add(changes.append)
    view.put(record(), 0.0)
    view.put(record(), 1.0)
    view.put(record(incarnation=2), 2.0)
    assert changes == [
        RegistryChange(ChangeKind.PUT, "w", record()),
        RegistryChange(ChangeKind.GONE, "w", None, record()),
        RegistryChange(ChangeKind.PUT, "w", record(incarnation=2)),
    ]
    assert (view.silent(4.9, 3.0), view.silent(5.0, 3.0), view.next_expiry_s(3.0)) == ([], ["w"], 5.0)
    view.touch_all(10.0)
    assert view.silent(12.9, 3.0) == []
    view.remove("w")
    view.remove("w")
    assert (view.snapshot(), view.next_expiry_s(3.0), len(changes)) == ({}, None, 4)


def test_outbox_is_bounded_keeps_order_and_gives_up() -> None:
    outbox = Outbox(limit=3)
    for number in range(4):
        outbox.add(Outgoing("s", b"%d" % number, durable=number == 3))
    assert (outbox.dropped, len(outbox)) == (1, 3)
    batch = outbox.take(10)
    assert [message.payload for message in batch] == [b"1", b"2"]
    batch[0].tries = MAX_TRIES
    outbox.give_back(batch)
    assert (outbox.dropped, [message.payload for message in outbox.take(10)]) == (2, [b"2"])
    assert [message.payload for message in outbox.take(10)] == [b"3"]
    assert outbox.take(10) == []
