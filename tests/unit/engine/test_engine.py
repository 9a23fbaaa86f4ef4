"""Exact tokens against a bare loop, whatever the batch, the chunks and the cache; and how sequences end."""

import math

import pytest
import torch

from tests.unit.engine.fake_model import EOS, VOCAB, Harness, logits_after, make_prompt, make_request
from tests.unit.engine.reference import generate
from weir.engine.engine import MAX_STALE_DEADLINES, Engine, EngineConfig
from weir.engine.output import Event, Finished, Preempted, Prefilled, Progress, Started, TokensOut
from weir.engine.request import EngineRequest, Mode
from weir.engine.sampler import Sampler
from weir.engine.sampling import SamplingParams
from weir.engine.scheduler import SchedulerConfig
from weir.errors import DeadlineExceeded, FailedPrecondition, InternalError, InvalidArgument, ResourceExhausted
from weir.ids import RequestKey
from weir.kvcache.blocks import BlockState
from weir.lifecycle import FinishReason

BLOCK = 4
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1]
SEEDED = SamplingParams(max_tokens=8, temperature=0.9, top_p=0.95, seed=11, ignore_eos=True)


def expected(request: EngineRequest) -> list[int]:
    return generate(logits_after, request)


@pytest.mark.parametrize("budget", [64, 3])
@pytest.mark.parametrize("warm", ["cold", "partial", "full"])
@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_are_exact_for_every_length_cache_state_and_chunking(length: int, warm: str, budget: int) -> None:
    harness = Harness(block_size=BLOCK, max_batch_tokens=budget)
    prompt = make_prompt(length)
    warm_tokens = {"cold": 0, "partial": length // 2, "full": length}[warm]
    if warm_tokens:
        harness.add(make_request("warm", prompt[:warm_tokens]))
        harness.run()
    request = make_request("a", prompt)
    key = harness.add(request)
    harness.run()
    seen = harness.seen[key]
    assert seen.tokens == expected(request)
    hit = min(warm_tokens // BLOCK, (length - 1) // BLOCK) * BLOCK
    assert seen.started[0].cached_tokens == hit
    assert seen.finished is not None
    usage = seen.finished.usage
    assert (usage.local_cache_hit, usage.local_compute, usage.external_kv) == (hit, length - hit, 0)
    harness.assert_idle()


def test_a_batch_of_16_gives_what_each_request_gives_alone() -> None:
    requests = [
        make_request(f"r{i}", make_prompt(LENGTHS[i % 6] + i, seed=i), sampling=SEEDED if i % 2 else None)
        for i in range(16)
    ]
    together = Harness(num_blocks=200, block_size=BLOCK, max_batch_tokens=40)
    for request in requests:
        together.add(request)
    together.run()
    for request in requests:
        alone = Harness(block_size=BLOCK)
        alone.add(request)
        alone.run()
        assert together.seen[request.key].tokens == alone.seen[request.key].tokens == expected(request)
    together.assert_idle()
    assert max(batch.num_sequences for batch in together.runner.batches) == 16


def test_generated_tokens_are_found_in_the_prefix_cache_by_the_next_turn() -> None:
    harness = Harness(block_size=BLOCK)
    first = make_request("a", make_prompt(6), sampling=SamplingParams(max_tokens=11, temperature=0.0, ignore_eos=True))
    harness.add(first)
    harness.run()
    answer = harness.seen[first.key].tokens
    second = make_request("b", [*first.prompt, *answer, 5])
    harness.add(second)
    harness.run()
    # 6 + 11 tokens, KV of 16 of them was computed: 4 full blocks.
    assert harness.seen[second.key].started[0].cached_tokens == 16
    assert harness.seen[second.key].tokens == expected(second)


def test_tenants_with_other_salts_share_no_kv() -> None:
    harness = Harness(block_size=BLOCK)
    harness.add(make_request("a", make_prompt(12), salt=b"x"))
    harness.run()
    key = harness.add(make_request("b", make_prompt(12), salt=b"y"))
    harness.run()
    assert harness.seen[key].started[0].cached_tokens == 0


def test_decodes_are_in_every_step_while_a_long_prompt_is_prefilled() -> None:
    harness = Harness(num_blocks=100, block_size=BLOCK, max_batch_tokens=8)
    long_decode = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    key = harness.add(make_request("d", make_prompt(4), sampling=long_decode))
    harness.step()
    harness.add(make_request("long", make_prompt(100, seed=1)))
    for _ in range(10):
        before = len(harness.seen[key].tokens)
        harness.step()
        assert len(harness.seen[key].tokens) == before + 1
        batch = harness.runner.batches[-1]
        assert (batch.num_decodes, batch.query_lens) == (1, [1, 7])


def test_events_of_a_prefill_come_in_order_and_seal_each_block_once() -> None:
    harness = Harness(block_size=BLOCK, max_batch_tokens=6, max_running=2)
    key = harness.add(make_request("p", make_prompt(14), Mode.PREFILL))
    events: list[Event] = []
    while harness.engine.has_work():
        events += harness.step()
    kinds = [type(event) for event in events]
    assert kinds == [Started, Progress, Progress, Progress, TokensOut, Prefilled]
    progress = [event for event in events if isinstance(event, Progress)]
    assert [event.num_tokens for event in progress] == [6, 12, 14]
    assert [[sealed.index for sealed in event.sealed] for event in progress] == [[0], [1, 2], [3]]
    table = harness.seen[key].started[0].block_table
    assert [sealed.block for event in progress for sealed in event.sealed] == list(table)
    assert harness.sealed_calls == [[table[0]], [table[1], table[2]], [table[3]]]
    assert harness.blocks.counts()[BlockState.LEASED] == 4
    assert harness.engine.release_kv(key)
    assert not harness.engine.release_kv(key)
    harness.assert_idle()


def test_a_prefix_hit_is_announced_with_the_first_chunk() -> None:
    harness = Harness(block_size=BLOCK)
    harness.add(make_request("warm", make_prompt(9)))
    harness.run()
    assert harness.sealed_calls == []  # nobody could read a local sequence's blocks
    key = harness.add(make_request("p", make_prompt(9), Mode.PREFILL))
    harness.run()
    assert sorted(harness.seen[key].sealed) == [0, 1, 2]
    assert [block for block, _ in harness.seen[key].sealed.values()] == list(harness.seen[key].started[0].block_table)
    prefilled = harness.seen[key].prefilled
    assert prefilled is not None
    assert (prefilled.usage.local_cache_hit, prefilled.usage.local_compute) == (8, 1)


def first_greedy(prompt: list[int]) -> int:
    return int(logits_after(prompt).argmax())


@pytest.mark.parametrize("mode", [Mode.PREFILL, Mode.LOCAL])
def test_a_first_token_that_is_eos_ends_the_request_normally(mode: Mode) -> None:
    harness = Harness(block_size=BLOCK)
    prompt = make_prompt(5)
    force = SamplingParams(max_tokens=6, temperature=0.0, logit_bias={EOS: 100.0})
    key = harness.add(make_request("a", prompt, mode, sampling=force))
    harness.run()
    seen = harness.seen[key]
    assert seen.tokens == [EOS]
    assert seen.prefilled is None
    assert seen.finished is not None
    assert (seen.finished.reason, seen.finished.stop_token) == (FinishReason.STOP, EOS)
    harness.assert_idle()


def test_stop_ids_end_the_sequence_and_are_its_last_token() -> None:
    prompt = make_prompt(5)
    free = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    tokens = expected(make_request("x", prompt, sampling=free))
    stop = tokens[3]
    harness = Harness(block_size=BLOCK)
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
    key = harness.add(make_request("a", prompt, sampling=params))
    harness.run()
    finished = harness.seen[key].finished
    assert harness.seen[key].tokens == tokens[: tokens.index(stop) + 1]
    assert finished is not None
    assert (finished.reason, finished.stop_token) == (FinishReason.STOP, stop)


def test_ignore_eos_treats_eos_like_any_token() -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logit_bias={EOS: 100.0})
    harness = Harness(block_size=BLOCK)
    key = harness.add(make_request("a", make_prompt(5), sampling=params))
    harness.run()
    finished = harness.seen[key].finished
    assert harness.seen[key].tokens == [EOS] * 4
    assert finished is not None
    assert (finished.reason, finished.stop_token) == (FinishReason.LENGTH, None)


def test_min_tokens_masks_eos_and_stops_until_then() -> None:
    params = SamplingParams(
        max_tokens=9, min_tokens=4, temperature=0.0, logit_bias={EOS: 100.0, 7: 90.0}, stop_token_ids=(7,)
    )
    harness = Harness(block_size=BLOCK)
    key = harness.add(make_request("a", make_prompt(5), sampling=params))
    harness.run()
    tokens = harness.seen[key].tokens
    assert len(tokens) == 5
    assert tokens[-1] == EOS
    assert not {EOS, 7} & set(tokens[:4])


@pytest.mark.parametrize("sampling", [None, SEEDED], ids=["greedy", "seeded"])
def test_a_resumed_request_continues_as_if_it_had_never_moved(sampling: SamplingParams | None) -> None:
    whole = make_request("a", make_prompt(7), sampling=sampling)
    tokens = expected(whole)
    for done in range(1, len(tokens)):
        harness = Harness(block_size=BLOCK)
        resumed = make_request("a", make_prompt(7), generated=tuple(tokens[:done]), sampling=sampling)
        key = harness.add(resumed)
        harness.run()
        assert harness.seen[key].first_index == done
        assert harness.seen[key].tokens == tokens[done:]
        finished = harness.seen[key].finished
        assert finished is not None
        assert finished.usage.completion == len(tokens)
        assert finished.usage.local_compute == finished.usage.prompt == 7


def test_penalties_and_min_tokens_survive_a_move() -> None:
    params = SamplingParams(
        max_tokens=10,
        min_tokens=7,
        temperature=0.7,
        seed=5,
        presence_penalty=0.5,
        frequency_penalty=0.7,
        repetition_penalty=1.3,
        top_k=20,
        min_p=0.02,
    )
    tokens = expected(make_request("a", make_prompt(9), sampling=params))
    for done in (0, 1, 4, 6):
        harness = Harness(block_size=BLOCK)
        key = harness.add(make_request("a", make_prompt(9), generated=tuple(tokens[:done]), sampling=params))
        harness.run()
        assert tokens[:done] + harness.seen[key].tokens == tokens


def test_logprobs_are_those_of_the_raw_logits() -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0, logprobs=3, logit_bias={9: 100.0}, ignore_eos=True)
    harness = Harness(block_size=BLOCK)
    prompt = make_prompt(5)
    key = harness.add(make_request("a", prompt, sampling=params))
    harness.run()
    raw = torch.log_softmax(torch.from_numpy(logits_after(prompt)), 0)
    entry = harness.seen[key].logprobs[0]
    top = torch.topk(raw, 3)
    assert harness.seen[key].tokens == [9, 9]
    assert entry.token == 9  # type: ignore[attr-defined]
    assert entry.logprob == float(raw[9])  # type: ignore[attr-defined]
    assert entry.top == tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", [Mode.PREFILL, Mode.LOCAL])
