"""Registry entries, load reports and cache events as the fleet and the prefix map want them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from weir.clock import ManualClock
from weir.events.memory import MemoryBus, MemoryRegistry, MemoryServer
from weir.events.subjects import kv_subject
from weir.ids import WorkerKey
from weir.rpc.v1 import common_pb2, events_pb2, kv_pb2
from weir.services.router.view import FleetView, info_of, kv_bytes_per_token, load_of

WORKER = WorkerKey("w", 3)


def record(**profile: Any) -> events_pb2.WorkerRecord:
    made = events_pb2.WorkerRecord(
        worker_id="w",
        incarnation=3,
        role=common_pb2.ROLE_DECODE,
        fingerprint=kv_pb2.KvFingerprint(kv_dtype="float32", layers=30, kv_heads=3, head_dim=64, block_size=16),
    )
    if profile:
        made.profile.CopyFrom(events_pb2.WorkerProfile(**profile))
    return made


def test_the_profile_comes_with_the_registry_entry() -> None:
    found = info_of(record(prefill_s=(0.1, 0.2, 0.0), step_s=(0.3, 0.0, 0.0), read_s=(0.0, 1e-9), threads=2)).profile
    assert found is not None
    assert found.prefill.coefficients == (0.1, 0.2, 0.0)
    assert (found.step_s(4, 100), found.read_s(1e9), found.threads) == (0.3, 1.0, 2)
    assert info_of(record()).profile is None


@pytest.mark.parametrize(
    "prefill", [(), (1.0,), (0.0, 0.0, 0.0), (-1.0, 0.0, 0.0), (math.nan, 1.0, 1.0), (math.inf, 1.0, 1.0)]
)
def test_a_profile_that_cannot_be_right_is_ignored(prefill: Sequence[float]) -> None:
    assert info_of(record(prefill_s=prefill, step_s=(1.0, 0.0, 0.0), read_s=(0.0, 1e-9))).profile is None


def test_kv_bytes_per_token_come_from_the_fingerprint() -> None:
    smollm = kv_pb2.KvFingerprint(kv_dtype="bfloat16", layers=30, kv_heads=3, head_dim=64)
    assert kv_bytes_per_token(smollm) == 23_040.0
    assert info_of(record()).kv_bytes_per_token == 46_080.0


def test_load_reports() -> None:
    blocks = common_pb2.BlockCounts(free=5, used=3, cached=2, total=10)
    load = load_of(common_pb2.WorkerLoad(sequence=4, blocks=blocks, generated_tokens=7, prefilled_tokens=8, routers=2))
    assert (load.free_blocks, load.used_blocks, load.total_blocks) == (7, 3, 10)
    assert (load.generated_tokens, load.prefilled_tokens, load.routers) == (7, 8, 2)
    assert load_of(common_pb2.WorkerLoad()).routers == 1  # it answers to this one at least


class Owner:
    """Notes what it is told of caches."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def blocks_changed(self, worker: WorkerKey, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        self.told.append((worker, list(stored), list(removed)))

    def blocks_unknown(self, worker: WorkerKey) -> None:
        self.told.append((worker, "unknown"))

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


async def test_cache_events_and_their_gaps() -> None:
    server, clock, owner = MemoryServer(), ManualClock(), Owner()
    bus = MemoryBus(server)
    view = FleetView(owner, MemoryRegistry(server, clock), bus)
    await view.open()
    for sequence, stored, removed in ((1, [b"a"], []), (2, [], [b"a"]), (2, [b"x"], []), (4, [b"b"], [])):
        origin = events_pb2.EventOrigin(publisher_id="w", incarnation=3, sequence=sequence)
        event = events_pb2.KvBlocksEvent(origin=origin, stored=stored, removed=removed)
        await bus.publish(kv_subject("w"), event.SerializeToString())
    await bus.publish(kv_subject("w"), b"\xff not a message")
    await view.close()
    assert owner.told == [
        (WORKER, [b"a"], []),
        (WORKER, [], [b"a"]),
        (WORKER, "unknown"),
        (WORKER, [b"b"], []),
    ]
    await bus.close()
