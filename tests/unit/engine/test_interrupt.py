"""A step that works mostly for a cancelled request is given up; the others lose nothing but time."""

from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.fake_model import Harness, logits_after, make_prompt, make_request
from tests.unit.engine.reference import generate
from weir.engine.batch import Batch
from weir.engine.engine import Runner
from weir.engine.interrupt import StepInterrupt, StepInterrupted
from weir.ids import RequestKey

A, B = RequestKey("a", 1), RequestKey("b", 1)


class Halfway:
    """Runs a hook in the middle of a step, then looks whether to go on, as a model does between layers."""

    def __init__(self, runner: Runner, check: Callable[[], None]) -> None:
        self.runner = runner
        self.check = check
        self.hook: Callable[[], object] = lambda: None

    def run(self, batch: Batch) -> torch.Tensor:
        self.hook()
        self.check()
        return self.runner.run(batch)


def halfway(harness: Harness) -> Halfway:
    runner = Halfway(harness.engine._runner, harness.engine._interrupt.check)
    harness.engine._runner = runner
    return runner


def test_a_step_for_a_cancelled_prefill_is_given_up() -> None:
    harness = Harness(num_blocks=40, block_size=4, max_batch_tokens=64)
    runner = halfway(harness)
    other = make_request("b", make_prompt(3, seed=2))
    harness.add(make_request("a", make_prompt(50, seed=1)))
    key = harness.add(other)
    runner.hook = lambda: harness.engine.interrupt(A)
    harness.step()
    assert harness.engine.interrupted_steps == 1
    runner.hook = lambda: None
    assert harness.engine.cancel(A)
    harness.run()
    assert harness.seen[key].tokens == generate(logits_after, other)
    harness.assert_idle()


def test_a_step_mostly_for_others_is_finished() -> None:
    harness = Harness(num_blocks=40, block_size=4, max_batch_tokens=64)
    runner = halfway(harness)
    harness.add(make_request("a", make_prompt(5, seed=1)))
    other = make_request("b", make_prompt(40, seed=2))
    key = harness.add(other)
    runner.hook = lambda: harness.engine.interrupt(A)
    harness.step()
    assert harness.engine.interrupted_steps == 0
    harness.engine.cancel(A)
    harness.run()
    assert harness.seen[key].tokens == generate(logits_after, other)
    harness.assert_idle()


def test_a_request_before_the_step_counts_too_and_is_forgotten_with_its_key() -> None:
    interrupt = StepInterrupt()
    interrupt.request(A)
    interrupt.begin({A: 3, B: 3})
    assert _given_up(interrupt)
    interrupt.end()
    assert not _given_up(interrupt)
    interrupt.forget(A)
    interrupt.begin({A: 6})
    assert not _given_up(interrupt)


@given(st.lists(st.tuples(st.integers(1, 100), st.booleans()), min_size=1, max_size=8))
def test_half_of_the_tokens_decides(work: list[tuple[int, bool]]) -> None:
    interrupt = StepInterrupt()
    keys = [RequestKey(str(i), 1) for i in range(len(work))]
    interrupt.begin({key: tokens for key, (tokens, _) in zip(keys, work, strict=True)})
    for key, (_, unwanted) in zip(keys, work, strict=True):
        if unwanted:
            interrupt.request(key)
    total = sum(tokens for tokens, _ in work)
    gone = sum(tokens for tokens, unwanted in work if unwanted)
    if abs(2 * gone - total) > 1e-6 * total:
        assert _given_up(interrupt) == (2 * gone > total)


def _given_up(interrupt: StepInterrupt) -> bool:
    try:
        interrupt.check()
    except StepInterrupted:
        return True
    return False
