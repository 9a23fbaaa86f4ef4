"""Workers die and stand still in every phase of a request; its tokens are exact all the same."""

from __future__ import annotations

import asyncio
import signal
import zlib
from typing import Any

import pytest

from tests.e2e.faults.tiny import TinyLlama, prompt_of
from tests.e2e.faults.watched import (
    Watched,
    bound_early,
    exact,
    killed,
    prefilling,
    prefills,
    state_of,
    used_again,
    worker_named,
)
from weir.cli.cluster import Cluster
from weir.client import AsyncClient
from weir.lifecycle import FinishReason

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.filterwarnings("ignore::FutureWarning")]

LONG = 3_000
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "ignore_eos": True}


@pytest.mark.parametrize("moment", ["while P prefills", "with the KV offered"])
async def test_decode_worker_dies_before_decoding(
    squad: Cluster, client: AsyncClient, tiny: TinyLlama, moment: str
) -> None:
    prompt, before = prompt_of(LONG, hash_of(moment)), await prefills(squad)
    request = Watched(client, prompt, max_tokens=40, **GREEDY)
    place = await request.place(bound_early)
    worker = worker_named(squad, place.decode_worker)
    if moment == "with the KV offered":
        worker.kill(signal.SIGSTOP)  # it will not read
        await request.seen(1)
    async with killed(squad, worker):
        request.struck("D killed", moment)
        answer = await request.outcome()
        exact(answer, tiny.greedy(prompt, 40), attempts=1)
        assert answer.final.timings.decode_worker != place.decode_worker
        assert answer.final.usage.external_kv_tokens == LONG, "another read under the same lease"
        after = await prefills_of(squad, [name for name in before if name != place.decode_worker])
        assert sum(after.values()) == sum(before.values()) - before[place.decode_worker] + 1, "no second prefill"


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_decode_worker_dies_while_decoding(
    squad: Cluster, client: AsyncClient, tiny: TinyLlama, sampling: dict[str, Any]
) -> None:
    prompt = prompt_of(100, 3)
    expected = (await client.complete(prompt, max_tokens=600, tenant="reference", **sampling)).token_ids
    if sampling is GREEDY:
        assert expected == tiny.greedy(prompt, 600)
    request = Watched(client, prompt, max_tokens=600, **sampling)
    await request.seen(40)
    place = await request.place(lambda place: True)
    async with killed(squad, worker_named(squad, place.decode_worker)):
        request.struck("D killed", "decoding")
        answer = await request.outcome()
        exact(answer, expected, attempts=2)
        assert answer.final.finish_reason is FinishReason.LENGTH
        assert answer.final.timings.decode_worker != place.decode_worker


async def test_stops_hold_across_a_death(squad: Cluster, client: AsyncClient, tiny: TinyLlama) -> None:
    prompt = prompt_of(100, 4)
    expected = tiny.greedy(prompt, 600)
    at = next(i for i in range(400, 600) if expected[i] not in expected[:i])
    text = f"t{expected[at - 1]}t{expected[at]}"
    stopped = Watched(client, prompt, max_tokens=1_000, stop_token_ids=[expected[at]], **GREEDY)
    worded = Watched(client, prompt, max_tokens=1_000, stop=[text], **GREEDY)
    await asyncio.gather(stopped.seen(30), worded.seen(30))
    place = await stopped.place(lambda place: True)
    async with killed(squad, worker_named(squad, place.decode_worker)):
        answer, other = await asyncio.gather(stopped.outcome(), worded.outcome())
    exact(answer, expected[: at + 1], attempts=2)
    assert answer.final.finish_reason is FinishReason.STOP
    assert other.token_ids == expected[: len(other.token_ids)]
    assert other.final.stop_string == text
    assert other.text == "".join(f"t{token}" for token in expected[: at - 1])


@pytest.mark.parametrize("moment", ["prefilling", "transferring"])
async def test_prefill_worker_dies(squad: Cluster, client: AsyncClient, tiny: TinyLlama, moment: str) -> None:
    # While D stands still, P must be done before D is given up, on a slow machine too.
    prompt = prompt_of(LONG if moment == "prefilling" else 1_000, hash_of(moment))
    request = Watched(client, prompt, max_tokens=40, **GREEDY)
    place = await request.place(bound_early)
    decode = worker_named(squad, place.decode_worker)
    if moment == "transferring":
        decode.kill(signal.SIGSTOP)
        await request.seen(1)
    else:
        assert request.tokens == []
    async with killed(squad, worker_named(squad, place.prefill_worker)):
        decode.kill(signal.SIGCONT)
        request.struck("P killed", moment)
        answer = await request.outcome()
        exact(answer, tiny.greedy(prompt, 40), attempts=2)
        assert answer.final.timings.prefill_worker != place.prefill_worker


async def test_a_worker_that_came_back_is_used_again(squad: Cluster, client: AsyncClient, tiny: TinyLlama) -> None:
    """Under its old id at its old address it is another: all its old tickets are void, new ones are read."""
    prompt, expected = prompt_of(200, 5), tiny.greedy(prompt_of(200, 5), 20)
    old = {name: (await state_of(squad, name)).incarnation for name in squad.worker_addresses}
    for worker in [squad.workers[0], squad.workers[2]]:
        async with killed(squad, worker):
            pass
    exact(await client.complete(prompt, max_tokens=20, **GREEDY), expected, attempts=1)
    await used_again(client, tiny, set(squad.worker_addresses), attempts=1)
    for worker in squad.workers:
        changed = (await state_of(squad, worker.ready[1])).incarnation != old[worker.ready[1]]
        assert changed == (worker in (squad.workers[0], squad.workers[2]))


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_stands_still(squad: Cluster, client: AsyncClient, tiny: TinyLlama, role: str) -> None:
    """It looks alive to TCP; the request goes on elsewhere, and the worker is of use again when it wakes up."""
    prompt = prompt_of(LONG if role == "prefill" else 100, hash_of(role))
    tokens = 40 if role == "prefill" else 1_000
    request = Watched(client, prompt, max_tokens=tokens, **GREEDY)
    place = await request.place(prefilling if role == "prefill" else lambda place: place.tokens_sent > 20)
    name = place.prefill_worker if role == "prefill" else place.decode_worker
    worker = worker_named(squad, name)
    worker.kill(signal.SIGSTOP)
    request.struck(f"{role[0].upper()} stopped", "prefilling" if role == "prefill" else "decoding")
    try:
        exact(await request.outcome(), tiny.greedy(prompt, tokens), attempts=2)
    finally:
        worker.kill(signal.SIGCONT)
    await used_again(client, tiny, {name})


async def prefills_of(squad: Cluster, names: list[str]) -> dict[str, int]:
    return {name: (await state_of(squad, name)).prefills_completed for name in names}


def hash_of(text: str) -> int:
    """A seed of its own for every case, so that no prompt is in a prefix cache."""
    return zlib.crc32(text.encode())
