"""The theory's golden values, exactly as far as they are given."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.balance import capacity, fabric, queueing, rideout
from weir.errors import InvalidArgument


def test_fabric_of_a_large_moe_on_fast_links() -> None:
    rate = fabric.roofline_prefill_tokens_per_s(flops_per_s=4.5e15, active_parameters=40e9)
    assert rate == 56_250
    check = fabric.check_fabric(
        prefill_workers=1, prefill_tokens_per_s=rate, bytes_per_token=95_000,
        prefill_link=50e9, decode_workers=1, decode_link=50e9,
    )  # fmt: skip
    assert check.flow == pytest.approx(5.34375e9)
    assert check.utilisation == pytest.approx(0.106875)
    assert check.holds


def test_fabric_of_an_mha_model_on_a_slow_link_fails() -> None:
    per_token = fabric.kv_bytes_per_token(layers=40, kv_heads=40, head_dim=128, bytes_per_value=2)
    check = fabric.check_fabric(
        prefill_workers=1, prefill_tokens_per_s=7_100, bytes_per_token=per_token,
        prefill_link=25e9 / 8, decode_workers=1, decode_link=25e9 / 8,
    )  # fmt: skip
    assert per_token == 819_200
    assert check.flow == pytest.approx(5.8e9, rel=0.01)
    assert not check.holds


@pytest.mark.parametrize(
    ("layers", "heads", "dim", "expected"),
    [(32, 8, 128, 131_072), (80, 8, 128, 327_680), (30, 3, 64, 23_040), (24, 2, 64, 12_288), (28, 8, 128, 114_688)],
)
def test_kv_bytes_per_token(layers: int, heads: int, dim: int, expected: int) -> None:
    assert fabric.kv_bytes_per_token(layers=layers, kv_heads=heads, head_dim=dim, bytes_per_value=2) == expected


def test_tensor_parallelism_beyond_the_kv_heads_ships_copies() -> None:
    one = fabric.kv_bytes_per_token(layers=94, kv_heads=4, head_dim=128, bytes_per_value=2)
    assert fabric.kv_bytes_per_token(layers=94, kv_heads=4, head_dim=128, bytes_per_value=2, tp=8) == 2 * one
    assert fabric.mla_bytes_per_token(layers=61, latent=512, rope=64, bytes_per_value=2) == 70_272


def test_the_decode_side_binds_first_when_it_is_small() -> None:
    check = fabric.check_fabric(
        prefill_workers=8, prefill_tokens_per_s=1, bytes_per_token=1, prefill_link=1, decode_workers=2, decode_link=1
    )
    assert check.binding == "decode ingress"
    assert not check.holds


@pytest.mark.parametrize(("gigabits", "milliseconds"), [(25, 1074), (100, 268), (400, 67)])
def test_transfer_times(gigabits: float, milliseconds: float) -> None:
    assert fabric.transfer_s(num_bytes=819_200 * 4096, link=gigabits * 1e9 / 8) * 1e3 == pytest.approx(
        milliseconds, abs=0.6
    )


def test_balanced_split() -> None:
    work = capacity.work_per_request(isl=4096, osl=512, prefill_tokens_per_s=10_000, step_s=0.03, batch=64)
    assert work.prefill_s == pytest.approx(0.4096)
    assert work.decode_s == pytest.approx(0.24)
    assert work.prefill_share == pytest.approx(0.630542, abs=5e-7)
    assert capacity.balanced_prefill_workers(work, 16) == pytest.approx(10.089, abs=5e-4)
    assert capacity.max_request_rate(work, 16) == pytest.approx(24.6305, abs=5e-5)


@pytest.mark.parametrize(("workers", "loss"), [(2, 0.2857), (4, 0.1667), (8, 0.1071), (16, 0.0179), (64, 0.0104)])
def test_whole_worker_loss(workers: int, loss: float) -> None:
    split = capacity.whole_worker_split(0.3, workers)
    assert split.loss == pytest.approx(loss, abs=5e-5)
    assert split.loss <= capacity.split_loss_bound(0.3, workers) + 1e-9


@pytest.mark.parametrize(("workers", "loss"), [(352, 0.697), (1056, 0.1342), (4096, 0.0104)])
def test_whole_worker_loss_in_units(workers: int, loss: float) -> None:
    split = capacity.whole_worker_split(0.3, workers, prefill_unit=32, decode_unit=320)
    assert split.loss == pytest.approx(loss, abs=5e-4)


@pytest.mark.parametrize(("rate", "expected_ms"), [(2, 78.2), (5, 92.5), (8, 121.4), (10, 165.6), (12, 304.8)])
def test_queue_of_one_worker(rate: float, expected_ms: float) -> None:
    assert queueing.mean_ttft_s(rate=rate, prefill_s=0.0721485) * 1e3 == pytest.approx(expected_ms, abs=0.06)


@pytest.mark.parametrize(
    ("rate", "single", "pipeline", "tensor"),
    [(1, 225.0, 205.6, 143.6), (2, 266.7, 212.5, 157.6), (3, 350.0, 221.4, 177.8), (4, 600.0, 233.3, 209.5)],
)
def test_two_ways_to_use_two(rate: float, single: float, pipeline: float, tensor: float) -> None:
    assert queueing.mean_ttft_s(rate=rate, prefill_s=0.2) * 1e3 == pytest.approx(single, abs=0.06)
    assert queueing.mean_ttft_pipeline_s(rate=rate, prefill_s=0.2) * 1e3 == pytest.approx(pipeline, abs=0.06)
    assert queueing.mean_ttft_tensor_s(rate=rate, prefill_s=0.2, speedup=1.5) * 1e3 == pytest.approx(tensor, abs=0.06)


def test_ride_out() -> None:
    assert rideout.rides_out(delta=-0.1, stock=1, capacity=60, tau_s=10)
    assert not rideout.rides_out(delta=-0.1, stock=0.99, capacity=60, tau_s=10)
    assert rideout.stranded_flow(delta=-0.5, stock=1, capacity=10, tau_s=60) == pytest.approx(0.48333, abs=5e-6)
    assert rideout.stranded_flow(delta=0.5, stock=1, capacity=10, tau_s=60) == pytest.approx(0.35)
    assert rideout.survivable_shortfall(ttft_slack_s=1, tau_s=60) == pytest.approx(0.017, abs=5e-4)
    assert rideout.survivable_shortfall(ttft_slack_s=1, tau_s=1) == 1
    assert rideout.max_stock(admitted_per_s=3, ttft_slack_s=2) == 6
    assert rideout.stock_delay_s(stock=6, admitted_per_s=3) == 2
    assert rideout.time_to_end_s(delta=0, stock=1, capacity=2) == math.inf


def test_slo_sizing_and_cost() -> None:
    rate = capacity.slo_prefill_tokens_per_s(max_tokens_per_s=28_300, isl=6144, ttft_s=2, overhead_s=0.1)
    assert rate == pytest.approx(25_066, abs=1)
    assert capacity.slo_ratio(max_batch=64, ttft_s=0.5, osl=256, tpot_s=0.05) == pytest.approx(2.5)
    assert capacity.cost_per_million_tokens(workers=2, price_per_worker_hour=1.8, tokens_per_s=1000) == pytest.approx(
        1.0
    )
    assert fabric.duplicated_bytes(produced_bytes_per_s=5e9, window_s=0.02) == pytest.approx(1e8)
    assert fabric.chunked_rereads(5) == 2


@given(st.floats(0.02, 0.98), st.integers(2, 300))
def test_the_split_is_the_best_of_all(share: float, workers: int) -> None:
    split = capacity.whole_worker_split(share, workers)
    assert split.prefill + split.decode == workers
    every = [capacity.split_loss(share, workers, p, workers - p) for p in range(1, workers)]
    assert split.loss == pytest.approx(min(every), abs=1e-9)


@pytest.mark.parametrize(
    "call",
    [
        lambda: capacity.work_per_request(isl=0, osl=1, prefill_tokens_per_s=1, step_s=1, batch=1),
        lambda: capacity.work_per_request(isl=1, osl=1, prefill_tokens_per_s=float("nan"), step_s=1, batch=1),
        lambda: capacity.whole_worker_split(0.5, 1),
        lambda: capacity.whole_worker_split(1.0, 4),
        lambda: queueing.mean_ttft_s(rate=5, prefill_s=0.2),
        lambda: rideout.rides_out(delta=1, stock=3, capacity=2, tau_s=1),
        lambda: fabric.check_fabric(prefill_workers=1, prefill_tokens_per_s=1, bytes_per_token=1, prefill_link=0,
                                    decode_workers=1, decode_link=1),
    ],
)  # fmt: skip
def test_nonsense_is_refused_by_name(call: object) -> None:
    assert callable(call)
    with pytest.raises(InvalidArgument):
        call()
