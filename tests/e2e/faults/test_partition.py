"""Cables are pulled: every process has a network namespace of its own, and KV goes over TCP between them.

The cut end learns nothing: no reset, no refusal, only silence. Answers are exact all the same, and what was cut is used
again when its cable is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.faults import recovery
from tests.e2e.faults.conftest import WORKER_FLAGS
from tests.e2e.faults.namespaces import ANY_HOST, PartedCluster, filters_unavailable, unavailable
from tests.e2e.faults.test_control import stale_is
from tests.e2e.faults.test_death import hash_of, prefills_of
from tests.e2e.faults.tiny import NAME, TinyLlama, prompt_of
from tests.e2e.faults.watched import (
    PATIENCE_S,
    Watched,
    bound_early,
    exact,
    prefilling,
    prefills,
    renewed,
    used_again,
    worker_named,
)
from tests.e2e.quiet import assert_quiet
from weir.cli.cluster import ClusterSpec, router_doors
from weir.client import AsyncClient
from weir.errors import DeadlineExceeded, Unavailable
from weir.rpc.v1 import common_pb2, router_pb2

WHY_NOT = unavailable()
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "namespaces can be made"),
]

LONG = 3_000
SLOW_LINK = "2mbit"
"""The KV of LONG tokens takes some 24 s: it is under way when the cable is pulled, on any machine."""
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
Place = router_pb2.GetRouterStateResponse.ActiveRequest
NO_FILTERS = filters_unavailable()
needs_filters = pytest.mark.skipif(bool(NO_FILTERS), reason=NO_FILTERS or "packets can be dropped")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def parted(tiny: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PartedCluster]:
    """Two prefill workers, two decode workers, two routers."""
    folder = tmp_path_factory.mktemp("parted")
    spec = ClusterSpec(
        tiny.folder, NAME, folder, prefill=2, decode=2, routers=2, host=ANY_HOST, worker_flags=WORKER_FLAGS
    )
    async with PartedCluster(spec) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def client(parted: PartedCluster) -> AsyncIterator[AsyncClient]:
    """A client of the first router; nothing is left in the cluster after it."""
    async with AsyncClient(parted.router_address) as client:
        yield client
    await healed(parted)
    await assert_quiet(parted)


async def healed(parted: PartedCluster) -> None:
    """Return when every worker can be reached by all again; the first try to connect may be one of before."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await renewed(parted)
                return
            except (Unavailable, DeadlineExceeded):
                continue


def node_of(parted: PartedCluster, worker_id: str) -> str:
    """The namespace of a worker."""
    return worker_named(parted, worker_id).name


def transferring(place: Place) -> bool:
    """Its prompt is prefilled and its KV under way to a decode worker."""
    return place.state == common_pb2.REQUEST_STATE_TRANSFERRING and bool(place.decode_worker)


@contextmanager
def slow_until(parted: PartedCluster) -> Iterator[Callable[[], None]]:
    """KV comes slowly to both decode workers; the function given ends that."""
    with ExitStack() as slowed:
        for node in ("decode-2", "decode-3"):
            slowed.enter_context(parted.fabric.slowed(node, SLOW_LINK))
        yield slowed.close


@pytest.mark.parametrize("phase", ["prefilling", "transferring"])
async def test_decode_worker_cut_off_before_decoding(
    parted: PartedCluster, client: AsyncClient, tiny: TinyLlama, phase: str
) -> None:
    """Another one reads under the same lease."""
    prompt, before = prompt_of(LONG, hash_of(f"D {phase}")), await prefills(parted)
    with slow_until(parted) as be_fast:
        request = Watched(client, prompt, max_tokens=20, **GREEDY)
        place = await request.place(bound_early if phase == "prefilling" else transferring)
        with parted.fabric.cut(node_of(parted, place.decode_worker)):
            request.struck("D cut off", phase)
            be_fast()
            answer = await request.outcome()
            after = await prefills_of(parted, [name for name in before if name != place.decode_worker])
    exact(answer, tiny.greedy(prompt, 20), attempts=1)
    assert answer.final.timings.decode_worker != place.decode_worker
    read = answer.final.timings.kv_read
    assert read is not None
    assert read.transport == "ucx:tcp"
    assert answer.final.usage.external_kv_tokens == LONG
    assert sum(after.values()) == sum(before.values()) - before[place.decode_worker] + 1, "no second prefill"
    await healed(parted)
    await used_again(client, tiny, {place.decode_worker})


async def test_decode_worker_cut_off_while_decoding(
    parted: PartedCluster, client: AsyncClient, tiny: TinyLlama
) -> None:
    prompt = prompt_of(100, 92)
    request = Watched(client, prompt, max_tokens=150, **GREEDY)
    place = await request.place(lambda place: place.tokens_sent > 20)
    with parted.fabric.cut(node_of(parted, place.decode_worker)):
        request.struck("D cut off", "decoding")
        answer = await request.outcome()
    exact(answer, tiny.greedy(prompt, 150), attempts=2)
    assert answer.final.timings.decode_worker != place.decode_worker


