"""Routers, the controller and NATS die and stand still; what was admitted finishes, what comes next is served."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.faults.tiny import TinyLlama, prompt_of
from tests.e2e.faults.watched import Watched, exact, kill, killed, prefilling, renewed, worker_named
from tests.e2e.quiet import assert_quiet
from weir.cli.cluster import Cluster, router_doors
from weir.client import AsyncClient
from weir.errors import Unavailable

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.filterwarnings("ignore::FutureWarning")]

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@pytest_asyncio.fixture(loop_scope="package")
async def second(squad: Cluster) -> AsyncIterator[AsyncClient]:
    """A client of the second router."""
    async with AsyncClient(router_doors(squad.routers[1])[0]) as client:
        yield client


async def stale_is(client: AsyncClient, stale: bool) -> None:
    """Return when the router says so."""
    async with asyncio.timeout(30):
        while (await client.workers()).stale != stale:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)


async def test_two_routers_serve_at_once(
    squad: Cluster, client: AsyncClient, second: AsyncClient, tiny: TinyLlama
) -> None:
    """Ids that clients give are labels: the same one on four requests confuses nobody."""
    prompts = [prompt_of(80, seed) for seed in range(20, 24)]
    requests = [
        Watched((client, second)[i % 2], prompt, max_tokens=60, client_request_id="mine", **GREEDY)
        for i, prompt in enumerate(prompts)
    ]
    for request, prompt in zip(requests, prompts, strict=True):
        exact(await request.outcome(), tiny.greedy(prompt, 60), attempts=1)
    assert len({request.request_id for request in requests}) == 4


async def test_a_router_dies(squad: Cluster, client: AsyncClient, second: AsyncClient, tiny: TinyLlama) -> None:
    """What it had under way is cleaned up, prefilling and decoding; the other router's requests go on."""
    prompt, router = prompt_of(100, 30), squad.routers[1]
    mine = Watched(client, prompt, max_tokens=800, **GREEDY)
    decoding = [Watched(second, prompt_of(100, seed), max_tokens=4_000, **GREEDY) for seed in (31, 32)]
    for request in (mine, *decoding):
        await request.seen(20)
    long = Watched(second, prompt_of(6_000, 33), max_tokens=10, **GREEDY)
    await long.place(prefilling)
    await kill(router)
    mine.struck("the other router killed", "decoding")
    for request in (*decoding, long):
        with pytest.raises(Unavailable):
            await request.outcome()
    exact(await mine.outcome(), tiny.greedy(prompt, 800), attempts=1)
    await assert_quiet(squad)
    await squad.restart_router(router)
    await renewed(squad)
    exact(await second.complete(prompt, max_tokens=10, **GREEDY), tiny.greedy(prompt, 10))


async def test_a_router_stands_still(squad: Cluster, second: AsyncClient, client: AsyncClient, tiny: TinyLlama) -> None:
    """Its clients wait; when it goes on, so do they, with the same tokens."""
    prompt = prompt_of(100, 34)
    request = Watched(second, prompt, max_tokens=600, **GREEDY)
    await request.seen(20)
    squad.routers[1].kill(signal.SIGSTOP)
    exact(await client.complete(prompt, max_tokens=200, **GREEDY), tiny.greedy(prompt, 200))
    squad.routers[1].kill(signal.SIGCONT)
    exact(await request.outcome(), tiny.greedy(prompt, 600))


async def test_the_controller_dies(squad: Cluster, client: AsyncClient, tiny: TinyLlama) -> None:
    prompt = prompt_of(100, 35)
    request = Watched(client, prompt, max_tokens=300, **GREEDY)
    await request.seen(20)
    assert squad.controller is not None
    await kill(squad.controller)
    request.struck("controller killed", "decoding")
    exact(await request.outcome(), tiny.greedy(prompt, 300), attempts=1)
    exact(await client.complete(prompt, max_tokens=20, **GREEDY), tiny.greedy(prompt, 20), attempts=1)


@pytest.mark.parametrize("store", ["kept", "lost"])
async def test_nats_dies_and_comes_back(squad: Cluster, client: AsyncClient, tiny: TinyLlama, store: str) -> None:
    """Served without it from the last view, also when a worker dies meanwhile; synchronised when it is back."""
    prompt = prompt_of(100, 36)
    request = Watched(client, prompt, max_tokens=600, **GREEDY)
    await request.seen(20)
    assert squad.nats is not None
    await squad.nats.kill()
    request.struck("NATS killed", "decoding")
    exact(await request.outcome(), tiny.greedy(prompt, 600), attempts=1)
    await stale_is(client, True)
    exact(await client.complete(prompt, max_tokens=20, **GREEDY), tiny.greedy(prompt, 20), attempts=1)
    request = Watched(client, prompt, max_tokens=600, tenant="without", **GREEDY)
    await request.seen(20)
    victim = worker_named(squad, (await request.place(lambda place: True)).decode_worker)
    await kill(victim)
    request.struck("D killed without NATS", "decoding")
    exact(await request.outcome(), tiny.greedy(prompt, 600), attempts=2)
    if store == "lost":
        shutil.rmtree(squad.nats._data_dir / "jetstream")
    await squad.nats.start()
    await stale_is(client, False)
    await squad.restart_worker(victim)
    await renewed(squad)
    exact(await client.complete(prompt, max_tokens=20, **GREEDY), tiny.greedy(prompt, 20), attempts=1)


async def test_nats_stands_still(squad: Cluster, client: AsyncClient, tiny: TinyLlama) -> None:
    """Its connections stay open and say nothing; longer than a registry entry lives."""
    assert squad.nats is not None
    assert squad.nats.pid is not None
    prompt = prompt_of(100, 37)
    os.kill(squad.nats.pid, signal.SIGSTOP)
    try:
        exact(await client.complete(prompt, max_tokens=20, **GREEDY), tiny.greedy(prompt, 20), attempts=1)
        await stale_is(client, True)
        exact(await client.complete(prompt, max_tokens=200, **GREEDY), tiny.greedy(prompt, 200), attempts=1)
    finally:
        os.kill(squad.nats.pid, signal.SIGCONT)
    await stale_is(client, False)
    await renewed(squad)
    async with killed(squad, squad.workers[0]):
        exact(await client.complete(prompt, max_tokens=20, **GREEDY), tiny.greedy(prompt, 20), attempts=1)
