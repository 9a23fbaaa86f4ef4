"""The request book by hand-made facts: the straight way, each row of the failure table, every bound."""

from __future__ import annotations

import pytest

from tests.unit.router.stage import D1, D2, M1, M2, P1, P2, PROMPT, Stage, transferring
from weir.errors import DeadlineExceeded, InvalidArgument, RequestCancelled, ResourceExhausted, Unavailable
from weir.lifecycle import FinishReason, RequestState
from weir.services.router.commands import PublishCancel, SendBeginDecode, SendBeginPrefill

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def decoding(stage: Stage) -> Stage:
    """Brings the request to DECODING on D1 with tokens 10, 11 sent; commands so far are forgotten."""
    stage.admit()
    stage.sent()
    stage.ticket(P1, "t1", final=True)
    stage.first(P1, 10)
    stage.read(D1)
    stage.tokens(D1, (11,), index=1)
    stage.sent()
    return stage


def test_a_split_request_from_start_to_end() -> None:
    stage = Stage(P1, D1)
    stage.admit()
    assert stage.names() == ["BeginPrefill prefill-1 1", "BeginDecode decode-1 1"]
    stage.book.prefill_started(P1, "r", 1, 2, 1.5, stage.now_s)
    stage.ticket(P1, "t1")
    stage.ticket(P1, "t2", final=True)
    stage.first(P1, 10)
    assert stage.names() == ["KvReady decode-1 t1", "KvReady decode-1 t2", "FirstToken decode-1 first 10"]
    assert stage.emitted == [10]
    stage.read(D1)
    assert stage.names() == ["Release prefill-1 1"]
    stage.tokens(D1, (11, 12), index=1)
    stage.tokens(D1, (13,), index=3, finish=STOP)
    assert stage.names() == []
    assert stage.emitted == [10, 11, 12, 13]
    assert stage.end.finish_reason is STOP
    assert stage.states == [
        "admitted.0", "prefilling.1", "prefilled.1", "transferring.1", "decoding.1", "finished.1",
    ]  # fmt: skip
    stage.ended(P1, "OK")
    stage.ended(D1, "OK")
    assert stage.names() == []
    assert len(stage.book) == 0


def test_begin_messages_carry_source_and_times() -> None:
    stage = Stage(P1, D1, lease_s=9.0)
    stage.admit(deadline_s=stage.now_s + 2.0)
    prefill, decode = stage.sent()
    assert isinstance(prefill, SendBeginPrefill)
    assert isinstance(decode, SendBeginDecode)
    assert (prefill.timeout_ms, prefill.lease_ms, prefill.generated) == (2000.0, 9000.0, ())
    assert (decode.timeout_ms, decode.source, decode.generated) == (2000.0, P1, ())


def test_usage_and_timings_add_up() -> None:
    stage = Stage(P1, D1)
    stage.admit()
    stage.now_s += 0.010
    stage.book.prefill_started(P1, "r", 1, 2, 4.0, stage.now_s)
    stage.now_s += 0.020
    stage.ticket(P1, "t", final=True)
    stage.first(P1, 10)
    stage.read(D1)
    stage.now_s += 0.005
    stage.tokens(D1, (11,), index=1)
    stage.now_s += 0.040
    stage.tokens(D1, (12,), index=2, finish=LENGTH)
    times, usage = stage.end.timings, stage.end.usage
    assert times.ttft_ms == times.admit_ms + times.queue_ms + times.prefill_ms + times.first_token_ms
    assert times.e2e_ms == times.ttft_ms + times.second_token_ms + times.decode_ms
    assert (times.queue_ms, times.prefill_ms) == (4.0, 3.0)
    assert times.ttft_ms == pytest.approx(31.0)
    assert times.second_token_ms == pytest.approx(5.0)
    assert times.decode_ms == pytest.approx(40.0)
    assert times.tpot_ms == pytest.approx(22.5)
    assert (times.kv_read, times.prefill_worker, times.decode_worker) == ("timings", "prefill-1", "decode-1")
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (5, 3, 2)
    assert (usage.local_compute_tokens, usage.local_cache_hit_tokens, usage.external_kv_tokens) == (0, 0, 5)


