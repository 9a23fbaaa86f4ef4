"""The whole cluster of compose.yaml: exact answers, workers lost in mid-stream, NATS restarted, scaled."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Container
from typing import Any

import openai
import pytest
import pytest_asyncio
from docker.models.containers import Container as DockerContainer

from tests.e2e.conftest import MODEL_NAME
from tests.e2e.containers.composed import Composed
from tests.e2e.containers.images import COMPOSE
from tests.e2e.test_serving import ANSWER, ANSWER_IDS, QUESTION, check_accounts
from weir.cli.workers import worker_state
from weir.client import Accepted, AsyncClient, Completion, Delta
from weir.errors import WeirError
from weir.lifecycle import FinishReason
from weir.rpc.channel import wait_ready
from weir.rpc.v1 import common_pb2, router_pb2

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

READY_TIMEOUT_S = 120.0
POLL_S = 0.1
LONG = 96
"""Tokens of a generation that something happens to: some seconds of work."""
DISTURB_AT = 12
PROMPT = "Once upon a time there was a small town by the river, where"
PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE


Worker = router_pb2.ListWorkersResponse.Worker


async def listed(project: Composed) -> list[Worker]:
    """The router's workers now."""
    async with AsyncClient(project.router_address) as client:
        return list((await client.workers()).workers)


async def connected(project: Composed, prefill: int, decode: int, but_not: Container[str] = ()) -> list[Worker]:
    """The router's workers once it has exactly these, and none that is named in ``but_not``."""
    wanted = sorted([PREFILL] * prefill + [DECODE] * decode)
    seen: Any = "router not reached"
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            await wait_ready(project.router_address, timeout_s=READY_TIMEOUT_S)
            async with AsyncClient(project.router_address) as client:
                while True:
                    seen = list((await client.workers()).workers)
                    whole = all(w.connected and w.worker_id not in but_not for w in seen)
                    if whole and sorted(w.role for w in seen) == wanted:
                        return list(seen)
                    await asyncio.sleep(POLL_S)
    except (TimeoutError, WeirError) as error:
        raise AssertionError(f"wanted {prefill}P{decode}D, got {seen} ({error})\n{project.logs()}") from None


async def assert_quiet(project: Composed) -> None:
    """No request at the router; no used, leased or quarantined block, lease or read at any worker."""
    found: list[str] = []
    try:
        async with asyncio.timeout(20), AsyncClient(project.router_address) as client:
            while True:
                active = (await client.state()).active_requests
                found = [f"router: {active} active"] if active else []
                for worker in (await client.workers()).workers:
                    load = (await worker_state(worker.address)).load
                    held = load.blocks.used + load.blocks.leased + load.blocks.quarantined
                    if held or load.open_leases or load.outstanding_reads or load.running or load.waiting:
                        found.append(f"{worker.worker_id}: {held} blocks, {load}")
                if not found:
                    return
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"left behind: {found}") from None


async def generate(project: Composed, disturb: Callable[[], Awaitable[None]] | None = None) -> Completion:
    """A long greedy generation; ``disturb`` is awaited beside it once ``DISTURB_AT`` tokens are here."""
    ids: list[int] = []
    request_id, text, final, task = "", "", None, None
    async with AsyncClient(project.router_address) as client:
        stream = client.generate(PROMPT, temperature=0.0, max_tokens=LONG, ignore_eos=True, timeout_s=120.0)
        async for event in stream:
            if isinstance(event, Delta):
                ids += event.token_ids
                text += event.text
                if task is None and disturb is not None and len(ids) >= DISTURB_AT:
                    task = asyncio.ensure_future(disturb())
            elif isinstance(event, Accepted):
                request_id = event.request_id
            else:
                final = event
    assert final is not None
    if task is not None:
        await task
    return Completion(request_id, text, tuple(ids), final)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(composed: Composed) -> AsyncIterator[Composed]:
    """One prefill and one decode worker."""
    await asyncio.to_thread(composed.up, prefill=1, decode=1)
    await connected(composed, 1, 1)
    controller = (await asyncio.to_thread(composed.containers, "controller"))[0]
    await wait_ready(f"{await asyncio.to_thread(composed.address_of, controller)}:7401", timeout_s=READY_TIMEOUT_S)
    yield composed


@pytest_asyncio.fixture(loop_scope="module")
async def whole(pair: Composed) -> AsyncIterator[Composed]:
    """Two of each, whatever an earlier test did to them; nothing is left in flight afterwards."""
    await asyncio.to_thread(pair.up, prefill=2, decode=2)
    await connected(pair, 2, 2)
    yield pair


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(pair: Composed) -> tuple[int, ...]:
    """The tokens of the long generation when nothing happens to it."""
    answer = await generate(pair)
    assert len(answer.token_ids) == LONG
    return answer.token_ids


async def decoding(project: Composed) -> DockerContainer:
    """The container of the decode worker that runs the one generation."""
    async with AsyncClient(project.router_address) as client:
        workers = [w for w in (await client.workers()).workers if w.role == DECODE]
    busy = [w for w in workers if (await worker_state(w.address)).load.running]
    assert len(busy) == 1, f"one decode worker is busy: {workers}"
    return await asyncio.to_thread(project.container_at, busy[0].address)


