"""The benchmarks against real clusters: what they count is what was done. Never how fast it was."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from rich.console import Console

from tests.e2e.conftest import MODEL_NAME
from tests.e2e.quiet import assert_quiet
from weir.bench.cancels import CancelShape, measure_cancels
from weir.bench.load import run_load
from weir.bench.plan import LoadPlan, Prompt, Target
from weir.cli.bench_interference import InterferenceShape, chat_itl, check_completed
from weir.cli.bench_layouts import parse_external
from weir.cli.bench_link import link_obstacle
from weir.cli.bench_matrix import MatrixOptions, run_bench_matrix
from weir.cli.bench_router import MODEL_NAME as MOCK_NAME
from weir.cli.bench_router import MockCluster, RouterShape, measure_door
from weir.cli.bench_serve import DatasetOptions, ServeOptions, run_bench_serve
from weir.cli.cluster import Cluster
from weir.client import AsyncClient
from weir.clock import SystemClock
from weir.errors import InvalidArgument

pytestmark = pytest.mark.asyncio(loop_scope="module")

VLLM_KEYS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput",
    "max_output_tokens_per_s", "max_concurrent_requests", "input_lens", "output_lens", "ttfts", "itls", "latencies",
    "start_times", "generated_texts", "errors",
}  # fmt: skip
STATISTICS = {
    f"{kind}_{metric}_ms" for kind in ("mean", "median", "std", "p99") for metric in ("ttft", "tpot", "itl", "e2el")
}


@pytest.fixture(scope="module")
def quiet_console() -> Console:
    return Console(quiet=True)


async def _finished(cluster: Cluster) -> int:
    async with AsyncClient(cluster.router_address) as client:
        return dict((await client.state()).ended).get("finished", 0)


@pytest.mark.parametrize("backend", ["weir", "openai", "openai-chat"])
async def test_serve_counts_what_was_served(
    pair: Cluster, demo_model: Path, tmp_path: Path, quiet_console: Console, backend: str
) -> None:
    address = pair.router_address if backend == "weir" else f"http://{pair.http_address}"
    dataset = DatasetOptions(count=6, input_tokens=20, output_tokens=5, warmups=1, tokenizer=demo_model, seed=3)
    options = ServeOptions(
        target=Target(backend, address, MODEL_NAME),
        dataset=dataset,
        request_rate=20.0,
        ignore_eos=True,
        goodput=("e2el:600000",),
        save=True,
        save_detailed=True,
        result_dir=tmp_path,
        result_filename="result.json",
        metadata=("layout=1p1d",),
        quiet=True,
    )
    before = await _finished(pair)
    await run_bench_serve(quiet_console, options)
    document: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    assert (VLLM_KEYS | STATISTICS) - set(document) == set()
    assert (document["completed"], document["failed"], document["errors_by_kind"]) == (6, 0, {})
    assert document["total_output_tokens"] == 30
    assert document["output_lens"] == [5] * 6
    if backend != "openai-chat":  # a chat's template adds tokens, and text need not encode to the ids it came from
        assert document["input_lens"] == [20] * 6
    assert document["request_goodput"] == pytest.approx(6 / document["duration"])
    assert document["layout"] == "1p1d"
    assert await _finished(pair) - before == 7, "six and the warm-up"
    await assert_quiet(pair)


async def test_errors_are_counted_by_kind(pair: Cluster) -> None:
    prompts = (Prompt(4, (300, 301)), Prompt(4, (10_000_000,)), Prompt(1 << 20, (300,)))
    target = Target("weir", pair.router_address)
    result = await run_load(LoadPlan(target, prompts, (0.0,) * 3, ignore_eos=True))
    assert [r.error for r in result.records] == ["", "INVALID_ARGUMENT", "INVALID_ARGUMENT"]
    await assert_quiet(pair)


async def test_cancelling_at_any_moment_gives_all_blocks_back(pair: Cluster) -> None:
    samples = await measure_cancels(
        pair.router_address,
        pair.worker_addresses,
        CancelShape(prompt_tokens=48, output_tokens=12),
        6,
        np.random.default_rng(5),
        SystemClock(),
    )
    assert [s.by for s in samples] == ["leave", "call"] * 3
    assert all(0 <= s.tokens <= 12 and s.back_ms > 0 for s in samples)
    await assert_quiet(pair)


async def test_interference_pools_the_gaps_of_the_chats_only(pair: Cluster) -> None:
    shape = InterferenceShape(chats=2, chat_input=16, chat_output=6, longs=1, long_input=64, long_output=2, after_s=0.0)
    result = await run_load(shape.plan(Target("weir", pair.router_address), 1, disturbed=True))
    check_completed(result.records)
    assert [(r.kind, r.output_tokens) for r in result.records] == [("chat", 6), ("chat", 6), ("long", 2)]
    assert sum(len(r.itls_s) for r in result.records if r.kind == "chat") == 10
    figures = chat_itl(result.records)
    assert figures["p50"] <= figures["p95"] <= figures["p99"] <= figures["max"]
    await assert_quiet(pair)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mock_cluster(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MockCluster]:
    async with MockCluster(demo_model, tmp_path_factory.mktemp("mock"), 1.0).running() as cluster:
        yield cluster


@pytest.mark.parametrize("door", ["gRPC", "HTTP"])
async def test_the_router_serves_mock_workers_at_both_doors(mock_cluster: MockCluster, door: str) -> None:
    shape = RouterShape(requests=20, streams=4, stream_tokens=9, concurrency=4, alone=5)
    direct = Target("weir", mock_cluster.mock_address, MOCK_NAME)
    grpc_target = Target("weir", mock_cluster.router_address, MOCK_NAME)
    target = grpc_target if door == "gRPC" else Target("openai", f"http://{mock_cluster.http_address}", MOCK_NAME)
    figures = await measure_door(door, target, mock_cluster.router_pid, shape, direct if door == "gRPC" else None)
    assert figures.door == door
    assert (figures.added_p50_ms is None) == (door == "HTTP")


@pytest.mark.slow
async def test_the_matrix_writes_a_report_and_survives_the_loss_of_a_worker(
    demo_model: Path, tmp_path: Path, quiet_console: Console
) -> None:
    options = MatrixOptions(
        model_dir=demo_model,
        scenarios=("worker-loss",),
        seconds=6.0,
        rate_scales=(1.0,),
        goodput=("ttft:60000",),
        seed=1,
        out=tmp_path,
    )
    report = await run_bench_matrix(quiet_console, options)
    runs = report["scenarios"][0]["runs"]
    assert [run["layout"] for run in runs] == ["1 prefill + 1 decode", "2 mixed"]
    for run in runs:
        assert (run["figures"]["completed"], run["figures"]["failed"]) == (4, 0), run["figures"]["error_details"]
        assert run["figures"]["total_output_tokens"] == 4 * 32, "no token twice, none missing"
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert "worker-loss" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.skipif(bool(link_obstacle()), reason=link_obstacle() or "possible")
async def test_kv_goes_over_the_limited_link_alone(demo_model: Path, tmp_path: Path, quiet_console: Console) -> None:
    options = MatrixOptions(
        model_dir=demo_model,
        scenarios=("network-degradation",),
        seconds=1.0,
        rate_scales=(1.0,),
        goodput=("ttft:600000",),
        seed=1,
        out=tmp_path,
        link_mbit=200.0,
    )
    report = await run_bench_matrix(quiet_console, options)
    scenario = report["scenarios"][0]
    split, mixed = scenario["runs"]
    assert (split["figures"]["completed"], mixed["figures"]["completed"]) == (1, 1), split["figures"]["error_details"]
    assert split["link"]["transport"] == "ucx:tcp"
    assert 0.0 < split["link"]["read_mb_s"] < 1.1 * split["link"]["limit_mb_s"]
    assert (mixed["link"]["transport"], mixed["link"]["read_mb_s"]) == ("", 0.0)
    assert scenario["link"].startswith("link limited to 25.0 MB/s: a TCP stream measured ")
    assert "a KV read by ucx:tcp" in (tmp_path / "report.html").read_text()
    assert scenario["checklist"][-1]["question"] == "Does the link carry the KV?"


@pytest.mark.slow
async def test_a_running_system_is_added_to_a_report(
    mixed: Cluster, demo_model: Path, tmp_path: Path, quiet_console: Console
) -> None:
    external = parse_external(f"other=openai:http://{mixed.http_address}", MODEL_NAME)
    options = MatrixOptions(
        model_dir=demo_model,
        scenarios=("decode-heavy",),
        seconds=1.0,
        rate_scales=(1.0,),
        goodput=("ttft:60000",),
        seed=1,
        out=tmp_path,
        externals=(external,),
    )
    with pytest.raises(InvalidArgument, match="first"):
        await run_bench_matrix(quiet_console, options)
    setup = {"arrivals in each run, s": 1.0, "objectives": "ttft:60000 ms", "seed": 1}
    verdict = {"outcome": "draw", "text": "none"}
    entry = {"name": "decode-heavy", "flows": [], "runs": [], "verdict": verdict}
    (tmp_path / "report.json").write_text(json.dumps({"title": "T", "setup": setup, "scenarios": [entry]}))
    report = await run_bench_matrix(quiet_console, options)
    run = report["scenarios"][0]["runs"][0]
    assert (run["layout"], run["figures"]["completed"], run["figures"]["failed"]) == ("other", 2, 0)
    again = await run_bench_matrix(quiet_console, options)
    assert [run["layout"] for run in again["scenarios"][0]["runs"]] == ["other"], "the later run replaces the earlier"
    with pytest.raises(InvalidArgument, match="seed = 1, not 2"):
        await run_bench_matrix(quiet_console, dataclasses.replace(options, seed=2))
    await assert_quiet(mixed)