def test_cancel_at_every_step_returns_all_blocks(mode: Mode) -> None:
    for cancel_after in range(12):
        harness = Harness(block_size=BLOCK, max_batch_tokens=4, max_running=4)
        other = make_request("other", make_prompt(6, seed=3))
        key = harness.add(make_request("a", make_prompt(14), mode))
        harness.add(other)
        for _ in range(cancel_after):
            harness.step()
        alive = harness.seen[key].finished is None
        assert harness.engine.cancel(key) is alive
        assert not harness.engine.cancel(key)
        harness.run()
        finished = harness.seen[key].finished
        assert finished is not None
        assert finished.reason is (FinishReason.CANCELLED if alive else finished.reason)
        assert harness.seen[other.key].tokens == expected(other)
        harness.assert_idle()


def test_after_ten_cancelled_long_prompts_a_short_one_starts_in_the_next_step() -> None:
    harness = Harness(num_blocks=600, block_size=BLOCK, max_batch_tokens=16, max_running=16)
    keys = [harness.add(make_request(f"l{i}", make_prompt(200, seed=i))) for i in range(10)]
    harness.step()
    harness.step()
    for key in keys:
        harness.engine.cancel(key)
    short = make_request("short", make_prompt(5, seed=99))
    harness.add(short)
    harness.step()
    assert harness.seen[short.key].tokens == expected(short)[:1]


