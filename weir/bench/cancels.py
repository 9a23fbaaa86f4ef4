"""How soon a cancelled request has given everything back, as seen from outside: over rpc, by asking the workers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field

import numpy as np

from weir.bench.synthetic import Vocabulary
from weir.client import Accepted, AsyncClient, Delta, Event
from weir.clock import Clock
from weir.errors import InternalError
from weir.rpc.channel import channel
from weir.rpc.v1 import worker_pb2, worker_pb2_grpc

POLL_S = 0.001
LONGEST_S = 30.0


@dataclass(frozen=True, slots=True)
class CancelShape:
    """The request that is cancelled."""

    prompt_tokens: int
    output_tokens: int
    vocabulary: Vocabulary = field(default_factory=Vocabulary)


@dataclass(frozen=True, slots=True)
class CancelSample:
    """``after_ms`` from sending to cancelling; ``back_ms`` from there until every worker says it holds nothing.

    ``back_ms`` is an upper bound: it ends when the last answer has come, so it contains a poll. ``by`` is ``leave``
    (the stream is dropped) or ``call`` (the Cancel method). ``tokens`` had been received.
    """

    after_ms: float
    back_ms: float
    tokens: int
    by: str

    @property
    def phase(self) -> str:
        """prefill, hand-over (first token is here, the second is not) or decode."""
        return ("prefill", "hand-over")[self.tokens] if self.tokens < 2 else "decode"


class WorkerPolls:
    """Asks all workers for their state, on connections that stay open."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._addresses = addresses
        self._stubs: list[worker_pb2_grpc.WorkerServiceStub] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> WorkerPolls:
        for address in self._addresses.values():
            link = await self._stack.enter_async_context(channel(address))
            self._stubs.append(worker_pb2_grpc.WorkerServiceStub(link))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def states(self) -> list[worker_pb2.GetStateResponse]:
        """One state per worker."""
        return list(await asyncio.gather(*(stub.GetState(worker_pb2.GetStateRequest()) for stub in self._stubs)))

    async def until_idle(self, clock: Clock) -> float:
        """Monotonic seconds when every worker had said that nothing is held; InternalError when none does."""
        deadline_s = clock.monotonic_s() + LONGEST_S
        while any(map(holds_anything, states := await self.states())):
            if clock.monotonic_s() > deadline_s:
                raise InternalError(f"still held {LONGEST_S:g} s after a cancel: {[s.load for s in states]}")
            await asyncio.sleep(POLL_S)
        return clock.monotonic_s()


def holds_anything(state: worker_pb2.GetStateResponse) -> bool:
    """Whether a worker has blocks, leases, reads or sequences of anybody."""
    load, blocks = state.load, state.load.blocks
    held = blocks.used + blocks.leased + blocks.quarantined
    return bool(held or load.open_leases or load.outstanding_reads or load.running or load.waiting)


async def measure_cancels(
    router: str,
    workers: Mapping[str, str],
    shape: CancelShape,
    count: int,
    random: np.random.Generator,
    clock: Clock,
) -> list[CancelSample]:
    """Cancel ``count`` requests, one at a time, at moments spread evenly at random over a request's whole life.

    Prompts are all different. Requests that ended before their cancel are run again. The cluster must be idle.
    """
    samples: list[CancelSample] = []
    async with AsyncClient(router) as client, WorkerPolls(workers) as polls:
        await _run(client, shape, random, clock, None)  # the first one warms up
        life_s = (await _run(client, shape, random, clock, None)).lived_s
        await polls.until_idle(clock)
        while len(samples) < count:
            by = ("leave", "call")[len(samples) % 2]
            cut = _Cut(float(random.uniform(0, life_s)), by)
            run = await _run(client, shape, random, clock, cut)
            back_s = await polls.until_idle(clock)
            if run.cut_s is not None:
                after_ms, back_ms = 1e3 * (run.cut_s - run.sent_s), 1e3 * (back_s - run.cut_s)
                samples.append(CancelSample(after_ms, back_ms, run.tokens, by))
    return samples


@dataclass(frozen=True, slots=True)
class _Cut:
    after_s: float
    by: str


@dataclass(slots=True)
class _Run:
    sent_s: float
    tokens: int = 0
    request_id: str = ""
    lived_s: float = 0.0
    cut_s: float | None = None

    def take(self, event: Event) -> None:
        if isinstance(event, Accepted):
            self.request_id = event.request_id
        elif isinstance(event, Delta):
            self.tokens += len(event.token_ids)


async def _run(
    client: AsyncClient, shape: CancelShape, random: np.random.Generator, clock: Clock, cut: _Cut | None
) -> _Run:
    prompt = shape.vocabulary.draw(shape.prompt_tokens, random)
    run = _Run(clock.monotonic_s())
    reading = asyncio.create_task(_read(client, prompt, shape.output_tokens, run))
    done, _ = await asyncio.wait([reading], timeout=None if cut is None else cut.after_s)
    if done:
        await reading
        run.lived_s = clock.monotonic_s() - run.sent_s
        return run
    assert cut is not None
    run.cut_s = clock.monotonic_s()
    if cut.by == "call" and run.request_id:
        await client.cancel(run.request_id)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    return run


async def _read(client: AsyncClient, prompt: Sequence[int], output_tokens: int, run: _Run) -> None:
    stream = client.generate(prompt, max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    async with aclosing(stream):  # type: ignore[type-var]
        async for event in stream:
            run.take(event)
