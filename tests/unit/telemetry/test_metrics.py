"""Few labels whatever is served; one observation, two names; stock, cost and goodput counted as they are defined."""

from __future__ import annotations

import random
import urllib.request
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.core import Sample

from tests.unit.telemetry.test_telemetry import samples
from weir.clock import ManualClock
from weir.engine.output import EngineLoad, Finished, Started, StepOutput, Usage
from weir.errors import DeadlineExceeded, KvReadVoid
from weir.ids import RequestKey, WorkerKey
from weir.kvcache.blocks import BlockState
from weir.lifecycle import FinishReason, RequestState, Role
from weir.services.router import answer
from weir.services.router.commands import End
from weir.services.router.fleet import Fleet, WorkerInfo
from weir.services.router.meters import Meters
from weir.services.router.timings import Timings
from weir.services.worker.load import LoadTracker
from weir.services.worker.meters import MAX_CANCELS, CancelTimes, WorkerMeters
from weir.telemetry.metrics import (
    CONTENT_TYPE,
    MAX_MODELS,
    MAX_PEERS,
    MAX_REASONS,
    MetricsServer,
    ProcessMetrics,
    RouterMetrics,
    WorkerMetrics,
)
from weir.telemetry.metrics_labels import CONCURRENCY, INPUT_TOKENS, OTHER, PATHS, Bounded, Ranges
from weir.transfer.plan import ReadReport

USAGE = answer.Usage(100, 5, 32, 68, 32, 0)
TIMES = Timings(1, 2, 3, 4, 10.0, 5, 20, 35, 6.25, None, "p", "d", 1)


def end(state: RequestState = RequestState.FINISHED, **fields: object) -> End:
    error = None if state is RequestState.FINISHED else DeadlineExceeded("late")
    made = End("r", state, FinishReason.LENGTH, error, "", USAGE, TIMES, path="disaggregated")
    return replace(made, **fields)  # type: ignore[arg-type]


def series(metrics: ProcessMetrics) -> list[Sample]:
    return [sample for family in metrics.registry.collect() for sample in family.samples]


def label_values(metrics: ProcessMetrics) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for sample in series(metrics):
        for name, value in sample.labels.items():
            found.setdefault(name, set()).add(value)
    return found


@pytest.mark.parametrize(
    ("value", "label"),
    [(0, "0-128"), (128, "0-128"), (129, "129-512"), (8_192, "2049-8192"), (32_768, "8193-32768"), (1 << 40, "32769+")],
)
def test_lengths_fall_into_ranges(value: int, label: str) -> None:
    assert INPUT_TOKENS.label(value) == label


