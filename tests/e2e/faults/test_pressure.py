"""Too much of everything: back-pressure or a refusal with a name, and later requests as if nothing had been."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from tests.e2e.faults.tiny import NAME, TinyLlama, prompt_of
from tests.e2e.faults.watched import Watched, exact, kill, renewed, state_of
from tests.e2e.quiet import assert_quiet
from weir.cli.cluster import Cluster, ClusterSpec
from weir.client import AsyncClient, Completion
from weir.errors import InvalidArgument, ResourceExhausted, Unavailable, WeirError
from weir.lifecycle import Role
from weir.rpc.descriptors import SAMPLE_S

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.filterwarnings("ignore::FutureWarning")]

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
BLOCK = 16
DECODE_BLOCKS = 96
WIDE_BLOCKS = 160
PREFILL_BLOCKS = 320
FLAGS = ("--max-batch-tokens", "256", "--session-grace-s", "0.5", "--num-blocks", str(PREFILL_BLOCKS))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def narrow(tiny: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """A decode worker whose pool holds 1.5 requests of 1,000 tokens; the prefill worker's holds five."""
    # least-loaded never prefills on the decode worker, so that all KV has to pass through the narrow place.
    spec = ClusterSpec(
        tiny.folder,
        NAME,
        tmp_path_factory.mktemp("narrow"),
        decode=0,
        worker_flags=FLAGS,
        router_flags=("--policy", "least-loaded"),
    )
    async with Cluster(spec) as cluster:
        await cluster.start_worker(Role.DECODE, 1, "--num-blocks", str(DECODE_BLOCKS))
        await cluster.wait_connected()
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def client(narrow: Cluster) -> AsyncIterator[AsyncClient]:
    """A client; nothing is left after it."""
    async with AsyncClient(narrow.router_address) as client:
        yield client
    await assert_quiet(narrow)


async def most_leased(narrow: Cluster, until: asyncio.Future[Any]) -> int:
    """Most leases open at once on the prefill worker, as seen from outside."""
    most = 0
    while not until.done():
        most = max(most, (await state_of(narrow, narrow.workers[0].ready[1])).load.open_leases)
        await asyncio.sleep(0.01)
    return most


async def test_twenty_requests_for_room_for_one_and_a_half(
    narrow: Cluster, client: AsyncClient, tiny: TinyLlama
) -> None:
    """Finished KV waits in P's memory until P is full too; then P waits. Nobody is refused, nothing locks up."""
    prompts = [prompt_of(900, 100 + seed) for seed in range(20)]
    requests = [Watched(client, prompt, max_tokens=100, **GREEDY) for prompt in prompts]
    answers = asyncio.gather(*(request.outcome() for request in requests))
    most = await most_leased(narrow, answers)
    for answer, prompt in zip(await answers, prompts, strict=True):
        exact(answer, tiny.greedy(prompt, 100))
        assert answer.final.usage.external_kv_tokens + answer.final.usage.local_cache_hit_tokens == 900
    assert 2 <= most <= PREFILL_BLOCKS * BLOCK // 900, "KV waited under leases, never more than the pool holds"


async def test_a_request_that_no_decode_pool_can_hold(narrow: Cluster, client: AsyncClient, tiny: TinyLlama) -> None:
    """Refused by name, soon, beside one that fits and is served."""
    fits = Watched(client, prompt_of(900, 130), max_tokens=100, **GREEDY)
    with pytest.raises(WeirError, match=r"blocks|tokens") as refused:
        async with asyncio.timeout(20):
            await client.complete(prompt_of(DECODE_BLOCKS * BLOCK + 200, 131), max_tokens=100, **GREEDY)
    assert not isinstance(refused.value, Unavailable), refused.value
    exact(await fits.outcome(), tiny.greedy(prompt_of(900, 130), 100))


async def test_one_that_outgrows_the_pool_while_it_decodes(
    narrow: Cluster, client: AsyncClient, tiny: TinyLlama
) -> None:
    """Its prompt fits and its output does not: its tokens are right as far as they come, and it ends by name."""
    prompt = prompt_of(1_400, 132)
    request = Watched(client, prompt, max_tokens=400, **GREEDY)
    with pytest.raises(WeirError, match=r"blocks|tokens"):
        await request.outcome()
    assert tuple(request.tokens) == tiny.greedy(prompt, len(request.tokens))
    exact(await client.complete(prompt, max_tokens=30, **GREEDY), tiny.greedy(prompt, 30))


async def test_decode_pools_of_unequal_size(narrow: Cluster, client: AsyncClient, tiny: TinyLlama) -> None:
    """What only the wide one can hold goes there, the rest to the other too; the refusal names the wide one's room."""
    wide = await narrow.start_worker(Role.DECODE, 1, "--num-blocks", str(WIDE_BLOCKS))
    try:
        await narrow.wait_connected()
        large, small = prompt_of(DECODE_BLOCKS * BLOCK + 100, 150), prompt_of(200, 151)
        long = Watched(client, large, max_tokens=800, **GREEDY)
        await long.place(lambda place: place.tokens_sent > 5)
        # The wide one is the busier now.
        answer = await client.complete(small, max_tokens=20, **GREEDY)
        exact(answer, tiny.greedy(small, 20), attempts=1)
        assert answer.final.timings.decode_worker == narrow.workers[1].ready[1]
        answer = await long.outcome()
        exact(answer, tiny.greedy(large, 800), attempts=1)
        assert answer.final.timings.decode_worker == wide.ready[1]
        room = WIDE_BLOCKS * BLOCK
        with pytest.raises(InvalidArgument, match=rf"prompt \+ max_tokens = {room + 1}: .* takes {room}$"):
            await client.complete(prompt_of(room - 59, 160), max_tokens=60, **GREEDY)
    finally:
        await narrow.stop_worker(wide.ready[1])


