"""The controller on a real cluster: the traffic turns, a worker flips, nothing is lost."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.e2e.faults.tiny import NAME, TinyLlama, prompt_of
from tests.e2e.quiet import assert_quiet
from weir.cli.cluster import Cluster, ClusterSpec
from weir.cli.up import controller_flags, supervised
from weir.client import AsyncClient
from weir.errors import NotFound
from weir.lifecycle import Role
from weir.rpc.channel import channel
from weir.rpc.v1 import common_pb2, controller_pb2, controller_pb2_grpc, events_pb2

EAGER = (
    *("--mode", "auto", "--interval-s", "0.2", "--window-s", "4", "--confirm-s", "1", "--cooldown-s", "2"),
    *("--slo-ttft-ms", "0", "--slo-tpot-ms", "0", "--no-mixed-fallback", "--busy", "0.25", "--spare", "0.2"),
)
PREFILL_HEAVY, DECODE_HEAVY = (3_000, 3), (20, 250)
GROWING = (
    *("--interval-s", "0.2", "--window-s", "4", "--confirm-s", "1", "--cooldown-s", "2"),
    # The first worker must have started by then, or the controller starts another one for it.
    *("--confirm-down-s", "600", "--pending-s", "120"),
    *("--slo-ttft-ms", "0", "--slo-tpot-ms", "0", "--busy", "0.25", "--spare", "0.2"),
)
FEW_SLOTS = ("--max-running", "4")
CLIENTS = 8
TURN_TIMEOUT_S = 120.0


Wanted = Callable[[controller_pb2.ListDecisionsResponse], bool]


class Traffic:
    """``CLIENTS`` that ask without a pause; ``mix`` may be changed at any time."""

    def __init__(self, client: AsyncClient) -> None:
        self.mix = PREFILL_HEAVY
        self.answered = 0
        self._client = client
        self._seeds = itertools.count()
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(CLIENTS)]

    async def _ask(self) -> None:
        while True:
            length, tokens = self.mix
            prompt = prompt_of(length, next(self._seeds))
            answer = await self._client.complete(prompt, max_tokens=tokens, ignore_eos=True, temperature=0.0)
            assert len(answer.token_ids) == tokens
            self.answered += 1

    async def until(self, wanted: Wanted, address: str) -> None:
        """Go on until the controller's decisions are ``wanted``; raises what a client met."""
        await until(wanted, address, self._tasks)

    async def stop(self) -> None:
        """Let nobody ask any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def until(wanted: Wanted, address: str, tasks: Sequence[asyncio.Task[None]] = ()) -> None:
    """Wait until the controller's decisions are ``wanted`` and none is pending; raises what one of ``tasks`` raised."""
    async with channel(address) as link, asyncio.timeout(TURN_TIMEOUT_S):
        stub = controller_pb2_grpc.ControllerServiceStub(link)
        while True:
            answer = await stub.ListDecisions(controller_pb2.ListDecisionsRequest())
            if wanted(answer) and not answer.pending:
                return
            await asyncio.sleep(0.2)
            for task in tasks:
                if task.done():
                    task.result()


def decided(answer: controller_pb2.ListDecisionsResponse, action: str) -> int:
    """Decisions of this kind."""
    wanted = events_pb2.BalanceAction.Value(f"BALANCE_ACTION_{action}")
    return sum(decision.action == wanted for decision in answer.decisions)


def flips_to(answer: controller_pb2.ListDecisionsResponse, role: common_pb2.Role) -> int:
    """Decisions to give a worker that role."""
    flips = [d for d in answer.decisions if d.action == events_pb2.BALANCE_ACTION_FLIP and not d.cancels]
    return sum(flip.role == role for decision in flips for flip in decision.flips)


@pytest.mark.filterwarnings("ignore::FutureWarning")
async def test_workers_follow_the_traffic(tmp_path: Path) -> None:
    tiny = TinyLlama(tmp_path / "model")
    spec = ClusterSpec(
        tiny.folder, NAME, tmp_path / "logs", prefill=1, decode=2, controller_flags=EAGER, worker_flags=FEW_SLOTS
    )
    async with Cluster(spec) as cluster, AsyncClient(cluster.router_address) as client:
        traffic = Traffic(client)
        try:
            await traffic.until(lambda a: flips_to(a, common_pb2.ROLE_PREFILL) == 1, cluster.controller_address)
            before = traffic.answered
            traffic.mix = DECODE_HEAVY
            await traffic.until(lambda a: flips_to(a, common_pb2.ROLE_DECODE) >= 1, cluster.controller_address)
            assert traffic.answered > before
        finally:
            await traffic.stop()
        await assert_quiet(cluster)


@pytest.mark.filterwarnings("ignore::FutureWarning")
async def test_the_controller_starts_a_worker_for_the_traffic(tmp_path: Path) -> None:
    tiny = TinyLlama(tmp_path / "model")
    flags = controller_flags("auto", 1, 2, GROWING)
    spec = ClusterSpec(
        tiny.folder, NAME, tmp_path / "logs", prefill=0, decode=0, mixed=1, controller_flags=flags,
        worker_flags=FEW_SLOTS,
    )  # fmt: skip
    said: list[str] = []
    async with Cluster(spec) as cluster, AsyncClient(cluster.router_address) as client:
        async with supervised(cluster, 2, said.append):
            traffic = Traffic(client)
            traffic.mix = DECODE_HEAVY
            try:
                await traffic.until(lambda a: decided(a, "SCALE_UP") == 1, cluster.controller_address)
                assert cluster.worker_count() == 2
                before = traffic.answered
                await traffic.until(lambda a: traffic.answered >= before + CLIENTS, cluster.controller_address)
            finally:
                await traffic.stop()
        assert [line.split(": ")[1] for line in said] == ["starting a mixed worker"]
        await assert_quiet(cluster)


async def test_workers_are_added_and_stopped_by_name(tmp_path: Path) -> None:
    tiny = TinyLlama(tmp_path / "model")
    spec = ClusterSpec(tiny.folder, NAME, tmp_path / "logs", prefill=0, decode=0, mixed=1)

    async with Cluster(spec) as cluster:
        watching = asyncio.create_task(cluster.wait_any_exit())
        added = await cluster.add_worker(Role.MIXED)
        assert cluster.worker_count() == 2
        await cluster.wait_connected()
        await cluster.stop_worker(added)
        assert (cluster.worker_count(), list(cluster.worker_addresses)) == (1, [cluster.workers[0].ready[1]])
        with pytest.raises(NotFound):
            await cluster.stop_worker(added)
        done, _ = await asyncio.wait({watching}, timeout=2.5)
        assert not done, "a worker that was asked to stop has not ended by itself"
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