def test_a_first_token_that_ends_the_request_needs_no_decode_worker() -> None:
    stage = Stage(P1, D1)
    stage.admit()
    stage.sent()
    stage.ticket(P1, "t", final=True)
    stage.first(P1, 10, finish=STOP)
    assert stage.names() == ["KvReady decode-1 t", "Release prefill-1 1", "Cancel decode-1 1"]
    assert (stage.emitted, stage.end.finish_reason) == ([10], STOP)
    assert stage.end.timings.decode_worker == ""
    assert stage.end.usage.local_compute_tokens == 3
    assert stage.end.usage.local_cache_hit_tokens == 2


def test_max_tokens_holds_whatever_workers_send() -> None:
    stage = Stage(P1, D1)
    stage.admit(max_tokens=3)
    stage.ticket(P1, "t", final=True)
    stage.first(P1, 10)
    stage.read(D1)
    stage.sent()
    stage.tokens(D1, (11, 12, 13), index=1)
    assert stage.names() == ["Cancel decode-1 1"]
    assert (stage.emitted, stage.end.finish_reason) == ([10, 11, 12], LENGTH)


def test_one_token_at_most_ends_with_the_first() -> None:
    stage = Stage(P1, D1)
    stage.admit(max_tokens=1)
    stage.sent()
    stage.first(P1, 10)
    assert stage.names() == ["Cancel prefill-1 1", "Cancel decode-1 1"]
    assert (stage.emitted, stage.end.finish_reason) == ([10], LENGTH)


def test_a_mixed_worker_prefills_locally() -> None:
    stage = Stage(M1)
    stage.admit()
    (begin,) = stage.sent()
    assert isinstance(begin, SendBeginDecode)
    assert (begin.worker, begin.source) == (M1, None)
    stage.book.decode_started(M1, "r", 1, 4, 0.5)
    stage.tokens(M1, (10,), index=0)
    stage.tokens(M1, (11,), index=1, finish=STOP)
    assert stage.names() == []
    assert stage.states == ["admitted.0", "prefilling.1", "decoding.1", "finished.1"]
    assert stage.book.local_prefills == {"mixed worker": 1}
    assert stage.end.usage.local_cache_hit_tokens == 4
    assert stage.end.usage.local_compute_tokens == 1
    assert stage.end.timings.prefill_worker == "mixed-1"


def test_a_decode_worker_prefills_when_there_is_nobody_else() -> None:
    stage = Stage(D1)
    stage.admit()
    assert stage.names() == ["BeginDecode decode-1 1"]
    assert stage.book.local_prefills == {"no prefill worker": 1}


def test_a_stop_string_ends_at_its_token_and_cancels_the_decode_leg() -> None:
    stage = decoding(Stage(P1, D1))
    stage.tokens(D1, (12, 13, 14), index=2)
    stage.book.stop("r", 4, "END", stage.now_s)
    assert stage.names() == ["Cancel decode-1 1"]
    assert stage.end.finish_reason is STOP
    assert stage.end.stop_string == "END"
    assert stage.end.usage.completion_tokens == 4


# binding


def test_a_decode_worker_without_room_is_bound_late_and_gets_everything() -> None:
    stage = Stage(P1, D1)
    stage.report(D1, running=3, free_blocks=0)
    stage.admit()
    assert stage.names() == ["BeginPrefill prefill-1 1"]
    stage.ticket(P1, "t1")
    stage.ticket(P1, "t2", final=True)
    stage.first(P1, 10)
    assert stage.names() == []
    assert stage.emitted == [10]
    stage.report(D1, running=2, free_blocks=50)
    assert stage.names() == [
        "BeginDecode decode-1 1", "KvReady decode-1 t1", "KvReady decode-1 t2", "FirstToken decode-1 first 10",
    ]  # fmt: skip
    assert stage.states[-1] == "transferring.1"


