"""The way between a P and a D is slow or dead while both are well: another D, then another P."""

from __future__ import annotations

from tests.unit.router.stage import D1, D2, P1, P2, Stage, transferring
from weir.services.router.commands import SendBeginDecode


def test_a_read_that_took_too_long_is_made_by_another_decode_worker() -> None:
    stage = transferring(Stage(P1, D1, D2))
    stage.read(D1, "timeout")
    assert stage.names() == [
        "Cancel decode-1 1", "BeginDecode decode-2 1", "KvReady decode-2 t1", "FirstToken decode-2 first 10",
    ]  # fmt: skip
    stage.read(D2)
    assert stage.names() == ["Release prefill-1 1"]
    stage.tokens(D1, (99,), index=1)
    stage.tokens(D2, (11,), index=1)
    assert stage.emitted == [10, 11]
    assert stage.book.retries == {"rebind": 1}


def test_when_another_one_cannot_read_either_another_worker_prefills() -> None:
    stage = transferring(Stage(P1, P2, D1, D2))
    stage.read(D1, "timeout")
    stage.sent()
    stage.read(D2, "timeout")
    assert stage.names() == ["Cancel prefill-1 1", "Cancel decode-2 1"]
    stage.advance(0.02)
    assert stage.names()[0] == "BeginPrefill prefill-2 2"
    assert stage.book.retries == {"rebind": 1, "read_void": 1}


def test_the_only_decode_worker_reads_from_another_prefill_worker() -> None:
    """A read that had all its time is not made the same way again."""
    stage = transferring(Stage(P1, P2, D1))
    stage.read(D1, "timeout")
    assert stage.names() == ["Cancel prefill-1 1", "Cancel decode-1 1"]
    stage.advance(0.02)
    assert stage.names() == ["BeginPrefill prefill-2 2", "BeginDecode decode-1 2"]


def test_the_only_pair_prefills_where_it_decodes() -> None:
    stage = transferring(Stage(P1, D1))
    stage.read(D1, "timeout")
    assert stage.names() == ["Cancel prefill-1 1", "Cancel decode-1 1"]
    stage.advance(0.02)
    begin = stage.all(SendBeginDecode)[-1]
    assert (begin.worker, begin.attempt, begin.source) == (D1, 2, None)
    stage.tokens(D1, (11, 12), index=1, attempt=2)
    assert stage.emitted == [10, 11, 12]
    assert stage.book.local_prefills == {"KV cannot be moved": 1}


def test_another_pair_is_tried_before_that() -> None:
    stage = transferring(Stage(P1, P2, D1))
    stage.read(D1, "timeout")
    stage.advance(0.02)
    stage.sent()
    stage.ticket(P2, "t2", final=True, attempt=2)
    stage.first(P2, 11, index=1, attempt=2)
    stage.sent()
    stage.read(D1, "timeout", attempt=2)
    stage.sent()
    stage.advance(0.1)
    begin = stage.all(SendBeginDecode)[-1]
    assert (begin.worker, begin.attempt, begin.source) == (D1, 3, None)


def test_a_read_that_was_broken_off_is_made_again_where_it_was() -> None:
    """Another read's end breaks off those beside it: that says nothing about the worker."""
    stage = transferring(Stage(P1, D1, D2))
    stage.read(D1, "transport")
    assert stage.names() == ["KvReady decode-1 t1"]


def test_broken_off_twice_it_is_made_by_another_decode_worker() -> None:
    """A way that is closed is told at once: both reads end, and neither had its time."""
    stage = transferring(Stage(P1, P2, D1, D2))
    stage.read(D1, "transport")
    stage.sent()
    stage.read(D1, "transport")
    assert stage.names() == [
        "Cancel decode-1 1", "BeginDecode decode-2 1", "KvReady decode-2 t1", "FirstToken decode-2 first 10",
    ]  # fmt: skip
    stage.read(D2, "transport")
    assert stage.names() == ["Cancel prefill-1 1", "Cancel decode-2 1"], "three reads are enough"


def test_bytes_that_are_wrong_twice_are_made_anew() -> None:
    stage = transferring(Stage(P1, D1, D2))
    stage.read(D1, "checksum")
    assert stage.names() == ["KvReady decode-1 t1"]
    stage.read(D1, "checksum")
    assert stage.names() == ["Cancel prefill-1 1", "Cancel decode-1 1"]


def test_bound_again_where_it_was_stopped_a_request_is_neither_cancelled_nor_failed() -> None:
    stage = transferring(Stage(P1, D1, D2))
    stage.read(D1, "timeout")
    stage.sent()
    stage.lose(D2)
    assert stage.names()[0] == "BeginDecode decode-1 1"
    stage.ended(D1, "CANCELLED")  # of its first life there, or of the second: the worker remembers the cancel
    stage.advance(0.02)
    assert stage.names()[:2] == ["Cancel prefill-1 1", "BeginPrefill prefill-1 2"]
    assert stage.book.retries == {"rebind": 2, "decode_lost": 1}
    (entry,) = stage.book.entries()
    assert entry.failures == 1  # the loss of D2
