"""PREFILL on one engine, REMOTE on another: the same tokens as in one place, and no block lost on the way."""

import dataclasses

import pytest

from tests.unit.engine.fake_model import EMPTY, EOS, Harness, logits_after, make_prompt, make_request
from tests.unit.engine.handover import copy_kv, deliver
from tests.unit.engine.reference import generate
from weir.engine.output import Finished, Preempted, Started, TokensOut
from weir.engine.request import EngineRequest, Mode
from weir.engine.sampling import SamplingParams
from weir.errors import DeadlineExceeded, FailedPrecondition
from weir.kvcache.blocks import BlockState
from weir.lifecycle import FinishReason

BLOCK = 4
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1]
GREEDY = SamplingParams(max_tokens=7, temperature=0.0)
SEEDED = SamplingParams(max_tokens=9, temperature=1.1, top_k=30, seed=77, presence_penalty=0.4, ignore_eos=True)


def two_modes(request: EngineRequest) -> tuple[EngineRequest, EngineRequest]:
    return dataclasses.replace(request, mode=Mode.PREFILL), dataclasses.replace(request, mode=Mode.REMOTE)


def begin(prompt_len: int = 10, sampling: SamplingParams = SEEDED) -> tuple[Harness, Harness, EngineRequest]:
    """A prefilled request on P, admitted on D, nothing read yet."""
    p, d = Harness(block_size=BLOCK), Harness(block_size=BLOCK)
    there, here = two_modes(make_request("a", make_prompt(prompt_len), sampling=sampling))
    p.add(there)
    p.run()
    d.add(here)
    d.step()
    return p, d, here


@pytest.mark.parametrize("warm", [0, 5, 100], ids=["cold", "partial", "full"])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_are_those_of_one_engine(length: int, sampling: SamplingParams, warm: int) -> None:
    p, d = Harness(block_size=BLOCK, max_batch_tokens=5), Harness(block_size=BLOCK)
    prompt = make_prompt(length)
    if warm:
        d.add(make_request("warm", prompt[:warm]))
        d.run()
    request = make_request("a", prompt, sampling=sampling)
    there, here = two_modes(request)
    p.add(there)
    d.add(here)
    p.run()
    d.run()
    assert p.seen[request.key].prefilled is not None
    deliver(p, d, here)
    d.run()
    assert p.seen[request.key].tokens + d.seen[request.key].tokens == generate(logits_after, request)
    finished = d.seen[request.key].finished
    assert finished is not None
    hit = min(warm, length) // BLOCK * BLOCK
    usage = finished.usage
    assert (usage.local_compute, usage.local_cache_hit, usage.external_kv) == (0, hit, length - hit)
    assert usage.completion == len(p.seen[request.key].tokens + d.seen[request.key].tokens)
    p.engine.release_kv(request.key)
    p.assert_idle()
    d.assert_idle()


@pytest.mark.parametrize("length", [9, 12])
def test_kv_read_chunk_by_chunk_while_prefill_goes_on(length: int) -> None:
    p, d = Harness(block_size=BLOCK, max_batch_tokens=3), Harness(block_size=BLOCK)
    request = make_request("a", make_prompt(length), sampling=SEEDED)
    there, here = two_modes(request)
    p.add(there)
    d.add(here)
    d.step()
    proven = 0
    while p.engine.has_work():
        p.step()
        sealed = len(p.seen[request.key].sealed)
        ready = min(sealed * BLOCK, length)
        if ready > proven:
            copy_kv(p, d, request.key, ready, first_token=proven)
            d.engine.kv_arrived(request.key, ready)
            proven = ready
        d.step()
    assert proven == length
    d.engine.first_token(request.key, p.seen[request.key].tokens[0])
    d.run()
    assert p.seen[request.key].tokens + d.seen[request.key].tokens == generate(logits_after, request)


def test_a_missing_block_would_show_in_the_tokens() -> None:
    """The fake model has teeth: the tests above would notice KV that never came."""
    p, d, here = begin()
    d.engine.reads_started(here.key)
    d.engine.kv_arrived(here.key, here.context_len)
    d.engine.first_token(here.key, p.seen[here.key].tokens[0])
    d.run()
    assert EMPTY in d.runner.read(d.seen[here.key].started[0].block_table, here.context_len)
    assert p.seen[here.key].tokens + d.seen[here.key].tokens != generate(logits_after, here)