async def test_the_demo_chat_gives_the_reference_tokens(pair: Composed) -> None:
    async with AsyncClient(pair.router_address) as client:
        answer = await client.complete_chat(QUESTION, temperature=0.0, max_tokens=64)
    assert answer.token_ids == ANSWER_IDS
    assert answer.text == ANSWER
    assert answer.final.finish_reason is FinishReason.STOP
    kv = answer.final.timings.kv_read
    assert kv is not None
    assert kv.transport == "ucx:tcp", "containers share neither memory nor process ids"
    assert kv.void_reads == 0
    check_accounts(answer)
    await assert_quiet(pair)


async def test_openai_client(pair: Composed) -> None:
    async with openai.AsyncOpenAI(base_url=f"http://{pair.http_address}/v1", api_key="none", max_retries=0) as client:
        create: Any = client.chat.completions.create
        ask = functools.partial(create, model=MODEL_NAME, messages=QUESTION, temperature=0, max_tokens=64)
        whole = await ask()
        assert whole.choices[0].message.content == ANSWER
        assert whole.usage.completion_tokens == len(ANSWER_IDS)
        text = ""
        async for chunk in await ask(stream=True):
            text += chunk.choices[0].delta.content or ""
    assert text == ANSWER
    await assert_quiet(pair)


async def test_scaled_to_two_of_each(whole: Composed) -> None:
    workers = await connected(whole, 2, 2)
    shown = await asyncio.to_thread(
        whole.compose, "exec", "-T", "-e", "COLUMNS=200", "router", "python3", "-m", "weir.cli.main", "workers"
    )
    for worker in workers:
        assert worker.worker_id in shown
        container = await asyncio.to_thread(whole.container_at, worker.address)
        assert container.labels["com.docker.compose.service"] == common_pb2.Role.Name(worker.role)[5:].lower()
    assert len({worker.address for worker in workers}) == 4
    async with AsyncClient(whole.router_address) as client:
        many = await asyncio.gather(*(client.complete_chat(QUESTION, temperature=0.0, max_tokens=64) for _ in range(8)))
    assert {answer.token_ids for answer in many} == {ANSWER_IDS}
    assert len({answer.final.timings.decode_worker for answer in many}) == 2, "both decode workers took part"
    await assert_quiet(whole)


async def test_a_stream_outlives_its_decode_container(whole: Composed, undisturbed: tuple[int, ...]) -> None:
    async def kill() -> None:
        container = await decoding(whole)
        await asyncio.to_thread(container.kill)

    answer = await generate(whole, kill)
    assert answer.token_ids == undisturbed
    assert answer.final.timings.attempts == 2
    await connected(whole, 2, 1)
    await assert_quiet(whole)


async def test_nats_is_restarted_under_a_generation(whole: Composed, undisturbed: tuple[int, ...]) -> None:
    async def restart() -> None:
        nats = (await asyncio.to_thread(whole.containers, "nats"))[0]
        await asyncio.to_thread(nats.restart, timeout=1)

    answer = await generate(whole, restart)
    assert answer.token_ids == undisturbed
    assert answer.final.timings.attempts == 1
    await connected(whole, 2, 2)
    assert (await generate(whole)).token_ids == undisturbed
    await assert_quiet(whole)


async def test_a_stream_outlives_its_decode_containers_network(whole: Composed, undisturbed: tuple[int, ...]) -> None:
    lost: list[DockerContainer] = []

    async def cut() -> None:
        lost.append(await decoding(whole))
        network = whole.engine.networks.get(whole.network)
        await asyncio.to_thread(network.disconnect, lost[0], force=True)

    try:
        answer = await generate(whole, cut)
        assert answer.token_ids == undisturbed
        assert answer.final.timings.attempts == 2
        await connected(whole, 2, 1)
        await assert_quiet(whole)
    finally:
        # Its address would be another one after a reconnection: it is made anew instead.
        for container in lost:
            await asyncio.to_thread(container.remove, force=True)


async def test_workers_that_share_the_host_read_its_memory(pair: Composed) -> None:
    sharing = dataclasses.replace(pair, files=(*pair.files, COMPOSE / "compose.host.yaml"))
    before = {worker.worker_id for worker in await listed(pair)}
    await asyncio.to_thread(sharing.up, prefill=1, decode=1)
    workers = await connected(sharing, 1, 1, but_not=before)
    async with AsyncClient(sharing.router_address) as client:
        answer = await client.complete_chat(QUESTION, temperature=0.0, max_tokens=64)
    assert answer.token_ids == ANSWER_IDS
    assert answer.final.timings.kv_read is not None
    assert answer.final.timings.kv_read.transport == "ucx:cma"
    assert {answer.final.timings.prefill_worker, answer.final.timings.decode_worker} == {w.worker_id for w in workers}
    await assert_quiet(sharing)