def test_a_refusing_decode_worker_is_replaced_without_another_prefill() -> None:
    stage = Stage(P1, D1, D2)
    stage.admit()
    assert stage.names() == ["BeginPrefill prefill-1 1", "BeginDecode decode-1 1"]
    stage.ticket(P1, "t", final=True)
    stage.first(P1, 10)
    stage.sent()
    stage.ended(D1, "RESOURCE_EXHAUSTED")
    assert stage.names() == ["BeginDecode decode-2 1", "KvReady decode-2 t", "FirstToken decode-2 first 10"]
    assert stage.book.retries == {}


def test_a_refusal_lapses() -> None:
    stage = Stage(P1, D1)
    transferring(stage)
    stage.ended(D1, "RESOURCE_EXHAUSTED", retry_after_ms=200)
    assert stage.names() == []
    stage.advance(0.1)
    assert stage.names() == []
    stage.advance(0.15)
    assert stage.names() == ["BeginDecode decode-1 1", "KvReady decode-1 t1", "FirstToken decode-1 first 10"]


def test_a_full_prefill_worker_is_left_for_another_and_costs_no_attempt() -> None:
    stage = Stage(P1, P2, D1)
    stage.admit()
    assert stage.names()[0] == "BeginPrefill prefill-1 1"
    stage.ended(P1, "RESOURCE_EXHAUSTED")
    assert stage.names() == ["Cancel decode-1 1", "BeginPrefill prefill-2 2", "BeginDecode decode-1 2"]
    assert stage.book.entries()[0].failures == 0


def test_refused_for_too_long_is_resource_exhausted() -> None:
    stage = Stage(P1, D1, queue_timeout_s=1.0)
    stage.admit()
    for attempt in range(1, 40):
        stage.ended(P1, "RESOURCE_EXHAUSTED", attempt=attempt)
        stage.advance(0.06)
        if not len(stage.book):
            break
    assert isinstance(stage.end.error, ResourceExhausted)
    assert "no room" in str(stage.end.error)


# the failure table


def test_prefill_worker_lost_while_prefilling() -> None:
    stage = Stage(P1, P2, D1)
    stage.admit()
    stage.sent()
    stage.ticket(P1, "t1")
    stage.sent()
    stage.lose(P1)
    assert stage.names() == ["Cancel decode-1 1"]
    stage.advance(0.014)
    assert stage.names() == []
    stage.advance(0.002)  # back-off 20 ms, jitter 0.5: 15 ms
    assert stage.names() == ["BeginPrefill prefill-2 2", "BeginDecode decode-1 2"]
    assert stage.book.retries == {"prefill_lost": 1}


def test_prefill_worker_lost_while_read_and_the_read_succeeds() -> None:
    stage = transferring(Stage(P1, P2, D1))
    stage.lose(P1)
    assert stage.names() == []
    stage.read(D1)
    stage.tokens(D1, (11,), index=1, finish=STOP)
    assert stage.names() == []
    assert (stage.emitted, stage.end.timings.attempts) == ([10, 11], 1)


def test_prefill_worker_lost_while_read_and_the_read_is_void() -> None:
    stage = transferring(Stage(P1, P2, D1))
    stage.lose(P1)
    stage.read(D1, "transport")
    assert stage.names() == ["Cancel decode-1 1"]
    stage.advance(0.02)
    begin = stage.sent()[0]
    assert isinstance(begin, SendBeginPrefill)
    assert (begin.worker, begin.attempt, begin.generated) == (P2, 2, (10,))


def test_prefill_worker_lost_and_the_read_never_ends() -> None:
    stage = transferring(Stage(P1, P2, D1, orphan_read_s=2.0))
    stage.lose(P1)
    stage.advance(1.99)
    assert stage.names() == []
    stage.advance(0.1)
    assert stage.names() == ["Cancel decode-1 1", "BeginPrefill prefill-2 2", "BeginDecode decode-1 2"]


def test_prefill_worker_lost_long_after_its_kv_could_have_been_read() -> None:
    """It was silent before it was given up: the read had its time."""
    stage = transferring(Stage(P1, P2, D1, orphan_read_s=2.0))
    stage.advance(5.0)
    stage.lose(P1)
    stage.advance(0.1)
    assert stage.names() == ["Cancel decode-1 1", "BeginPrefill prefill-2 2", "BeginDecode decode-1 2"]


