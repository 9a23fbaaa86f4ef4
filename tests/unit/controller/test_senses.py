"""From messages to observations: counted once, of the right incarnation, with the right units."""

from __future__ import annotations

from typing import Any

import pytest

from weir.balance.profile import Fit, Profile
from weir.errors import InvalidArgument
from weir.lifecycle import RequestState, Role
from weir.rpc.convert import state_to_pb
from weir.rpc.v1 import common_pb2, events_pb2, kv_pb2
from weir.services.controller.senses import Senses
from weir.services.controller.speed import SpeedBook, bytes_per_token

MARK = kv_pb2.KvFingerprint(kv_dtype="float32", layers=30, kv_heads=3, head_dim=64)


def record(worker_id: str, role: common_pb2.Role = common_pb2.ROLE_DECODE, **fields: Any) -> events_pb2.WorkerRecord:
    made = events_pb2.WorkerRecord(
        worker_id=worker_id, incarnation=1, role=role, role_epoch=1, fingerprint=MARK, num_blocks=100, block_size=16,
        max_running=8,
    )  # fmt: skip
    made.MergeFrom(events_pb2.WorkerRecord(**fields))
    return made


def state(name: RequestState, request_id: str = "r-1", attempt: int = 1, **fields: Any) -> events_pb2.LifecycleEvent:
    return events_pb2.LifecycleEvent(
        request_id=request_id, attempt=attempt, state=state_to_pb(name), prompt_tokens=100, **fields
    )


def report(worker_id: str, incarnation: int = 1, **load: Any) -> events_pb2.LoadEvent:
    return events_pb2.LoadEvent(
        origin=events_pb2.EventOrigin(publisher_id=worker_id, incarnation=incarnation),
        load=common_pb2.WorkerLoad(**load),
    )


def test_a_request_is_counted_once_in_each_state() -> None:
    senses = Senses(SpeedBook(), window_s=10)
    senses.observe({}, False, 0.0)
    for _ in range(3):
        senses.lifecycle(state(RequestState.ADMITTED), 0.5)
        senses.lifecycle(state(RequestState.PREFILLED, cached_tokens=40), 0.6)
        senses.lifecycle(state(RequestState.DECODING), 0.7)
        senses.lifecycle(state(RequestState.FINISHED, completion_tokens=7, ttft_ms=120.0, tpot_ms=30.0), 0.8)
        senses.lifecycle(state(RequestState.REJECTED, request_id="r-2"), 0.9)
    assert senses.repeats == 10
    traffic = senses.observe({}, False, 2.0).traffic
    assert (traffic.rate_per_s, traffic.refused_per_s) == (0.5, 0.5)
    assert (traffic.isl.mean, traffic.uncached.mean, traffic.osl.mean) == (100, 60, 7)
    assert traffic.hit_ratio == pytest.approx(0.4)
    assert (traffic.ttft_s.p50, traffic.tpot_s.p50) == (0.12, 0.03)
    with pytest.raises(InvalidArgument):
        senses.lifecycle(events_pb2.LifecycleEvent(request_id="x"), 1.0)


def test_workers_are_what_the_registry_and_their_own_reports_say() -> None:
    senses = Senses(SpeedBook(), window_s=10)
    blocks = common_pb2.BlockCounts(free=50, cached=10, used=30, leased=10, total=100)
    senses.load(report("p", running=2, waiting=1, pending_prefill_tokens=500, blocks=blocks), 3.0)
    senses.load(report("old", incarnation=9, running=4), 3.0)
    senses.load(report("gone", running=4), 3.0)
    members = {"p": record("p", common_pb2.ROLE_PREFILL), "old": record("old"), "new": record("new", draining=True)}
    seen = {worker.worker_id: worker for worker in senses.observe(members, False, 4.0).workers}
    assert set(seen) == {"p", "old", "new"}
    per_block = 16 * 2 * 30 * 3 * 64 * 4
    assert (seen["p"].role, seen["p"].heard_s, seen["p"].load) == (Role.PREFILL, 3.0, 3)
    assert (seen["p"].stock_bytes, seen["p"].headroom_bytes) == (10 * per_block, 60 * per_block)
    assert seen["p"].pending_prefill_tokens == 500
    assert seen["old"].heard_s is None, "a report of another life"
    assert (seen["new"].heard_s, seen["new"].draining) == (None, True)
    assert senses.observe(members, True, 4.0).stale == "the registry is out of reach"
    with pytest.raises(InvalidArgument):
        senses.observe({"x": events_pb2.WorkerRecord(worker_id="x")}, False, 5.0)


