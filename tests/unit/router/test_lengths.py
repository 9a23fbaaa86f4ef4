"""How long answers are expected to be."""

from __future__ import annotations

from weir.services.router.lengths import ENOUGH, FIRST_GUESS, MAX_KEYS, SAMPLES, OutputLengths


def test_max_tokens_bounds_but_never_decides() -> None:
    lengths = OutputLengths()
    assert lengths.expect("", 100, 1_000_000) == FIRST_GUESS
    assert lengths.expect("", 100, 5) == 5
    for _ in range(ENOUGH):
        lengths.learn("", 100, 20)
    assert lengths.expect("", 100, 1_000_000) == 20
    assert lengths.expect("", 100, 7) == 7


def test_by_tenant_and_length_of_the_prompt_then_by_length_then_by_all() -> None:
    lengths = OutputLengths()
    for _ in range(ENOUGH):
        lengths.learn("chatty", 100, 400)
        lengths.learn("terse", 5000, 10)
    assert lengths.expect("chatty", 120, 10_000) == 400
    assert lengths.expect("terse", 4500, 10_000) == 10
    assert lengths.expect("new", 100, 10_000) == 400
    assert lengths.expect("new", 5000, 10_000) == 10
    assert lengths.expect("new", 1, 10_000) in (10, 400)


def test_quantiles_of_the_last_answers() -> None:
    lengths = OutputLengths()
    for tokens in range(1, 1 + 3 * SAMPLES):
        lengths.learn("t", 50, tokens)
    newest = list(range(1 + 2 * SAMPLES, 1 + 3 * SAMPLES))
    assert lengths.expect("t", 50, 10_000, 0.0) == newest[0]
    assert lengths.expect("t", 50, 10_000, 1.0) == newest[-1]
    assert lengths.expect("t", 50, 10_000) == newest[int(0.5 * (SAMPLES - 1))]


def test_what_is_left_of_a_running_answer() -> None:
    lengths = OutputLengths()
    for tokens in (10,) * ENOUGH + (100,) * ENOUGH:
        lengths.learn("t", 50, tokens)
    assert lengths.left("t", 50, 10_000, 0) == 10
    assert lengths.left("t", 50, 10_000, 10) == 90
    assert lengths.left("t", 50, 10_000, 200) == 100  # longer than all: half as long again
    assert lengths.left("t", 50, 210, 200) == 10
    assert lengths.left("t", 50, 200, 200) == 1


def test_bounded() -> None:
    lengths = OutputLengths()
    for number in range(3 * MAX_KEYS):
        lengths.learn(f"tenant{number}", number, 5)
    assert len(lengths) == MAX_KEYS
