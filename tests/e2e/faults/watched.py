"""Requests that a test watches from outside, token by token, while it breaks things."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence, Set
from contextlib import asynccontextmanager
from itertools import count, pairwise
from typing import Any, Unpack

from tests.e2e.faults import recovery
from tests.e2e.faults.tiny import TinyLlama, prompt_of
from weir.cli.cluster import Cluster, router_doors
from weir.cli.process import ChildProcess
from weir.cli.workers import worker_state
from weir.client import AsyncClient, Completion, Delta, Event
from weir.client.messages import Collector
from weir.client.types import Accepted, Options
from weir.rpc.v1 import common_pb2, router_pb2, worker_pb2

PATIENCE_S = 60.0
"""Bound of every wait: it says that something happens, not how fast."""

_numbers = count()


class Watched:
    """One request under way. Positions come in order, none twice: the collector asserts it."""

    def __init__(self, client: AsyncClient, prompt: Sequence[int], **options: Unpack[Options]) -> None:
        self.request_id = ""
        self.tokens: list[int] = []
        self._client = client
        self._changed = asyncio.Condition()
        self._news_s: list[float] = []
        self._struck: tuple[str, str, float] | None = None
        self._task = asyncio.create_task(self._follow(client.generate(prompt, **options)))

    async def _follow(self, stream: AsyncIterator[Event]) -> Completion:
        collector = Collector()
        try:
            async for event in stream:
                collector.add(event)
                await self._note(event)
        finally:
            async with self._changed:
                self._changed.notify_all()
        return collector.completion()

    async def _note(self, event: Event) -> None:
        self._news_s.append(asyncio.get_running_loop().time())
        async with self._changed:
            if isinstance(event, Accepted):
                self.request_id = event.request_id
            elif isinstance(event, Delta):
                self.tokens += event.token_ids
            self._changed.notify_all()

    async def _until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: true() or self._task.done())
        assert true(), f"it ended first: {self._task}"

    async def accepted(self) -> None:
        """Return when the router has admitted it."""
        await self._until(lambda: bool(self.request_id))

    async def seen(self, tokens: int) -> None:
        """Return when so many tokens have come."""
        await self._until(lambda: len(self.tokens) >= tokens)

    async def place(
        self, true: Callable[[router_pb2.GetRouterStateResponse.ActiveRequest], bool]
    ) -> router_pb2.GetRouterStateResponse.ActiveRequest:
        """Where the router has it, as soon as ``true`` holds of that."""
        await self.accepted()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                state = await self._client.state()
                mine = [active for active in state.requests if active.request_id == self.request_id]
                assert mine, f"it ended first: {self._task}"
                if true(mine[0]):
                    return mine[0]

    def struck(self, fault: str, phase: str) -> None:
        """``fault`` is done now, in this phase of the request: from here on its longest silence is what it cost."""
        self._struck = (fault, phase, asyncio.get_running_loop().time())

    async def outcome(self) -> Completion:
        """The whole answer; raises its error. Notes what a fault cost."""
        async with asyncio.timeout(PATIENCE_S):
            answer = await self._task
        if self._struck is not None:
            fault, phase, at_s = self._struck
            heard_s = [at_s, *(news_s for news_s in self._news_s if news_s > at_s)]
            silence_s = max((b - a for a, b in pairwise(heard_s)), default=0.0)
            recovery.note(fault, phase, silence_s, answer.final.timings.attempts)
        return answer

    async def leave(self) -> None:
        """As a client that goes away."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._task.done()


def exact(answer: Completion, expected: Sequence[int], attempts: int | None = None) -> None:
    """The tokens are the expected ones, all counted once, and the sources add up to the prompt."""
    assert answer.token_ids == tuple(expected)
    usage = answer.final.usage
    assert usage.completion_tokens == len(expected)
    assert usage.local_compute_tokens + usage.local_cache_hit_tokens + usage.external_kv_tokens == usage.prompt_tokens
    if attempts is not None:
        assert answer.final.timings.attempts == attempts, answer.final.timings


def prefilling(place: router_pb2.GetRouterStateResponse.ActiveRequest) -> bool:
    """A prefill worker has it."""
    return place.state == common_pb2.REQUEST_STATE_PREFILLING and bool(place.prefill_worker)


def bound_early(place: router_pb2.GetRouterStateResponse.ActiveRequest) -> bool:
    """It is being prefilled, and its decode worker is known."""
    return prefilling(place) and bool(place.decode_worker)


def worker_named(cluster: Cluster, worker_id: str) -> ChildProcess:
    """The process of a worker."""
    return next(worker for worker in cluster.workers if worker.ready[1] == worker_id)


async def state_of(cluster: Cluster, worker_id: str) -> worker_pb2.GetStateResponse:
    """What a worker says of itself."""
    return await worker_state(cluster.worker_addresses[worker_id])


async def prefills(cluster: Cluster) -> dict[str, int]:
    """Prefills completed, by worker."""
    return {name: (await state_of(cluster, name)).prefills_completed for name in cluster.worker_addresses}


async def kill(worker: ChildProcess) -> None:
    """SIGKILL, and it is gone."""
    worker.kill()
    await worker.wait()


@asynccontextmanager
async def killed(cluster: Cluster, worker: ChildProcess) -> AsyncIterator[None]:
    """``worker`` is killed now, and started again on its address when the block ends."""
    await kill(worker)
    try:
        yield
    finally:
        await cluster.restart_worker(worker)
        await renewed(cluster)


async def renewed(cluster: Cluster) -> None:
    """Return when every router has sessions with every worker's present life and knows no other."""
    wanted = {(name, (await state_of(cluster, name)).incarnation) for name in cluster.worker_addresses}
    for router in cluster.routers:
        async with AsyncClient(router_doors(router)[0]) as client:
            await _sees(client, wanted)


async def _sees(client: AsyncClient, wanted: set[tuple[str, int]]) -> None:
    seen: Any = None
    try:
        async with asyncio.timeout(PATIENCE_S):
            while seen != wanted:
                answer = await client.workers()
                seen = {(w.worker_id, w.incarnation) for w in answer.workers if w.connected}
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"the router sees {seen}, not {wanted}") from None


async def used_again(client: AsyncClient, tiny: TinyLlama, worker_ids: Set[str], attempts: int | None = None) -> None:
    """Return when each of these workers has taken part in a request, all answered right and in so many attempts.

    Several at once, so that the others are busy, each with a tenant of its own: what another worker has cached, or does
    faster, would always be the better choice.
    """
    prompt = prompt_of(50, 90)
    expected = tiny.greedy(prompt, 5)
    used: set[str] = set()
    async with asyncio.timeout(90):
        while not worker_ids <= used:
            tenants = [f"again {next(_numbers)}" for _ in range(6)]
            answers = await asyncio.gather(
                *(
                    client.complete(prompt, max_tokens=5, temperature=0.0, ignore_eos=True, tenant=tenant)
                    for tenant in tenants
                )
            )
            for answer in answers:
                exact(answer, expected, attempts)
                used |= {answer.final.timings.prefill_worker, answer.final.timings.decode_worker}
