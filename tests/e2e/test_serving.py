"""A real model through real processes: exact tokens, split and mixed, and nothing left afterwards."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import openai
import pytest

from tests.e2e.conftest import MODEL_NAME
from tests.e2e.quiet import assert_quiet
from weir.cli.cluster import Cluster
from weir.client import AsyncClient, Client, Completion, Delta, Final, Message
from weir.errors import InvalidArgument
from weir.lifecycle import FinishReason

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUESTION: list[Message] = [{"role": "user", "content": "Name the planets of the solar system."}]
ANSWER_IDS = (
    504, 9244, 282, 260, 3693, 817, 359, 42, 198, 198, 61, 9532, 28, 16293, 28, 2591, 28, 7621, 28, 14713, 28, 16440,
    28, 36985, 28, 30461, 28, 284, 24254, 30, 2,
)  # fmt: skip
ANSWER = (
    "The planets of the solar system are:\n\nMercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune, and Pluto."
)
BLOCK = 16
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1, 700)


def check_accounts(answer: Completion) -> None:
    """Sources add up to the prompt; stages add up to TTFT and to the whole."""
    usage, times = answer.final.usage, answer.final.timings
    sources = usage.local_compute_tokens + usage.local_cache_hit_tokens + usage.external_kv_tokens
    assert sources == usage.prompt_tokens
    assert usage.completion_tokens == len(answer.token_ids)
    first = times.admit_ms + times.queue_ms + times.prefill_ms + times.first_token_ms
    assert first == pytest.approx(times.ttft_ms, abs=0.01)
    assert times.ttft_ms + times.second_token_ms + times.decode_ms == pytest.approx(times.e2e_ms, abs=0.01)


async def test_the_demo_chat_gives_the_reference_tokens(pair: Cluster) -> None:
    async with AsyncClient(pair.router_address) as client:
        answer = await client.complete_chat(QUESTION, temperature=0.0, max_tokens=64)
    assert answer.token_ids == ANSWER_IDS
    assert answer.text == ANSWER
    assert answer.final.finish_reason is FinishReason.STOP
    assert answer.final.usage.external_kv_tokens == answer.final.usage.prompt_tokens == 17
    kv = answer.final.timings.kv_read
    assert kv is not None
    assert kv.void_reads == 0
    assert kv.bytes == 2 * BLOCK * 30 * 2 * 3 * 64 * 4, "two blocks of 16 tokens, 30 layers, K and V, 3 heads, fp32"
    assert kv.transport
    assert answer.final.timings.prefill_worker != answer.final.timings.decode_worker
    check_accounts(answer)
    await assert_quiet(pair)


async def _answers(cluster: Cluster, prompts: list[list[int]], **options: Any) -> list[tuple[int, ...]]:
    async with AsyncClient(cluster.router_address) as client:
        whole = await asyncio.gather(*(client.complete(p, max_tokens=8, ignore_eos=True, **options) for p in prompts))
    for answer in whole:
        check_accounts(answer)
        assert len(answer.token_ids) == 8
    await assert_quiet(cluster)
    return [answer.token_ids for answer in whole]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95, "seed": 7}])
async def test_split_equals_mixed(pair: Cluster, mixed: Cluster, sampling: dict[str, Any]) -> None:
    source = random.Random(11)
    prompts = [[source.randrange(200, 40_000) for _ in range(n)] for n in LENGTHS]
    prompts.append(prompts[-1][:-5])  # a partial prefix hit
    alone = [(await _answers(mixed, [prompt], **sampling))[0] for prompt in prompts]
    assert await _answers(pair, prompts, **sampling) == alone, "all at once, cold"
    assert await _answers(pair, prompts, **sampling) == alone, "all at once, cached on both sides"
    assert await _answers(mixed, prompts, **sampling) == alone, "mixed, in one batch"


async def test_blocking_client_streams_and_reports(pair: Cluster) -> None:
    def ask() -> tuple[str, list[int], Final | None]:
        text, final = "", None
        ids: list[int] = []
        with Client(pair.router_address) as client:
            for event in client.chat(QUESTION, temperature=0, max_tokens=12):
                if isinstance(event, Delta):
                    text += event.text
                    ids += event.token_ids
                elif isinstance(event, Final):
                    final = event
        return text, ids, final

    text, ids, final = await asyncio.to_thread(ask)
    assert tuple(ids) == ANSWER_IDS[:12]
    assert ANSWER.startswith(text)
    assert final is not None
    assert final.finish_reason is FinishReason.LENGTH


async def test_a_client_that_leaves_takes_its_work_along(pair: Cluster) -> None:
    async with AsyncClient(pair.router_address) as client:
        stream = client.generate("Once upon a time", max_tokens=2000, ignore_eos=True, temperature=0.0)
        seen = 0
        async for event in stream:
            if isinstance(event, Delta):
                seen += len(event.token_ids)
            if seen >= 3:
                break
        await stream.aclose()  # type: ignore[attr-defined]
    await assert_quiet(pair)


async def test_stop_strings_and_first_token_ends(pair: Cluster) -> None:
    async with AsyncClient(pair.router_address) as client:
        stopped = await client.complete_chat(QUESTION, temperature=0.0, max_tokens=64, stop=["Venus"])
        first = await client.complete_chat(QUESTION, temperature=0.0, max_tokens=64, stop_token_ids=[ANSWER_IDS[0]])
        single = await client.complete_chat(QUESTION, temperature=0.0, max_tokens=1)
    assert stopped.text == ANSWER[: ANSWER.index("Venus")]
    assert stopped.final.stop_string == "Venus"
    assert first.token_ids == ANSWER_IDS[:1]
    assert first.final.finish_reason is FinishReason.STOP
    assert single.token_ids == ANSWER_IDS[:1]
    assert single.final.finish_reason is FinishReason.LENGTH
    await assert_quiet(pair)


BAD: list[tuple[str, Any, dict[str, Any]]] = [
    ("prompt", [], {}),
    ("prompt", [50_000], {}),
    ("prompt + max_tokens", [5] * 10, {"max_tokens": 9_000}),
    ("max_tokens", [5], {"max_tokens": 0}),
    ("temperature", [5], {"temperature": float("nan")}),
    ("temperature", [5], {"temperature": -1.0}),
    ("top_p", [5], {"top_p": 0.0}),
    ("top_p", [5], {"top_p": 1.5}),
    ("stop", [5], {"stop": ["x"] * 17}),
    ("model", [5], {"model": "gpt-17"}),
]


@pytest.mark.parametrize(("field", "prompt", "options"), BAD)
async def test_bad_input_is_named(pair: Cluster, field: str, prompt: Any, options: dict[str, Any]) -> None:
    async with AsyncClient(pair.router_address) as client:
        with pytest.raises(InvalidArgument) as caught:
            await client.complete(prompt, **options)
    assert caught.value.field == field
    await assert_quiet(pair)


async def test_openai_client(pair: Cluster) -> None:
    create: Any
    client = openai.AsyncOpenAI(base_url=f"http://{pair.http_address}/v1", api_key="none", max_retries=0)
    async with client:
        create = client.chat.completions.create
        assert [m.id for m in (await client.models.list()).data] == [MODEL_NAME]
        whole = await create(
            model=MODEL_NAME,
            messages=QUESTION,
            temperature=0,
            max_tokens=64,
        )
        assert whole.choices[0].message.content == ANSWER
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (17, len(ANSWER_IDS))
        text = ""
        stream = await create(
            model=MODEL_NAME,
            messages=QUESTION,
            temperature=0,
            max_tokens=64,
            stream=True,
        )
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        assert text == ANSWER
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model=MODEL_NAME, prompt="x", max_tokens=-1)
        assert caught.value.param == "max_tokens"
    await assert_quiet(pair)
