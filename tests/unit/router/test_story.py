"""What a request's last error says: which workers, which reasons, in which attempts; never an empty word, never OK."""

from __future__ import annotations

import itertools

import pytest

from tests.unit.router.stage import D1, D2, M1, P1, P2, Stage
from weir.errors import Unavailable
from weir.services.router.ending import error_of
from weir.services.router.facts import EndedNews
from weir.services.router.story import Story


def test_a_story_tells_beginning_and_end_and_counts_the_rest() -> None:
    story = Story()
    assert not story
    for attempt in range(1, 9):
        story.add(attempt, f"reason {attempt}")
        story.add(attempt, f"reason {attempt}")
    assert str(story) == (
        "attempt 1: reason 1; attempt 2: reason 2; 3 more; "
        "attempt 6: reason 6; attempt 7: reason 7; attempt 8: reason 8"
    )


def test_long_reasons_are_cut() -> None:
    story = Story()
    story.add(1, "x" * 1_000)
    assert len(str(story)) == 211


@pytest.mark.parametrize("code", ["", "INTERNAL", "UNAVAILABLE", "CANCELLED", "SOMETHING_NEW"])
def test_an_error_without_words_gets_some(code: str) -> None:
    text = str(error_of(code, "", D1, 0.0))
    assert text == (
        f"decode-1: ended it with {code} and no word of why" if code else "decode-1: ended it without a status"
    )


def test_a_lease_ended_as_read_by_a_reader_that_then_died() -> None:
    """P is told of the proven read by the read itself, D dies before it can tell the router: OK is no reason."""
    stage = Stage(P1, D1, max_attempts=2)
    stage.admit()
    for attempt in (1, 2):
        stage.sent()
        stage.ticket(P1, "t", attempt=attempt, final=True)
        stage.first(P1, 10 + attempt, attempt=attempt, index=attempt - 1)
        stage.lose(D1)
        if len(stage.book):
            stage.ended(P1, "OK", attempt=attempt)
        stage.up(D1)
        stage.advance(1.0)
    assert isinstance(stage.end.error, Unavailable)
    assert str(stage.end.error) == (
        "gave up after 2 attempts: attempt 1: decode-1 was lost while transferring; "
        "attempt 1: prefill-1 gave its KV up, for decode-1 had read it, and was lost before it decoded"
    )


def test_the_end_names_every_worker_and_reason() -> None:
    stage = Stage(P1, P2, D1, D2, max_attempts=3)
    stage.admit()
    stage.sent()
    stage.book.attempt_ended(P1, True, "r", 1, EndedNews("INTERNAL", "the model failed"), stage.now_s)
    stage.advance(1.0)
    stage.sent()
    stage.lose(P2)
    stage.advance(1.0)
    stage.sent()
    stage.ticket(P1, "t", attempt=3, final=True)
    stage.first(P1, 10, attempt=3)
    stage.book.kv_read_done(D1, "r", 3, 7, "generation", "block 4", None, stage.now_s)
    assert str(stage.end.error) == (
        "gave up after 3 attempts: attempt 1: prefill-1: the model failed; "
        "attempt 2: prefill-2 was lost while prefilling; "
        "attempt 3: KV read void on decode-1 (generation): block 4"
    )


@pytest.mark.parametrize(
    ("prefill", "code"), list(itertools.product((True, False), ("OK", "", "INTERNAL", "UNAVAILABLE")))
)
def test_no_reason_is_ok_or_empty_in_any_phase(prefill: bool, code: str) -> None:
    """Whatever status ends whichever leg, in each phase."""
    for phase in range(4):
        stage = Stage(P1, D1, max_attempts=1)
        stage.admit()
        stage.sent()
        if phase > 0:
            stage.ticket(P1, "t", final=phase > 1)
        if phase > 2:
            stage.first(P1, 10)
        worker = P1 if prefill else D1
        stage.book.attempt_ended(worker, prefill, "r", 1, EndedNews(code), stage.now_s)
        stage.lose(D1)
        stage.lose(P1)
        stage.advance(200.0)
        text = str(stage.end.error)
        assert "OK" not in text, text
        assert ": ;" not in text, text
        assert "attempt 1: " in text, text


def test_a_mixed_worker_that_ends_without_a_word_is_named() -> None:
    stage = Stage(M1, max_attempts=1)
    stage.admit()
    stage.sent()
    stage.book.attempt_ended(M1, False, "r", 1, EndedNews("OK"), stage.now_s)
    assert str(stage.end.error) == "gave up after 1 attempts: attempt 1: mixed-1 ended it without its last token"
