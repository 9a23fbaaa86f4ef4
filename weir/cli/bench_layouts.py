"""The two ways to use the same cores, and what their workers said while a load ran."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc

from weir.bench.cancels import WorkerPolls
from weir.bench.plan import BACKENDS, Target
from weir.cli.cluster import Cluster, ClusterSpec
from weir.clock import Clock
from weir.errors import InvalidArgument

SAMPLE_S = 0.25


@dataclass(frozen=True, slots=True)
class Layout:
    """How many workers of each role; ``name`` as reports show it."""

    name: str
    prefill: int = 0
    decode: int = 0
    mixed: int = 0

    def spec(self, model_dir: Path, log_dir: Path) -> ClusterSpec:
        """A cluster of this layout."""
        return ClusterSpec(
            model_dir,
            model_dir.name,
            log_dir / self.name.replace(" ", "-"),
            prefill=self.prefill,
            decode=self.decode,
            mixed=self.mixed,
        )


SPLIT = Layout("1 prefill + 1 decode", prefill=1, decode=1)
AGGREGATED = Layout("2 mixed", mixed=2)


@dataclass(frozen=True, slots=True)
class External:
    """A system that already runs, such as vLLM; reports show it as ``name``."""

    name: str
    target: Target


def parse_external(text: str, model: str) -> External:
    """From ``NAME=BACKEND:URL[,URL]``, for example ``vLLM 1P1D=vllm-pd:http://127.0.0.1:8100,http://127.0.0.1:8200``."""
    name, _, rest = text.partition("=")
    backend, _, address = rest.partition(":")
    if not name or backend not in BACKENDS or not address:
        raise InvalidArgument("--external", text, f"must be NAME=BACKEND:URL with a backend of {', '.join(BACKENDS)}")
    return External(name, Target(backend, address, model))


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """Sums over the workers that answered, ``at_s`` after the run's start."""

    at_s: float
    waiting: int
    running: int
    used_blocks: int
    leased_blocks: int
    workers: int


@contextlib.asynccontextmanager
async def sampled(cluster: Cluster, clock: Clock) -> AsyncIterator[list[LoadPoint]]:
    """Collect a point every quarter of a second while the block runs; times are monotonic, to be shifted."""
    points: list[LoadPoint] = []
    sampling = asyncio.create_task(_sample(cluster, clock, points))
    try:
        yield points
    finally:
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)


async def _sample(cluster: Cluster, clock: Clock, points: list[LoadPoint]) -> None:
    while True:
        async with WorkerPolls(dict(cluster.worker_addresses)) as polls:
            with contextlib.suppress(grpc.RpcError):
                while True:
                    points.append(await _point(polls, clock))
                    await asyncio.sleep(SAMPLE_S)
        await asyncio.sleep(SAMPLE_S)  # a worker is gone; perhaps another one is listed by now


async def _point(polls: WorkerPolls, clock: Clock) -> LoadPoint:
    states = await polls.states()
    loads = [state.load for state in states]
    return LoadPoint(
        at_s=clock.monotonic_s(),
        waiting=sum(load.waiting for load in loads),
        running=sum(load.running for load in loads),
        used_blocks=sum(load.blocks.used for load in loads),
        leased_blocks=sum(load.blocks.leased for load in loads),
        workers=len(loads),
    )