@pytest.mark.parametrize("early", [True, False])
def test_the_first_token_may_come_before_blocks_or_kv(early: bool) -> None:
    p, d = Harness(block_size=BLOCK), Harness(block_size=BLOCK)
    for length in (7, 8, 11):
        there, here = two_modes(make_request(f"a{length}", make_prompt(length, seed=length), sampling=SEEDED))
        p.add(there)
        p.run()
        d.add(here)
        if not early:
            d.step()
        assert d.engine.first_token(here.key, p.seen[here.key].tokens[0])
        assert not d.engine.first_token(here.key, p.seen[here.key].tokens[0])
        d.step()
        copy_kv(p, d, here.key, length)
        d.engine.kv_arrived(here.key, length)
        d.run()
        assert p.seen[here.key].tokens + d.seen[here.key].tokens == generate(logits_after, here)
    d.assert_idle()


def test_the_first_token_is_not_told_twice_and_may_end_the_request() -> None:
    p, d, here = begin(sampling=GREEDY)
    d.engine.reads_started(here.key)
    assert d.engine.first_token(here.key, EOS)
    events = d.step()
    assert [type(event) for event in events] == [Finished]
    assert isinstance(events[0], Finished)
    assert (events[0].reason, events[0].stop_token) == (FinishReason.STOP, EOS)
    assert d.blocks.counts()[BlockState.QUARANTINED] == 3
    d.engine.reads_done(here.key)
    d.assert_idle()
    assert p.engine.release_kv(here.key)


def test_a_full_hit_needs_no_read() -> None:
    d = Harness(block_size=BLOCK)
    prompt = make_prompt(8)
    d.add(make_request("warm", prompt))
    d.run()
    request = make_request("a", prompt, Mode.REMOTE)
    tokens = generate(logits_after, request)
    d.add(request)
    d.step()
    assert d.seen[request.key].started[0].cached_tokens == 8
    d.engine.first_token(request.key, tokens[0])
    d.run()
    assert d.seen[request.key].tokens == tokens[1:]


def test_cancel_while_reading_keeps_the_blocks_until_the_reads_are_done() -> None:
    _, d, here = begin()
    table = d.seen[here.key].started[0].block_table
    d.engine.reads_started(here.key)
    d.engine.kv_arrived(here.key, 4)
    assert d.engine.cancel(here.key)
    # The proven block is free to go; the other two may still be written to.
    assert [d.blocks.state(block) for block in table] == [
        BlockState.CACHED,
        BlockState.QUARANTINED,
        BlockState.QUARANTINED,
    ]
    with pytest.raises(FailedPrecondition):
        d.engine.add(here)
    d.step()
    d.engine.reads_done(here.key)
    d.engine.reads_done(here.key)
    d.assert_idle()


def test_cancel_can_say_that_reads_are_outstanding() -> None:
    _, d, here = begin()
    assert d.engine.cancel(here.key, quarantined=True)
    assert d.blocks.counts()[BlockState.QUARANTINED] == 3
    d.engine.reads_done(here.key)
    d.assert_idle()


def test_a_deadline_while_reading_keeps_the_blocks_too() -> None:
    d = Harness(block_size=BLOCK)
    request = make_request("a", make_prompt(10), Mode.REMOTE, deadline_s=5.0)
    d.add(request)
    d.step()
    assert d.engine.reads_started(request.key)
    d.clock.advance(10.0)
    d.step()
    finished = d.seen[request.key].finished
    assert finished is not None
    assert isinstance(finished.error, DeadlineExceeded)
    assert d.blocks.counts()[BlockState.QUARANTINED] == 3
    assert not d.engine.kv_arrived(request.key, 10)
    assert not d.engine.reads_started(request.key)
    d.engine.reads_done(request.key)
    d.assert_idle()


