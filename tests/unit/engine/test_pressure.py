"""Pools far too small: preemption, waiting and refusal, with exact tokens and never a deadlock."""

import pytest

from tests.unit.engine.fake_model import Harness, logits_after, make_prompt, make_request
from tests.unit.engine.handover import deliver
from tests.unit.engine.reference import generate
from weir.engine.request import Mode
from weir.engine.sampling import SamplingParams
from weir.kvcache.blocks import BlockState

BLOCK = 4
LONG = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=20, temperature=0.8, seed=3, ignore_eos=True)


@pytest.mark.parametrize("watermark", [0.0, 0.2])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("num_blocks", [8, 9, 12, 17])
def test_preempted_sequences_lose_and_repeat_no_token(num_blocks: int, prefix_cache: bool, watermark: float) -> None:
    harness = Harness(
        num_blocks, BLOCK, prefix_cache=prefix_cache, max_batch_tokens=16, watermark=watermark, max_running=6
    )
    requests = [
        make_request(f"r{i}", make_prompt(3 + 2 * (i % 5), seed=i % 3), sampling=LONG if i % 2 else SEEDED)
        for i in range(9)
    ]
    for request in requests:
        harness.add(request)
    harness.run()
    for request in requests:
        assert harness.seen[request.key].tokens == generate(logits_after, request)
    assert sum(seen.preemptions for seen in harness.seen.values()) > 0
    harness.assert_idle()


