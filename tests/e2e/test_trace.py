"""A trace across real processes: the HTTP caller's context, router, workers, one collector; and ``weir trace``."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.faults.tiny import NAME, TinyLlama
from tests.e2e.quiet import assert_quiet
from tests.integration.otlp_receiver import collecting
from weir.cli.cluster import Cluster, ClusterSpec
from weir.client import AsyncClient

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
PROMPT = [3 + i % 50 for i in range(70)]


async def weir(*arguments: str) -> tuple[int, str]:
    """Exit code and output of the command."""
    command = "from weir.cli.main import main; main()"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", command, *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "COLUMNS": "160", "NO_COLOR": "1"},
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


@pytest.mark.filterwarnings("ignore::FutureWarning")
async def test_one_trace_from_http_to_the_workers_and_in_the_terminal(tmp_path: Path) -> None:
    tiny = TinyLlama(tmp_path / "model")
    with collecting() as collector:
        flags = ("--otlp-endpoint", collector.address, "--trace-ratio", "0")
        spec = ClusterSpec(tiny.folder, NAME, tmp_path / "logs", worker_flags=flags, router_flags=flags)
        async with Cluster(spec) as cluster:
            body = {"model": NAME, "prompt": PROMPT, "max_tokens": 5, "temperature": 0}
            headers = {"traceparent": f"00-{TRACE_ID}-{CALLER}-01"}
            async with httpx.AsyncClient(base_url=f"http://{cluster.http_address}", timeout=60) as http:
                answer = await http.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                quiet = await http.post("/v1/completions", json=body)
                assert quiet.status_code == 200
            async with AsyncClient(cluster.router_address) as client:
                last = await client.trace()
                traced = await client.trace(request_of(answer))
            assert (last.sampled, traced.sampled, traced.trace_id) == (False, True, TRACE_ID)
            code, shown = await weir("trace", traced.request_id, "--router", cluster.router_address)
            unknown, complaint = await weir("trace", "nobody", "--router", cluster.router_address)
            await assert_quiet(cluster)
    assert code == 0, shown
    for name in ("admit", "queue", "prefill", "first_token", "second_token", "decode", "kv_read", "route"):
        assert re.search(rf"^ *{name} +\d+\.\d ms", shown, re.MULTILINE), (name, shown)
    assert TRACE_ID in shown
    assert "TTFT" in shown
    assert (unknown, "not found" in complaint) == (1, True), complaint
    spans = collector.trace(TRACE_ID)
    assert set(collector.traces()) == {TRACE_ID}
    (root,) = [span for span in spans if span.service == "weir-router" and span.kind == 2]
    assert root.parent_id == CALLER
    assert root.attributes["weir.request_id"] == traced.request_id
    workers = {span.name: span for span in spans if span.service == "weir-worker"}
    assert set(workers) == {"worker.prefill", "worker.decode", "worker.kv_read", "worker.guard_check"}
    assert workers["worker.prefill"].parent_id == workers["worker.decode"].parent_id == root.span_id
    assert workers["worker.kv_read"].parent_id == workers["worker.decode"].span_id
    assert workers["worker.guard_check"].parent_id == workers["worker.kv_read"].span_id


def request_of(answer: httpx.Response) -> str:
    """The router's identity of the request, which OpenAI's id carries."""
    identity: str = answer.json()["id"]
    return identity.removeprefix("cmpl-")