def test_speed_is_learnt_from_reports() -> None:
    book = SpeedBook()
    members = [record("a"), record("b", max_running=0)]
    assert book.speed(members, 100) is None
    book.note("a", 0, 0.0, 900.0)
    book.note("b", 0, 0.0, 1100.0)
    assert book.speed(members, 100) is None, "no decode step yet"
    for batch in (1, 2, 4, 8):
        book.note("a", batch, 20.0 + 2.0 * batch, 0.0)
        book.note("a", batch, 20.0 + 2.0 * batch, 0.0)  # the same report again
    speed = book.speed(members, 100)
    assert speed is not None
    assert speed.prefill_tokens_per_s == 1000.0
    assert speed.step_base_s == pytest.approx(0.020)
    assert speed.step_per_sequence_s == pytest.approx(0.002)
    assert (speed.max_batch, speed.kv_tokens, speed.bytes_per_token) == (8, 1600, 46080.0)
    assert speed.source == "reports of 2 workers and 4 decode steps"
    book.keep(["b"])
    kept = book.speed(members, 100)
    assert kept is not None
    assert kept.prefill_tokens_per_s == 1100.0


def test_a_profile_speaks_instead() -> None:
    profile = Profile(
        "f", "cpu", 1, Fit((0.01, 0.001, 0.0), 1, 0, 3), Fit((0.02, 0.001, 1e-6), 1, 0, 3), Fit((0.0, 1e-9), 1, 0, 2)
    )
    speed = SpeedBook(profile).speed([record("a")], 100.0)
    assert speed is not None
    assert speed.prefill_tokens_per_s == pytest.approx(100 / 0.11)
    assert speed.step_s(4, 1000) == pytest.approx(0.025)
    assert speed.source == "profile of cpu"


def test_published_profiles_come_before_reports_and_rough_ones_after() -> None:
    def published(rough: bool, base: float = 0.02, **fields: Any) -> events_pb2.WorkerRecord:
        profile = events_pb2.WorkerProfile(
            prefill_s=[0.01, 0.001, 0.0], step_s=[base, 0.001, 1e-6], rough=rough, device="cpu"
        )
        return record("b", profile=profile, **fields)

    book = SpeedBook()
    rough = book.speed([record("a"), published(True)], 100.0)
    assert rough is not None
    assert rough.source == "a worker's rough profile"
    assert rough.prefill_tokens_per_s == pytest.approx(100 / 0.11)
    book.note("a", 2, 50.0, 700.0)
    seen = book.speed([published(True)], 100.0)
    assert seen is not None
    assert (seen.prefill_tokens_per_s, seen.step_base_s) == (700.0, 0.05)
    stored = book.speed([published(False)], 100.0)
    assert stored is not None
    assert (stored.source, stored.step_base_s, stored.step_per_token_s) == ("published profile of cpu", 0.02, 1e-6)
    corrupt = SpeedBook().speed([published(False, base=float("nan"))], 100.0)
    assert corrupt is None


def test_measured_flips_are_tau() -> None:
    senses = Senses(SpeedBook(), window_s=10)
    assert senses.observe({}, False, 0.0).flip_s == 0.0
    for took_s in (0.2, 0.8, float("nan"), 0.4):
        senses.flipped(took_s)
    assert senses.observe({}, False, 0.0).flip_s == 0.8


def test_the_forecast_is_fed_every_second_once() -> None:
    senses = Senses(SpeedBook(), window_s=30)
    senses.observe({}, False, 0.0)
    for tenth in range(400):
        now_s = tenth / 10
        senses.lifecycle(state(RequestState.ADMITTED, request_id=f"r-{tenth}"), now_s)
        if tenth % 7 == 0:
            senses.observe({}, False, now_s)
    seen = senses.observe({}, False, 40.0)
    assert seen.forecast is not None
    assert seen.forecast.value == pytest.approx(10.0)
    assert seen.forecast.error == pytest.approx(0.0, abs=1e-9)


def test_bytes_per_token_of_what_a_record_says() -> None:
    assert bytes_per_token(record("a")) == 2 * 30 * 3 * 64 * 4
    assert bytes_per_token(events_pb2.WorkerRecord(worker_id="a")) == 0.0
