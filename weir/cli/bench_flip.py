"""``weir bench flip``: roles change over and over under load; nothing may be lost, no token may differ."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table

from weir.cli.cluster import Cluster, ClusterSpec
from weir.cli.workers import worker_state
from weir.client import AsyncClient
from weir.clock import SystemClock
from weir.errors import WeirError
from weir.rpc.channel import channel
from weir.rpc.status import from_rpc_error
from weir.rpc.v1 import common_pb2, worker_pb2, worker_pb2_grpc

TOKEN_IDS = (200, 40_000)
LENGTHS = (3, 16, 17, 60, 130)
PROMPTS = 8
OUTPUT_TOKENS = 16
FLIP_TIMEOUT_S = 60.0
ROLES = (common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE, common_pb2.ROLE_MIXED)
DRAINS_MS = (0.0, 1.0, 200.0)
"""The worker's own limit, hardly any time (running work has to move), and a little."""


@dataclass(slots=True)
class FlipReport:
    """What happened. ``lost`` requests ended with an error, ``wrong`` ones with other tokens than without flips."""

    seed: int
    flips: int = 0
    requests: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    busy_flip_ms: list[float] = field(default_factory=list)
    idle_flip_ms: list[float] = field(default_factory=list)
    attempts: dict[int, int] = field(default_factory=dict)
    wall_s: float = 0.0

    @property
    def ended(self) -> int:
        """Requests that have ended, in whatever way."""
        return sum(self.attempts.values()) + len(self.lost)


@dataclass(slots=True)
class _Worker:
    stub: worker_pb2_grpc.WorkerServiceStub
    role: common_pb2.Role
    epoch: int


async def flip_under_load(
    cluster: Cluster, *, flips: int, clients: int, seed: int, token_ids: tuple[int, int] = TOKEN_IDS
) -> FlipReport:
    """Change roles ``flips`` times while ``clients`` ask; then twice as often as there are workers, while idle.

    The same prompts (of ids in the range ``token_ids``) are asked before the first flip; those answers, greedy and
    seeded ones, are what is right.
    """
    source, clock = random.Random(seed), SystemClock()
    report = FlipReport(seed)
    prompts = [[source.randrange(*token_ids) for _ in range(LENGTHS[i % len(LENGTHS)])] for i in range(PROMPTS)]
    async with AsyncExitStack() as stack:
        workers = await _workers(cluster, stack)
        client = await stack.enter_async_context(AsyncClient(cluster.router_address))
        right = [await _answer(client, prompts, index) for index in range(PROMPTS)]
        done = asyncio.Event()
        asking = [asyncio.create_task(_ask(client, prompts, right, report, done, n)) for n in range(clients)]
        started_s = clock.monotonic_s()
        try:
            while report.flips < flips:
                await _one_more_answer(report, asking)
                took_ms = await _flip(workers, source, drain_ms=source.choice(DRAINS_MS))
                report.busy_flip_ms.append(took_ms)
                report.flips += 1
        finally:
            done.set()
            await asyncio.gather(*asking)
        report.wall_s = clock.monotonic_s() - started_s
        for _ in range(2 * len(workers)):
            report.idle_flip_ms.append(await _flip(workers, source, drain_ms=0.0))
    return report


async def _one_more_answer(report: FlipReport, asking: list[asyncio.Task[None]]) -> None:
    """Return when another request has ended: flips alone would be all that runs."""
    before = report.ended
    while report.ended == before and not any(task.done() for task in asking):  # noqa: ASYNC110 - told by no event
        await asyncio.sleep(0.005)


async def _workers(cluster: Cluster, stack: AsyncExitStack) -> list[_Worker]:
    """The workers, with a channel each until ``stack`` is left."""
    found = []
    for address in cluster.worker_addresses.values():
        state = await worker_state(address)
        link = await stack.enter_async_context(channel(address))
        found.append(_Worker(worker_pb2_grpc.WorkerServiceStub(link), state.role, state.role_epoch))
    return found


