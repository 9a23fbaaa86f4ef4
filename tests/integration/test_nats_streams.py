"""Streams and queues stay inside their bounds while more is published than they hold; nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import streams
from tests.chaos.streams import STATES, broken, flood
from weir.clock import SystemClock
from weir.config import NatsConfig
from weir.events.nats_bus import NatsBus
from weir.events.nats_link import NatsLink
from weir.events.nats_registry import NatsRegistry
from weir.events.nats_server import EmbeddedNats
from weir.events.subjects import REQUEST_STREAM

REQUESTS = 1_700
"""Of six durable events each: 10,200."""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path / "server")
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server forgets the watchers' consumers after 10 s: only the long run waits for that."""
    monkeypatch.setattr(streams, "CONSUMERS_GONE_S", 0.0)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("messages", "megabytes"), [(1_000, 64), (200_000, 1)], ids=["messages", "bytes"])
async def test_the_oldest_are_discarded(tmp_path: Path, messages: int, megabytes: int) -> None:
    config = NatsConfig(stream_max_messages=messages, stream_max_mb=megabytes)
    figures = await flood(tmp_path, config, REQUESTS)
    assert broken(figures, config) == []
    assert figures.dropped == 0
    assert figures.last_sequence == figures.durable == REQUESTS * len(STATES)
    assert figures.first_sequence > 5_000, "of what was published, less than half is kept"
    if messages == 1_000:
        assert figures.first_sequence == figures.durable - messages + 1


async def test_the_old_are_discarded(server: EmbeddedNats) -> None:
    config = NatsConfig(url=server.url, stream_max_age_s=1.0)
    link = await NatsLink.connect(config, name="test")
    try:
        bus = await NatsBus.open(link)
        for number in range(100):
            await bus.publish("weir.v1.request.finished", b"event", msg_id=f"{number}", durable=True)
        await bus.close()
        async with asyncio.timeout(20):
            while (await _stream(link)).messages:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)
        assert (await _stream(link)).last_seq == 100
    finally:
        await link.close()


async def _stream(link: NatsLink) -> Any:
    return (await link.jetstream.stream_info(REQUEST_STREAM)).state


@pytest.mark.usefixtures("at_once")
async def test_what_the_queue_cannot_hold_is_dropped_and_counted(tmp_path: Path) -> None:
    """One that waits for nothing: the queue stays at its limit, and what is neither sent nor waiting was counted."""
    config = NatsConfig(stream_max_messages=1_000, max_pending_events=500)
    figures = await flood(tmp_path, config, REQUESTS, burst=True)
    assert broken(figures, config) == []
    assert figures.most_pending <= 500
    assert figures.dropped > 0
    assert figures.last_sequence < figures.durable


async def test_a_watch_that_is_given_up_on_its_way_leaves_nothing(server: EmbeddedNats) -> None:
    """The connection comes and goes while the watch is being made, at every point of that."""
    link = await NatsLink.connect(NatsConfig(url=server.url), name="test")
    try:
        registry = await NatsRegistry.open(link, SystemClock())
        await registry.watch(lambda change: None)
        before = len(link.client._subs)
        for step in range(60):
            registry._on_link(True)
            await asyncio.sleep(step * 0.0004)
            registry._on_link(False)
        registry._on_link(True)
        async with asyncio.timeout(10):
            while len(link.client._subs) != before or registry.stale:  # noqa: ASYNC110 - several tasks
                await asyncio.sleep(0.01)
        await registry.close()
        assert len(link.client._subs) == before - 1
    finally:
        await link.close()
