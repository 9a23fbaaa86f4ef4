"""What others measured on real servers, reproduced. Nothing is fitted to the results: see docs/simulate.md."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.unit.simulate.shared import shared
from weir.balance.sizing import Slo
from weir.engine.scheduler import SchedulerConfig
from weir.lifecycle import Role
from weir.services.router.policy import LeastLoaded
from weir.simulate.cluster import Cluster, ClusterOptions
from weir.simulate.distserve import distserve_model, harness_arrivals, read_lengths
from weir.simulate.events import EventQueue
from weir.simulate.metrics import Metrics
from weir.simulate.operators import OperatorTimes
from weir.simulate.replay import Replay
from weir.simulate.traffic import Arrival, sampled

FIG_9A = {0.875: 94.3, 1.125: 90.5, 1.375: 87.1, 1.625: 78.6, 1.875: 71.0, 2.125: 66.7}
FIG_9A_VLLM = {0.875: 71.0, 1.125: 65.0, 1.375: 56.5, 1.625: 38.0, 1.875: 36.5, 2.125: 28.0}
SLO = Slo(0.125, 0.2)
SPLIT_GPUS, VLLM_GPUS = 8, 4
PROMPTS_PER_GPU = 50
FILES = (
    "distserve_profiler-a100-80g.distserve.json",
    "distserve_profiler-a100-80g.vllm.json",
    "distserve_max_num_tokens.csv",
    "humaneval_opt_token_lengths.csv",
)


def attainment(folder: Path, arrivals: Iterable[Arrival], *, split: bool, slo: Slo = SLO) -> float:
    """Percent of requests within the SLO; TPOT as they define it, over all output tokens."""
    events, metrics = EventQueue(), Metrics(slo, per_output=True)
    cluster = Cluster(events, LeastLoaded(), metrics, ClusterOptions(prompts_first=not split))
    if split:
        cluster.add(Role.PREFILL, distserve_model(folder, tp=4))
        cluster.add(Role.DECODE, distserve_model(folder, tp=2, pp=2))
    else:
        cluster.add(Role.MIXED, distserve_model(folder, tp=4, engine="vllm"))
    cluster.feed(iter(arrivals))
    events.run()
    assert cluster.live == 0
    return 100 * metrics.good() / metrics.arrived


def error(found: Iterable[float], wanted: Iterable[float]) -> float:
    """Mean absolute error."""
    return statistics.fmean(abs(a - b) for a, b in zip(found, wanted, strict=True))


def test_distserve_fig_9a_is_closer_than_its_own_simulator() -> None:
    folder = shared(*FILES)
    rows = read_lengths(folder / FILES[3])
    count = PROMPTS_PER_GPU * SPLIT_GPUS
    found = [attainment(folder, harness_arrivals(rows, rate * SPLIT_GPUS, count), split=True) for rate in FIG_9A]
    print([round(value, 1) for value in found], "MAE", round(error(found, FIG_9A.values()), 2))
    assert error(found, FIG_9A.values()) < 1.6  # their simulator: 2.3


def test_distserve_fig_9a_holds_for_other_arrivals() -> None:
    """5,000 Poisson arrivals instead of the 400 that were measured."""
    folder = shared(*FILES)
    rows = read_lengths(folder / FILES[3])
    found = [attainment(folder, sampled(rows, rate * SPLIT_GPUS, 5_000, seed=1), split=True) for rate in FIG_9A]
    print([round(value, 1) for value in found], "MAE", round(error(found, FIG_9A.values()), 2))
    assert error(found, FIG_9A.values()) < 2.1


def test_vllm_in_fig_9a() -> None:
    folder = shared(*FILES)
    rows = read_lengths(folder / FILES[3])
    count = PROMPTS_PER_GPU * VLLM_GPUS
    found = [attainment(folder, harness_arrivals(rows, rate * VLLM_GPUS, count), split=False) for rate in FIG_9A_VLLM]
    print([round(value, 1) for value in found], "MAE", round(error(found, FIG_9A_VLLM.values()), 2))
    assert error(found, FIG_9A_VLLM.values()) < 5.2  # their simulator: 7 to 8


@pytest.mark.parametrize(
    ("source", "bytes_per_token", "latency_s", "bytes_per_s", "worst"),
    [
        # 36 layers, 8 KV heads of 128, K and V, 2 bytes
        ("Qwen3-8B", 2 * 36 * 8 * 128 * 2, 0.378e-3, 146e9, 0.07),
        # 94 layers, 4 KV heads of 128; TP8 ships each twice
        ("Qwen3-235B-A22B", 2 * 94 * 4 * 128 * 2 * 2, 1.835e-3, 171e9, 0.07),
    ],
)
def test_kv_transfer(source: str, bytes_per_token: int, latency_s: float, bytes_per_s: float, worst: float) -> None:
    folder = shared("mooncake_pd_kv_transfer_measured.csv", *FILES)
    model = distserve_model(folder).with_link(latency_s, bytes_per_s, bytes_per_token)
    with (folder / "mooncake_pd_kv_transfer_measured.csv").open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["model"] == source]
    assert len(rows) == 9
    errors = []
    for row in rows:
        measured_s = float(row["transfer_ms"]) / 1e3
        errors.append(model.read_s(int(row["prompt_tokens"]) * bytes_per_token) / measured_s - 1)
    print(source, [f"{value:+.1%}" for value in errors])
    assert max(abs(value) for value in errors) < worst
    assert statistics.fmean(abs(value) for value in errors) < 0.05


def test_vllm_0_19_request_by_request() -> None:
    """The production scheduler under the measured operators of the same GPU, without any overhead added."""
    name = "llmservingsim/RTX4090_Llama-3.1-8B"
    profile = "llmservingsim/profile_RTX4090_Llama-3.1-8B_tp1_"
    folder = shared(
        f"{name}.vllm_requests.jsonl", *(f"{profile}{t}.csv" for t in ("attention", "dense", "per_sequence"))
    )
    lines = (folder / f"{name}.vllm_requests.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    # By the engine's clock, from when the engine had it: that is what all its times are taken from.
    rows.sort(key=lambda row: row["queued_ts"])
    start_s = rows[0]["queued_ts"]
    arrivals = [Arrival(row["queued_ts"] - start_s, row["input_toks"], row["output_toks"]) for row in rows]
    times = OperatorTimes.load(folder / "llmservingsim", "RTX4090_Llama-3.1-8B_tp1", layers=32)
    config = SchedulerConfig(max_batch_tokens=2048, max_running=256, max_waiting=4096)
    replay = Replay(times, config, num_blocks=2588 - 1)  # vLLM keeps one block for itself
    found = replay.run(arrivals)
    assert replay.scheduler.num_live == 0
    assert replay.preemptions > 0
    mean = statistics.fmean
    errors = {
        "ttft": mean(one.ttft_s for one in found) / mean(r["first_token_ts"] - r["queued_ts"] for r in rows) - 1,
        "tpot": mean(one.tpot_s for one in found)
        / mean((r["last_token_ts"] - r["first_token_ts"]) / (r["output_toks"] - 1) for r in rows)
        - 1,
        "e2e": mean(one.e2e_s for one in found) / mean(r["last_token_ts"] - r["queued_ts"] for r in rows) - 1,
    }
    print({key: f"{value:+.2%}" for key, value in errors.items()}, replay.preemptions, "preemptions")
    assert abs(errors["tpot"]) < 0.002
    assert abs(errors["e2e"]) < 0.012
    assert abs(errors["ttft"]) < 0.016