async def test_two_that_outgrow_the_pool_together(narrow: Cluster, client: AsyncClient, tiny: TinyLlama) -> None:
    """Each fits alone: one makes way for the other, both are exact."""
    prompts = [prompt_of(600, 133 + i) for i in range(2)]
    requests = [Watched(client, prompt, max_tokens=400, **GREEDY) for prompt in prompts]
    for request, prompt in zip(requests, prompts, strict=True):
        exact(await request.outcome(), tiny.greedy(prompt, 400))


async def patiently(client: AsyncClient, prompt: list[int], tokens: int) -> Completion:
    """Ask until there is an answer."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await client.complete(prompt, max_tokens=tokens, **GREEDY)
            except (Unavailable, ResourceExhausted):
                await asyncio.sleep(0.2)


@contextlib.contextmanager
def descriptors_left(pid: int, count: int) -> Iterator[None]:
    """The process may open ``count`` more file descriptors (fewer than 0: it has too many already)."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (psutil.Process(pid).num_fds() + count, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


async def test_no_files_left_on_the_decode_worker(narrow: Cluster, client: AsyncClient, tiny: TinyLlama) -> None:
    """It may open no way to a new prefill worker, says so, and prefills itself; with files again KV is read again."""
    prefill, decode = narrow.workers
    await kill(prefill)
    await narrow.restart_worker(prefill)
    await renewed(narrow)
    voids = (await state_of(narrow, decode.ready[1])).void_reads["transport"]
    for number, left in enumerate((20, -4), start=1):  # only what is kept for emergencies; none at all
        prompt = prompt_of(200, 140 + number)
        with descriptors_left(decode.pid, left):
            await asyncio.sleep(2 * SAMPLE_S)  # what the worker goes by may be as old as that
            answer = await client.complete(prompt, max_tokens=20, timeout_s=30, **GREEDY)
        exact(answer, tiny.greedy(prompt, 20))
        assert (answer.final.timings.attempts, answer.final.usage.external_kv_tokens) == (2, 0)
        assert answer.final.timings.decode_worker == decode.ready[1]
        assert (await state_of(narrow, decode.ready[1])).void_reads["transport"] == voids + 2 * number
    said = decode.log_path.read_text()
    assert f"file descriptors are open: no room for a connection to {prefill.ready[1]}" in said
    prompt = prompt_of(200, 140)
    answer = await patiently(client, prompt, 20)
    exact(answer, tiny.greedy(prompt, 20))
    assert answer.final.usage.external_kv_tokens == len(prompt)
    assert decode.exit_code is None


async def test_few_files_left_on_the_router(narrow: Cluster, client: AsyncClient, tiny: TinyLlama) -> None:
    """Who is connected is served; who is new is refused by name at both doors, with a time to come again."""
    prompt = prompt_of(200, 142)
    await client.state()
    body = {"model": NAME, "prompt": prompt, "max_tokens": 5, "temperature": 0}
    async with httpx.AsyncClient(base_url=f"http://{narrow.http_address}", timeout=30) as known:
        assert (await known.get("/v1/models")).status_code == 200
        async with AsyncClient(narrow.router_address) as another:
            with descriptors_left(narrow.routers[0].pid, 20):
                exact(await client.complete(prompt, max_tokens=20, **GREEDY), tiny.greedy(prompt, 20))
                assert (await known.post("/v1/completions", json=body)).status_code == 200
                for _ in range(3):
                    with pytest.raises(
                        ResourceExhausted, match="file descriptors are open: no room for a new client"
                    ) as no:
                        await another.complete(prompt, max_tokens=20, **GREEDY)
                    assert no.value.retry_after_s == 1.0
                for _ in range(3):
                    async with httpx.AsyncClient(base_url=f"http://{narrow.http_address}", timeout=30) as new:
                        answer = await new.post("/v1/completions", json=body)
                        assert answer.status_code == 503
                        assert answer.headers["retry-after"] == "1"
                        assert answer.json()["error"]["code"] == "no_room"
                        assert (
                            "file descriptors are open: no room for a new client" in answer.json()["error"]["message"]
                        )
                metrics = (await known.get("/metrics")).text
            exact(await patiently(another, prompt, 20), tiny.greedy(prompt, 20))
        assert 'weir_connections_refused_total{door="grpc"} 3.0' in metrics
        assert 'weir_connections_refused_total{door="http"} 3.0' in metrics


async def test_no_files_left_on_the_router(narrow: Cluster, client: AsyncClient, tiny: TinyLlama) -> None:
    """Clients that are connected are served; new ones wait or are refused, and are served afterwards."""
    prompt = prompt_of(200, 141)
    router = narrow.routers[0]
    await client.state()
    async with AsyncClient(narrow.router_address) as another:
        with descriptors_left(router.pid, 0):
            waiting = Watched(another, prompt, max_tokens=20, **GREEDY)
            exact(await client.complete(prompt, max_tokens=20, **GREEDY), tiny.greedy(prompt, 20))
        with contextlib.suppress(Unavailable, ResourceExhausted):
            exact(await waiting.outcome(), tiny.greedy(prompt, 20))
        exact(await patiently(another, prompt, 20), tiny.greedy(prompt, 20))