async def _answer(client: AsyncClient, prompts: list[list[int]], index: int) -> tuple[tuple[int, ...], int]:
    """The tokens of a prompt, and the attempts that they took; every second one is sampled."""
    sampling: dict[str, Any] = {"temperature": 0.0} if index % 2 == 0 else {"temperature": 0.8, "seed": index}
    answer = await client.complete(prompts[index], max_tokens=OUTPUT_TOKENS, ignore_eos=True, **sampling)
    return answer.token_ids, answer.final.timings.attempts


async def _ask(
    client: AsyncClient,
    prompts: list[list[int]],
    right: list[tuple[tuple[int, ...], int]],
    report: FlipReport,
    done: asyncio.Event,
    number: int,
) -> None:
    """One client: a request after the other until ``done``."""
    index = number
    while not done.is_set():
        index = (index + 1) % len(prompts)
        report.requests += 1
        try:
            tokens, attempts = await _answer(client, prompts, index)
        except WeirError as error:
            report.lost.append(f"prompt {index}: {type(error).__name__}: {error}")
            continue
        report.attempts[attempts] = report.attempts.get(attempts, 0) + 1
        if tokens != right[index][0]:
            report.wrong.append(f"prompt {index}: {tokens} instead of {right[index][0]}")


async def _flip(workers: list[_Worker], source: random.Random, *, drain_ms: float) -> float:
    """Give one worker another role such that both kinds of work are still done; the milliseconds that it took."""
    choices = [(w, role) for w in workers for role in ROLES if role != w.role and _serves(workers, w, role)]
    worker, role = source.choice(choices)
    request = worker_pb2.SetRoleRequest(role=role, expected_epoch=worker.epoch, drain_timeout_ms=drain_ms)
    try:
        answer = await worker.stub.SetRole(request, timeout=FLIP_TIMEOUT_S)
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
    assert answer.role == role, answer
    assert answer.role_epoch == worker.epoch + 1, answer
    worker.role, worker.epoch = answer.role, answer.role_epoch
    return float(answer.took_ms)


def _serves(workers: list[_Worker], changed: _Worker, role: common_pb2.Role) -> bool:
    """Whether requests can be served with the change, and while it is made."""
    others = [w.role for w in workers if w is not changed]
    after = [*others, role]
    return _complete(after) and _complete(others)


def _complete(roles: list[common_pb2.Role]) -> bool:
    """A mixed worker, or one of each kind (decode workers prefill for themselves when nobody else does)."""
    return common_pb2.ROLE_MIXED in roles or common_pb2.ROLE_DECODE in roles


async def run_bench_flip(
    console: Console, model_dir: Path, *, flips: int, clients: int, seed: int, json_path: Path | None
) -> bool:
    """Run it on a cluster of 1 prefill, 1 decode and 1 mixed worker; whether nothing was lost or wrong."""
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as scratch:
        spec = ClusterSpec(model_dir, model_dir.name, Path(scratch), mixed=1)
        async with Cluster(spec) as cluster:
            report = await flip_under_load(cluster, flips=flips, clients=clients, seed=seed)
    console.print(flip_table(report))
    for line in [*report.lost[:5], *report.wrong[:5]]:
        console.print(line, highlight=False)
    if json_path is not None:
        json_path.write_text(json.dumps(asdict(report), indent=1))
    return not report.lost and not report.wrong


def flip_table(report: FlipReport) -> Table:
    """The report for people."""
    table = Table(title=f"role flips under load, seed {report.seed}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rows = {
        "flips": str(report.flips),
        "requests": str(report.requests),
        "lost": str(len(report.lost)),
        "with wrong tokens": str(len(report.wrong)),
        "attempts per request": ", ".join(f"{n}: {count}" for n, count in sorted(report.attempts.items())),
        "flip under load, ms (median, max)": _middle_and_most(report.busy_flip_ms),
        "flip when idle, ms (median, max)": _middle_and_most(report.idle_flip_ms),
        "wall time": f"{report.wall_s:.1f} s",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _middle_and_most(values_ms: list[float]) -> str:
    return f"{statistics.median(values_ms):.1f}, {max(values_ms):.1f}" if values_ms else "-"