def test_prefill_worker_lost_before_its_last_ticket() -> None:
    stage = Stage(P1, P2, D1)
    stage.admit()
    stage.ticket(P1, "t1")
    stage.first(P1, 10)
    stage.sent()
    stage.lose(P1)
    assert stage.names() == ["Cancel decode-1 1"]


def test_decode_worker_lost_while_prefilling_binds_another() -> None:
    stage = Stage(P1, D1, D2)
    stage.admit()
    stage.sent()
    stage.ticket(P1, "t1")
    stage.sent()
    stage.lose(D1)
    assert stage.names() == ["BeginDecode decode-2 1", "KvReady decode-2 t1"]


def test_decode_worker_lost_while_reading_takes_another_under_the_same_lease() -> None:
    stage = transferring(Stage(P1, D1, D2))
    stage.lose(D1)
    assert stage.names() == ["BeginDecode decode-2 1", "KvReady decode-2 t1", "FirstToken decode-2 first 10"]
    stage.read(D2)
    stage.tokens(D2, (11,), index=1, finish=STOP)
    assert stage.names() == ["Release prefill-1 1"]
    assert stage.emitted == [10, 11]
    assert (stage.end.timings.attempts, stage.end.timings.decode_worker) == (1, "decode-2")
    assert stage.book.retries == {"rebind": 1}


def test_decode_worker_lost_while_decoding_resumes_elsewhere() -> None:
    stage = decoding(Stage(P1, D1, D2))
    stage.lose(D1)
    assert stage.names() == []
    stage.advance(0.02)
    prefill, decode = stage.sent()
    assert isinstance(prefill, SendBeginPrefill)
    assert isinstance(decode, SendBeginDecode)
    assert (prefill.worker, prefill.attempt, prefill.generated) == (P1, 2, (10, 11))
    assert (decode.worker, decode.attempt, decode.generated) == (D2, 2, (10, 11))
    stage.tokens(D1, (12,), index=2)  # of the lost one: ignored
    stage.ticket(P1, "u1", attempt=2, final=True)
    stage.first(P1, 12, attempt=2, index=2)
    stage.read(D2, attempt=2)
    stage.tokens(D2, (13,), attempt=2, index=3, finish=STOP)
    assert stage.emitted == [10, 11, 12, 13]
    assert stage.end.usage.completion_tokens == 4
    assert stage.end.timings.attempts == 2
    assert stage.book.stale_facts == 1


def test_a_resumed_request_bound_late_gets_the_tokens_of_before_only() -> None:
    stage = decoding(Stage(P1, D1))
    stage.lose(D1)
    stage.advance(0.02)
    stage.sent()
    assert stage.book.waiting == 1  # no decode worker at all
    stage.up(D2)
    assert stage.names() == ["BeginPrefill prefill-1 2", "BeginDecode decode-2 2"]


def test_a_local_worker_lost_resumes_elsewhere() -> None:
    stage = Stage(M1, M2)
    stage.admit()
    stage.tokens(M1, (10, 11), index=0)
    stage.sent()
    stage.lose(M1)
    stage.advance(0.02)
    (begin,) = stage.sent()
    assert isinstance(begin, SendBeginDecode)
    assert (begin.worker, begin.attempt, begin.generated) == (M2, 2, (10, 11))
    stage.tokens(M2, (12,), attempt=2, index=2, finish=STOP)
    assert stage.emitted == [10, 11, 12]


def test_a_void_read_is_repeated_once_under_the_same_lease() -> None:
    stage = transferring(Stage(P1, D1))
    stage.read(D1, "checksum")
    assert stage.names() == ["KvReady decode-1 t1"]
    stage.read(D1)
    assert stage.names() == ["Release prefill-1 1"]
    assert stage.book.void_reads == {"checksum": 1}


def test_two_void_reads_prefill_again() -> None:
    stage = transferring(Stage(P1, D1))
    stage.read(D1, "checksum")
    stage.sent()
    stage.read(D1, "checksum")
    assert stage.names() == ["Cancel prefill-1 1", "Cancel decode-1 1"]
    stage.advance(0.02)
    assert stage.names() == ["BeginPrefill prefill-1 2", "BeginDecode decode-1 2"]


