"""A real Prometheus scrapes a real cluster: its figures are those of the load, its rules and panels work."""

from __future__ import annotations

import asyncio
import json
import math
import runpy
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.faults.tiny import NAME, TinyLlama, prompt_of
from tests.e2e.prometheus_server import COMPOSE, CONFIG, Prometheus, free_port, needs_prometheus, prometheus
from tests.e2e.quiet import assert_quiet
from weir.cli.cluster import Cluster, ClusterSpec
from weir.client import AsyncClient, Completion, Delta
from weir.errors import ResourceExhausted
from weir.lifecycle import Role
from weir.telemetry.metrics_labels import INPUT_TOKENS

pytestmark = [
    needs_prometheus,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

LENGTHS = (8, 100, 300, 300, 700)
ROUNDS = 4
"""The last one repeats the prompts of the one before: the caches know them."""
MAX_TOKENS = 12
BLOCKS = 512
PRICE = 3.6
BLOCK_BYTES = 16 * 4 * 2 * 2 * 32 * 4
"""16 tokens, 4 layers, K and V, 2 heads of 32, fp32."""
MAY_BE_EMPTY = {"Forecast error"}
"""Panels whose metric has no sample before the controller has a forecast: it only balances when told to."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A cluster that has served ``answers``, cancelled one request and refused another; and who has watched it."""

    cluster: Cluster
    server: Prometheus
    answers: Sequence[Completion]
    tokens_of_cancelled: int
    workers: int


async def serve(client: AsyncClient) -> list[Completion]:
    """The load; one round after another, so that rates have several samples to rest on."""
    answers: list[Completion] = []
    for number in range(ROUNDS):
        seeds = min(number, ROUNDS - 2)
        prompts = [prompt_of(length, 100 * seeds + index) for index, length in enumerate(LENGTHS)]
        limits: dict[str, Any] = {"slo_ttft_ms": 60_000.0} if number == 1 else {}
        made = [
            client.complete(prompt, max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0.0, **limits)
            for prompt in prompts
        ]
        answers += await asyncio.gather(*made)
        await asyncio.sleep(1.2)  # a scrape in between, not a wait for anything
    return answers


async def leave_early(client: AsyncClient) -> None:
    """Cancel a request that is being decoded."""
    stream = client.generate(prompt_of(200, 9_000), max_tokens=4_000, ignore_eos=True, temperature=0.0)
    async for event in stream:
        if isinstance(event, Delta) and event.first_index > 2:
            break
    await stream.aclose()  # type: ignore[attr-defined]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def loaded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Loaded]:
    folder = tmp_path_factory.mktemp("metrics")
    tiny = TinyLlama(folder / "model")
    ports = [free_port() for _ in range(3)]
    binds = [("--metrics-bind", f"127.0.0.1:{port}") for port in ports]
    flags = ("--num-blocks", str(BLOCKS), "--price-per-hour", str(PRICE), "--threads", "1")
    control = (*binds[2], "--mode", "advise")
    spec = ClusterSpec(
        tiny.folder, NAME, folder / "logs", prefill=0, decode=0, worker_flags=flags, controller_flags=control
    )
    async with Cluster(spec) as cluster:
        await cluster.start_worker(Role.PREFILL, 0, *binds[0])
        await cluster.start_worker(Role.DECODE, 1, *binds[1])
        await cluster.wait_connected()
        targets = {
            "weir-router": [cluster.http_address],
            "weir-worker": [f"127.0.0.1:{port}" for port in ports[:2]],
            "weir-controller": [f"127.0.0.1:{ports[2]}"],
        }
        async with prometheus(folder / "prometheus", targets) as server, AsyncClient(cluster.router_address) as client:
            answers = await serve(client)
            await assert_quiet(cluster)
            await server.scraped(4, time.time() + 1.0)
            before = await server.value('sum(vllm:generation_tokens_total{job="weir-router"})')
            await leave_early(client)
            with pytest.raises(ResourceExhausted, match="TTFT would be"):
                await client.complete(prompt_of(1_500, 9_001), max_tokens=2, slo_ttft_ms=1.0)
            await assert_quiet(cluster)
            await server.scraped(4, time.time() + 2.0)
            assert before == sum(len(answer.token_ids) for answer in answers)
            after = await server.value('sum(vllm:generation_tokens_total{job="weir-router"})')
            yield Loaded(cluster, server, answers, int(after - before), 2)


async def by_label(server: Prometheus, label: str, expr: str) -> dict[str, float]:
    """The samples, by one of their labels."""
    return {labels[label]: value for labels, value in await server.query(expr)}


async def test_requests_and_goodput(loaded: Loaded) -> None:
    ended = await by_label(loaded.server, "state", "weir_requests_ended_total")
    assert ended == {"finished": len(loaded.answers), "failed": 0, "rejected": 1, "cancelled": 1}
    assert await by_label(loaded.server, "reason", "weir_admission_refusals_total > 0") == {"slo_ttft": 1}
    assert await loaded.server.value("weir_requests_good_total") == len(loaded.answers)
    assert await loaded.server.value("sum(weir_requests_slo_missed_total)") == 0
    assert await loaded.server.value("sum(weir_placements_total)") == len(loaded.answers) + 1
    assert await loaded.server.value("sum(weir_requests_active)") == 0
    assert await loaded.server.value("sum(weir_request_retries_total)") == 0


async def test_tokens_add_up(loaded: Loaded) -> None:
    server, usages = loaded.server, [answer.final.usage for answer in loaded.answers]
    sources = await by_label(server, "source", 'vllm:prompt_tokens_by_source_total{job="weir-router"}')
    assert sources == {
        "local_compute": sum(usage.local_compute_tokens for usage in usages),
        "local_cache_hit": sum(usage.local_cache_hit_tokens for usage in usages),
        "external_kv_transfer": sum(usage.external_kv_tokens for usage in usages),
    }
    sent = ROUNDS * sum(LENGTHS)
    assert sum(sources.values()) == sent == sum(usage.prompt_tokens for usage in usages)
    assert await server.value('sum(vllm:prompt_tokens_total{job="weir-router"})') == sent
    assert sources["local_cache_hit"] > 0
    assert await server.value("weir_prefix_hit_tokens_total") == sum(usage.cached_tokens for usage in usages)
    generated = ROUNDS * len(LENGTHS) * MAX_TOKENS
    assert generated == sum(len(answer.token_ids) for answer in loaded.answers)
    by_workers = await server.value('sum(vllm:generation_tokens_total{job="weir-worker"})')
    assert by_workers >= generated + loaded.tokens_of_cancelled >= generated + 3


async def test_latencies_by_length_and_path(loaded: Loaded) -> None:
    expected: Counter[tuple[str, str]] = Counter()
    for answer in loaded.answers:
        times, usage = answer.final.timings, answer.final.usage
        path = "local" if times.prefill_worker == times.decode_worker else "disaggregated"
        expected[INPUT_TOKENS.label(usage.prompt_tokens), path] += 1
    expected[INPUT_TOKENS.label(200), "disaggregated"] += 1  # the cancelled one
    found = await loaded.server.query("weir_ttft_seconds_count")
    assert {(labels["input_tokens"], labels["path"]): value for labels, value in found} == expected
    assert {path for _, path in expected} == {"local", "disaggregated"}
    assert await loaded.server.value("vllm:time_to_first_token_seconds_count") == len(loaded.answers) + 1
    e2e_s = sum(answer.final.timings.e2e_ms for answer in loaded.answers) / 1e3
    assert await loaded.server.value("vllm:e2e_request_latency_seconds_sum") == pytest.approx(e2e_s, rel=1e-3)
    stages = await by_label(loaded.server, "stage", "weir_request_stage_seconds_sum")
    assert sum(stages.values()) == pytest.approx(e2e_s, rel=1e-3)
    assert await loaded.server.value("sum(weir_tpot_seconds_count)") == len(loaded.answers)
    assert await loaded.server.value("vllm:inter_token_latency_seconds_count") == await loaded.server.value(
        "sum(weir_itl_seconds_count)"
    )


async def test_the_hand_over(loaded: Loaded) -> None:
    server = loaded.server
    reads = [answer.final.timings.kv_read for answer in loaded.answers]
    done = [read for read in reads if read is not None]
    assert sum(read.void_reads for read in done) == 0
    void = await server.query("weir_kv_reads_void_total")
    assert len(void) == 12 * loaded.workers
    assert sum(value for _, value in void) == 0
    assert await server.value("sum(weir_kv_read_errors_total)") == 0
    counted = await server.value("sum(weir_kv_read_bytes_total)")
    # The cancelled request's KV was read too: 200 tokens are 13 blocks.
    blocks = (counted - sum(read.bytes for read in done)) / BLOCK_BYTES
    assert blocks == 13
    assert counted == await server.value("sum(vllm:nixl_bytes_transferred_sum)")
    assert await server.value("sum(weir_leases_open)") == 0
    transports = {labels["transport"] for labels, _ in await server.query("weir_kv_transport_info")}
    assert transports == {read.transport for read in done if read.transport}


async def test_memory_pools_and_prices(loaded: Loaded) -> None:
    server = loaded.server
    assert await server.value("sum(weir_kv_blocks)") == BLOCKS * loaded.workers
    assert await server.value('sum(weir_kv_blocks{state=~"used|leased|quarantined"})') == 0
    assert await server.value("sum(weir_stock_bytes)") == 0
    assert await by_label(server, "role", "weir_role_info") == {"prefill": 1, "decode": 1}
    assert await server.value("sum(weir_worker_price_per_hour)") == pytest.approx(PRICE * loaded.workers)
    assert await server.value("sum(weir_cancel_seconds_count)") >= 1
    pools = {labels["pool"] for labels, _ in await server.query("weir:pool_utilisation:ratio")}
    assert pools == {"prefill", "decode"}
    spent = await server.value("sum(weir_worker_cost_total)")
    assert 0 < await server.value("weir:cost_per_good_request:5m") <= spent
    assert await by_label(server, "state", "weir_breakers") == {"closed": 2, "half_open": 0, "open": 0}
    assert await server.value("sum(weir_members)") == 2


async def test_every_panel_shows_something(loaded: Loaded) -> None:
    empty = []
    for path in sorted((COMPOSE / "grafana" / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                found = await loaded.server.query(target["expr"].replace("$__rate_interval", "1m"))
                if not found:
                    empty.append(panel["title"])
    assert set(empty) <= MAY_BE_EMPTY


async def test_quantiles_are_numbers(loaded: Loaded) -> None:
    for name in ("vllm:time_to_first_token_seconds", "weir_kv_read_seconds", "weir_queue_seconds"):
        expr = f"histogram_quantile(0.99, sum by (le) (rate({name}_bucket[1m])))"
        assert math.isfinite(await loaded.server.value(expr)), name


async def test_rules_are_healthy_and_quiet(loaded: Loaded) -> None:
    await loaded.server.scraped(4, time.time())
    rules = [rule for group in (await loaded.server.get("rules"))["groups"] for rule in group["rules"]]
    assert len(rules) == 28
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []
    firing = [rule["name"] for rule in rules if rule.get("state") == "firing"]
    assert firing == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "recording.yaml", "alerts.yaml"),
        ("test", "rules", "rules_test.yaml"),
    ],
)
async def test_promtool_accepts_the_rules(arguments: tuple[str, ...]) -> None:
    process = await asyncio.create_subprocess_exec(
        "promtool", *arguments, cwd=CONFIG, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()


async def test_the_dashboards_are_those_of_the_script() -> None:
    script = COMPOSE / "grafana" / "dashboards.py"
    files: dict[Path, str] = runpy.run_path(str(script))["files"]()
    assert {path: path.read_text() for path in script.parent.glob("dashboards/*.json")} == files
