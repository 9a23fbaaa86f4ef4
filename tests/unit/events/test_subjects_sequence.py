"""Names on the bus and numbers of messages."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.errors import InvalidArgument
from weir.events import subjects
from weir.events.sequence import GapDetector, Order, SequenceCounter
from weir.lifecycle import RequestState


def test_names_are_those_of_the_protos() -> None:
    assert subjects.request_subject(RequestState.FINISHED) == "weir.v1.request.finished"
    assert subjects.cancel_subject("r-0000002a-000000000001") == "weir.v1.cancel.r-0000002a-000000000001"
    assert subjects.transfer_subject("prefill-1") == "weir.v1.transfer.prefill-1"
    assert subjects.load_subject("w_1") == "weir.v1.load.w_1"
    assert subjects.kv_subject("w") == "weir.v1.kv.w"
    assert subjects.message_id("r-1", 2, "finished") == "r-1.2.finished"


@pytest.mark.parametrize("token", ["", "a.b", "a b", "*", ">", "a\n", "é", "x" * 129])
def test_tokens_that_would_change_the_subject_are_refused(token: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        subjects.load_subject(token)
    assert caught.value.field == "worker_id"


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.b.c", "a.b", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*.c", "a.b.c", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a", True),
    ],
)
def test_matching_is_that_of_nats(pattern: str, subject: str, expected: bool) -> None:
    assert subjects.matches(pattern, subject) is expected


@pytest.mark.parametrize("pattern", ["", "a..b", "a.>.b", "a b", ".a", "a."])
def test_patterns_that_nats_refuses_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidArgument):
        subjects.check_pattern(pattern)


def test_gaps_repetitions_and_restarts() -> None:
    detector = GapDetector()
    assert detector.observe("p", 1, 5) is Order.OK
    assert detector.observe("p", 1, 6) is Order.OK
    assert detector.observe("p", 1, 6) is Order.DUPLICATE
    assert detector.observe("p", 1, 9) is Order.GAP
    assert detector.lost == 2
    assert detector.observe("p", 1, 8) is Order.DUPLICATE
    assert detector.observe("p", 2, 1) is Order.OK
    assert detector.observe("p", 1, 10) is Order.DUPLICATE
    assert detector.observe("q", 1, 1) is Order.OK
    detector.forget("q")
    assert detector.observe("q", 1, 7) is Order.OK
    assert detector.lost == 2


def test_publishers_are_bounded() -> None:
    detector = GapDetector(max_publishers=2)
    for publisher in ("a", "b", "c"):
        detector.observe(publisher, 1, 1)
    assert detector.observe("a", 1, 9) is Order.OK  # forgotten, so a new start
    assert detector.observe("c", 1, 3) is Order.GAP


@given(seed=st.integers(0, 2**32), lose=st.floats(0, 0.9))
@settings(max_examples=50)
def test_every_lost_message_is_counted(seed: int, lose: float) -> None:
    source = random.Random(seed)
    counter, detector = SequenceCounter(), GapDetector()
    detector.observe("p", 1, counter.next())
    lost = pending = 0
    for _ in range(200):
        number = counter.next()
        if source.random() < lose:
            pending += 1
            continue
        assert detector.observe("p", 1, number) is (Order.GAP if pending else Order.OK)
        lost, pending = lost + pending, 0
    assert detector.lost == lost
