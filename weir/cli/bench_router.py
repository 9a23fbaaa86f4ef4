"""``weir bench router``: what the router itself costs, with workers that cost nothing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from weir.bench.cpu import process_cpu_s
from weir.bench.load import LoadResult, run_load
from weir.bench.plan import LoadPlan, Prompt, Target
from weir.bench.synthetic import Vocabulary, random_prompts
from weir.cli.bench_router_peer import has_peer, running_peer
from weir.cli.cluster import READY_TIMEOUT_S, STOP_GRACE_S
from weir.cli.process import ChildProcess
from weir.client import AsyncClient
from weir.errors import InternalError, Unavailable
from weir.events.nats_server import EmbeddedNats

MODEL_NAME = "mock"
CONNECT_TIMEOUT_S = 30.0
PEER_PACKAGE = "sglang-router"
TARGET_REQUEST_US, TARGET_TOKEN_US = 400.0, 20.0


@dataclass(frozen=True, slots=True)
class RouterShape:
    """``requests`` of one token, ``streams`` of ``stream_tokens``, ``concurrency`` at once.

    Prompts are token ids, or ``text`` of as many words.
    """

    requests: int = 2000
    streams: int = 200
    stream_tokens: int = 128
    input_tokens: int = 64
    concurrency: int = 32
    alone: int = 200
    step_ms: float = 5.0
    text: bool = False


@dataclass(frozen=True, slots=True)
class DoorFigures:
    """One door. CPU is the router process's own, in microseconds; ``per_s`` is what was reached on shared cores.

    ``ttft_ms`` is of one request at a time; ``added_ms`` is what the router adds to the same call without it.
    """

    door: str
    request_us: float
    token_us: float
    requests_per_core_s: float
    per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    added_p50_ms: float | None
    generator: str


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """A router's addresses and its process."""

    grpc: str
    http: str
    pid: int


class MockCluster:
    """nats-server, the mock workers and a real router, each a process."""

    def __init__(self, model_dir: Path, log_dir: Path, step_ms: float) -> None:
        self._model_dir = model_dir
        self._log_dir = log_dir
        self._step_ms = step_ms
        self._nats_url = ""
        self.router = RunningRouter("", "", 0)
        self.mock_address = ""
        """The mock's own RouterService; it takes spans there too."""

    @property
    def router_address(self) -> str:
        """gRPC."""
        return self.router.grpc

    @property
    def http_address(self) -> str:
        """HTTP."""
        return self.router.http

    @property
    def router_pid(self) -> int:
        """Its process."""
        return self.router.pid

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[MockCluster]:
        """Start everything and wait until the router has both workers."""
        async with contextlib.AsyncExitStack() as stack:
            nats = EmbeddedNats(self._log_dir / "nats")
            await nats.start()
            stack.push_async_callback(nats.stop)
            self._nats_url = nats.url
            mock = ["weir.bench.mock_workers", "--nats", nats.url, "--model", MODEL_NAME]
            words = await self._start(stack, "mock", [*mock, "--step-ms", f"{self._step_ms:g}"])
            self.mock_address = words["door"]
            self.router = await self.start_router(stack, "router")
            yield self

    async def start_router(self, stack: contextlib.AsyncExitStack, name: str, *flags: str) -> RunningRouter:
        """Another router before the same workers; it ends with ``stack``. Raises Unavailable."""
        argv = ["weir.services.router", "--nats", self._nats_url, "--bind", "127.0.0.1:0", "--http", "127.0.0.1:0"]
        argv += ["--model", str(self._model_dir), "--model-name", MODEL_NAME, *flags]
        words = await self._start(stack, name, argv)
        await _connected(words["grpc"])
        return RunningRouter(words["grpc"], words["http"], int(words["pid"]))

    async def _start(self, stack: contextlib.AsyncExitStack, name: str, module: list[str]) -> dict[str, str]:
        child = await ChildProcess.start(name, [sys.executable, "-m", *module], self._log_dir / f"{name}.log")
        stack.push_async_callback(child.stop, STOP_GRACE_S)
        words = await child.wait_ready(READY_TIMEOUT_S)
        return dict(word.split("=", 1) for word in words if "=" in word) | {"pid": str(child.pid)}


async def _connected(address: str) -> None:
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S), AsyncClient(address) as client:
            while sum(w.connected for w in (await client.workers()).workers) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise Unavailable("the router did not connect to the mock workers") from None


def router_plan(target: Target, count: int, tokens: int, concurrency: int, shape: RouterShape) -> LoadPlan:
    """``count`` requests as fast as ``concurrency`` at once allow, after one that opens the connection."""
    prompts = random_prompts(
        count + 1,
        input_tokens=shape.input_tokens,
        output_tokens=tokens,
        range_ratio=0.0,
        prefix_tokens=0,
        vocabulary=Vocabulary(),
        random=np.random.default_rng(count),
    )
    if shape.text:
        prompts = [Prompt(tokens, text=" ".join(f"word{i % 997}" for i in p.token_ids)) for p in prompts]
    warm, measured = tuple(prompts[:1]), tuple(prompts[1:])
    return LoadPlan(target, measured, (0.0,) * count, warmups=warm, max_concurrency=concurrency, ignore_eos=True)


