"""Clients leave, cancel and run out of time in every phase; both legs stop, and what they held is free again."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.faults.conftest import WORKER_FLAGS
from tests.e2e.faults.tiny import NAME, TinyLlama, prompt_of
from tests.e2e.faults.watched import Watched, exact, prefilling, state_of
from tests.e2e.quiet import assert_quiet
from weir.cli.cluster import Cluster, ClusterSpec
from weir.client import AsyncClient
from weir.errors import DeadlineExceeded, RequestCancelled

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.filterwarnings("ignore::FutureWarning")]

CHUNK = 64
LONG = 6_000
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def duo(tiny: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One prefill and one decode worker."""
    spec = ClusterSpec(tiny.folder, NAME, tmp_path_factory.mktemp("duo"), worker_flags=WORKER_FLAGS)
    async with Cluster(spec) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def client(duo: Cluster) -> AsyncIterator[AsyncClient]:
    """A client; nothing is left after it."""
    async with AsyncClient(duo.router_address) as client:
        yield client
    await assert_quiet(duo)


def ids_in_order(duo: Cluster) -> tuple[str, str]:
    """Worker ids: prefill, decode."""
    first, second = (worker.ready[1] for worker in duo.workers)
    return (first, second) if first.startswith("prefill") else (second, first)


async def stop(client: AsyncClient, request: Watched, how: str) -> None:
    """End it as its client would; the answer to ``cancel`` is an error with that name."""
    if how == "leave":
        await request.leave()
    else:
        assert await client.cancel(request.request_id)
        with pytest.raises(RequestCancelled):
            await request.outcome()
    assert not await client.cancel(request.request_id)


@pytest.mark.parametrize("how", ["leave", "cancel"])
@pytest.mark.parametrize("phase", ["queued", "prefilling", "prefilled", "reading", "decoding"])
async def test_cancelled_in_any_phase(duo: Cluster, client: AsyncClient, phase: str, how: str) -> None:
    prefill, decode = ids_in_order(duo)
    decoder = next(worker for worker in duo.workers if worker.ready[1] == decode)
    ahead = Watched(client, prompt_of(LONG, 40), max_tokens=5, **GREEDY) if phase == "queued" else None
    if ahead is not None:
        await ahead.place(prefilling)
    if phase in ("prefilled", "reading"):
        decoder.kill(signal.SIGSTOP)  # it reads nothing, or not to the end
    length = LONG if phase in ("prefilling", "reading") else 200
    request = Watched(client, prompt_of(length, 41), max_tokens=2_000, tenant=f"{phase} {how}", **GREEDY)
    if phase == "decoding":
        await request.seen(20)
    elif phase == "prefilled":
        await request.seen(1)
    else:
        await request.place(prefilling)
    if phase == "reading":
        await _announced(duo, prefill)
        decoder.kill(signal.SIGCONT)
    await stop(client, request, how)
    if phase == "queued":
        assert ahead is not None
        await ahead.leave()
    decoder.kill(signal.SIGCONT)
    await assert_quiet(duo)
    assert (await state_of(duo, prefill)).load.blocks.leased == 0


async def _announced(duo: Cluster, worker_id: str) -> None:
    """Return when the worker has promised KV of a prefill that goes on."""
    async with asyncio.timeout(30):
        while (await state_of(duo, worker_id)).load.open_leases == 0:
            pass


async def test_a_short_prompt_is_not_kept_by_ten_long_ones_that_left(
    duo: Cluster, client: AsyncClient, tiny: TinyLlama
) -> None:
    """Counted in tokens computed: at most the chunk under way and its own come before its first token."""
    prefill, _ = ids_in_order(duo)
    long = [Watched(client, prompt_of(LONG, 50 + i), max_tokens=10, **GREEDY) for i in range(10)]
    await asyncio.gather(*(request.accepted() for request in long))
    async with asyncio.timeout(30):
        # One is enough: on a fast machine the first may be through before the last has begun.
        while not any(prefilling(place) for place in (await client.state()).requests):
            pass
    await asyncio.gather(*(request.leave() for request in long))
    before = (await state_of(duo, prefill)).load.prefilled_tokens
    prompt = prompt_of(50, 60)
    short = Watched(client, prompt, max_tokens=5, **GREEDY)
    await short.seen(1)
    computed = (await state_of(duo, prefill)).load.prefilled_tokens - before
    assert computed <= 2 * CHUNK + len(prompt)
    exact(await short.outcome(), tiny.greedy(prompt, 5), attempts=1)


async def test_a_deadline_ends_the_work(duo: Cluster, client: AsyncClient) -> None:
    """What runs stops within a chunk; what waited behind it was never begun."""
    prefill, _ = ids_in_order(duo)
    whole = await client.complete(prompt_of(LONG, 69), max_tokens=1, **GREEDY)
    half_s = whole.final.timings.ttft_ms / 2e3  # so that the machine's speed does not matter
    before = (await state_of(duo, prefill)).load.prefilled_tokens
    requests = [Watched(client, prompt_of(LONG, 70 + i), max_tokens=5, timeout_s=half_s, **GREEDY) for i in range(3)]
    for request in requests:
        with pytest.raises(DeadlineExceeded):
            await request.outcome()
    await assert_quiet(duo)
    computed = (await state_of(duo, prefill)).load.prefilled_tokens - before
    assert 0 < computed < LONG, "not even one of three was worked on to its end"
    quick = Watched(client, prompt_of(20, 75), max_tokens=5, **GREEDY)
    await quick.outcome()
    assert (await state_of(duo, prefill)).load.prefilled_tokens - before - computed == 20


async def test_a_deadline_while_decoding(duo: Cluster, client: AsyncClient, tiny: TinyLlama) -> None:
    prompt = prompt_of(30, 76)
    request = Watched(client, prompt, max_tokens=4_000, timeout_s=2.0, **GREEDY)
    with pytest.raises(DeadlineExceeded):
        await request.outcome()
    assert len(request.tokens) > 1
    assert tuple(request.tokens) == tiny.greedy(prompt, len(request.tokens))


async def test_finish_and_cancel_at_once(duo: Cluster, client: AsyncClient, tiny: TinyLlama) -> None:
    """The cancel meets the last token in one step, before it or after it: nothing but these two outcomes."""
    prompt = prompt_of(30, 77)
    expected = tiny.greedy(prompt, 30)
    for number in range(30):
        request = Watched(client, prompt, max_tokens=number % 3 + 1, **GREEDY)
        await request.seen(1)
        running = await client.cancel(request.request_id)
        try:
            exact(await request.outcome(), expected[: number % 3 + 1])
        except RequestCancelled:
            assert running
            assert tuple(request.tokens) == expected[: len(request.tokens)]