def test_a_passed_deadline_ends_a_request_without_work() -> None:
    harness = Harness(block_size=BLOCK, max_batch_tokens=4, max_running=4)
    waiting = harness.add(make_request("w", make_prompt(9), deadline_s=-1.0))
    running = harness.add(make_request("r", make_prompt(9, seed=1), deadline_s=0.0015))
    harness.step()
    assert harness.engine.has_work()
    harness.clock.advance(1.0)
    events = harness.step()
    assert len(harness.runner.batches) == 1  # only the first step of r
    assert [type(event) for event in events] == [Finished]
    for key in (waiting, running):
        finished = harness.seen[key].finished
        assert finished is not None
        assert finished.reason is FinishReason.ERROR
        assert isinstance(finished.error, DeadlineExceeded)
    assert harness.seen[waiting].started == []
    assert not harness.engine.has_work()
    harness.assert_idle()


def test_a_failing_model_ends_its_batch_and_not_the_engine() -> None:
    harness = Harness(block_size=BLOCK)
    broken = harness.add(make_request("a", make_prompt(6)))
    harness.step()
    harness.runner.fail_next = True
    harness.step()
    finished = harness.seen[broken].finished
    assert finished is not None
    assert isinstance(finished.error, InternalError)
    assert "planted" in str(finished.error)
    assert harness.engine.failed_steps == 1
    later = make_request("b", make_prompt(6))
    harness.add(later)
    harness.run()
    assert harness.seen[later.key].tokens == expected(later)
    harness.assert_idle()


