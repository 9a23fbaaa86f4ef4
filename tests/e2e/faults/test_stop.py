"""Workers that end by themselves or because they are told to: they leave in order, and no request notices."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.e2e.faults.fragile_worker import CAUSE
from tests.e2e.faults.tiny import TinyLlama, prompt_of
from tests.e2e.faults.watched import PATIENCE_S, Watched, exact, prefilling, renewed
from weir.cli.cluster import READY_TIMEOUT_S, Cluster
from weir.cli.process import ChildProcess
from weir.client import AsyncClient
from weir.rpc.v1 import common_pb2, router_pb2

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.filterwarnings("ignore::FutureWarning")]

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
MAX_TRIES = 40
Place = router_pb2.GetRouterStateResponse.ActiveRequest


@asynccontextmanager
async def one_more(
    squad: Cluster, role: str, *flags: str, module: str = "weir.services.worker"
) -> AsyncIterator[ChildProcess]:
    """A worker of ``role`` beside the squad's own, with ``flags``; gone afterwards."""
    like = squad.workers[0]
    argv = [sys.executable, "-m", module, *like.argv[3:], "--role", role, *flags]
    log = like.log_path.with_name(f"one-more-{role}.log")
    log.unlink(missing_ok=True)
    worker = await ChildProcess.start(f"one-more-{role}", argv, log)
    try:
        await worker.wait_ready(READY_TIMEOUT_S)
        squad.workers.append(worker)
        squad.worker_addresses[worker.ready[1]] = worker.ready[-1]
        await squad.wait_connected()
        yield worker
    finally:
        await worker.stop(5.0)
        if worker in squad.workers:
            squad.workers.remove(worker)
            squad.worker_addresses.pop(worker.ready[1], None)
        await renewed(squad)


async def on(
    client: AsyncClient, worker: ChildProcess, place: str, length: int, tokens: int
) -> tuple[Watched, list[int]]:
    """A request that is with ``worker`` now, as its ``place``: prefill_worker, or decode_worker and decoding.

    Its prompt is another one in each try: the cache of whoever had it would draw it there again.
    """
    name = worker.ready[1]

    def is_there(active: Place) -> bool:
        if place == "prefill_worker":
            return prefilling(active) and active.prefill_worker == name
        return active.state == common_pb2.REQUEST_STATE_DECODING and active.decode_worker == name

    def is_placed(active: Place) -> bool:
        if place == "prefill_worker":
            return bool(active.prefill_worker)
        return active.state == common_pb2.REQUEST_STATE_DECODING

    for attempt in range(MAX_TRIES):
        prompt = prompt_of(length, 10_000 + attempt)
        request = Watched(client, prompt, max_tokens=tokens, **GREEDY)
        if is_there(await request.place(is_placed)):
            return request, prompt
        await request.leave()
    raise AssertionError(f"{name} was not chosen in {MAX_TRIES} tries")


async def gone(worker: ChildProcess) -> int:
    """Its exit status."""
    async with asyncio.timeout(PATIENCE_S):
        return await worker.wait()


async def not_listed(client: AsyncClient, worker: ChildProcess) -> None:
    """Return when the router knows it no more; that is no matter of a record that expires."""
    async with asyncio.timeout(5):
        while worker.ready[1] in {known.worker_id for known in (await client.workers()).workers}:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_dead_engine_ends_its_worker(squad: Cluster, client: AsyncClient, tiny: TinyLlama) -> None:
    """Its requests go on elsewhere, it leaves the registry, says why in its log and ends with a status of its own."""
    async with one_more(squad, "decode", module="tests.e2e.faults.fragile_worker") as fragile:
        request, prompt = await on(client, fragile, "decode_worker", 40, 400)
        fragile.kill(signal.SIGUSR1)
        assert await gone(fragile) == 70
        await not_listed(client, fragile)
        answer = await request.outcome()
        exact(answer, tiny.greedy(prompt, 400), attempts=2)
        assert answer.final.timings.decode_worker != fragile.ready[1]
        log = fragile.log_path.read_text()
        assert f"the step thread died: OSError: {CAUSE}" in log
        assert "raise OSError(CAUSE)" in log, "the traceback"
        assert f"worker: the step thread died: OSError: {CAUSE}" in log.splitlines()


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
async def test_a_stopped_worker_finishes_what_runs(
    squad: Cluster, client: AsyncClient, tiny: TinyLlama, role: str
) -> None:
    """SIGTERM while it works: nothing new goes there, what it has ends there, nothing is done twice."""
    place = "prefill_worker" if role == "prefill" else "decode_worker"
    length, tokens = (3_000, 20) if role == "prefill" else (40, 300)
    async with one_more(squad, role, "--role-drain-timeout-s", "60") as worker:
        request, prompt = await on(client, worker, place, length, tokens)
        worker.kill(signal.SIGTERM)
        other_prompt = prompt_of(30, 312)
        others = [Watched(client, other_prompt, max_tokens=20, **GREEDY) for _ in range(4)]
        for other in others:
            exact(await other.outcome(), tiny.greedy(other_prompt, 20))
        answer = await request.outcome()
        exact(answer, tiny.greedy(prompt, tokens), attempts=1)
        assert getattr(answer.final.timings, place) == worker.ready[1]
        assert await gone(worker) == 0
        await not_listed(client, worker)


async def test_what_outlasts_the_drain_goes_on_elsewhere(squad: Cluster, client: AsyncClient, tiny: TinyLlama) -> None:
    """Without a failure that counts: it is sent away, and goes on from what was sent."""
    async with one_more(squad, "decode", "--role-drain-timeout-s", "0.05") as worker:
        request, prompt = await on(client, worker, "decode_worker", 40, 500)
        worker.kill(signal.SIGTERM)
        assert await gone(worker) == 0
        answer = await request.outcome()
        exact(answer, tiny.greedy(prompt, 500))
        assert answer.final.timings.attempts >= 2
        assert answer.final.timings.decode_worker != worker.ready[1]


async def test_a_second_signal_ends_it_at_once(squad: Cluster, client: AsyncClient, tiny: TinyLlama) -> None:
    """It does not wait for what runs; that goes on elsewhere, as after any death."""
    async with one_more(squad, "decode", "--role-drain-timeout-s", "600") as worker:
        request, prompt = await on(client, worker, "decode_worker", 40, 4_000)
        worker.kill(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            while "stopping on SIGTERM" not in worker.log_path.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not request.done
        worker.kill(signal.SIGTERM)
        assert await gone(worker) == 128 + signal.SIGTERM
        seen = len(request.tokens)
        await request.seen(seen + 20)
        assert tuple(request.tokens) == tiny.greedy(prompt, len(request.tokens))
        await request.leave()
