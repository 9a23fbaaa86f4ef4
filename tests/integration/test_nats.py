"""Bus and registry on a real nats-server: bounds, duplicates, loss and return of the server, expiry."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import nats.errors
import pytest

from weir.clock import SystemClock
from weir.config import NatsConfig
from weir.errors import InvalidArgument, Unavailable
from weir.events import nats_bus
from weir.events.bus import MAX_EVENT_BYTES, Event
from weir.events.nats_bus import MAX_UNACKED, NatsBus
from weir.events.nats_link import NatsLink
from weir.events.nats_registry import NatsRegistry
from weir.events.nats_server import EmbeddedNats
from weir.events.registry import ChangeKind, RegistryChange
from weir.events.subjects import REGISTRY_BUCKET, REQUEST_STREAM
from weir.rpc.v1.events_pb2 import WorkerRecord

TTL_S = 1.0


class Changes:
    """Collects registry changes and waits for one."""

    def __init__(self) -> None:
        self.seen: list[RegistryChange] = []
        self._more = asyncio.Event()

    def __call__(self, change: RegistryChange) -> None:
        self.seen.append(change)
        self._more.set()

    async def until(self, wanted: Callable[[RegistryChange], bool], timeout_s: float = 15.0) -> RegistryChange:
        async with asyncio.timeout(timeout_s):
            while True:
                for change in self.seen:
                    if wanted(change):
                        return change
                self._more.clear()
                await self._more.wait()

    def kinds(self) -> list[tuple[str, str]]:
        return [(change.kind.value, change.worker_id) for change in self.seen]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path / "nats")
    await server.start()
    yield server
    await server.stop()


def config_for(server: EmbeddedNats, **changes: object) -> NatsConfig:
    settings: dict[str, object] = {
        "url": server.url,
        "registry_ttl_s": TTL_S,
        "reconnect_min_ms": 20.0,
        "reconnect_max_ms": 100.0,
        "stream_max_age_s": 600.0,
        "stream_max_mb": 8,
        "stream_max_messages": 1_000,
        "duplicate_window_s": 30.0,
        **changes,
    }
    return NatsConfig(**settings)  # type: ignore[arg-type]


@pytest.fixture
async def link(server: EmbeddedNats) -> AsyncIterator[NatsLink]:
    link = await NatsLink.connect(config_for(server), name="test")
    yield link
    await link.close()


def state_waiter(link: NatsLink) -> Callable[[bool], "asyncio.Future[None]"]:
    def wait(connected: bool) -> "asyncio.Future[None]":
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        link.on_state_change(lambda now: future.set_result(None) if now is connected and not future.done() else None)
        return future

    return wait


def record(worker_id: str = "prefill-1", incarnation: int = 7, **fields: object) -> WorkerRecord:
    return WorkerRecord(worker_id=worker_id, incarnation=incarnation, address="127.0.0.1:1", **fields)  # type: ignore[arg-type]


async def test_messages_arrive_once_with_their_headers(link: NatsLink) -> None:
    bus = await NatsBus.open(link)
    arrived: asyncio.Queue[Event] = asyncio.Queue()
    subscription = await bus.subscribe("weir.v1.load.*", arrived.put_nowait)
    await bus.publish("weir.v1.load.a", b"one", headers={"traceparent": "00-1"})
    await bus.publish("weir.v1.other.a", b"not for us")
    await bus.publish("weir.v1.load.b", b"two")
    first, second = await arrived.get(), await arrived.get()
    assert (first.subject, first.payload, first.headers) == ("weir.v1.load.a", b"one", {"traceparent": "00-1"})
    assert (second.subject, second.payload, second.headers) == ("weir.v1.load.b", b"two", {})
    await subscription.unsubscribe()
    await bus.publish("weir.v1.load.a", b"three")
    await bus.close()
    assert arrived.empty()
    assert (bus.stats().published, bus.stats().dropped, bus.stats().received) == (4, 0, 2)


async def test_repeated_message_ids_are_stored_once_and_bounds_are_set(link: NatsLink) -> None:
    bus = await NatsBus.open(link)
    for _ in range(3):
        await bus.publish("weir.v1.request.finished", b"x", msg_id="r-1.1.finished", durable=True)
    await bus.publish("weir.v1.request.finished", b"y", msg_id="r-2.1.finished", durable=True)
    await bus.close()
    info = await link.jetstream.stream_info(REQUEST_STREAM)
    assert info.state.messages == 2
    bounds = info.config
    assert (bounds.max_age, bounds.max_bytes, bounds.max_msgs) == (600.0, 8 << 20, 1_000)
    assert (bounds.discard, bounds.duplicate_window) == ("old", 30.0)
    assert bounds.max_msg_size == MAX_EVENT_BYTES + 4_096
    await NatsRegistry.open(link, SystemClock())
    bucket = (await link.jetstream.stream_info(f"KV_{REGISTRY_BUCKET}")).config
    assert (bucket.max_age, bucket.max_msgs_per_subject, bucket.max_bytes) == (TTL_S, 1, 64 << 20)


async def test_many_events_are_stored_in_order_and_once_over_a_loss_of_the_server(
    server: EmbeddedNats, link: NatsLink
) -> None:
    """One acknowledgement speaks for a whole batch; what it did not cover is sent again."""
    bus = await NatsBus.open(link)
    lost, back = state_waiter(link)(False), state_waiter(link)(True)
    for number in range(2 * MAX_UNACKED):
        await bus.publish("weir.v1.request.admitted", b"%d" % number, msg_id=f"r-{number}", durable=True)
    while bus.stats().pending == 2 * MAX_UNACKED:  # noqa: ASYNC110  # one batch leaves, and no event tells of it
        await asyncio.sleep(0)
    await server.kill()  # with a batch on its way
    await asyncio.wait_for(lost, 10)
    await server.start()
    await asyncio.wait_for(back, 10)
    await bus.publish("weir.v1.request.finished", b"last", msg_id="r-last", durable=True)
    while bus.stats().pending:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await bus.close()
    state = (await link.jetstream.stream_info(REQUEST_STREAM)).state
    assert (state.messages, bus.stats().dropped) == (2 * MAX_UNACKED + 1, 0)
    for number in (0, 1, MAX_UNACKED - 1, MAX_UNACKED, 2 * MAX_UNACKED - 1):
        assert (await link.jetstream.get_msg(REQUEST_STREAM, number + 1)).data == b"%d" % number


async def test_a_cancel_does_not_wait_for_events_to_gather(link: NatsLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_bus, "LINGER_S", 3_600.0)
    bus = await NatsBus.open(link)
    arrived: asyncio.Queue[bytes] = asyncio.Queue()
    await bus.subscribe("weir.v1.>", lambda event: arrived.put_nowait(event.payload))
    await bus.publish("weir.v1.request.failed", b"event", msg_id="r-1", durable=True)
    await bus.publish("weir.v1.cancel.r-1", b"cancel")
    async with asyncio.timeout(10):
        assert {await arrived.get(), await arrived.get()} == {b"event", b"cancel"}
    await bus.close()


async def test_an_existing_stream_is_brought_to_the_new_bounds(server: EmbeddedNats, link: NatsLink) -> None:
    await (await NatsBus.open(link)).close()
    other = await NatsLink.connect(config_for(server, stream_max_messages=5), name="other")
    bus = await NatsBus.open(other)
    for number in range(9):
        await bus.publish("weir.v1.request.admitted", b"%d" % number, durable=True)
    await bus.close()
    info = await link.jetstream.stream_info(REQUEST_STREAM)
    assert (info.config.max_msgs, info.state.messages, info.state.first_seq) == (5, 5, 5)
    await other.close()


async def test_a_handler_that_raises_is_counted_and_harms_nobody(link: NatsLink) -> None:
    bus = await NatsBus.open(link)
    arrived: asyncio.Queue[bytes] = asyncio.Queue()

    def handler(event: Event) -> None:
        if event.payload == b"bad":
            raise ValueError("no")
        arrived.put_nowait(event.payload)

    await bus.subscribe("weir.v1.cancel.*", handler)
    await bus.publish("weir.v1.cancel.r-1", b"bad")
    await bus.publish("weir.v1.cancel.r-1", b"good")
    assert await arrived.get() == b"good"
    assert bus.stats().handler_errors == 1
    await bus.close()


async def test_what_is_published_while_the_server_is_away_arrives_afterwards(
    server: EmbeddedNats, link: NatsLink
) -> None:
    bus = await NatsBus.open(link)
    arrived: asyncio.Queue[bytes] = asyncio.Queue()
    await bus.subscribe("weir.v1.>", lambda event: arrived.put_nowait(event.payload))
    lost, back = state_waiter(link)(False), state_waiter(link)(True)
    await server.kill()
    await asyncio.wait_for(lost, 10)
    assert not bus.connected
    await bus.publish("weir.v1.cancel.r-1", b"cancel")
    await bus.publish("weir.v1.request.failed", b"failed", msg_id="r-1.1.failed", durable=True)
    assert (bus.stats().pending, bus.stats().published) == (2, 0)
    with pytest.raises(Unavailable):
        await bus.subscribe("weir.v1.kv.*", lambda event: None)
    await server.start()
    await asyncio.wait_for(back, 10)
    assert sorted([await arrived.get(), await arrived.get()]) == [b"cancel", b"failed"]
    await bus.close()
    stats = bus.stats()
    assert (stats.pending, stats.published, stats.dropped, stats.reconnects) == (0, 2, 0, 1)
    assert (await link.jetstream.stream_info(REQUEST_STREAM)).state.messages == 1


async def test_a_full_buffer_drops_the_oldest_and_counts(server: EmbeddedNats) -> None:
    link = await NatsLink.connect(config_for(server, max_pending_events=3), name="small")
    bus = await NatsBus.open(link)
    lost = state_waiter(link)(False)
    await server.kill()
    await asyncio.wait_for(lost, 10)
    for number in range(5):
        await bus.publish("weir.v1.load.a", b"%d" % number)
    assert (bus.stats().pending, bus.stats().dropped) == (3, 2)
    await bus.close()
    await link.close()


async def test_bad_subjects_and_sizes_are_refused(link: NatsLink) -> None:
    bus = await NatsBus.open(link)
    with pytest.raises(InvalidArgument, match="at most 65536"):
        await bus.publish("weir.v1.load.a", b"x" * (MAX_EVENT_BYTES + 1))
    with pytest.raises(InvalidArgument, match="subject"):
        await bus.publish("weir.v1.load.*", b"")
    with pytest.raises(InvalidArgument, match="subject"):
        await bus.subscribe("weir..load", lambda event: None)
    await bus.close()


async def test_no_server_is_an_error_that_names_the_address() -> None:
    config = NatsConfig(url="nats://127.0.0.1:1", connect_timeout_s=0.3)
    with pytest.raises(Unavailable, match=r"nats://127\.0\.0\.1:1 not reached in 0\.3 s"):
        await NatsLink.connect(config, name="test")


async def test_registry_shows_puts_changes_restarts_and_deletions(link: NatsLink) -> None:
    registry = await NatsRegistry.open(link, SystemClock())
    await registry.put(record())
    changes = Changes()
    await registry.watch(changes)
    assert not registry.stale
    assert registry.snapshot() == {"prefill-1": record()}
    await registry.put(record())
    await registry.put(record(draining=True))
    await registry.put(record(incarnation=8))
    await registry.delete("prefill-1", 7)
    await registry.put(record("decode-1"))
    await changes.until(lambda change: change.worker_id == "decode-1")
    await registry.delete("prefill-1", 8)
    await registry.delete("never-seen", 1)
    await changes.until(lambda c: c.kind is ChangeKind.GONE and c.previous is not None and c.previous.incarnation == 8)
    assert changes.kinds() == [
        ("put", "prefill-1"),
        ("put", "prefill-1"),
        ("gone", "prefill-1"),
        ("put", "prefill-1"),
        ("put", "decode-1"),
        ("gone", "prefill-1"),
    ]
    assert registry.snapshot() == {"decode-1": record("decode-1")}
    await registry.close()


async def test_a_silent_worker_is_gone_and_a_renewed_one_stays(link: NatsLink) -> None:
    registry = await NatsRegistry.open(link, SystemClock())
    changes = Changes()
    await registry.watch(changes)
    await registry.put(record("silent"))

    async def renew() -> None:
        while True:
            await registry.put(record("renewed"))
            await asyncio.sleep(TTL_S / 5)

    renewing = asyncio.create_task(renew())
    gone = await changes.until(lambda change: change.kind is ChangeKind.GONE)
    assert gone.worker_id == "silent"
    assert set(registry.snapshot()) == {"renewed"}
    renewing.cancel()
    await asyncio.gather(renewing, return_exceptions=True)
    await changes.until(lambda change: change.kind is ChangeKind.GONE and change.worker_id == "renewed")
    assert registry.snapshot() == {}
    await registry.close()


@pytest.mark.parametrize("keep_storage", [True, False])
async def test_server_loss_keeps_the_view_stale_and_return_syncs_it(
    server: EmbeddedNats, link: NatsLink, keep_storage: bool
) -> None:
    registry = await NatsRegistry.open(link, SystemClock())
    changes = Changes()
    await registry.watch(changes)
    await registry.put(record())
    await registry.put(record("leaves"))
    await changes.until(lambda change: change.worker_id == "leaves")
    await server.kill()
    await changes.until(lambda change: change.kind is ChangeKind.STALE)
    assert registry.stale
    with pytest.raises(Unavailable):
        await registry.put(record())
    await asyncio.sleep(TTL_S * 1.5)  # nothing expires while the server is away
    assert set(registry.snapshot()) == {"prefill-1", "leaves"}
    if not keep_storage:
        (server._data_dir / "jetstream").rename(server._data_dir / "lost")
    await server.start()
    await changes.until(lambda change: change.kind is ChangeKind.SYNCED)
    assert not registry.stale

    async def renew() -> None:
        while True:
            await registry.put(record(draining=True))
            await asyncio.sleep(TTL_S / 5)

    renewing = asyncio.create_task(renew())
    gone = await changes.until(lambda change: change.kind is ChangeKind.GONE)
    assert gone.worker_id == "leaves"
    assert registry.snapshot() == {"prefill-1": record(draining=True)}
    assert ("gone", "prefill-1") not in changes.kinds()
    renewing.cancel()
    await asyncio.gather(renewing, return_exceptions=True)
    await registry.close()


async def test_foreign_entries_in_the_bucket_are_ignored(link: NatsLink) -> None:
    registry = await NatsRegistry.open(link, SystemClock())
    changes = Changes()
    await registry.watch(changes)
    bucket = await link.jetstream.key_value(REGISTRY_BUCKET)
    await bucket.put("junk", b"\xff\xff\xff")
    await bucket.put("liar", record("other").SerializeToString())
    await registry.put(record())
    await changes.until(lambda change: change.kind is ChangeKind.PUT)
    assert changes.kinds() == [("put", "prefill-1")]
    await registry.close()


async def test_a_taken_port_is_named(server: EmbeddedNats, tmp_path: Path) -> None:
    second = EmbeddedNats(tmp_path / "second", server.port)
    with pytest.raises(Unavailable, match=rf":{server.port}.*address already in use"):
        await second.start()
    assert not second.running
    third = EmbeddedNats(tmp_path / "nats")
    with pytest.raises(Unavailable, match="another nats-server uses"):
        await third.start()


async def test_the_server_dies_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import asyncio, os, sys, pathlib\n"
        "from weir.events.nats_server import EmbeddedNats\n"
        "async def main():\n"
        "    server = EmbeddedNats(pathlib.Path(sys.argv[1]))\n"
        "    await server.start()\n"
        "    print(server.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(tmp_path / "d"), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await asyncio.wait_for(parent.stdout.readline(), 30))
    handle = os.pidfd_open(pid)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(handle, ended.set)
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    await asyncio.wait_for(ended.wait(), 10)
    asyncio.get_running_loop().remove_reader(handle)
    os.close(handle)


async def test_a_server_that_hangs_is_found_by_pings(server: EmbeddedNats) -> None:
    link = await NatsLink.connect(config_for(server, ping_interval_s=0.1), name="pings")
    registry = await NatsRegistry.open(link, SystemClock())
    changes = Changes()
    await registry.watch(changes)
    await registry.put(record())
    await changes.until(lambda change: change.kind is ChangeKind.PUT)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        await changes.until(lambda change: change.kind is ChangeKind.STALE)
        assert set(registry.snapshot()) == {"prefill-1"}
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await changes.until(lambda change: change.kind is ChangeKind.SYNCED)
    assert set(registry.snapshot()) == {"prefill-1"}
    await registry.close()
    await link.close()


async def test_nothing_is_left_running_after_close(server: EmbeddedNats) -> None:
    before = asyncio.all_tasks()
    link = await NatsLink.connect(config_for(server), name="leaves")
    bus = await NatsBus.open(link)
    registry = await NatsRegistry.open(link, SystemClock())
    await registry.watch(lambda change: None)
    await bus.subscribe("weir.v1.>", lambda event: None)
    await bus.publish("weir.v1.load.a", b"x")
    await registry.close()
    await bus.close()
    await link.close()
    for close in (registry.close, bus.close, link.close):
        await close()
    await asyncio.sleep(0)
    assert {task.get_name() for task in asyncio.all_tasks() - before} == set()


class SlowWatch:
    """A bucket whose watches say nothing for a while, as in a process that stood still or a server under load.

    The first watch falls silent once it is complete; the first news of any other take 50 ms.
    """

    def __init__(self, bucket: Any) -> None:
        self.watches = 0
        self._bucket = bucket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)

    async def watchall(self, **options: Any) -> Any:
        self.watches += 1
        watcher = await self._bucket.watchall(**options)
        watcher.updates = self._first(watcher.updates) if self.watches == 1 else self._later(watcher.updates)
        return watcher

    @staticmethod
    def _first(updates: Any) -> Any:
        complete = False

        async def silent(timeout: float) -> Any:
            nonlocal complete
            if complete:
                await asyncio.sleep(timeout)
                raise nats.errors.TimeoutError
            entry = await updates(timeout=timeout)
            complete = entry is None
            return entry

        return silent

    @staticmethod
    def _later(updates: Any) -> Any:
        started = False

        async def late(timeout: float) -> Any:
            nonlocal started
            if not started and timeout < 0.05:
                await asyncio.sleep(timeout)
                raise nats.errors.TimeoutError
            started = True
            return await updates(timeout=timeout)

        return late


async def test_a_broken_watch_is_begun_once_more_and_not_for_ever(
    server: EmbeddedNats, link: NatsLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The view is old when the new watch begins: it must wait for its news before it takes silence for death."""
    registry = await NatsRegistry.open(link, SystemClock())
    slow = SlowWatch(registry._bucket)

    async def keep_bucket() -> None:
        registry._bucket = slow

    monkeypatch.setattr(registry, "_ensure_bucket", keep_bucket)
    other = await NatsLink.connect(config_for(server), name="other")
    writer = await NatsRegistry.open(other, SystemClock())
    await writer.put(record(role_epoch=1))
    changes = Changes()
    await registry.watch(changes)
    for epoch in range(2, 14):
        await writer.put(record(role_epoch=epoch))
        await asyncio.sleep(TTL_S / 4)
    assert slow.watches == 2
    assert ("gone", "prefill-1") not in changes.kinds()
    assert registry.snapshot()["prefill-1"].role_epoch == 13
    await registry.close()
    await writer.close()
    await other.close()


async def test_the_consumer_of_a_killed_watcher_is_soon_gone(server: EmbeddedNats, link: NatsLink) -> None:
    registry = await NatsRegistry.open(link, SystemClock())
    await registry.watch(Changes())
    consumers = await link.jetstream.consumers_info(f"KV_{REGISTRY_BUCKET}")
    assert [consumer.config.inactive_threshold for consumer in consumers] == [10.0]
    await registry.close()