@pytest.mark.parametrize("reason", ["generation", "lease_expired", "wrong_incarnation", "malformed", "fingerprint"])
def test_a_void_read_that_cannot_heal_prefills_again_at_once(reason: str) -> None:
    stage = transferring(Stage(P1, D1))
    stage.read(D1, reason)
    assert stage.names() == ["Cancel prefill-1 1", "Cancel decode-1 1"]


def test_a_lapsed_lease_that_nobody_read_is_prefilled_again() -> None:
    stage = Stage(P1, D1)
    stage.report(D1, running=3, free_blocks=0)
    stage.admit()
    stage.ticket(P1, "t", final=True)
    stage.first(P1, 10)
    stage.sent()
    stage.ended(P1, "DEADLINE_EXCEEDED")
    stage.advance(0.02)
    assert stage.names() == ["BeginPrefill prefill-1 2"]


def test_attempts_are_bounded() -> None:
    stage = Stage(P1, D1, max_attempts=3)
    stage.admit()
    for attempt in (1, 2, 3):
        stage.ended(P1, "INTERNAL", attempt=attempt)
        stage.advance(1.0)
    assert isinstance(stage.end.error, Unavailable)
    assert "gave up after 3 attempts" in str(stage.end.error)
    assert stage.states[-1] == "failed.3"


def test_the_retry_budget_bounds_retries_of_living_workers_only() -> None:
    stage = Stage(P1, D1, max_attempts=100, backoff_first_s=0.0)
    stage.admit()
    for attempt in range(1, 11):
        stage.ended(P1, "INTERNAL", attempt=attempt)
        stage.advance(0.1)
    stage.lose(P1)
    stage.up(P1)
    stage.advance(0.1)
    assert len(stage.book) == 1  # a dead worker's requests move without charge
    stage.ended(P1, "INTERNAL", attempt=12)
    assert "retry budget" in str(stage.end.error)


def test_invalid_argument_from_a_worker_is_final() -> None:
    stage = Stage(P1, P2, D1)
    stage.admit()
    stage.sent()
    stage.ended(P1, "INVALID_ARGUMENT")
    assert isinstance(stage.end.error, InvalidArgument)
    assert stage.end.timings.attempts == 1


# protocol faults


def test_an_older_attempt_is_ignored() -> None:
    stage = Stage(P1, P2, D1)
    stage.admit()
    stage.sent()
    stage.lose(P1)
    stage.advance(0.02)
    stage.sent()
    stage.first(P2, 10, attempt=1)
    stage.first(P1, 10, attempt=2)
    stage.tokens(D1, (11,), attempt=1, index=0)
    assert stage.emitted == []
    assert stage.book.stale_facts == 3


def test_a_repeated_position_is_sent_once() -> None:
    stage = decoding(Stage(P1, D1))
    stage.tokens(D1, (11, 12), index=1)
    stage.tokens(D1, (12,), index=2)
    stage.tokens(D1, (12, 13), index=2, finish=STOP)
    assert stage.emitted == [10, 11, 12, 13]


def test_a_gap_is_a_fault_and_is_done_again() -> None:
    stage = decoding(Stage(P1, D1, D2))
    stage.tokens(D1, (13,), index=3)
    assert stage.names() == ["Cancel decode-1 1"]
    stage.advance(0.02)
    assert stage.names() == ["BeginPrefill prefill-1 2", "BeginDecode decode-2 2"]
    assert stage.emitted == [10, 11]


def test_tokens_before_the_first_token_are_a_fault() -> None:
    stage = Stage(P1, D1)
    stage.admit()
    stage.sent()
    stage.tokens(D1, (10,), index=0)
    assert stage.names() == ["Cancel prefill-1 1", "Cancel decode-1 1"]
    assert stage.emitted == []


# leaving, deadlines, bounds


