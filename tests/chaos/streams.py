"""``python -m tests.chaos.streams --requests 100000``: do NATS's streams and its publishers stay inside their bounds?

The real publishers of a router and of two workers tell a real nats-server of so many requests, as fast as it takes
them or (``burst``) faster, while the stream, its files, the server's memory and the outgoing queues are looked at.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil

from weir.clock import SystemClock
from weir.config import NatsConfig
from weir.events.nats_bus import NatsBus
from weir.events.nats_link import NatsLink
from weir.events.nats_registry import NatsRegistry
from weir.events.nats_server import EmbeddedNats
from weir.events.subjects import REQUEST_STREAM
from weir.ids import RequestKey, WorkerKey
from weir.kvcache.blocks import KvChanges
from weir.lifecycle import RequestState
from weir.rpc.v1 import common_pb2, events_pb2
from weir.services.router.commands import PublishState
from weir.services.router.events import LifecyclePublisher
from weir.services.worker.announcer import Announcer

STATES = (
    RequestState.ADMITTED, RequestState.PREFILLING, RequestState.PREFILLED, RequestState.TRANSFERRING,
    RequestState.DECODING, RequestState.FINISHED,
)  # fmt: skip
BETWEEN_LOOKS = 200
"""Requests."""
WATCHERS = 2
MOST_SERVER_MB = 384.0
"""Most of it are the ids of the last minute, by which repetitions are known, and what Go has not collected yet."""
SETTLE_S = 120.0
CONSUMERS_GONE_S = 30.0
"""0: do not wait for the server to forget the consumers of the watchers that are gone."""


@dataclasses.dataclass(slots=True)
class Figures:
    """``most_*`` are the largest values seen at any look. Durable events are those of requests' lives."""

    requests: int = 0
    durable: int = 0
    published: int = 0
    dropped: int = 0
    most_messages: int = 0
    most_bytes: int = 0
    most_pending: int = 0
    first_rss_mb: float = 0.0
    most_rss_mb: float = 0.0
    most_disk_mb: float = 0.0
    consumers_left: int = 0
    first_sequence: int = 0
    last_sequence: int = 0
    took_s: float = 0.0


class Publishers:
    """A router and two workers, each with a connection of its own; ``tell`` publishes the life of one request."""

    def __init__(self, buses: list[NatsBus], registries: list[NatsRegistry]) -> None:
        clock = SystemClock()
        self.buses = buses
        self.router = LifecyclePublisher(buses[0], clock, "router-1", 1)
        self.workers = [
            Announcer(
                WorkerKey(name, 1),
                bus,
                registry,
                clock,
                record=lambda name=name: events_pb2.WorkerRecord(worker_id=name, incarnation=1),  # type: ignore[misc]
                load=common_pb2.WorkerLoad,
                heartbeat_s=1.0,
                load_report_s=0.25,
            )
            for name, bus, registry in zip(("prefill-1", "decode-1"), buses[1:], registries[1:], strict=True)
        ]

    async def start(self) -> None:
        """Begin to send; be in the registry and watch it."""
        self.router.start()
        for worker in self.workers:
            await worker.subscribe(
                on_cancel=lambda *found: None, on_completed=lambda *found: None, on_peer_gone=lambda *found: None
            )
            await worker.start()

    async def close(self) -> None:
        """Send what waits, stop."""
        await self.router.close()
        for worker in self.workers:
            await worker.stop()

    def tell(self, number: int) -> None:
        """All that is published about one request that goes well."""
        request_id = f"r-00000001-{number:012x}"
        for state in STATES:
            self.router.put(
                PublishState(
                    request_id, 1, state, worker_id="decode-1", prompt_tokens=1_000, completion_tokens=200,
                    cached_tokens=64, age_ms=1_234.5, ttft_ms=321.5, tpot_ms=12.25, model="a-model", tenant="tenant",
                    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
                )
            )  # fmt: skip
        stored = (number.to_bytes(16), (number << 64).to_bytes(16))
        self.workers[0].kv_changed(KvChanges(stored, (), overflowed=False))
        self.workers[1].transfer_completed(RequestKey(request_id, 1), number, WorkerKey("prefill-1", 1))

    @property
    def pending(self) -> int:
        """The longest outgoing queue."""
        return max(bus.stats().pending for bus in self.buses)

    @property
    def published(self) -> int:
        return sum(bus.stats().published for bus in self.buses)

    @property
    def dropped(self) -> int:
        return self.router.dropped + sum(bus.stats().dropped for bus in self.buses)


