"""Workers with other weights under one name, and workers that are the only ones left: who goes on with what."""

from __future__ import annotations

from typing import Any

from tests.unit.router.slo_fleet import Desk
from tests.unit.router.stage import D1, D2, M1, MODEL, P1, P2, Stage, info
from weir.errors import Unavailable
from weir.lifecycle import RequestState, Role
from weir.rpc.v1 import kv_pb2
from weir.services.router.commands import End, PublishCancel
from weir.services.router.facts import EndedNews
from weir.services.router.fleet import Fleet
from weir.services.router.placing import STRANDED_S
from weir.services.router.policy import Demand
from weir.services.router.view import revision_of

OLD: dict[str, Any] = {"fingerprint": b"old", "revision": "old"}
NEW: dict[str, Any] = {"fingerprint": b"new", "revision": "new"}


def test_a_revision_is_what_answers_depend_on_and_not_how_kv_lies() -> None:
    one = kv_pb2.KvFingerprint(weights="w", dtype="float32", block_size=16, layout_version=1)
    assert revision_of(one) == revision_of(kv_pb2.KvFingerprint(weights="w", dtype="float32", block_size=64))
    assert revision_of(one) != revision_of(kv_pb2.KvFingerprint(weights="v", dtype="float32", block_size=16))
    assert revision_of(one) != revision_of(kv_pb2.KvFingerprint(weights="w", dtype="bfloat16", block_size=16))
    assert revision_of(kv_pb2.KvFingerprint()) == ""


def test_only_workers_of_its_revision_are_able_to_go_on() -> None:
    fleet = Fleet()
    for worker, kind in ((P1, OLD), (D1, OLD), (D2, NEW)):
        fleet.put(info(worker, **kind)).connected = True
    everyone = fleet.serving(MODEL)
    assert fleet.able(MODEL, Demand(5, 8)) is everyone
    old = fleet.able(MODEL, Demand(5, 8, revision="old"))
    assert [view.key for view in old] == [P1, D1]
    assert fleet.able(MODEL, Demand(6, 7, revision="old")) is old
    assert [view.key for view in fleet.able(MODEL, Demand(5, 8, revision="gone"))] == []


def test_a_begun_answer_is_gone_on_with_by_the_same_weights_only() -> None:
    stage = Stage()
    for worker, kind in ((P1, OLD), (D1, OLD)):
        stage.up(worker, **kind)
    stage.admit()
    stage.first(P1, 40)
    stage.up(P2, **NEW)
    stage.up(D2, **NEW)
    stage.lose(D1)
    stage.lose(P1)
    stage.sent()
    stage.advance(1.0)
    assert [name for name in stage.names() if name.startswith("Begin")] == []
    # Others are served meanwhile, and it goes on once its weights are back.
    stage.admit("r2")
    assert stage.names() == ["BeginPrefill prefill-2 1", "BeginDecode decode-2 1"]
    stage.up(P1, **OLD)
    stage.up(D1, **OLD)
    begun = [name for name in stage.names() if name.startswith("Begin")]
    assert begun == ["BeginPrefill prefill-1 2", "BeginDecode decode-1 2"]


def test_without_its_weights_a_begun_answer_ends_by_that_name() -> None:
    stage = Stage(queue_timeout_s=3.0)
    for worker, kind in ((P1, OLD), (D1, OLD), (P2, NEW), (D2, NEW)):
        stage.up(worker, **kind)
    stage.admit()
    maker = P1 if "BeginPrefill prefill-1 1" in stage.names() else P2
    reader = D1 if maker == P1 else D2
    stage.first(maker, 40)
    stage.lose(reader)
    stage.lose(maker)
    stage.advance(1.0)
    stage.advance(4.0)
    end = stage.end
    assert (end.state, type(end.error)) == (RequestState.FAILED, Unavailable)
    assert "no worker decodes with the weights that its answer began with" in str(end.error)


def test_a_prefill_worker_that_nobody_can_read_keeps_nobody_waiting() -> None:
    stage = Stage()
    stage.up(P1, **NEW)
    stage.up(D1, **OLD)
    stage.admit()
    assert stage.names() == ["BeginDecode decode-1 1"]
    desk = Desk()
    desk.add("p0", info(P1).role, **NEW)
    desk.add("d0", info(D1).role, **OLD)
    choice = desk.choose(desk.demand())
    assert choice is not None
    assert (choice.prefill, choice.reason) == (None, "no prefill worker")
    desk.add("p1", info(P1).role, **OLD)
    choice = desk.choose(desk.demand())
    assert choice is not None
    assert choice.prefill is desk.view("p1")


def test_a_request_that_others_cancel_on_its_workers_is_cancelled_and_not_tried_again() -> None:
    stage = Stage(P1, D1)
    stage.admit()
    stage.sent()
    stage.book.attempt_ended(P1, True, "r", 1, EndedNews("CANCELLED", "cancelled by event"), stage.now_s)
    end = stage.end
    assert (end.state, str(end.error)) == (RequestState.CANCELLED, "cancelled by event")
    assert len(stage.book) == 0
    stage.book.check_integrity()
    cancels = [command for command in stage.seen if isinstance(command, PublishCancel)]
    assert cancels == [] or cancels[0].attempt == 1


def test_a_prompt_whose_readers_have_other_weights_by_now_is_placed_anew() -> None:
    stage = Stage()
    stage.up(P1, **OLD)
    stage.up(D1, **OLD)
    stage.prefills_begin = False
    stage.admit()
    assert stage.names() == ["BeginPrefill prefill-1 1"]
    stage.lose(D1)
    stage.up(D2, **NEW)
    assert stage.names() == []  # it waits at P1 and holds nothing there
    stage.book.prefill_started(P1, "r", 1, 0, 1.0, stage.now_s)
    assert stage.names() == ["Cancel prefill-1 1", "BeginDecode decode-2 2"]


def test_begun_kv_is_not_kept_for_long_for_readers_that_have_other_weights() -> None:
    stage = Stage(queue_timeout_s=60.0)
    stage.up(P1, **OLD)
    stage.admit()
    stage.up(D1, **OLD)
    stage.sent()
    stage.ticket(P1, "t1", final=True)
    stage.first(P1, 40)
    stage.lose(D1)
    stage.up(D2, **NEW)
    stage.advance(STRANDED_S - 0.1)
    assert stage.all(End) == []
    stage.advance(0.2)
    assert "no worker decodes with the weights that its answer began with" in str(stage.end.error)


def test_a_prefill_worker_that_decodes_by_now_is_not_bound_to_read_from_itself() -> None:
    stage = Stage(P1)
    stage.up(D1)
    stage.prefills_begin = False
    stage.admit()
    assert stage.names() == ["BeginPrefill prefill-1 1"]
    stage.lose(D1)
    stage.up(P1, role=Role.MIXED, role_epoch=2)
    stage.book.prefill_started(P1, "r", 1, 0, 1.0, stage.now_s)
    # A new attempt, all of it there.
    assert stage.names() == ["Cancel prefill-1 1", "BeginDecode prefill-1 2"]


def test_another_one_reads_from_a_prefill_worker_that_decodes_by_now() -> None:
    stage = Stage(P1)
    stage.up(M1)
    stage.up(D1)
    stage.admit()
    stage.first(P1, 40)
    stage.up(P1, role=Role.MIXED, role_epoch=2)
    stage.sent()
    stage.lose(D1)
    assert stage.names()[0] == "BeginDecode mixed-1 1"
