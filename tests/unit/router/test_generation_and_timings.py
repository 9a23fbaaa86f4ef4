"""A consumer's view of a request, and the arithmetic of its stages."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.unit.models.text_models import byte_level_folder
from weir.engine.sampling import SamplingParams
from weir.errors import Unavailable
from weir.lifecycle import FinishReason
from weir.models.detokenize import IncrementalDetokenizer
from weir.models.tokenizer import Tokenizer
from weir.services.router.answer import Accepted, Delta, Final, Usage
from weir.services.router.generation import Generation
from weir.services.router.timings import Served, Stamps, measure

SERVED = Served(None, "p", "d", 1)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(byte_level_folder(tmp_path))


class Consumer:
    """A Generation with its tokenizer, and whether it was left."""

    def __init__(self, tokenizer: Tokenizer, **sampling: object) -> None:
        self.left = 0
        self.tokenizer = tokenizer
        params = SamplingParams(**sampling)  # type: ignore[arg-type]
        detokenizer = IncrementalDetokenizer(tokenizer, [0])
        self.generation = Generation(Accepted("r", 1, "toy", 0.0), params, detokenizer, self._leave)

    def _leave(self) -> None:
        self.left += 1

    def push(self, text: str) -> tuple[int, str] | None:
        return self.generation.push(self.tokenizer.encode(text, add_special_tokens=False), ())


def final() -> Final:
    times = measure(Stamps(0.0, 0.0), end_s=1.0, tokens=1, served=SERVED)
    return Final(FinishReason.STOP, "", Usage(1, 1, 0, 1, 0, 0), times)


async def test_what_comes_between_two_reads_is_one_delta(tokenizer: Tokenizer) -> None:
    consumer = Consumer(tokenizer)
    stream = consumer.generation
    assert isinstance(await anext(stream), Accepted)
    consumer.push("ab")
    consumer.push("c")
    delta = await anext(stream)
    assert isinstance(delta, Delta)
    assert (delta.text, len(delta.token_ids), delta.first_index) == ("abc", 3, 0)
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    assert not waiting.done()
    consumer.push("d")
    delta = await waiting
    assert isinstance(delta, Delta)
    assert (delta.text, delta.first_index) == ("d", 3)
    consumer.push("e")
    stream.finish(final())
    assert [type(event).__name__ async for event in stream] == ["Delta", "Final"]


async def test_an_error_comes_after_the_tokens_before_it(tokenizer: Tokenizer) -> None:
    consumer = Consumer(tokenizer)
    consumer.push("ab")
    consumer.generation.finish(Unavailable("gone"))
    await anext(consumer.generation)
    delta = await anext(consumer.generation)
    assert isinstance(delta, Delta)
    assert delta.text == "ab"
    with pytest.raises(Unavailable, match="gone"):
        await anext(consumer.generation)


async def test_leaving_cancels_once_and_not_after_the_end(tokenizer: Tokenizer) -> None:
    early, late = Consumer(tokenizer), Consumer(tokenizer)
    early.generation.leave()
    await early.generation.aclose()
    late.generation.finish(final())
    late.generation.leave()
    assert (early.left, late.left) == (1, 0)


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abSTOP")])
async def test_a_stop_string_cuts_the_text_and_counts_its_last_token(
    tokenizer: Tokenizer, include: bool, text: str
) -> None:
    consumer = Consumer(tokenizer, stop=("STOP",), include_stop=include)
    assert consumer.push("abST") is None
    assert consumer.push("OPxyz") == (2, "STOP")
    assert consumer.push("more") is None
    assert consumer.generation.tokens_taken == 6
    assert consumer.generation.flush() == "STOP"
    await anext(consumer.generation)
    delta = await anext(consumer.generation)
    assert isinstance(delta, Delta)
    assert (delta.text, len(delta.token_ids)) == (text, 6)


async def test_what_could_have_been_a_stop_string_is_given_at_the_end(tokenizer: Tokenizer) -> None:
    consumer = Consumer(tokenizer, stop=("STOP",))
    consumer.push("abST")
    assert consumer.generation.flush() == ""
    await anext(consumer.generation)
    delta = await anext(consumer.generation)
    assert isinstance(delta, Delta)
    assert delta.text == "abST"


async def test_half_a_character_is_never_given(tokenizer: Tokenizer) -> None:
    consumer = Consumer(tokenizer)
    ids = tokenizer.encode("é", add_special_tokens=False)
    assert len(ids) == 2
    consumer.generation.push(ids[:1], ())
    await anext(consumer.generation)
    half = await anext(consumer.generation)
    consumer.generation.push(ids[1:], ())
    rest = await anext(consumer.generation)
    assert isinstance(half, Delta)
    assert isinstance(rest, Delta)
    assert (half.text, rest.text) == ("", "é")


@pytest.mark.parametrize(
    ("queue_ms", "prefill_ms"), [(1.0, 2.0), (0.0, 0.0), (1e9, 1e9), (-5.0, -5.0), (3.3, 1e9), (1e9, 0.1)]
)
def test_stages_add_up_whatever_workers_report(queue_ms: float, prefill_ms: float) -> None:
    stamps = Stamps(1.0, 1.0007, 1.0011, 1.3, 1.41, queue_ms, prefill_ms)
    times = measure(stamps, end_s=2.0, tokens=5, served=SERVED)
    stages = (times.admit_ms, times.queue_ms, times.prefill_ms, times.first_token_ms)
    assert min(stages) >= 0
    assert times.admit_ms + times.queue_ms + times.prefill_ms + times.first_token_ms == times.ttft_ms
    assert times.ttft_ms + times.second_token_ms + times.decode_ms == times.e2e_ms
    assert times.ttft_ms == pytest.approx(300.0)
    assert times.e2e_ms == pytest.approx(1000.0)
    assert times.tpot_ms == pytest.approx(175.0)


def test_a_request_without_tokens_has_only_waited() -> None:
    times = measure(Stamps(1.0, 1.5), end_s=3.0, tokens=0, served=SERVED)
    assert (times.admit_ms, times.queue_ms, times.e2e_ms, times.tpot_ms) == (500.0, 1500.0, 2000.0, 0.0)