@pytest.mark.parametrize("proven", [0, 4, 10])
@pytest.mark.parametrize("first", ["none", "before", "while_waiting", "while_prefilling"])
def test_recompute_prefills_here_what_is_not_proven(proven: int, first: str) -> None:
    p, _, here = begin()
    d = Harness(block_size=BLOCK, max_batch_tokens=2)
    d.add(here)
    d.step()
    token = p.seen[here.key].tokens[0]
    d.engine.reads_started(here.key)
    if proven:
        copy_kv(p, d, here.key, proven)
        d.engine.kv_arrived(here.key, proven)
    if first == "before" and proven < here.context_len:
        d.engine.first_token(here.key, token)
    assert d.engine.recompute(here.key)
    assert not d.engine.recompute(here.key)
    assert not d.engine.kv_arrived(here.key, here.context_len)
    if first == "while_waiting":
        assert d.engine.first_token(here.key, token)
    d.step()
    if first == "while_prefilling" and d.engine.first_token(here.key, token):
        assert isinstance(d.step()[0], Preempted)
    d.engine.reads_done(here.key)
    d.run()
    reference = generate(logits_after, here)
    told = d.seen[here.key].tokens
    assert told == reference[len(reference) - len(told) :]
    assert len(told) == len(reference) - (d.seen[here.key].first_index or 0)
    finished = d.seen[here.key].finished
    assert finished is not None
    usage = finished.usage
    assert usage.local_compute + usage.local_cache_hit + usage.external_kv == usage.prompt == 10
    assert usage.external_kv == proven
    d.assert_idle()


def test_recompute_while_waiting_turns_the_request_local() -> None:
    d = Harness(block_size=BLOCK, max_running=1)
    d.add(make_request("busy", make_prompt(4), sampling=SEEDED))
    d.step()
    request = make_request("a", make_prompt(6), Mode.REMOTE)
    d.add(request)
    assert d.engine.recompute(request.key)
    d.run()
    assert d.seen[request.key].tokens == generate(logits_after, request)


def test_another_reader_can_take_over_under_the_same_lease() -> None:
    p, first, here = begin()
    first.engine.reads_started(here.key)
    second = Harness(block_size=BLOCK)
    second.add(here)
    second.step()
    deliver(p, second, here)
    second.run()
    assert p.seen[here.key].tokens + second.seen[here.key].tokens == generate(logits_after, here)
    assert sum(batch.num_tokens for batch in p.runner.batches) == here.context_len  # prefilled once


def test_commands_for_unknown_requests_are_harmless() -> None:
    d = Harness(block_size=BLOCK)
    key = make_request("x", [3]).key
    d.engine.reads_done(key)
    assert not d.engine.kv_arrived(key, 1)
    assert not d.engine.first_token(key, 3)
    assert not d.engine.recompute(key)
    assert not d.engine.release_kv(key)
    local = d.add(make_request("l", make_prompt(3)))
    d.step()
    assert not d.engine.first_token(local, 3)
    assert not d.engine.reads_started(local)
    assert not d.engine.release_kv(local)


def test_a_resumed_request_is_handed_over_like_a_fresh_one() -> None:
    whole = make_request("a", make_prompt(6), sampling=SEEDED)
    tokens = generate(logits_after, whole)
    p, d = Harness(block_size=BLOCK), Harness(block_size=BLOCK)
    there, here = two_modes(dataclasses.replace(whole, generated=tuple(tokens[:4])))
    p.add(there)
    p.run()
    d.add(here)
    d.step()
    deliver(p, d, here)
    d.run()
    assert p.seen[whole.key].first_index == 4
    assert d.seen[whole.key].first_index == 5
    assert tokens[:4] + p.seen[whole.key].tokens + d.seen[whole.key].tokens == tokens


def test_held_kv_can_be_cancelled() -> None:
    p, _, here = begin()
    assert p.engine.cancel(here.key)
    assert [type(event) for event in p.step()] == [Finished]
    p.assert_idle()


def test_a_remote_request_tells_its_blocks_once() -> None:
    _, d, here = begin(prompt_len=9)
    started = d.seen[here.key].started
    assert [type(event) for event in started] == [Started]
    assert len(started[0].block_table) == 3
    assert started[0].cached_tokens == 0
    assert TokensOut not in {type(event) for event in d.step()}


def test_an_early_first_token_takes_no_part_in_the_prefix_match() -> None:
    """The cache may hold prompt + first token as a full block; the KV asked for is still the prompt's alone."""
    prompt = make_prompt(7)
    request = make_request("a", prompt, Mode.REMOTE, sampling=SEEDED)
    tokens = generate(logits_after, request)
    d = Harness(block_size=BLOCK)
    d.add(make_request("warm", [*prompt, tokens[0], 5]))
    d.run()
    p = Harness(block_size=BLOCK)
    p.add(dataclasses.replace(request, mode=Mode.PREFILL))
    p.run()
    d.add(request)
    d.engine.first_token(request.key, tokens[0])
    d.step()
    assert d.seen[request.key].started[0].cached_tokens == 4
    copy_kv(p, d, request.key, 7)
    d.engine.kv_arrived(request.key, 7)
    d.run()
    assert d.seen[request.key].tokens == tokens[1:]
