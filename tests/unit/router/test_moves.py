"""Work that a worker sends away (role change, shutdown) is moved: no failure, no charge, and bounded all the same."""

from __future__ import annotations

from tests.unit.router.stage import D1, D2, M1, P1, P2, Stage, info
from weir.errors import Unavailable
from weir.lifecycle import Role
from weir.services.router.recovery import MAX_MOVES


def test_a_request_outlives_more_moves_than_failures() -> None:
    stage = Stage(P1, P2, D1, max_attempts=2)
    stage.admit()
    for attempt in range(1, 11):
        began = [name for name in stage.names() if name.startswith("BeginPrefill")]
        assert began == [f"BeginPrefill {'prefill-1' if attempt % 2 else 'prefill-2'} {attempt}"], "the other one"
        stage.ended(P1 if attempt % 2 else P2, "UNAVAILABLE", attempt=attempt)
        stage.advance(0.06)
    assert stage.book.retries["prefill_lost"] == 10
    assert len(stage.book) == 1


def test_moves_end() -> None:
    stage = Stage(P1, D1, max_attempts=3)
    stage.admit()
    for attempt in range(1, MAX_MOVES + 3):
        assert len(stage.book) == 1, attempt
        stage.sent()
        stage.ended(P1, "UNAVAILABLE", attempt=attempt)
        stage.advance(2.0)
    assert isinstance(stage.end.error, Unavailable)
    assert len(stage.book) == 0


def test_finished_prefill_goes_to_a_mixed_worker_when_the_decode_worker_has_become_one() -> None:
    stage = Stage(P1, D1)
    stage.admit()
    stage.sent()
    stage.ticket(P1, "t1", final=True)
    stage.first(P1, 10)
    stage.sent()
    stage.fleet.put(info(D1, Role.MIXED, role_epoch=2)).connected = True
    stage.ended(D1, "UNAVAILABLE")
    stage.advance(0.2)
    stage.up(M1)
    names = stage.names()
    assert names[0] in ("BeginDecode mixed-1 1", "BeginDecode decode-1 1")
    assert not [name for name in names if name.startswith("BeginPrefill")], "no second prefill"
    assert stage.emitted == [10]


def test_a_decode_that_moves_continues_where_it_was() -> None:
    stage = Stage(P1, D1, D2)
    stage.admit()
    began = [name for name in stage.names() if name.startswith("BeginDecode")]
    first = D1 if began == ["BeginDecode decode-1 1"] else D2
    stage.ticket(P1, "t1", final=True)
    stage.first(P1, 10)
    stage.read(first)
    stage.tokens(first, (11,), index=1)
    stage.sent()
    stage.ended(first, "UNAVAILABLE")
    stage.advance(0.1)
    names = stage.names()
    assert [name for name in names if name.startswith("BeginPrefill")] == ["BeginPrefill prefill-1 2"]
    assert stage.emitted == [10, 11]