def test_the_youngest_is_preempted_and_its_usage_says_so() -> None:
    harness = Harness(num_blocks=6, block_size=BLOCK, prefix_cache=False, watermark=0.0)
    old = make_request("old", make_prompt(6), sampling=SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    params = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
    young = make_request("young", make_prompt(6, seed=1), sampling=params)
    harness.add(old)
    harness.add(young)
    harness.run()
    assert harness.seen[old.key].preemptions == 0
    assert harness.seen[young.key].preemptions == 1
    finished = harness.seen[young.key].finished
    assert finished is not None
    usage = finished.usage
    assert (usage.preemptions, usage.local_compute, usage.prompt) == (1, 6, 6)
    # Both hold 3 blocks when the old one needs its 4th: at 12 + 1 tokens, with KV of 12.
    assert usage.recomputed == 12
    assert harness.seen[young.key].tokens == generate(logits_after, young)


def test_a_preempted_remote_sequence_is_recomputed_here() -> None:
    p = Harness(num_blocks=64, block_size=BLOCK)
    d = Harness(num_blocks=7, block_size=BLOCK, watermark=0.0)
    elder = make_request("elder", make_prompt(8), sampling=LONG)
    d.add(elder)
    d.step()
    there = make_request("a", make_prompt(9, seed=4), Mode.PREFILL, sampling=SEEDED)
    here = make_request("a", make_prompt(9, seed=4), Mode.REMOTE, sampling=SEEDED)
    p.add(there)
    p.run()
    d.add(here)
    d.step()
    deliver(p, d, here)
    d.run()
    assert d.seen[here.key].preemptions >= 1
    assert d.seen[elder.key].preemptions == 0
    assert p.seen[here.key].tokens + d.seen[here.key].tokens == generate(logits_after, here)
    finished = d.seen[here.key].finished
    assert finished is not None
    assert finished.usage.external_kv == 9
    assert finished.usage.recomputed > 0
    d.assert_idle()


def test_a_sequence_whose_kv_is_being_read_is_never_preempted() -> None:
    d = Harness(num_blocks=7, block_size=BLOCK, watermark=0.0)
    local = make_request("local", make_prompt(6), sampling=LONG)
    d.add(local)
    d.step()
    remote = make_request("remote", make_prompt(14, seed=1), Mode.REMOTE)
    d.add(remote)
    d.step()
    assert d.engine.reads_started(remote.key)
    d.run(limit=100)
    # The local one grew into the last block, gave way to the read, and waits for it.
    assert d.seen[remote.key].preemptions == 0
    assert d.seen[local.key].preemptions >= 1
    assert d.seen[local.key].finished is None
    d.engine.cancel(remote.key)
    d.run(limit=5)
    assert d.blocks.counts()[BlockState.QUARANTINED] == 4
    d.engine.reads_done(remote.key)
    d.run()
    assert d.seen[local.key].tokens == generate(logits_after, local)
    d.assert_idle()


def test_20_come_to_a_pool_that_holds_one_and_a_half() -> None:
    p = Harness(num_blocks=400, block_size=BLOCK)
    d = Harness(num_blocks=9, block_size=BLOCK)
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    requests = [make_request(f"r{i}", make_prompt(14, seed=i), Mode.REMOTE, sampling=params) for i in range(20)]
    for request in requests:
        p.add(make_request(request.key.request_id, list(request.prompt), Mode.PREFILL, sampling=params))
        d.add(request)
    p.run()
    delivered = set()
    for _ in range(2000):
        d.step()
        for request in requests:
            seen = d.seen[request.key]
            if seen.started and request.key not in delivered:
                deliver(p, d, request)
                p.engine.release_kv(request.key)
                delivered.add(request.key)
    for request in requests:
        tokens = p.seen[request.key].tokens + d.seen[request.key].tokens
        assert tokens == generate(logits_after, request)
    d.assert_idle()
    p.assert_idle()


def test_held_kv_is_the_headroom_of_a_prefill_worker() -> None:
    harness = Harness(num_blocks=10, block_size=BLOCK)
    keys = [harness.add(make_request(f"p{i}", make_prompt(11, seed=i), Mode.PREFILL)) for i in range(6)]
    harness.run()
    assert harness.engine.load().holding == 3
    assert harness.engine.load().waiting == 3
    for key in keys:
        harness.engine.release_kv(key)
        harness.run()
    for key in keys[3:]:
        harness.engine.release_kv(key)
    assert all(harness.seen[key].prefilled for key in keys)
    harness.assert_idle()


def test_a_large_request_at_the_head_is_not_overtaken_for_ever() -> None:
    harness = Harness(num_blocks=8, block_size=BLOCK, max_batch_tokens=16)
    for i in range(3):
        harness.add(make_request(f"s{i}", make_prompt(6, seed=i)))
    harness.step()
    large = harness.add(make_request("large", make_prompt(25, seed=9)))
    for i in range(3, 30):
        harness.add(make_request(f"s{i}", make_prompt(6, seed=i)))
    for _ in range(12):
        harness.step()
    assert harness.seen[large].started
    harness.run()
    harness.assert_idle()


def test_a_preempted_prefill_announces_all_its_blocks_again() -> None:
    """On a mixed worker a decoding sequence takes the blocks of a younger prefill; old promises are void."""
    harness = Harness(7, BLOCK, prefix_cache=False, max_batch_tokens=2, watermark=0.0)
    local = make_request(
        "local", make_prompt(4), sampling=SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    )
    harness.add(local)
    harness.step()
    harness.step()
    harness.step()
    prefill = make_request("p", make_prompt(16, seed=1), Mode.PREFILL)
    harness.add(prefill)
    announced: list[dict[int, tuple[int, int]]] = []
    while harness.engine.has_work():
        before = dict(harness.seen[prefill.key].sealed)
        harness.step()
        if before and not harness.seen[prefill.key].sealed:
            announced.append(before)
    seen = harness.seen[prefill.key]
    assert seen.preemptions == 1
    assert sorted(announced[0]) == [0]
    assert all(harness.blocks.generation(block) != promised for block, promised in announced[0].values())
    assert sorted(seen.sealed) == [0, 1, 2, 3]
    assert all(harness.blocks.generation(block) == promised for block, promised in seen.sealed.values())
    assert seen.tokens == generate(logits_after, prefill)[:1]
    assert harness.seen[local.key].tokens == generate(logits_after, local)
    harness.engine.release_kv(prefill.key)
    harness.assert_idle()
