"""What is refused, with what answer, and what that does under overload."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.unit.router.fluid import Fluid, Outcome
from tests.unit.router.slo_fleet import PROFILE, Desk, key
from tests.unit.router.stage import MODEL
from weir.engine.sampling import SamplingParams
from weir.errors import ResourceExhausted
from weir.services.router.admission import MAX_RETRY_S, Gate, Promise
from weir.services.router.commands import Admission
from weir.services.router.entry import NEVER_S, Entry
from weir.services.router.queue import FairQueue, Waiting
from weir.services.router.slo_policy import SloOptions

PER_TOKEN_MS = (5 + 0.5 * 256) / 256


def check(desk: Desk, tokens: int = 200, queue: FairQueue | None = None, **fields: Any) -> Promise:
    admission = Admission(
        "r", MODEL, (1,) * tokens, SamplingParams(max_tokens=1_000), desk.now_s, desk.now_s + 60, **fields
    )
    entry = Entry(admission, desk.now_s, NEVER_S, 100)
    return Gate(desk.fleet, desk.policy).check(entry, queue, desk.now_s)


def test_without_an_slo_nothing_is_refused() -> None:
    desk = Desk(prefills=1, decodes=1)
    desk.report("p0", pending_prefill_tokens=1_000_000)
    assert check(desk).until_s == NEVER_S


def test_an_slo_that_can_be_met_says_how_long_waiting_makes_sense() -> None:
    desk = Desk(prefills=1, decodes=1)
    assert check(desk, slo_ttft_ms=305.0).until_s == pytest.approx(desk.now_s + 0.2)
    assert check(desk, slo_tpot_ms=50.0).until_s == NEVER_S


def test_a_refusal_says_when_the_work_in_the_way_will_be_done() -> None:
    desk = Desk(prefills=1, decodes=1)
    desk.report("p0", pending_prefill_tokens=2_000)
    desk.report("d0", running=50)
    with pytest.raises(ResourceExhausted, match=r"TTFT would be about 1144 ms, the SLO is 500 ms") as caught:
        check(desk, slo_ttft_ms=500.0)
    assert caught.value.retry_after_s == pytest.approx((2_000 * PER_TOKEN_MS + 105 - 450) / 1e3)
    desk.now_s += (caught.value.retry_after_s or 0.0) + 0.01
    assert check(desk, slo_ttft_ms=500.0).until_s > desk.now_s


def test_what_nobody_can_do_is_said_so() -> None:
    desk = Desk(prefills=1, decodes=1)
    with pytest.raises(ResourceExhausted, match="computing the prompt alone takes 105 ms on the best worker") as caught:
        check(desk, slo_ttft_ms=50.0)
    assert caught.value.retry_after_s == MAX_RETRY_S


def test_those_before_it_in_the_queue_count() -> None:
    desk = Desk(prefills=2, decodes=1)
    queue = FairQueue()
    for number in range(10):
        queue.put(Waiting(f"q{number}", "", 0, number + 1, 500, 500))
    check(desk, queue=queue, slo_ttft_ms=2_000.0)
    with pytest.raises(ResourceExhausted):
        check(desk, queue=queue, slo_ttft_ms=1_400.0)
    # Another tenant has to wait for about as much of theirs as it brings itself.
    check(desk, queue=queue, slo_ttft_ms=1_400.0, tenant="other")


def test_tpot() -> None:
    desk = Desk(prefills=1, decodes=1)
    desk.report("d0", running=99)
    with pytest.raises(ResourceExhausted, match=r"TPOT would be about 30\.0 ms, the SLO is 20 ms") as caught:
        check(desk, slo_tpot_ms=20.0)
    assert caught.value.retry_after_s == pytest.approx((1 - 18 / 30) * 100 * 0.03)


def test_nobody_is_refused_for_want_of_knowledge() -> None:
    from weir.lifecycle import Role

    desk = Desk()
    desk.add("p0", Role.PREFILL, profile=None)
    desk.add("d0", Role.DECODE, profile=None)
    assert check(desk, slo_ttft_ms=0.001).until_s == NEVER_S
    assert check(Desk(), slo_ttft_ms=0.001).until_s == NEVER_S


def test_a_refusal_for_a_bound_says_when_there_may_be_room() -> None:
    desk = Desk(prefills=1, decodes=1)
    gate = Gate(desk.fleet, desk.policy)
    admission = Admission("r", MODEL, (1,) * 200, SamplingParams(max_tokens=9), desk.now_s, desk.now_s + 60)
    assert gate.retry_after_s(admission, None, desk.now_s) == 1.0
    desk.report("p0", pending_prefill_tokens=4_000)
    desk.report("d0", running=50)
    assert gate.retry_after_s(admission, None, desk.now_s) == pytest.approx(4 * PER_TOKEN_MS)
    queue = FairQueue()
    queue.put(Waiting("q", "", 0, 1, 3_000, 2_000))
    assert gate.retry_after_s(admission, queue, desk.now_s) == pytest.approx(6 * PER_TOKEN_MS)


# under load

TTFT_MS, TPOT_MS = 600.0, 40.0
PREFILL_CAPACITY = 2 / PROFILE.prefill_s(200)
SECONDS = 25.0


def offered(
    rate: float, *, seed: int = 5, output: int = 50, seconds: float = SECONDS, told: bool = True, **workers: Any
) -> Outcome:
    """Poisson arrivals of 100 to 300 tokens at ``rate`` a second; ``told``: the router knows their SLOs."""
    fluid = Fluid(**{"prefills": 2, "decodes": 2, **workers}, seed=seed)
    now_s, number = 0.0, 0
    while (now_s := now_s + fluid.random.expovariate(rate)) < seconds:
        number += 1
        fluid.offer(
            now_s,
            f"r{number}",
            fluid.random.randrange(100, 300),
            fluid.random.randrange(output // 2, output * 3 // 2),
            slo_ttft_ms=TTFT_MS if told else 0.0,
            slo_tpot_ms=TPOT_MS if told else 0.0,
        )
    outcome = fluid.run(seconds + 60.0)
    assert len(fluid.book) == 0
    fluid.book.check_integrity()
    assert outcome.ended["finished"] + len(outcome.refused) == number
    return outcome


@pytest.mark.parametrize(
    ("capacity", "case"),
    [(PREFILL_CAPACITY, {}), (12.0, {"output": 300, "decodes": 1, "prefills": 2})],
    ids=["prefill is short", "decode is short"],
)
def test_under_twice_the_load_goodput_stays_and_promises_hold(capacity: float, case: dict[str, Any]) -> None:
    shares = (0.6, 0.8, 0.9, 1.0, 1.2)
    peak = max(offered(share * capacity, **case).good(TTFT_MS, TPOT_MS) for share in shares)
    outcome = offered(2.0 * capacity, **case)
    good, accepted = outcome.good(TTFT_MS, TPOT_MS), outcome.ended["finished"]
    refused = len(outcome.refused)
    print(f"peak {peak / SECONDS:.2f}/s, at 2x {good / SECONDS:.2f}/s; {accepted} accepted, {refused} refused")
    assert good >= 0.95 * peak
    assert good >= 0.95 * accepted
    assert outcome.refused
    assert all(0.0 < retry_s <= MAX_RETRY_S for retry_s in outcome.refused.values())


def test_without_admission_goodput_falls_under_twice_the_load() -> None:
    """What the test above would show if nothing were refused."""
    peak = offered(0.9 * PREFILL_CAPACITY).good(TTFT_MS, TPOT_MS)
    assert offered(2.0 * PREFILL_CAPACITY, told=False).good(TTFT_MS, TPOT_MS) < 0.5 * peak


def test_a_worker_that_becomes_slow_gets_less_within_seconds() -> None:
    fluid = Fluid(2, 2)
    for number in range(160):
        fluid.offer(number / 8, f"r{number}", 200, 20)
    fluid.later(10.0, lambda: setattr(fluid.workers[key("p0")], "slowness", 6.0))
    fluid.run(12.0)
    before = {name: fluid.workers[key(name)].prefilled for name in ("p0", "p1")}
    fluid.run(25.0)
    after = {name: fluid.workers[key(name)].prefilled - before[name] for name in ("p0", "p1")}
    assert before["p0"] > 0.7 * before["p1"]
    assert after["p0"] < 0.35 * after["p1"]
    view = fluid.fleet.get(key("p0"))
    assert view is not None
    assert fluid.outcome.ended["finished"] == 160


def test_a_light_tenant_is_served_as_if_the_heavy_one_were_not_there() -> None:
    fluid = Fluid(1, 1, options=SloOptions(queue_ms=200.0))
    for number in range(300):  # five times what the worker can do
        fluid.offer(number / 50, f"heavy{number}", 200, 20, tenant="heavy")
    for number in range(12):
        fluid.offer(1.0 + number / 2, f"light{number}", 200, 20, tenant="light")
    outcome = fluid.run(90.0)
    assert outcome.ended["finished"] == 312
    light = sorted(ms for name, ms in outcome.ttft_ms.items() if name.startswith("light"))
    heavy = sorted(ms for name, ms in outcome.ttft_ms.items() if name.startswith("heavy"))
    assert light[-1] < 2_500.0
    assert heavy[len(heavy) // 2] > 8_000.0


def test_limits_of_a_tenant_and_priorities() -> None:
    fluid = Fluid(1, 1, options=SloOptions(queue_ms=100.0), tenant_max_active=20, tenant_max_queued=10)
    for number in range(40):
        fluid.offer(0.0, f"a{number}", 200, 5, tenant="a")
    fluid.offer(0.0, "b", 200, 5, tenant="b")
    fluid.offer(0.0, "c", 200, 5, tenant="c", priority=3)
    outcome = fluid.run(60.0)
    assert 10 <= outcome.by_tenant["a"] <= 20
    assert len(outcome.refused) == 40 - outcome.by_tenant["a"]
    assert outcome.ttft_ms["c"] < outcome.ttft_ms["b"]
    assert outcome.by_tenant["b"] == outcome.by_tenant["c"] == 1


def test_who_waits_too_long_for_its_slo_is_refused_before_prefill() -> None:
    """Predicted in time, but the worker got slow: the queue's own deadline ends the wait."""
    fluid = Fluid(1, 1, options=SloOptions(queue_ms=100.0))
    for number in range(8):
        fluid.offer(0.0, f"r{number}", 200, 5)
    fluid.workers[key("p0")].slowness = 20.0
    fluid.offer(0.01, "late", 200, 5, slo_ttft_ms=3_000.0)
    outcome = fluid.run(60.0)
    assert "late" in outcome.refused
    assert "late" not in outcome.ttft_ms
    assert outcome.ended["rejected"] == 1


def test_a_wave_of_finished_prefills_stretches_others_steps_by_no_more_than_the_batch_does() -> None:
    """32 prompts finish at once while 8 sequences decode; gaps are compared to a step of the batch of then."""
    fluid = Fluid(32, 1, profile=PROFILE)
    for number in range(8):
        fluid.offer(0.0, f"long{number}", 100, 600)
    for number in range(32):
        fluid.offer(2.0, f"wave{number}", 100, 40)
    fluid.run(20.0)
    gaps = []
    for number in range(8):
        moments = [moment for moment in fluid.emitted_s[f"long{number}"] if 1.0 < moment < 6.0]
        gaps += [after - before for before, after in pairwise(moments)]
    gaps.sort()
    whole_batch_s = PROFILE.step_s(40, 0)
    assert gaps[int(0.99 * len(gaps))] <= 1.3 * whole_batch_s
    assert gaps[len(gaps) // 2] <= 1.3 * PROFILE.step_s(8, 0)