def test_ranges_cover_everything_once() -> None:
    assert CONCURRENCY.labels == ("0-1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "65-128", "129+")
    assert Ranges((5,)).labels == ("0-5", "6+")
    assert [CONCURRENCY.label(value) for value in (1, 2, 3, 4, 129)] == ["0-1", "2", "3-4", "3-4", "129+"]


def test_bounded_keeps_the_first() -> None:
    bounded = Bounded(2, ("known",))
    assert [bounded(value) for value in ("a", "b", "known", "a", "")] == ["a", OTHER, "known", "a", OTHER]


def test_the_router_has_few_series_whatever_comes() -> None:
    seed = 5
    source = random.Random(seed)
    meters = Meters(RouterMetrics())
    for number in range(2_000):
        model = f"model-{source.getrandbits(64)}"
        usage = replace(USAGE, prompt_tokens=source.randrange(1 << 24), completion_tokens=source.randrange(1, 1 << 20))
        state = source.choice((RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED))
        made = end(state, usage=usage, path=source.choice(PATHS), slo_ttft_ms=source.random() * 20)
        meters.ended(made, model, source.randrange(1 << 16))
        meters.gap(model, source.randrange(1 << 16), source.expovariate(1.0))
        meters.metrics.placements.labels(meters.metrics.reasons(f"reason {number}")).inc()
    values = label_values(meters.metrics)
    assert set(values["input_tokens"]) <= set(INPUT_TOKENS.labels), f"seed {seed}"
    assert set(values["concurrency"]) <= set(CONCURRENCY.labels)
    assert set(values["path"]) <= set(PATHS)
    assert len(values["model_name"]) == MAX_MODELS + 1
    assert len(values["reason"]) == MAX_REASONS + 1
    assert set(values) == {
        "model_name", "input_tokens", "path", "concurrency", "stage", "le", "source", "slo", "reason", "state",
    }  # fmt: skip
    bound = (MAX_MODELS + 1) * (len(PATHS) * len(INPUT_TOKENS.labels) + 2 * len(CONCURRENCY.labels) + 6) * 20
    assert len(series(meters.metrics)) < bound


def test_the_worker_has_few_series_whatever_comes() -> None:
    metrics = WorkerMetrics("m")
    for number in range(500):
        metrics.set_transport(f"peer-{number}", f"wire-{number}")
        metrics.saw_read(tokens=1 << (number % 40), transport=f"wire-{number}", num_bytes=1, descriptors=1, seconds=1)
        metrics.saw_read_error(tokens=number, transport=f"wire-{number}")
        metrics.void_reads.labels(metrics.reasons(f"reason-{number}")).inc()
    values = label_values(metrics)
    assert len(values["peer"]) == MAX_PEERS
    assert "peer-499" in values["peer"]
    assert len(values["transport"]) == 9
    assert len(values["reason"]) == MAX_REASONS + 1
    assert len(series(metrics)) < 6 * 9 * 18 + 400


def test_one_observation_has_both_names() -> None:
    metrics = RouterMetrics()
    metrics.saw_ttft("m", prompt_tokens=100, path="local", seconds=0.3)
    metrics.saw_ttft("m", prompt_tokens=1_000, path="disaggregated", seconds=0.02)
    metrics.saw_ttft("n", prompt_tokens=1_000, path="disaggregated", seconds=9.0)
    found = samples(metrics)
    assert found["vllm:time_to_first_token_seconds_count{model_name=m}"] == 2
    assert found["vllm:time_to_first_token_seconds_sum{model_name=m}"] == pytest.approx(0.32)
    assert found["vllm:time_to_first_token_seconds_bucket{le=0.025,model_name=m}"] == 1
    assert found["vllm:time_to_first_token_seconds_bucket{le=+Inf,model_name=n}"] == 1
    key = "weir_ttft_seconds_bucket{input_tokens=513-2048,le=0.025,model_name=m,path=disaggregated}"
    assert (found[key], found[key.replace("0.025", "0.01")]) == (1, 0)


@pytest.mark.parametrize(
    ("slos", "good", "missed"),
    [
        ({}, 1, (0, 0)),
        ({"slo_ttft_ms": 10.0, "slo_tpot_ms": 6.25}, 1, (0, 0)),
        ({"slo_ttft_ms": 9.9}, 0, (1, 0)),
        ({"slo_ttft_ms": 9.9, "slo_tpot_ms": 6.2}, 0, (1, 1)),
    ],
)
def test_goodput_counts_what_met_its_slos(slos: dict[str, Any], good: int, missed: tuple[int, int]) -> None:
    meters = Meters(RouterMetrics())
    meters.ended(end(**slos), "m", 3)
    meters.ended(end(RequestState.FAILED, **slos), "m", 3)
    found = samples(meters.metrics)
    assert found["weir_requests_good_total{}"] == good
    slo = "weir_requests_slo_missed_total{slo=%s}"
    assert (found[slo % "ttft"], found[slo % "tpot"]) == missed
    assert found["weir_tpot_seconds_sum{concurrency=3-4,model_name=m}"] == pytest.approx(0.00625)
    assert found["vllm:generation_tokens_total{model_name=m}"] == 10
    assert found["vllm:prompt_tokens_total{model_name=m}"] == 100
    assert found["weir_prefix_hit_tokens_total{}"] == 32
    stages = [found[f"weir_request_stage_seconds_sum{{stage={s}}}"] for s in ("admit", "queue", "prefill")]
    assert stages == [0.001, 0.002, 0.003]


def load(**fields: object) -> EngineLoad:
    blocks = dict.fromkeys(BlockState, 0) | {BlockState.FREE: 5, BlockState.CACHED: 2, BlockState.LEASED: 3}
    return replace(EngineLoad(1, 2, 0, 0, blocks), **fields)  # type: ignore[arg-type]


KEY = RequestKey("r", 1)
DONE = Usage(prompt=48, completion=1, local_compute=16, local_cache_hit=32, external_kv=0, recomputed=0, preemptions=0)


def refresh(meters: WorkerMeters, tracker: LoadTracker) -> None:
    meters.refresh(tracker, open_leases=1, outstanding_reads=0, voids={"generation": 2, "timeout": 1}, leases_ended={})


def test_the_worker_counts_by_pool_and_charges_its_price() -> None:
    clock = ManualClock()
    metrics = WorkerMetrics("m")
    meters = WorkerMeters(metrics, clock, Role.PREFILL, block_bytes=1_000, price_per_hour=7.2)
    meters.stepped(StepOutput((Started(KEY, 0, (1,), 0.5),), load(prefill_tokens=16, model_ms=100.0)))
    meters.prompt(DONE)
    clock.advance(500.0)
    meters.role_is(Role.DECODE)
    meters.stepped(StepOutput((), load(decodes=3, model_ms=50.0)))
    meters.stepped(StepOutput((), load()))
    clock.advance(250.0)
    tracker = LoadTracker(load())
    refresh(meters, tracker)
    refresh(meters, tracker)
    found = samples(metrics)
    assert found["weir_busy_seconds_total{pool=prefill}"] == pytest.approx(0.1)
    assert found["weir_busy_seconds_total{pool=decode}"] == pytest.approx(0.05)
    assert found["weir_queue_seconds_sum{pool=prefill}"] == 0.5
    assert found["weir_decode_step_seconds_count{concurrency=3-4}"] == 1
    assert found["weir_worker_cost_total{pool=prefill}"] == pytest.approx(1.0)
    assert found["weir_worker_cost_total{pool=decode}"] == pytest.approx(0.5)
    assert (found["weir_stock_bytes{}"], found["weir_headroom_bytes{}"]) == (3_000, 7_000)
    assert found["vllm:prefix_cache_queries_total{model_name=m}"] == 48
    assert found["vllm:prefix_cache_hits_total{model_name=m}"] == 32
    voids = {key: value for key, value in found.items() if key.startswith("weir_kv_reads_void_total")}
    assert len(voids) == 12
    assert sum(voids.values()) == 3
    assert found["vllm:nixl_num_failed_transfers_total{model_name=m}"] == 1
    assert found["weir_role_info{role=decode}"] == 1


def test_a_cancel_is_timed_until_the_sequence_is_gone() -> None:
    clock = ManualClock()
    metrics = WorkerMetrics("m")
    meters = WorkerMeters(metrics, clock, Role.MIXED, 1, 0.0)
    seen: list[RequestKey] = []

    class Port:
        def submit(self, command: object) -> None:
            raise AssertionError("not called")

        def interrupt(self, key: RequestKey) -> None:
            seen.append(key)

    meters.cancels.watching(Port()).interrupt(KEY)
    clock.advance(0.02)
    gone = Finished(KEY, FinishReason.CANCELLED, None, DONE)
    meters.stepped(StepOutput((gone, gone), load()))
    found = samples(metrics)
    assert seen == [KEY]
    assert found["weir_cancel_seconds_count{}"] == 1
    assert found["weir_cancel_seconds_sum{}"] == pytest.approx(0.02)


def test_cancels_that_never_end_are_not_kept() -> None:
    taken: list[float] = []
    times = CancelTimes(ManualClock(), taken.append)
    keys: Iterable[RequestKey] = [RequestKey(f"r{number}", 1) for number in range(MAX_CANCELS + 1)]
    for key in keys:
        times.begun(key)
    times.ended(RequestKey("r0", 1))
    times.ended(RequestKey("r1", 1))
    assert len(taken) == 1


def test_names_keep_their_colon_whatever_format_is_asked_for() -> None:
    metrics = WorkerMetrics("m")
    server = MetricsServer("127.0.0.1:0", metrics)
    accept = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1,text/plain;q=0.5"
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/metrics", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.headers["content-type"] == CONTENT_TYPE
            assert b'\nvllm:num_requests_running{model_name="m"} 0.0\n' in answer.read()
    finally:
        server.close()


def test_a_void_read_is_counted_by_length_and_transport() -> None:
    metrics = WorkerMetrics("m")
    meters = WorkerMeters(metrics, ManualClock(), Role.DECODE, 1, 0.0)
    order: Any = SimpleNamespace(read=SimpleNamespace(ticket=SimpleNamespace(num_tokens=600)))
    void = KvReadVoid("timeout", "late")
    meters.read_void(order, void, "ucx:tcp")
    meters.read_void(order, void, "")
    meters.read_proven(order, ReadReport(4_096, 1, 2, "ucx:tcp", 0.0, 0.0, 0.0, 0.0, 0.004))
    found = samples(metrics)
    errors = {key: value for key, value in found.items() if key.startswith("weir_kv_read_errors_total")}
    assert errors == {
        "weir_kv_read_errors_total{input_tokens=513-2048,transport=ucx:tcp}": 1,
        "weir_kv_read_errors_total{input_tokens=513-2048,transport=unknown}": 1,
    }
    assert found["weir_kv_read_bytes_total{input_tokens=513-2048,transport=ucx:tcp}"] == 4_096
    assert found["vllm:nixl_num_descriptors_sum{model_name=m}"] == 2
    assert found["vllm:nixl_xfer_time_seconds_sum{model_name=m}"] == 0.004


def test_a_worker_that_is_listed_again_has_its_breaker_counted_from_anew() -> None:
    fleet, key = Fleet(), WorkerKey("w", 1)
    info = WorkerInfo(key, Role.DECODE, 0, "a:1", False, "m", b"f", 16, 8, 128)
    book: Any = SimpleNamespace(entries=list, ended={}, decisions={}, retries={}, refusals={})
    meters = Meters(RouterMetrics())
    for failures, openings in ((3, 1), (0, 1), (3, 2)):
        breaker = fleet.put(info).breaker
        for _ in range(failures):
            breaker.failed(10.0)
        meters.refresh(book, fleet, 1, 10.5)
        assert samples(meters.metrics)["weir_breaker_openings_total{}"] == openings
        fleet.remove(key)


def test_breakers_retries_and_refusals_come_from_their_owners() -> None:
    fleet = Fleet()
    keys = [WorkerKey(f"w{number}", 1) for number in range(2)]
    views = [fleet.put(WorkerInfo(key, Role.DECODE, 0, "a:1", False, "m", b"f", 16, 8, 128)) for key in keys]
    book: Any = SimpleNamespace(
        entries=list,
        ended={"finished": 4},
        decisions={"mixed worker": 5},
        retries={"rebind": 2},
        refusals={"slo_ttft": 3},
    )
    meters = Meters(RouterMetrics())
    for _ in range(3):
        views[0].breaker.failed(10.0)
    meters.refresh(book, fleet, 2, 10.5)
    found = samples(meters.metrics)
    assert [found[f"weir_breakers{{state={state}}}"] for state in ("closed", "open", "half_open")] == [1, 1, 0]
    assert found["weir_breaker_openings_total{}"] == 1
    fleet.remove(keys[0])
    book.retries["rebind"] = 3
    meters.refresh(book, fleet, 2, 20.0)
    found = samples(meters.metrics)
    assert [found[f"weir_breakers{{state={state}}}"] for state in ("closed", "open", "half_open")] == [1, 0, 0]
    assert found["weir_breaker_openings_total{}"] == 1
    assert found["weir_request_retries_total{reason=rebind}"] == 3
    assert found["weir_admission_refusals_total{reason=slo_ttft}"] == 3
    assert found["weir_placements_total{reason=mixed worker}"] == 5
    assert found["weir_sessions_open{leg=decode}"] == 2