def test_logits_that_are_not_finite_end_their_own_sequence_only() -> None:
    harness = Harness(block_size=BLOCK)
    bad = harness.add(make_request("a", make_prompt(6)))
    also_bad = harness.add(make_request("c", make_prompt(6, seed=2), sampling=SEEDED))
    good = make_request("b", make_prompt(6, seed=1))
    harness.add(good)
    run = harness.runner.run

    def poisoned(batch):  # type: ignore[no-untyped-def]
        logits = run(batch)
        logits[0, 3] = math.nan
        logits[1, :] = math.nan
        harness.runner.run = run  # type: ignore[method-assign]
        return logits

    harness.runner.run = poisoned  # type: ignore[method-assign]
    harness.run()
    for key in (bad, also_bad):
        finished = harness.seen[key].finished
        assert finished is not None
        assert isinstance(finished.error, InternalError)
    assert harness.seen[good.key].tokens == expected(good)
    harness.assert_idle()


def test_refusals_name_numbers_and_leave_nothing() -> None:
    harness = Harness(num_blocks=4, block_size=BLOCK, max_waiting=2, max_context_tokens=30)
    with pytest.raises(InvalidArgument, match=r"needs 5 KV blocks of 4 tokens; the pool has 4"):
        harness.engine.add(make_request("big", make_prompt(12)))
    with pytest.raises(InvalidArgument, match=r"exceed the context of 30"):
        harness.engine.add(make_request("long", make_prompt(25)))
    with pytest.raises(InvalidArgument, match=r"at least 1 token"):
        harness.engine.add(make_request("empty", []))
    with pytest.raises(InvalidArgument, match=rf"token ids lie in \[0, {VOCAB}\)"):
        harness.engine.add(make_request("foreign", [VOCAB]))
    with pytest.raises(InvalidArgument, match=r"seed"):
        harness.engine.add(make_request("noseed", [3], sampling=SamplingParams(temperature=1.0, max_tokens=2)))
    with pytest.raises(InvalidArgument, match=r"generated"):
        harness.engine.add(make_request("over", [3], generated=(4,) * 6))
    harness.add(make_request("a", make_prompt(3)))
    with pytest.raises(FailedPrecondition, match=r"a\.1"):
        harness.engine.add(make_request("a", make_prompt(3)))
    harness.add(make_request("b", make_prompt(3)))
    with pytest.raises(ResourceExhausted, match=r"max_waiting = 2"):
        harness.engine.add(make_request("c", make_prompt(3)))
    harness.run()
    harness.assert_idle()
    assert harness.blocks.num_available() == 4


def test_the_largest_request_that_fits_runs() -> None:
    harness = Harness(num_blocks=4, block_size=BLOCK)
    request = make_request(
        "a", make_prompt(11), sampling=SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    )
    key = harness.add(request)
    harness.run()
    assert harness.seen[key].tokens == expected(request)


