from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from weir.bench.goodput import Slo, parse_goodput
from weir.bench.metrics import detailed, parse_metrics, parse_percentiles, statistics_ms, summarise
from weir.bench.records import RequestRecord
from weir.bench.watchdog import judge
from weir.errors import InvalidArgument


def record(index: int = 0, sent_s: float = 0.0, times: tuple[float, ...] = (), **fields: Any) -> RequestRecord:
    ended_s = fields.pop("ended_s", times[-1] if times else sent_s)
    values = {"kind": "", "scheduled_s": sent_s, "fired_s": sent_s, "prompt_tokens": 10, "output_tokens": len(times)}
    return RequestRecord(index=index, sent_s=sent_s, ended_s=ended_s, token_times_s=times, **{**values, **fields})


FOUR = record(0, 1.0, (1.5, 1.6, 1.8, 2.1))
ONE = record(1, 2.0, (2.25,))
LOST = record(2, 2.0, (2.1,), ended_s=3.0, error="UNAVAILABLE", detail="worker gone")


def test_one_request_by_hand() -> None:
    assert FOUR.ttft_s == pytest.approx(0.5)
    assert FOUR.e2e_s == pytest.approx(1.1)
    assert FOUR.tpot_s == pytest.approx((1.1 - 0.5) / 3)
    assert FOUR.itls_s == pytest.approx([0.1, 0.2, 0.3])
    assert (ONE.tpot_s, ONE.itls_s) == (0.0, [])


def test_a_run_by_hand() -> None:
    figures = summarise([FOUR, ONE, LOST], 2.0, slo=Slo(ttft_ms=300.0), percentiles=(50.0, 99.0))
    assert figures["duration"] == 2.0
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (20, 5)
    assert figures["request_throughput"] == 1.0
    assert figures["request_goodput"] == 0.5, "only the second is within 300 ms"
    assert figures["output_throughput"] == 2.5
    assert figures["total_token_throughput"] == 12.5
    assert figures["mean_ttft_ms"] == pytest.approx(375.0)
    assert figures["median_tpot_ms"] == pytest.approx(200.0), "a single token has no time per further token"
    assert figures["mean_itl_ms"] == pytest.approx(200.0)
    assert figures["p50_itl_ms"] == pytest.approx(200.0)
    assert figures["p99_itl_ms"] == pytest.approx(298.0)
    assert figures["std_e2el_ms"] == pytest.approx((1100.0 - 250.0) / 2)
    assert figures["errors_by_kind"] == {"UNAVAILABLE": 1}
    assert figures["error_details"] == ["worker gone"]
    assert figures["max_concurrent_requests"] == 3, "FOUR ends at 2.1, after the others began"
    assert figures["max_output_tokens_per_s"] == 3.0


def test_inter_token_latencies_are_pooled_not_averaged_by_request() -> None:
    slow = record(0, 0.0, (0.0, 1.0))
    fast = record(1, 0.0, tuple(0.1 * i for i in range(11)))
    assert summarise([slow, fast], 1.0)["mean_itl_ms"] == pytest.approx((1000.0 + 10 * 100.0) / 11)


def test_a_run_without_a_completed_request_has_zeros() -> None:
    figures = summarise([LOST], 1.0)
    assert (figures["completed"], figures["p99_ttft_ms"], figures["request_goodput"]) == (0, 0.0, None)


def test_percentiles_are_numpys() -> None:
    samples = np.random.default_rng(3).exponential(size=501).tolist()
    figures = statistics_ms("ttft", samples, (50, 90, 99.9))
    assert figures["p50_ttft_ms"] == figures["median_ttft_ms"] == float(np.median(samples))
    assert figures["p90_ttft_ms"] == float(np.percentile(samples, 90))
    assert figures["p99.9_ttft_ms"] == float(np.percentile(samples, 99.9))


def test_the_detailed_lists_have_an_entry_per_request() -> None:
    lists = detailed([FOUR, LOST])
    assert lists["output_lens"] == [4, 1]
    assert lists["ttfts"] == pytest.approx([0.5, 0.1])
    assert lists["errors"] == ["", "UNAVAILABLE: worker gone"]
    assert lists["start_times"] == [1.0, 2.0]


def test_goodput_words() -> None:
    assert parse_goodput([]) is None
    assert parse_goodput(["ttft:200", "tpot:50"]) == Slo(200.0, 50.0, math.inf)
    assert parse_goodput(["ttft:200,e2el:1e3"]) == Slo(200.0, math.inf, 1000.0)


@pytest.mark.parametrize("word", ["itl:5", "ttft", "ttft:", "ttft:-1", "ttft:0", "ttft:nan", "ttft:1 ttft:2"])
def test_goodput_words_refused(word: str) -> None:
    with pytest.raises(InvalidArgument, match="--goodput"):
        parse_goodput([word])


def test_every_objective_must_be_met_and_a_bound_is_within() -> None:
    exact = record(0, 0.0, (0.25, 0.5, 0.75))
    assert Slo(250.0, 250.0, 750.0).met_by(exact)
    for missed in (Slo(249.0, 250.0, 750.0), Slo(250.0, 249.0, 750.0), Slo(250.0, 250.0, 749.0)):
        assert not missed.met_by(exact)
    assert not Slo().met_by(LOST), "a failed request meets nothing"


def test_lists_on_the_command_line() -> None:
    assert parse_metrics("ttft, itl") == ("ttft", "itl")
    assert parse_percentiles("50,99.9") == (50.0, 99.9)
    for wrong in ("", "101", "-1", "x"):
        with pytest.raises(InvalidArgument):
            parse_percentiles(wrong)
    with pytest.raises(InvalidArgument):
        parse_metrics("ttft,latency")


def test_the_watchdog_names_every_fault_of_the_generator() -> None:
    assert judge([0.001] * 100, [0.002] * 100, cpu_s=1.0, wall_s=10.0).verdict == ""
    late = judge([0.0] * 90 + [0.05] * 10, [0.03] * 10, cpu_s=9.0, wall_s=10.0)
    assert late.schedule_lag_p50_ms == 0.0
    assert late.verdict == (
        "the load generator was a bottleneck: its event loop came 30.0 ms late (p99), "
        "requests were sent 50.0 ms late (p99), it used 90 % of a core"
    )