async def flood(folder: Path, config: NatsConfig, requests: int, *, burst: bool = False) -> Figures:
    """Start a server in ``folder``, publish, look. ``burst`` waits for nothing, so that queues overflow."""
    figures, started_s = Figures(requests=requests, durable=requests * len(STATES)), time.monotonic()
    server = EmbeddedNats(folder / "nats")
    config = dataclasses.replace(config, url=await server.start())
    try:
        async with AsyncExitStack() as stack:
            publishers = await _publishers(config, stack)
            looker = await NatsLink.connect(config, name="looker")
            stack.push_async_callback(looker.close)
            await publishers.start()
            await _look(figures, server, folder, looker, publishers)
            figures.first_rss_mb = figures.most_rss_mb
            for number in range(requests):
                publishers.tell(number)
                if number % BETWEEN_LOOKS == 0:
                    await _look(figures, server, folder, looker, publishers)
                if not burst and number % 20 == 0:
                    await _room(config, publishers)
            await _settled(publishers)
            await _look(figures, server, folder, looker, publishers)
            await publishers.close()
            figures.published, figures.dropped = publishers.published, publishers.dropped
        figures.took_s = time.monotonic() - started_s
        figures.consumers_left = await _consumers_left(config)
    finally:
        await server.stop()
    return figures


async def _publishers(config: NatsConfig, stack: AsyncExitStack) -> Publishers:
    buses, registries = [], []
    for name in ("router-1", "prefill-1", "decode-1"):
        link = await NatsLink.connect(config, name=name)
        stack.push_async_callback(link.close)
        buses.append(await NatsBus.open(link))
        stack.push_async_callback(buses[-1].close)
        registries.append(await NatsRegistry.open(link, SystemClock()))
        stack.push_async_callback(registries[-1].close)
    return Publishers(buses, registries)


async def _room(config: NatsConfig, publishers: Publishers) -> None:
    await asyncio.sleep(0)
    async with asyncio.timeout(SETTLE_S):
        while publishers.pending > config.max_pending_events // 2:  # noqa: ASYNC110 - counts of other tasks
            await asyncio.sleep(0.001)


async def _settled(publishers: Publishers) -> None:
    await asyncio.sleep(0)
    async with asyncio.timeout(SETTLE_S):
        while publishers.pending:  # noqa: ASYNC110 - counts of other tasks
            await asyncio.sleep(0.01)
        await asyncio.gather(*(bus.wait_sent() for bus in publishers.buses))


async def _look(figures: Figures, server: EmbeddedNats, folder: Path, looker: NatsLink, publishers: Publishers) -> None:
    assert server.pid is not None
    state: Any = (await looker.jetstream.stream_info(REQUEST_STREAM)).state
    disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    figures.most_messages = max(figures.most_messages, state.messages)
    figures.most_bytes = max(figures.most_bytes, state.bytes)
    figures.first_sequence, figures.last_sequence = state.first_seq, state.last_seq
    figures.most_disk_mb = max(figures.most_disk_mb, disk / 1e6)
    figures.most_rss_mb = max(figures.most_rss_mb, psutil.Process(server.pid).memory_info().rss / 1e6)
    figures.most_pending = max(figures.most_pending, publishers.pending)


async def _consumers_left(config: NatsConfig) -> int:
    """Of all streams, once those that nobody listens to have had the time to go."""
    link = await NatsLink.connect(config, name="looker")
    try:
        end_s = time.monotonic() + CONSUMERS_GONE_S
        while True:
            streams = await link.jetstream.streams_info()
            left: int = sum(stream.state.consumer_count for stream in streams)
            if not left or time.monotonic() >= end_s:
                return left
            await asyncio.sleep(0.25)
    finally:
        await link.close()


def broken(figures: Figures, config: NatsConfig) -> list[str]:
    """Bounds that did not hold."""
    most = {
        "messages": (figures.most_messages, config.stream_max_messages),
        "bytes": (figures.most_bytes, config.stream_max_mb << 20),
        "pending": (figures.most_pending, config.max_pending_events),
        "consumers left": (figures.consumers_left, 0 if CONSUMERS_GONE_S else WATCHERS),
        "MB on disk": (figures.most_disk_mb, 2.0 * config.stream_max_mb + 32),
        "MB of server memory": (figures.most_rss_mb - figures.first_rss_mb, MOST_SERVER_MB),
    }
    return [f"{name}: {seen} > {bound}" for name, (seen, bound) in most.items() if seen > bound]


def main() -> int:
    """The exit status: 0 when every bound held."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.streams", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--burst", action="store_true", help="do not wait for the server")
    given = parser.parse_args()
    config = NatsConfig()
    with tempfile.TemporaryDirectory(prefix="weir-streams-") as folder:
        figures = asyncio.run(flood(Path(folder), config, given.requests, burst=given.burst))
    for name, value in dataclasses.asdict(figures).items():
        print(f"{name:<16} {value:,.1f}" if isinstance(value, float) else f"{name:<16} {value:,}")
    wrong = broken(figures, config)
    print("\n".join(wrong) or "every bound held")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
