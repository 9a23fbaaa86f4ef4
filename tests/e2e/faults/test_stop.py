"""Workers that end by themselves or because they are told to: they leave in order, and no request notices.

One worker stays. While a request is placed it has a role in which it cannot get it; then it takes over.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.faults.fragile_worker import CAUSE
from tests.e2e.faults.tiny import NAME, TinyLlama, prompt_of
from tests.e2e.faults.watched import PATIENCE_S, Watched, bound_early, exact
from tests.e2e.quiet import assert_quiet
from weir.cli.cluster import READY_TIMEOUT_S, Cluster, ClusterSpec
from weir.cli.process import ChildProcess
from weir.cli.workers import worker_state
from weir.client import AsyncClient
from weir.lifecycle import Role
from weir.rpc.channel import channel
from weir.rpc.convert import role_to_pb
from weir.rpc.v1 import common_pb2, router_pb2, worker_pb2, worker_pb2_grpc

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.filterwarnings("ignore::FutureWarning")]

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
FLAGS = ("--num-blocks", "1024", "--max-batch-tokens", "64", "--session-grace-s", "0.5")
PROMPT, TOKENS = prompt_of(40, 300), 1_000
PATIENT = ("--role-drain-timeout-s", "60")


@dataclass
class Pair:
    """A cluster with the worker that stays, and a client of it."""

    cluster: Cluster
    client: AsyncClient

    @property
    def stays(self) -> ChildProcess:
        return self.cluster.workers[0]

    async def takes(self, role: Role) -> None:
        """Give the worker that stays another role; the router knows of it on return."""
        worker_id, address = self.stays.ready[1], self.stays.ready[-1]
        epoch = (await worker_state(address)).role_epoch
        async with channel(address) as link:
            request = worker_pb2.SetRoleRequest(role=role_to_pb(role), expected_epoch=epoch)
            await worker_pb2_grpc.WorkerServiceStub(link).SetRole(request)
        async with asyncio.timeout(PATIENCE_S):
            while (worker_id, role_to_pb(role)) not in await self.seen():  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def seen(self) -> set[tuple[str, int]]:
        """The connected workers and their roles, as the router knows them."""
        return {(known.worker_id, known.role) for known in (await self.client.workers()).workers if known.connected}

    @asynccontextmanager
    async def with_one_more(
        self, role: Role, *flags: str, module: str = "weir.services.worker"
    ) -> AsyncIterator[ChildProcess]:
        """A worker beside the one that stays; gone, and the other as it was, afterwards."""
        like = self.stays
        argv = [sys.executable, "-m", module, *like.argv[3:], "--role", role.value, *flags]
        log = like.log_path.with_name(f"one-more-{role.value}.log")
        log.unlink(missing_ok=True)
        worker = await ChildProcess.start(f"one-more-{role.value}", argv, log)
        try:
            name = (await worker.wait_ready(READY_TIMEOUT_S))[1]
            async with asyncio.timeout(PATIENCE_S):
                while (name, role_to_pb(role)) not in await self.seen():  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            yield worker
        finally:
            await worker.stop(5.0)
            await self.takes(Role.PREFILL)

    async def not_listed(self, worker: ChildProcess) -> None:
        """Return when the router knows it no more; that is no matter of a record that expires."""
        async with asyncio.timeout(5):
            while worker.ready[1] in {known.worker_id for known in (await self.client.workers()).workers}:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def decoding_on(self, worker: ChildProcess) -> Watched:
        """A request that ``worker`` decodes, with PROMPT; the other is ready to take over."""
        request = Watched(self.client, PROMPT, max_tokens=TOKENS, **GREEDY)
        place = await request.place(lambda active: active.state == common_pb2.REQUEST_STATE_DECODING)
        assert place.decode_worker == worker.ready[1]
        await self.takes(Role.DECODE)
        assert not request.done
        return request


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tiny: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    spec = ClusterSpec(tiny.folder, NAME, tmp_path_factory.mktemp("pair"), decode=0, worker_flags=FLAGS)
    async with Cluster(spec) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(tiny: TinyLlama) -> tuple[int, ...]:
    """The answer to PROMPT."""
    return tiny.greedy(PROMPT, TOKENS)


@pytest_asyncio.fixture(loop_scope="module")
async def pair(cluster: Cluster) -> AsyncIterator[Pair]:
    """Nothing is left in it after a test."""
    async with AsyncClient(cluster.router_address) as client:
        yield Pair(cluster, client)
    await assert_quiet(cluster)


async def gone(worker: ChildProcess) -> int:
    """Its exit status."""
    async with asyncio.timeout(PATIENCE_S):
        return await worker.wait()


async def test_a_dead_engine_ends_its_worker(pair: Pair, expected: tuple[int, ...]) -> None:
    """Its requests go on elsewhere, it leaves the registry, says why in its log and ends with a status of its own."""
    async with pair.with_one_more(Role.DECODE, module="tests.e2e.faults.fragile_worker") as fragile:
        request = await pair.decoding_on(fragile)
        fragile.kill(signal.SIGUSR1)
        assert await gone(fragile) == 70
        await pair.not_listed(fragile)
        answer = await request.outcome()
        exact(answer, expected, attempts=2)
        assert answer.final.timings.decode_worker == pair.stays.ready[1]
        log = fragile.log_path.read_text()
        assert f"the step thread died: OSError: {CAUSE}" in log
        assert "raise OSError(CAUSE)" in log, "the traceback"
        assert f"worker: the step thread died: OSError: {CAUSE}" in log.splitlines()


async def served_elsewhere(pair: Pair, tiny: TinyLlama, seed: int) -> None:
    """New requests, while a worker drains: the other one takes them."""
    prompt = prompt_of(30, seed)
    for answer in await asyncio.gather(
        *(pair.client.complete(prompt, max_tokens=20, **GREEDY) for _ in range(4)),
    ):
        exact(answer, tiny.greedy(prompt, 20))
        assert answer.final.timings.decode_worker == pair.stays.ready[1]


@pytest.mark.parametrize("role", [Role.DECODE, Role.MIXED])
async def test_a_stopped_worker_finishes_what_it_decodes(
    pair: Pair, tiny: TinyLlama, expected: tuple[int, ...], role: Role
) -> None:
    """SIGTERM while it works: nothing new goes there, what it has ends there, nothing is done twice, it ends well."""
    async with pair.with_one_more(role, *PATIENT) as worker:
        request = await pair.decoding_on(worker)
        worker.kill(signal.SIGTERM)
        await served_elsewhere(pair, tiny, 311)
        answer = await request.outcome()
        exact(answer, expected, attempts=1)
        assert answer.final.timings.decode_worker == worker.ready[1]
        assert await gone(worker) == 0
        await pair.not_listed(worker)


async def test_a_stopped_worker_finishes_what_it_prefills(pair: Pair, tiny: TinyLlama) -> None:
    """The KV is read from it before it goes."""
    prompt = prompt_of(3_000, 320)
    await pair.takes(Role.DECODE)
    async with pair.with_one_more(Role.PREFILL, *PATIENT) as worker:
        request = Watched(pair.client, prompt, max_tokens=20, **GREEDY)
        place: router_pb2.GetRouterStateResponse.ActiveRequest = await request.place(bound_early)
        assert place.prefill_worker == worker.ready[1]
        worker.kill(signal.SIGTERM)
        await served_elsewhere(pair, tiny, 321)
        answer = await request.outcome()
        exact(answer, tiny.greedy(prompt, 20), attempts=1)
        assert answer.final.timings.prefill_worker == worker.ready[1]
        assert answer.final.usage.external_kv_tokens == 3_000
        assert await gone(worker) == 0
        await pair.not_listed(worker)


async def test_what_outlasts_the_drain_goes_on_elsewhere(pair: Pair, expected: tuple[int, ...]) -> None:
    """It is sent away, and goes on from what was sent."""
    async with pair.with_one_more(Role.DECODE, "--role-drain-timeout-s", "0.05") as worker:
        request = await pair.decoding_on(worker)
        worker.kill(signal.SIGTERM)
        assert await gone(worker) == 0
        answer = await request.outcome()
        exact(answer, expected, attempts=2)
        assert answer.final.timings.decode_worker == pair.stays.ready[1]


async def test_a_second_signal_ends_it_at_once(pair: Pair, expected: tuple[int, ...]) -> None:
    """It does not wait for what runs; that goes on elsewhere, as after any death."""
    async with pair.with_one_more(Role.DECODE, *PATIENT) as worker:
        request = await pair.decoding_on(worker)
        worker.kill(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            while "stopping on SIGTERM" not in worker.log_path.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not request.done
        worker.kill(signal.SIGTERM)
        assert await gone(worker) == 128 + signal.SIGTERM
        await request.seen(len(request.tokens) + 20)
        assert tuple(request.tokens) == expected[: len(request.tokens)]
        await request.leave()