def test_higher_priority_is_admitted_first() -> None:
    harness = Harness(block_size=BLOCK, max_running=1)
    keys = [
        harness.add(make_request(name, make_prompt(4, seed=i), priority=priority))
        for i, (name, priority) in enumerate([("low", 0), ("high", 5), ("mid", 2)])
    ]
    order = []
    while harness.engine.has_work():
        order += [event.key for event in harness.step() if isinstance(event, Started)]
    assert order == [keys[1], keys[2], keys[0]]


def test_load_counts_what_waits_and_runs() -> None:
    harness = Harness(num_blocks=8, block_size=BLOCK, max_running=1)
    harness.add(make_request("a", make_prompt(6)))
    harness.add(make_request("b", make_prompt(7, seed=1)))
    harness.step()
    assert harness.last is not None
    load = harness.last.load
    assert (load.running, load.waiting, load.waiting_tokens) == (1, 1, 7)
    assert (load.decodes, load.prefill_tokens) == (0, 6)
    harness.step()
    assert harness.last.load.decodes == 1


def test_no_work_when_the_queue_cannot_move() -> None:
    """Finished KV under a lease fills the pool: the next prompt waits, and the loop may sleep."""
    harness = Harness(num_blocks=4, block_size=BLOCK)
    held = harness.add(make_request("p", make_prompt(10), Mode.PREFILL))
    harness.run()
    blocked = make_request("q", make_prompt(10, seed=1), Mode.PREFILL)
    harness.add(blocked)
    harness.run(limit=3)
    assert harness.engine.load().waiting == 1
    assert not harness.engine.has_work()
    harness.engine.release_kv(held)
    assert harness.engine.has_work()
    harness.run()
    assert harness.seen[blocked.key].tokens == expected(blocked)[:1]
    harness.engine.release_kv(blocked.key)
    harness.assert_idle()


def test_without_a_prefix_cache_everything_is_computed() -> None:
    harness = Harness(block_size=BLOCK, prefix_cache=False)
    for name in ("a", "b"):
        request = make_request(name, make_prompt(13))
        key = harness.add(request)
        harness.run()
        assert harness.seen[key].started[0].cached_tokens == 0
        assert harness.seen[key].tokens == expected(request)
    assert harness.blocks.num_available() == 64
    assert harness.blocks.counts()[BlockState.CACHED] == 0


def test_config_refuses_a_budget_smaller_than_the_running_sequences() -> None:
    with pytest.raises(InvalidArgument, match="decode in one step"):
        SchedulerConfig(max_batch_tokens=4, max_running=8)


def test_an_engine_is_made_of_its_parts_only() -> None:
    harness = Harness()
    engine = Engine(
        harness.runner, Sampler(), harness.blocks, lambda blocks: None, EngineConfig(VOCAB, 100), harness.clock
    )
    assert not engine.has_work()
    assert engine.next_deadline_s() is None
    assert not engine.cancel(RequestKey("x", 1))
    assert Preempted not in {type(event) for event in engine.step().events}


def test_two_requests_may_have_the_same_deadline() -> None:
    harness = Harness()
    first = harness.add(make_request("b", make_prompt(5), deadline_s=1.0))
    second = harness.add(make_request("a", make_prompt(5, seed=1), deadline_s=1.0))
    harness.run()
    assert harness.seen[first].finished is not None
    assert harness.seen[second].finished is not None


def test_deadlines_of_finished_requests_do_not_pile_up() -> None:
    harness = Harness(block_size=BLOCK)
    one = SamplingParams(max_tokens=1, temperature=0.0)
    for i in range(3 * MAX_STALE_DEADLINES):
        harness.engine.add(make_request(f"r{i}", [5], sampling=one, deadline_s=1e9 + i))
        harness.engine.step()
    assert len(harness.engine._deadlines) <= MAX_STALE_DEADLINES + 2
    last = harness.add(make_request("last", make_prompt(4), deadline_s=5.0))
    assert harness.engine.next_deadline_s() == 5.0
    harness.clock.advance(6.0)
    harness.step()
    finished = harness.seen[last].finished
    assert finished is not None
    assert isinstance(finished.error, DeadlineExceeded)
