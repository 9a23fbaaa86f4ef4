"""The worker that skips steps against one that takes every step; memory, caps and losses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.simulate.machines import SLO, WORKER
from weir.lifecycle import Role
from weir.services.router.policy import LeastLoaded
from weir.simulate.cluster import Cluster, ClusterOptions
from weir.simulate.events import EventQueue
from weir.simulate.metrics import Metrics
from weir.simulate.models import WorkerModel
from weir.simulate.traffic import Arrival

SMALL = replace(WORKER, kv_tokens=0, max_batch=4, read_latency_s=0.0, read_bytes_per_s=math.inf)


def serve(arrivals: list[Arrival], model: WorkerModel, *roles: Role, **options: bool) -> tuple[Metrics, Cluster]:
    """All of them, to the end."""
    events, metrics = EventQueue(), Metrics(SLO)
    cluster = Cluster(events, LeastLoaded(), metrics, ClusterOptions(**options))
    for role in roles:
        cluster.add(role, model)
    cluster.feed(iter(arrivals))
    events.run()
    cluster.check_integrity()
    return metrics, cluster


def step_by_step(arrivals: list[Arrival], model: WorkerModel) -> list[tuple[float, float, float]]:
    """(arrival, first token, last token) by end, of one P with single prompts and one D, one step at a time."""
    ready: list[tuple[float, Arrival]] = []
    free_s = 0.0
    for one in arrivals:
        free_s = max(free_s, one.at_s) + model.prefill_s([(one.prompt, 0)])
        ready.append((free_s, one))
    done = [(one.at_s, at_s, at_s) for at_s, one in ready if one.output == 1]
    waiting = [(at_s, one) for at_s, one in ready if one.output > 1]
    running: list[list[float]] = []  # arrival, first, context, left
    now_s = 0.0
    while waiting or running:
        if not running:
            now_s = max(now_s, waiting[0][0])
        while waiting and waiting[0][0] <= now_s and len(running) < model.max_batch:
            at_s, one = waiting.pop(0)
            running.append([one.at_s, at_s, one.prompt + 1, one.output - 1])
        now_s += model.step_s(len(running), sum(row[2] for row in running))
        for row in running:
            row[2] += 1
            row[3] -= 1
        done += [(row[0], row[1], now_s) for row in running if row[3] == 0]
        running = [row for row in running if row[3] > 0]
    return sorted(done)


REQUESTS = st.lists(st.tuples(st.floats(0.0, 0.3), st.integers(1, 600), st.integers(1, 60)), min_size=1, max_size=25)


@settings(max_examples=60, deadline=None)
@given(REQUESTS)
def test_skipping_steps_changes_nothing(rows: list[tuple[float, int, int]]) -> None:
    at_s, arrivals = 0.0, []
    for gap_s, prompt, output in rows:
        at_s += gap_s + 1e-3
        arrivals.append(Arrival(at_s, prompt, output))
    model = replace(SMALL, max_prefill_batch=1)
    metrics, _ = serve(arrivals, model, Role.PREFILL, Role.DECODE)
    found = sorted(
        (at, at + ttft, end) for at, ttft, end in zip(metrics.arrivals_s, metrics.ttfts_s, metrics.ends_s, strict=True)
    )
    for mine, wanted in zip(found, step_by_step(arrivals, model), strict=True):
        assert mine == pytest.approx(wanted, abs=1e-9)


def test_one_request_alone() -> None:
    """Prefill 5 + 100 + 0.5 ms; nine steps of 12 + 0.1 ms and 0.04 us a token; the read is one chunk of KV."""
    model = replace(WORKER, kv_tokens=0)
    metrics, _ = serve([Arrival(1.0, 1000, 10)], model, Role.PREFILL, Role.DECODE)
    assert metrics.ttfts_s[0] == pytest.approx(0.1055)
    read_s = 1e-3 + 1000 * 131_072 / 25e9
    steps_s = sum(0.0121 + 4e-8 * (1001 + i) for i in range(9))
    assert metrics.ends_s[0] == pytest.approx(1.0 + 0.1055 + read_s + steps_s)
    assert metrics.tpots_s[0] == pytest.approx((read_s + steps_s) / 9)


def test_early_binding_leaves_the_last_chunk_to_read() -> None:
    model = replace(WORKER, kv_tokens=0, batch_tokens=256)
    early, _ = serve([Arrival(0.0, 4096, 2)], model, Role.PREFILL, Role.DECODE, early=True)
    late, _ = serve([Arrival(0.0, 4096, 2)], model, Role.PREFILL, Role.DECODE, early=False)
    saved_s = (4096 - 256) * 131_072 / 25e9
    assert late.ends_s[0] - early.ends_s[0] == pytest.approx(saved_s)
    assert late.ttfts_s[0] == early.ttfts_s[0]


def test_prompts_are_prefilled_together_up_to_the_bound() -> None:
    """The first alone, the next two in one batch of 200 tokens, the fourth after them."""
    model = replace(SMALL, batch_tokens=200)
    metrics, _ = serve([Arrival(0.0, 100, 1)] * 4, model, Role.PREFILL, Role.DECODE)
    one, two = model.prefill_s([(100, 0)]), model.prefill_s([(100, 0)] * 2)
    assert sorted(metrics.ttfts_s) == pytest.approx([one, one + two, one + two, 2 * one + two])


def test_a_mixed_worker_stretches_its_steps() -> None:
    """A prompt that comes while another decodes is computed within its steps, chunk by chunk."""
    model = replace(SMALL, batch_tokens=101)
    metrics, _ = serve([Arrival(0.0, 10, 40), Arrival(0.1, 250, 1)], model, Role.MIXED)
    prefill_s = model.prefill_s([(10, 0)])
    steps = 0
    now_s = prefill_s
    while now_s < 0.1:
        now_s += model.step_s(1, 11 + steps)
        steps += 1
    for chunk in ((100, 0), (100, 100), (50, 200)):
        now_s += model.mixed_s(1, 11 + steps, [chunk])
        steps += 1
    assert metrics.arrivals_s[0] == 0.1
    assert metrics.ends_s[0] == pytest.approx(now_s)


def test_the_cap_on_step_tokens_holds_sequences_back() -> None:
    model = replace(SMALL, max_step_tokens=150)
    metrics, _ = serve([Arrival(0.0, 100, 20)] * 2, model, Role.PREFILL, Role.DECODE)
    first, second = sorted(metrics.ends_s)
    assert second - first == pytest.approx(sum(model.step_s(1, 101 + i) for i in range(19)))


def test_a_full_pool_preempts_the_youngest() -> None:
    """Two sequences outgrow 300 tokens; the younger is computed again, and both finish."""
    model = replace(SMALL, kv_tokens=300)
    metrics, cluster = serve([Arrival(0.0, 100, 100), Arrival(0.01, 100, 100)], model, Role.MIXED)
    (worker,) = cluster.workers.values()
    assert worker.preemptions >= 1
    assert list(metrics.arrivals_s) == [0.0, 0.01]
    assert metrics.output_tokens == 200


def test_what_never_fits_is_refused() -> None:
    metrics, _ = serve([Arrival(0.0, 300, 100)], replace(SMALL, kv_tokens=300), Role.MIXED)
    assert metrics.rejected == 1
    assert len(metrics.ends_s) == 0


def test_patience() -> None:
    """Without any worker a request is rejected when its patience ends."""
    events, metrics = EventQueue(), Metrics(SLO)
    cluster = Cluster(events, LeastLoaded(), metrics, ClusterOptions(patience_s=3.0))
    cluster.feed(iter([Arrival(1.0, 10, 10)]))
    events.run()
    assert events.now_s == 4.0
    assert metrics.rejected == 1
    cluster.check_integrity()


@pytest.mark.parametrize("dies_s", [0.05, 0.1058, 0.108, 0.15])
@pytest.mark.parametrize("victim", ["w0001", "w0003"])
def test_a_death_in_every_phase(dies_s: float, victim: str) -> None:
    """Prefilling, reading, decoding: another worker takes over."""
    events, metrics = EventQueue(), Metrics(SLO)
    cluster = Cluster(events, LeastLoaded(), metrics)
    for role in (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE):
        cluster.add(role, WORKER)
    cluster.feed(iter([Arrival(0.0, 1000, 10)]))
    events.at(dies_s, lambda _: cluster.remove(cluster.workers[victim]), None)
    events.run()
    assert len(metrics.ends_s) == 1
    cluster.check_integrity()
    prefilling, reading = dies_s < 0.1055, 0.1055 <= dies_s < 0.1119
    again = prefilling or reading if victim == "w0001" else not (prefilling or reading)
    assert metrics.retried == int(again)


def test_two_runs_of_one_seed_are_equal() -> None:
    from weir.simulate.traffic import Phase, phases

    def go() -> list[float]:
        arrivals = list(phases([Phase(60, 20, 800, 100)], 7))
        return list(serve(arrivals, WORKER, Role.PREFILL, Role.DECODE, Role.MIXED)[0].ends_s)

    assert go() == go()
