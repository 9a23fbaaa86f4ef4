"""Accounting and transitions of one sequence, and the batch that a plan becomes."""

import pytest

from tests.unit.engine.fake_model import EOS, make_prompt, make_request
from weir.engine.batch import Batch
from weir.engine.request import Mode
from weir.engine.sampling import SamplingParams
from weir.engine.scheduler import Plan, build_batch
from weir.engine.sequence import Sequence, SequenceState, max_kv_tokens
from weir.kvcache.prefix import block_hashes, chain_seed
from weir.lifecycle import FinishReason


def make(prompt_len: int = 10, generated: tuple[int, ...] = (), **params: int | float | bool) -> Sequence:
    sampling = SamplingParams(temperature=0.0, **{"max_tokens": 6, **params})  # type: ignore[arg-type]
    return Sequence(make_request("a", make_prompt(prompt_len), generated=generated, sampling=sampling), 0, 0.0)


def test_each_prompt_token_is_counted_once_under_its_first_source() -> None:
    sequence = make(10, generated=(7, 8))
    sequence.advance(4, "hit")
    sequence.advance(8, "external")
    sequence.forget_kv()  # recompute: 4 of them are found again
    sequence.advance(4, "hit")
    sequence.advance(12, "compute")
    usage = sequence.usage()
    assert (usage.local_cache_hit, usage.external_kv, usage.local_compute) == (4, 4, 2)
    assert usage.recomputed == 4
    assert (usage.prompt, usage.completion) == (10, 2)


def test_finish_reasons() -> None:
    sequence = make(max_tokens=3, min_tokens=2)
    sequence.tokens.append(EOS)
    assert sequence.finish_reason() is None  # below min_tokens nothing stops
    sequence.tokens.append(9)
    assert sequence.finish_reason() is None
    sequence.tokens[-1] = EOS
    assert sequence.finish_reason() is FinishReason.STOP
    sequence.tokens.append(9)
    assert sequence.finish_reason() is FinishReason.LENGTH
    sequence.tokens[-1] = EOS
    assert sequence.finish_reason() is FinishReason.STOP  # the last token allowed may be the stop


def test_hashes_grow_as_if_made_at_once() -> None:
    sequence, seed = make(10), chain_seed(b"f", b"t")
    for known in (3, 4, 9, 10):
        sequence.extend_hashes(4, seed, known)
        assert sequence.hashes == block_hashes(sequence.tokens[:known], 4, seed)


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ([], SequenceState.DECODING),
        ([], SequenceState.HOLDING),
        ([SequenceState.PREFILLING], SequenceState.AWAITING_KV),
        ([SequenceState.PREFILLING, SequenceState.HOLDING], SequenceState.DECODING),
        ([SequenceState.PREFILLING, SequenceState.DECODING], SequenceState.PREFILLING),
        ([SequenceState.AWAITING_KV], SequenceState.PREFILLING),
        ([SequenceState.DONE], SequenceState.DONE),
    ],
)
def test_steps_that_are_not_in_the_drawing_are_refused(path: list[SequenceState], wrong: SequenceState) -> None:
    sequence = make()
    for state in path:
        sequence.enter(state)
    with pytest.raises(AssertionError):
        sequence.enter(wrong)


@pytest.mark.parametrize(
    ("mode", "generated", "tokens"), [(Mode.PREFILL, 2, 12), (Mode.LOCAL, 2, 15), (Mode.REMOTE, 0, 15)]
)
def test_the_most_kv_a_request_needs(mode: Mode, generated: int, tokens: int) -> None:
    request = make_request("a", make_prompt(10), mode, generated=(5,) * generated)
    assert max_kv_tokens(request) == tokens


def test_a_batch_lists_new_tokens_with_their_slots() -> None:
    decode, chunk, end = make(5), make(10), make(3)
    decode.tokens.append(40)
    decode.num_computed, decode.block_table = 5, [3, 1]
    chunk.num_computed, chunk.block_table = 2, [0, 4, 5]
    end.block_table = [7]
    batch = build_batch(Plan([decode, chunk, end], [1, 4, 3], num_decodes=1), block_size=4)
    assert batch == Batch(
        token_ids=[40, *chunk.tokens[2:6], *end.tokens],
        positions=[5, 2, 3, 4, 5, 0, 1, 2],
        slots=[5, 2, 3, 16, 17, 28, 29, 30],
        query_lens=[1, 4, 3],
        context_lens=[6, 6, 3],
        block_tables=[[3, 1], [0, 4, 5], [7]],
        logit_rows=[0, 2],
        num_decodes=1,
    )