@pytest.mark.parametrize("phase", ["waiting", "prefilling", "transferring", "decoding", "backing off"])
def test_cancel_stops_both_legs_at_once(phase: str) -> None:
    stage = Stage(*([] if phase == "waiting" else [P1, D1]))
    expected = ["Cancel prefill-1 1", "Cancel decode-1 1"]
    if phase == "transferring":
        transferring(stage)
    elif phase == "decoding":
        decoding(stage)
        expected = ["Cancel decode-1 1"]
    else:
        stage.admit()
        stage.sent()
    if phase == "waiting":
        expected = []
    if phase == "backing off":
        stage.ended(P1, "INTERNAL")
        stage.sent()
        expected = []
    assert stage.book.cancel("r", "gone", stage.now_s)
    assert stage.names() == expected
    assert isinstance(stage.end.error, RequestCancelled)
    assert stage.end.state is RequestState.CANCELLED
    assert len(stage.all(PublishCancel)) == 1
    assert not stage.book.cancel("r", "again", stage.now_s)
    assert (len(stage.book), stage.book.waiting) == (0, 0)


def test_a_deadline_stops_both_legs() -> None:
    stage = Stage(P1, D1)
    stage.admit(deadline_s=stage.now_s + 2.0)
    stage.sent()
    stage.advance(1.9)
    assert stage.names() == []
    stage.advance(0.2)
    assert stage.names() == ["Cancel prefill-1 1", "Cancel decode-1 1"]
    assert isinstance(stage.end.error, DeadlineExceeded)


def test_without_workers_a_request_waits_and_is_then_unavailable() -> None:
    stage = Stage(queue_timeout_s=5.0)
    stage.admit()
    stage.advance(4.9)
    assert stage.book.waiting == 1
    stage.advance(0.2)
    assert isinstance(stage.end.error, Unavailable)
    assert stage.end.state is RequestState.REJECTED


def test_a_waiting_request_starts_when_a_worker_comes() -> None:
    stage = Stage()
    stage.admit()
    assert stage.names() == []
    stage.up(P1)
    assert stage.names() == []  # nobody could decode
    stage.up(D1)
    assert stage.names() == ["BeginPrefill prefill-1 1", "BeginDecode decode-1 1"]


def test_waiting_requests_start_by_priority_then_age() -> None:
    stage = Stage()
    for request_id, priority in (("a", 0), ("b", 0), ("c", 5)):
        stage.admit(request_id, priority=priority)
    stage.up(M1)
    begins = [command for command in stage.sent() if isinstance(command, SendBeginDecode)]
    assert [begin.admission.request_id for begin in begins] == ["c", "a", "b"]


def test_active_and_queued_requests_are_bounded() -> None:
    stage = Stage(M1, max_active=2, max_queued=1)
    stage.admit("a")
    stage.admit("b")
    with pytest.raises(ResourceExhausted, match="2 requests are under way"):
        stage.admit("c")
    empty = Stage(max_active=2, max_queued=1)
    empty.admit("a")
    with pytest.raises(ResourceExhausted, match="1 requests wait"):
        empty.admit("b")
    assert empty.book.ended == {"rejected": 1}
    empty.book.check_integrity()


def test_close_ends_everything_and_starts_nothing() -> None:
    stage = Stage(M1)
    stage.admit("a")
    stage.admit("b")
    stage.sent()
    stage.book.close(stage.now_s, "stopping")
    assert stage.names() == ["Cancel mixed-1 1", "Cancel mixed-1 1"]
    assert len(stage.book) == 0


def test_resume_keeps_the_prompt_apart_from_generated_tokens() -> None:
    stage = decoding(Stage(P1, D1, D2))
    stage.lose(D1)
    stage.advance(0.02)
    begin = stage.sent()[0]
    assert isinstance(begin, SendBeginPrefill)
    assert begin.admission.prompt == PROMPT


def test_a_decode_worker_is_bound_when_the_prefill_begins_not_before() -> None:
    """Room on D must not be held for a prompt that waits for P's memory: whoever holds that may wait for D."""
    stage = Stage(P1, D1)
    stage.prefills_begin = False
    stage.admit()
    assert stage.names() == ["BeginPrefill prefill-1 1"]
    stage.report(D1)
    assert stage.names() == []
    stage.book.prefill_started(P1, "r", 1, 2, 1.5, stage.now_s)
    assert stage.names() == ["BeginDecode decode-1 1"]