async def timed(plan: LoadPlan, pid: int) -> tuple[LoadResult, float]:
    """Run a plan; CPU seconds that process ``pid`` used meanwhile, warm-up left out.

    Raises InternalError when a request fails.
    """
    before_s = 0.0

    def started(_: float) -> None:
        nonlocal before_s
        before_s = process_cpu_s(pid)

    result = await run_load(plan, on_started=started)
    used_s = process_cpu_s(pid) - before_s
    failed = [r for r in result.records if not r.ok]
    if failed:
        raise InternalError(f"{len(failed)} requests failed, the first: {failed[0].error} {failed[0].detail}")
    return result, used_s


async def measure_door(name: str, target: Target, pid: int, shape: RouterShape, direct: Target | None) -> DoorFigures:
    """Short answers, long answers, and one at a time, after a round that does not count."""
    await timed(router_plan(target, max(10, shape.requests // 4), 4, shape.concurrency, shape), pid)
    short, short_s = await timed(router_plan(target, shape.requests, 1, shape.concurrency, shape), pid)
    long, long_s = await timed(router_plan(target, shape.streams, shape.stream_tokens, shape.concurrency, shape), pid)
    alone, _ = await timed(router_plan(target, shape.alone, 1, 1, shape), pid)
    ttft_ms = [1e3 * r.ttft_s for r in alone.records]
    added = None
    if direct is not None:
        without = await run_load(router_plan(direct, shape.alone, 1, 1, shape))
        added = float(np.median(ttft_ms) - np.median([1e3 * r.ttft_s for r in without.records]))
    request_us = 1e6 * short_s / shape.requests
    more_tokens = shape.streams * (shape.stream_tokens - 1)
    verdicts = [r.health.verdict for r in (short, long) if r.health.verdict]
    return DoorFigures(
        door=name,
        request_us=request_us,
        token_us=(1e6 * long_s - shape.streams * request_us) / more_tokens,
        requests_per_core_s=1e6 / request_us,
        per_s=shape.requests / short.duration_s,
        ttft_p50_ms=float(np.percentile(ttft_ms, 50)),
        ttft_p99_ms=float(np.percentile(ttft_ms, 99)),
        added_p50_ms=added,
        generator=verdicts[0] if verdicts else "",
    )


async def measure_router(model_dir: Path, shape: RouterShape) -> list[DoorFigures]:
    """Both doors of one router; HTTP also with text, which Weir tokenises."""
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as scratch:
        async with MockCluster(model_dir, Path(scratch), shape.step_ms).running() as cluster:
            grpc_target = Target("weir", cluster.router_address, MODEL_NAME)
            direct = Target("weir", cluster.mock_address, MODEL_NAME)
            http_target = Target("openai", f"http://{cluster.http_address}", MODEL_NAME)
            as_text = dataclasses.replace(shape, text=True)
            return [
                await measure_door("gRPC", grpc_target, cluster.router_pid, shape, direct),
                await measure_door("HTTP", http_target, cluster.router_pid, shape, None),
                await measure_door("HTTP, text", http_target, cluster.router_pid, as_text, None),
            ]


async def measure_peer(python: str, shape: RouterShape) -> tuple[list[DoorFigures], str]:
    """The Rust router's figures, if ``python`` has it, and a line about it.

    It takes only text, and passes it on as it is: nothing is tokenised.
    """
    shape = dataclasses.replace(shape, text=True)
    if not await has_peer(python):
        return [], f"{PEER_PACKAGE}: not installed, skipped"
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as scratch:
        async with running_peer(python, Path(scratch), shape.step_ms) as peer:
            figures = await measure_door(f"{PEER_PACKAGE}, text", peer.target, peer.pid, shape, None)
    return [figures], f"{PEER_PACKAGE} in the same run"


async def run_bench_router(
    console: Console, model_dir: Path, shape: RouterShape, peer_python: Path | None, out: Path | None
) -> dict[str, Any]:
    """Measure and print. ``peer_python`` is an interpreter that has sglang-router; this one by default."""
    doors = await measure_router(model_dir, shape)
    peers, note = await measure_peer(str(peer_python or sys.executable), shape)
    doors += peers
    table = Table(
        "door", "CPU µs/request", "CPU µs/token", "requests/s a core", "reached/s", "TTFT p50 ms", "p99", "added"
    )
    for d in doors:
        added = f"{d.added_p50_ms:.2f}" if d.added_p50_ms is not None else "-"
        numbers = (f"{d.request_us:.0f}", f"{d.token_us:.1f}", f"{d.requests_per_core_s:,.0f}", f"{d.per_s:,.0f}")
        table.add_row(d.door, *numbers, f"{d.ttft_p50_ms:.2f}", f"{d.ttft_p99_ms:.2f}", added)
    console.print(table)
    for d in doors:
        if d.generator:
            console.print(f"[yellow]{d.door}: {d.generator}[/] (CPU figures stand, rates do not)", highlight=False)
    console.print(f"targets: {TARGET_REQUEST_US:g} µs a request, {TARGET_TOKEN_US:g} µs a token; {note}")
    document = {
        "shape": dataclasses.asdict(shape),
        "doors": [dataclasses.asdict(d) for d in doors],
        "peer": note,
    }
    if out is not None:
        out.write_text(json.dumps(document, indent=1), encoding="utf-8")
    return document