@pytest.mark.parametrize("phase", ["prefilling", "transferring"])
async def test_prefill_worker_cut_off(parted: PartedCluster, client: AsyncClient, tiny: TinyLlama, phase: str) -> None:
    """With it, all that was not read yet is lost."""
    prompt = prompt_of(LONG, hash_of(f"P {phase}"))
    with slow_until(parted) as be_fast:
        request = Watched(client, prompt, max_tokens=20, **GREEDY)
        place = await request.place(bound_early if phase == "prefilling" else transferring)
        with parted.fabric.cut(node_of(parted, place.prefill_worker)):
            request.struck("P cut off", phase)
            be_fast()
            answer = await request.outcome()
    exact(answer, tiny.greedy(prompt, 20), attempts=2)
    assert answer.final.timings.prefill_worker != place.prefill_worker
    await healed(parted)
    await used_again(client, tiny, {place.prefill_worker})


async def test_prefill_worker_cut_off_while_decoding(
    parted: PartedCluster, client: AsyncClient, tiny: TinyLlama
) -> None:
    """D has all it needs."""
    prompt = prompt_of(100, 94)
    request = Watched(client, prompt, max_tokens=150, **GREEDY)
    place = await request.place(lambda place: place.tokens_sent > 20)
    with parted.fabric.cut(node_of(parted, place.prefill_worker)):
        request.struck("P cut off", "decoding")
        answer = await request.outcome()
    exact(answer, tiny.greedy(prompt, 150), attempts=1)


@needs_filters
async def test_the_two_do_not_reach_each_other(parted: PartedCluster, client: AsyncClient, tiny: TinyLlama) -> None:
    """Router and NATS see both alive; only the KV does not come through. Another D reads it, under the same lease."""
    prompt = prompt_of(LONG, 95)
    with slow_until(parted) as be_fast:
        request = Watched(client, prompt, max_tokens=20, **GREEDY)
        place = await request.place(transferring)
        with parted.fabric.parted(node_of(parted, place.decode_worker), node_of(parted, place.prefill_worker)):
            request.struck("link between P and D cut", "transferring")
            be_fast()
            answer = await request.outcome()
    exact(answer, tiny.greedy(prompt, 20), attempts=1)
    assert answer.final.timings.decode_worker != place.decode_worker
    assert answer.final.usage.external_kv_tokens == LONG


@needs_filters
@pytest.mark.parametrize(("what", "hook"), [("deaf", "input"), ("mute", "output")])
async def test_packets_are_lost_one_way(
    parted: PartedCluster, client: AsyncClient, tiny: TinyLlama, what: str, hook: str
) -> None:
    """A deaf worker is heard for a while: until TCP has sent all that it may send unacknowledged."""
    prompt = prompt_of(100, hash_of(what))
    request = Watched(client, prompt, max_tokens=400, **GREEDY)
    place = await request.place(lambda place: place.tokens_sent > 20)
    with parted.fabric.dropping(node_of(parted, place.decode_worker), hook):
        request.struck(f"D {what}", "decoding")
        answer = await request.outcome()
    exact(answer, tiny.greedy(prompt, 400), attempts=2)


async def test_nats_and_controller_cut_off(parted: PartedCluster, client: AsyncClient, tiny: TinyLlama) -> None:
    """Admitted ones finish, new ones are served from the last view."""
    prompt = prompt_of(100, 98)
    request = Watched(client, prompt, max_tokens=150, **GREEDY)
    await request.seen(20)
    with parted.fabric.cut("nats"), parted.fabric.cut("controller"):
        request.struck("NATS and controller cut off", "decoding")
        exact(await request.outcome(), tiny.greedy(prompt, 150), attempts=1)
        exact(await client.complete(prompt, max_tokens=20, **GREEDY), tiny.greedy(prompt, 20), attempts=1)
        await stale_is(client, True)
        exact(await client.complete(prompt, max_tokens=20, **GREEDY), tiny.greedy(prompt, 20), attempts=1)
    await stale_is(client, False)


async def test_a_router_cut_off(parted: PartedCluster, client: AsyncClient, tiny: TinyLlama) -> None:
    """The workers end what it had under way; the other router serves meanwhile."""
    prompt = prompt_of(100, 99)
    async with AsyncClient(router_doors(parted.routers[1])[0]) as second:
        lost = [Watched(second, prompt_of(size, size), max_tokens=2_000, **GREEDY) for size in (101, 6_000)]
        await lost[0].seen(20)
        await lost[1].place(prefilling)
        with parted.fabric.cut("router-1"):
            cut_s = asyncio.get_running_loop().time()
            exact(await client.complete(prompt, max_tokens=20, **GREEDY), tiny.greedy(prompt, 20), attempts=1)
            await assert_quiet(parted, within_s=PATIENCE_S)
            recovery.note("router cut off: blocks back", "any", asyncio.get_running_loop().time() - cut_s, 1)
        for request in lost:
            await request.leave()
    async with AsyncClient(router_doors(parted.routers[1])[0]) as again:
        exact(await again.complete(prompt, max_tokens=20, **GREEDY), tiny.greedy(prompt, 20))
