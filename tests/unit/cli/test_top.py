"""Frames of ``weir top`` from two samples: what flows, and every part of the screen."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from weir.cli.top import Flow, Recent, Sample, flows, frame, size_of
from weir.rpc.v1 import common_pb2, controller_pb2, events_pb2, kv_pb2, router_pb2, worker_pb2

PRINT = kv_pb2.KvFingerprint(layers=30, kv_heads=3, head_dim=64, kv_dtype="float32", block_size=16)


def load(prefilled: int = 0, generated: int = 0, leased: int = 0, kv_read: int = 0) -> common_pb2.WorkerLoad:
    blocks = common_pb2.BlockCounts(free=60 - leased, used=30, cached=10, leased=leased, total=100)
    return common_pb2.WorkerLoad(
        running=2, waiting=1, pending_prefill_tokens=70, blocks=blocks, open_leases=1, outstanding_reads=3,
        decode_step_ms=12.5, prefilled_tokens=prefilled, generated_tokens=generated,
        kv_read_bytes=kv_read,
    )  # fmt: skip


def worker(name: str, role: common_pb2.Role, said: common_pb2.WorkerLoad, incarnation: int = 1) -> Any:
    return router_pb2.ListWorkersResponse.Worker(
        worker_id=name, incarnation=incarnation, role=role, connected=True, load=said
    )


def own(said: common_pb2.WorkerLoad, incarnation: int = 1) -> worker_pb2.GetStateResponse:
    return worker_pb2.GetStateResponse(incarnation=incarnation, load=said, fingerprint=PRINT)


def sample(at_s: float, *workers: Any, states: dict[str, Any] | None = None, **others: Any) -> Sample:
    router = others.get("router", router_pb2.GetRouterStateResponse())
    fleet = router_pb2.ListWorkersResponse(workers=workers, stale=others.get("stale", False))
    return Sample(at_s, fleet, router, states or {}, others.get("decisions"))


def drawn(before: Sample | None, now: Sample, rows: int = 12) -> list[str]:
    console = Console(width=200, force_terminal=False, color_system=None)
    with console.capture() as captured:
        console.print(frame(before, now, rows=rows))
    return [" ".join(line.split()) for line in captured.get().splitlines() if line.strip()]


def test_flows_are_what_was_added_between_two_samples() -> None:
    before = sample(
        10.0,
        worker("p", common_pb2.ROLE_PREFILL, load(prefilled=100)),
        worker("d", common_pb2.ROLE_DECODE, load()),
        states={"d": own(load(generated=40, kv_read=16_000))},
    )
    now = sample(
        12.0,
        worker("p", common_pb2.ROLE_PREFILL, load(prefilled=1100)),
        worker("d", common_pb2.ROLE_DECODE, load()),
        worker("new", common_pb2.ROLE_MIXED, load(prefilled=9)),
        states={"d": own(load(generated=100, kv_read=48_000))},
    )
    assert flows(before, now) == {"p": Flow(500.0), "d": Flow(0.0, 30.0, 16_000.0), "new": Flow()}
    assert flows(None, now) == dict.fromkeys(("p", "d", "new"), Flow())


def test_a_worker_that_began_anew_has_no_flow_yet() -> None:
    before = sample(10.0, worker("p", common_pb2.ROLE_PREFILL, load(prefilled=900)))
    now = sample(11.0, worker("p", common_pb2.ROLE_PREFILL, load(prefilled=5), incarnation=2))
    assert flows(before, now) == {"p": Flow()}


def test_kv_is_counted_from_the_last_report_of_a_worker_that_does_not_answer() -> None:
    before, now = (
        sample(at_s, worker("d", common_pb2.ROLE_DECODE, load(kv_read=count)), states={})
        for at_s, count in ((10.0, 500_000), (12.0, 2_500_000))
    )
    assert flows(before, now) == {"d": Flow(kv=1_000_000.0)}
    assert any(line.startswith("decode 1 ") and line.endswith(" 1.0 MB") for line in drawn(before, now))


def test_flows_are_means_over_a_window_however_often_one_looks() -> None:
    recent = Recent()
    samples = [sample(float(at_s)) for at_s in range(8)]
    assert recent.add(samples[0]) is None
    assert [recent.add(one) for one in samples[1:]] == [samples[i] for i in (0, 0, 0, 1, 2, 3, 4)]
    late = sample(100.0)
    assert recent.add(late) is samples[7], "what came before a pause is no window's beginning"


def test_pools_show_stock_and_headroom_in_bytes_when_workers_say_what_a_block_takes() -> None:
    said = load(leased=4)
    lines = drawn(None, sample(1.0, worker("p", common_pb2.ROLE_PREFILL, said), states={"p": own(said)}))
    # 4 leased and 56 + 10 free or cached blocks of 16 tokens.
    assert "prefill 1 2 1 70 tok 2.9 MB 48.7 MB 0 0 0 B" in lines
    lines = drawn(None, sample(1.0, worker("p", common_pb2.ROLE_PREFILL, said)))
    assert "prefill 1 2 1 70 tok 4 blocks 66 blocks 0 0 0 B" in lines


def test_workers_and_their_blocks() -> None:
    lines = drawn(None, sample(1.0, worker("d", common_pb2.ROLE_DECODE, load(leased=4)), stale=True))
    assert "d decode ready 2 1 ██████" + "█" + "▒▒" + "·" * 11 + " 34 % 1 3 12.5 0 0" in lines
    assert lines[0].endswith("registry out of reach: last known view")


def test_requests_by_state_oldest_first_and_how_many_more() -> None:
    requests = [
        router_pb2.GetRouterStateResponse.ActiveRequest(
            request_id=f"r-{age}", state=state, attempt=1, prefill_worker="p", tokens_sent=2, age_ms=age
        )
        for age, state in (
            (500.0, common_pb2.REQUEST_STATE_DECODING),
            (9000.0, common_pb2.REQUEST_STATE_DECODING),
            (20.0, common_pb2.REQUEST_STATE_PREFILLING),
        )
    ]
    router = router_pb2.GetRouterStateResponse(
        active_requests=3, queued_requests=1, open_sessions=4, ended={"finished": 7, "failed": 0}, requests=requests
    )
    lines = drawn(None, sample(1.0, router=router), rows=1)
    assert lines[0] == "weir 3 in flight 1 queued 4 sessions ended: 7 finished"
    assert "requests 1 prefilling 2 decoding" in lines
    assert "r-9000.0 decoding 1 9.0 s 2 p -" in lines
    assert "and 2 more" in lines


def test_decisions_of_a_controller() -> None:
    event = events_pb2.DecisionEvent(
        number=3,
        action=events_pb2.BALANCE_ACTION_FLIP,
        reason="prefill is short",
        flips=[events_pb2.RoleFlip(worker_id="d2", role=common_pb2.ROLE_PREFILL)],
    )
    answer = controller_pb2.ListDecisionsResponse(decisions=[event], latest=event, mode="auto", pending=3)
    lines = drawn(None, sample(1.0, decisions=answer))
    assert "decisions, mode auto" in lines
    assert any(line.endswith("flip (pending) d2 -> prefill prefill is short") for line in lines)
    assert lines[-1] == "now: flip; prefill is short"
    assert not any("decisions" in line for line in drawn(None, sample(1.0)))


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 B"), (999, "999 B"), (8_847_360, "8.8 MB"), (1.1e9, "1.1 GB"), (5e13, "50.0 TB")]
)
def test_sizes(count: float, said: str) -> None:
    assert size_of(count) == said
