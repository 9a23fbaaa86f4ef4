"""The balance controller driven through scenarios, by a fluid model of workers and by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.balance.plant import SPEED, Mix, Plant, drive, lasting
from weir.balance.decide import BalanceController
from weir.balance.decision import Action, BalanceLimits, Decision, Flip
from weir.balance.observe import Links, Observation, WorkerFacts
from weir.balance.sizing import Slo
from weir.balance.window import Distribution, TrafficWindow
from weir.errors import InvalidArgument
from weir.lifecycle import Role

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED
SLO = Slo(ttft_s=2.0, tpot_s=0.05)
SPLIT = BalanceLimits(slo=SLO, mixed=False, local_prefill=False)
SCALING = BalanceLimits(slo=SLO, mixed=False, local_prefill=False, scale=True, max_workers=6, min_workers=1)
PREFILL_HEAVY, DECODE_HEAVY = Mix(3.6, 6000, 50), Mix(7.0, 500, 400)


def alternating(t: float) -> Mix:
    """Phases of five minutes."""
    return PREFILL_HEAVY if int(t // 300) % 2 == 0 else DECODE_HEAVY


# -- scenarios ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("roles", [[P, P, D, D], [P, D, D, D], [P, P, P, D]])
def test_constant_load_for_30_minutes_changes_at_most_once(seed: int, roles: list[Role]) -> None:
    plant = Plant(roles, lambda t: Mix(8.0), seed=seed)
    made = lasting(drive(plant, BalanceController(SPLIT), 1800))
    assert len(made) <= 1, f"seed {seed}: {[one.reason for one in made]}"
    assert plant.counts() == (2, 2, 0)


@pytest.mark.parametrize("seed", range(3))
def test_constant_load_is_left_alone_by_the_whole_policy(seed: int) -> None:
    limits = BalanceLimits(slo=SLO, scale=True, max_workers=8)
    plant = Plant([P, P, D, D], lambda t: Mix(6.0), seed=seed)
    made = lasting(drive(plant, BalanceController(limits), 1800))
    assert len(made) <= 1, f"seed {seed}: {[one.reason for one in made]}"


@pytest.mark.parametrize("seed", range(3))
def test_a_mix_that_turns_is_followed_without_swinging(seed: int) -> None:
    plant, controller = Plant([P, P, D, D], alternating, seed=seed), BalanceController(SPLIT)
    settled: list[tuple[int, int, int]] = []
    made: list[Decision] = []
    for _ in range(6):
        made += drive(plant, controller, 75)
        settled.append(plant.counts())
        late = drive(plant, controller, 225)
        assert lasting(late) == [], f"seed {seed}: swings at {plant.now_s}"
    assert settled == [(3, 1, 0), (1, 3, 0)] * 3, f"seed {seed}"
    assert len(lasting(made)) == 11, "one flip at first, then two for each turn"
    assert plant.arrived - plant.finished < 200


def test_following_beats_every_fixed_split() -> None:
    controlled = Plant([P, P, D, D], alternating, seed=5)
    drive(controlled, BalanceController(SPLIT), 1800)
    for prefill in (1, 2, 3):
        fixed = Plant([P] * prefill + [D] * (4 - prefill), alternating, seed=5)
        while fixed.now_s < 1800:
            fixed.tick()
        assert controlled.finished - controlled.late > 1.4 * (fixed.finished - fixed.late), prefill


def test_no_traffic_returns_to_the_minimum_and_traffic_brings_workers_back() -> None:
    def traffic(t: float) -> Mix:
        return Mix(5.0 if t < 300 else 0.0 if t < 1500 else 8.0)

    plant, controller = Plant([P, P, D, D], traffic), BalanceController(SCALING)
    drive(plant, controller, 300)
    assert plant.counts() == (2, 2, 0)
    made = drive(plant, controller, 1195)
    assert plant.counts() == (0, 0, 1), "one mixed worker is left"
    assert {one.action for one in made} == {Action.SCALE_DOWN, Action.ALL_MIXED}
    drive(plant, controller, 600)
    assert plant.counts()[0] + plant.counts()[1] + plant.counts()[2] >= 4
    assert len(plant.workers) <= 6


def test_no_traffic_without_scaling_changes_nothing() -> None:
    plant = Plant([P, P, D, D], lambda t: Mix(8.0 if t < 60 else 0.0))
    assert drive(plant, BalanceController(SPLIT), 900) == []


def test_a_worker_that_never_becomes_ready_expires_and_is_tried_less_and_less() -> None:
    plant, controller = Plant([P, D], lambda t: Mix(12.0)), BalanceController(SCALING)
    plant.starts_work = False
    made = drive(plant, controller, 1800)
    ups = [one for one in made if one.action is Action.SCALE_UP]
    cancelled = [one.cancels for one in made if one.cancels]
    assert cancelled == [one.number for one in ups][: len(cancelled)]
    assert 3 <= len(ups) <= 6
    gaps = [b.at_s - a.at_s for a, b in pairwise(ups)]
    assert gaps == sorted(gaps), "each failure doubles the pause"
    pressed = [one for one in made if one.action is Action.BACK_PRESSURE]
    assert pressed, "meanwhile too much is said to be too much"
    assert all(one.admit_per_s >= one.inputs["capacity"] > 0 for one in pressed)
    assert all(one.expires_s == one.at_s + SCALING.advice_s for one in pressed)


def test_a_flip_that_never_happens_expires_and_another_worker_is_asked() -> None:
    plant, controller = Plant([P, D, D, D], lambda t: PREFILL_HEAVY), BalanceController(SPLIT)
    plant.broken.add("w002")
    made = drive(plant, controller, 300)
    flips = [one.flips[0].worker_id for one in made if one.flips]
    assert flips[0] == "w002"
    assert flips[1:] == ["w003", "w004"]
    assert plant.counts() == (3, 1, 0)


def test_dead_workers_are_made_good() -> None:
    plant, controller = Plant([P, D, D, D], lambda t: DECODE_HEAVY), BalanceController(SPLIT)
    assert drive(plant, controller, 120) == []
    plant.die("w001")
    made = lasting(drive(plant, controller, 5))
    assert [one.action for one in made] == [Action.FLIP], "at once: nobody prefills"
    assert plant.counts() == (1, 2, 0)
    for worker_id in [w.worker_id for w in plant.workers.values() if w.role is P]:
        plant.die(worker_id)
    plant.die(next(iter(plant.workers)))
    drive(plant, controller, 5)
    assert plant.counts() == (0, 0, 1), "the last one does everything"


def test_workers_that_are_just_starting_are_not_made_mixed() -> None:
    def traffic(t: float) -> Mix:
        return Mix(0.0)

    plant, controller = Plant([D], traffic), BalanceController(BalanceLimits(slo=SLO))
    assert drive(plant, controller, 10) == [], "a decode worker alone, and no request yet"
    plant.add(P)
    assert drive(plant, controller, 60) == []
    alone = lasting(drive(Plant([D], traffic), BalanceController(BalanceLimits(slo=SLO)), 125))
    assert [one.action for one in alone] == [Action.ALL_MIXED], "nobody else came"


def test_a_full_budget_is_never_exceeded_and_an_exceeded_one_goes_down_first() -> None:
    limits = replace(SCALING, max_workers=3)
    plant, controller = Plant([P, P, D, D, D], lambda t: Mix(30.0)), BalanceController(limits)
    seen = [len(plant.workers)]
    actions = []
    for _ in range(300):
        actions += drive(plant, controller, 1)
        seen.append(len(plant.workers))
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == 3
    downs = [one.action for one in actions if one.action.lasting][:2]
    assert downs == [Action.SCALE_DOWN, Action.SCALE_DOWN]
    assert Action.SCALE_UP not in {one.action for one in actions}
    assert any(one.action is Action.BACK_PRESSURE for one in actions)


def test_scaling_up_stops_at_what_carries_the_load() -> None:
    plant, controller = Plant([P, D], lambda t: Mix(8.0)), BalanceController(SCALING)
    made = lasting(drive(plant, controller, 900))
    assert {one.action for one in made} <= {Action.SCALE_UP, Action.FLIP}
    assert 4 <= len(plant.workers) <= 6
    assert lasting(drive(plant, controller, 900)) == [], "and stays"


def test_a_manual_change_is_taken_as_it_is() -> None:
    plant, controller = Plant([P, P, D, D], lambda t: Mix(8.0)), BalanceController(SPLIT)
    assert drive(plant, controller, 120) == []
    plant.set_role("w002", D)
    decision = controller.step(plant.observe(), plant.now_s)
    assert decision.action is Action.NONE
    assert decision.reason == "roles were changed by hand (w002): taken as they are"
    quiet = drive(plant, controller, SPLIT.cooldown_s - 2)
    assert lasting(quiet) == []
    back = lasting(drive(plant, controller, 60))
    assert [one.flips[0].role for one in back] == [P], "one prefill worker does not carry this"
    assert back[0].flips[0].expected_epoch == plant.workers[back[0].flips[0].worker_id].epoch - 1
    assert plant.counts() == (2, 2, 0)


def test_a_manual_change_during_a_flip_ends_it() -> None:
    plant, controller = Plant([P, D, D, D], lambda t: PREFILL_HEAVY, flip_s=20.0), BalanceController(SPLIT)
    made = lasting(drive(plant, controller, 30))
    assert len(made) == 1
    worker_id = made[0].flips[0].worker_id
    plant.due.clear()
    plant.set_role(worker_id, M)
    decision = controller.step(plant.observe(), plant.now_s)
    assert f"{worker_id} was made mixed by someone else" in decision.reason
    assert controller.pending is None


def test_a_day_is_followed_by_numbers_of_workers() -> None:
    day_s = 3600.0

    def traffic(t: float) -> Mix:
        return Mix(5.0 + 4.0 * math.sin(2 * math.pi * t / day_s))

    limits = replace(SCALING, max_workers=8, confirm_down_s=60.0)
    plant, controller = Plant([P, P, D, D], traffic, seed=3), BalanceController(limits)
    sizes, made = [], []
    for _ in range(72):
        made += lasting(drive(plant, controller, 100))
        sizes.append(len(plant.workers))
    assert max(sizes) <= 8
    high, low = max(sizes[5:13]), min(sizes[22:34])
    assert low < high, sizes
    assert low <= 3, sizes
    assert len(made) <= 30, [(one.at_s, one.action.value) for one in made]
    assert plant.late < 0.03 * plant.arrived


def test_decode_heavy_traffic_ends_up_mixed_when_the_split_does_not_pay() -> None:
    plant, controller = Plant([P, P, D, D], lambda t: Mix(8.2, 300, 500)), BalanceController(BalanceLimits(slo=SLO))
    made = lasting(drive(plant, controller, 900))
    assert made[-1].action is Action.ALL_MIXED
    assert "it does not pay" in made[-1].reason
    assert plant.counts()[2] >= 2
    assert lasting(drive(plant, controller, 900)) == []


# -- by hand --------------------------------------------------------------------------------------------


def traffic_of(rate: float, isl: int, osl: int, *, span_s: int = 20) -> TrafficWindow:
    """A window with this traffic in seconds 0 to ``span_s``."""
    window = TrafficWindow(span_s=span_s)
    window.start(0.0)
    for index in range(int(rate * span_s)):
        at_s = (index + 0.5) / rate
        window.arrived(at_s, isl)
        window.prefilled(at_s, isl, 0)
        window.decode_began(at_s, isl)
        window.finished(at_s, osl, 0.1, 0.03)
    return window


def facts(*roles: Role, heard_s: float = 20.0) -> tuple[WorkerFacts, ...]:
    """Idle workers a, b, ... with a pool of 4 GB."""
    return tuple(
        WorkerFacts(chr(97 + i), role, 1, heard_s, running=1, headroom_bytes=4e9) for i, role in enumerate(roles)
    )


def seen(rate: float, isl: int, osl: int, *roles: Role, **changes: object) -> Observation:
    observation = Observation(
        workers=facts(*roles), traffic=traffic_of(rate, isl, osl).snapshot(20.0), speed=SPEED, flip_s=0.5
    )
    return replace(observation, **changes)  # type: ignore[arg-type]


def confirmed(controller: BalanceController, observation: Observation, seconds: float = 16.0) -> Decision:
    """The decision after the same observation has been made for a while."""
    decision = controller.step(observation, 20.0)
    for step in range(1, int(seconds) + 1):
        if decision.action is not Action.NONE:
            return decision
        fresh = tuple(replace(w, heard_s=20.0 + step) if w.heard_s == 20.0 else w for w in observation.workers)
        decision = controller.step(replace(observation, workers=fresh), 20.0 + step)
    return decision


def test_a_flip_carries_epoch_reason_and_inputs() -> None:
    decision = confirmed(BalanceController(SPLIT), seen(3.6, 6000, 50, P, D, D, D))
    assert decision.action is Action.FLIP
    assert decision.flips == (Flip("b", P, 1),)
    assert decision.at_s == 35.0, "confirmed for 15 s"
    assert decision.expires_s == decision.at_s + SPLIT.pending_s
    assert "balanced split of 4 is 3P+1D" in decision.reason
    assert decision.inputs["rate"] == pytest.approx(3.6)
    assert decision.inputs["isl_mean"] == 6000
    assert decision.inputs["tau_s"] == 0.5


def test_a_stock_that_would_not_last_shortens_the_confirmation() -> None:
    window = traffic_of(3.6, 6000, 50)
    traffic = replace(window.snapshot(20.0), admitted_tokens_per_s=3.6 * 6000 * 1.5)
    workers = tuple(replace(w, stock_bytes=8.64e9 if w.role is P else 0.0) for w in facts(P, D, D, D))
    short = seen(3.6, 6000, 50, P, D, D, D, traffic=traffic, workers=workers)
    decision = confirmed(BalanceController(SPLIT), short)
    assert decision.inputs["delta_bytes_per_s"] == pytest.approx(-1.08e9)
    assert decision.inputs["stock_end_s"] == pytest.approx(8.0)
    assert decision.at_s == 28.0, "8 s of stock less 0.5 s of flip, at the next step"


def test_one_action_at_a_time_and_its_end_is_what_is_observed() -> None:
    controller = BalanceController(SPLIT)
    observation = seen(3.6, 6000, 50, P, D, D, D)
    decision = confirmed(controller, observation)
    waits = controller.step(replace(observation, workers=facts(P, D, D, D, heard_s=36.0)), 36.0)
    assert waits.reason == f"decision {decision.number}, flip, is under way"
    flipped = (WorkerFacts("a", P, 1, 37.0), WorkerFacts("b", P, 2, 37.0), *facts(P, D, D, D, heard_s=37.0)[2:])
    done = controller.step(replace(observation, workers=flipped), 37.0)
    assert done.reason.endswith("done, the new roles are seen")
    assert controller.pending is None


def test_a_pending_action_can_be_cancelled_and_can_fail() -> None:
    controller = BalanceController(SPLIT)
    assert controller.cancel(0.0) is None
    decision = confirmed(controller, seen(3.6, 6000, 50, P, D, D, D))
    cancelled = controller.cancel(36.0)
    assert cancelled is not None
    assert cancelled.cancels == decision.number
    assert controller.pending is None
    other = BalanceController(SPLIT)
    first = confirmed(other, seen(3.6, 6000, 50, P, D, D, D))
    other.failed(first.number + 1, "not ours", 36.0)
    assert other.pending is not None
    other.failed(first.number, "stale epoch", 36.0)
    assert other.pending is None


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("rate_per_s", math.nan, "arrival rate is nan"),
        ("produced_tokens_per_s", math.inf, "KV produced is inf"),
        ("isl", Distribution(5, math.nan, 1, 1, 1), "ISL is nan"),
        ("osl", Distribution(5, -4.0, 1, 1, 1), "OSL is -4.0"),
    ],
)
def test_nonsense_is_not_acted_on(field: str, value: object, words: str) -> None:
    observation = seen(3.6, 6000, 50, P, D, D, D)
    traffic = replace(observation.traffic, **{field: value})  # type: ignore[arg-type]
    decision = confirmed(BalanceController(SPLIT), replace(observation, traffic=traffic), 60)
    assert decision.action is Action.NONE
    assert decision.reason == f"not acted on: {words}"


def test_stale_views_and_empty_ones_are_not_acted_on_but_pending_ones_still_expire() -> None:
    controller = BalanceController(SPLIT)
    observation = seen(3.6, 6000, 50, P, D, D, D)
    stale = replace(observation, stale="the registry is out of reach")
    assert confirmed(controller, stale, 40).reason == "not acted on: the registry is out of reach"
    decision = confirmed(controller, observation)
    late = controller.step(stale, decision.expires_s)
    assert late.cancels == decision.number
    empty = Observation(workers=(), traffic=TrafficWindow().snapshot(0.0))
    alone = BalanceController(SCALING)
    assert alone.step(empty, 0.0).action is Action.NONE, "they may be starting"
    assert alone.step(empty, SCALING.confirm_down_s).action is Action.SCALE_UP
    assert BalanceController(SPLIT).step(empty, 0.0).reason == "no worker is ready"
    unknown = confirmed(BalanceController(SPLIT), replace(observation, speed=None))
    assert unknown.reason == "speed and traffic are not known yet"


def test_silent_workers_are_not_counted_and_freeze_nobody() -> None:
    workers = (*facts(P, D, D, D), WorkerFacts("never", D, 1, None), WorkerFacts("mute", P, 1, 1.0))
    decision = confirmed(BalanceController(SPLIT), seen(3.6, 6000, 50, P, D, D, D, workers=workers))
    assert decision.action is Action.FLIP
    assert decision.flips[0].worker_id == "b"


def test_a_small_shortage_of_prefill_is_lent_by_decode() -> None:
    limits = BalanceLimits(slo=replace(SLO, tpot_s=0.1), mixed=False)
    observation = seen(6.5, 2200, 60, P, P, D, D)
    decision = BalanceController(limits).step(observation, 20.0)
    assert decision.action is Action.LOCAL_PREFILL
    assert decision.flips == ()
    used, busy = 6.5 * decision.inputs["t_p_s"] / 2, limits.busy
    assert decision.local_share == pytest.approx((used - busy) / used)
    assert (decision.expires_s, decision.epochs) == (20.0 + limits.advice_s, 4)
    tight = BalanceController(replace(limits, slo=SLO)).step(observation, 20.0)
    assert tight.action is Action.NONE, "a chunk's pause beside a step is longer than the TPOT: no router would heed it"
    without = BalanceController(replace(limits, local_prefill=False)).step(observation, 20.0)
    assert without.action is Action.NONE


def test_a_fabric_that_cannot_carry_the_split_makes_all_mixed() -> None:
    observation = seen(3.6, 6000, 50, P, P, D, D, links=Links(prefill=3e8, decode=3e8))
    decision = confirmed(BalanceController(BalanceLimits(slo=SLO, band=0.0)), observation)
    carried = BalanceController(BalanceLimits(slo=SLO))
    assert "decode ingress carries 3e+08 B/s" in decision.reason
    assert "balanced split" in confirmed(carried, replace(observation, links=Links(prefill=5e10, decode=5e10))).reason


def test_large_fleets_flip_a_share_at_once() -> None:
    workers = tuple(WorkerFacts(f"w{i:04d}", P if i < 250 else D, 1, 20.0, running=i % 7) for i in range(1000))
    decision = confirmed(BalanceController(SPLIT), seen(900.0, 6000, 50, P, workers=workers))
    assert len(decision.flips) == 100
    assert {flip.role for flip in decision.flips} == {P}
    loads = [next(w.load for w in workers if w.worker_id == flip.worker_id) for flip in decision.flips]
    assert loads == sorted(loads)


@pytest.mark.parametrize(
    "make",
    [
        lambda: BalanceLimits(min_workers=0),
        lambda: BalanceLimits(min_workers=4, max_workers=3),
        lambda: BalanceLimits(max_workers=-1),
        lambda: BalanceLimits(busy=0.5, spare=0.6),
        lambda: BalanceLimits(band=-0.1),
        lambda: BalanceLimits(pending_s=0.0),
        lambda: BalanceLimits(confirm_s=math.nan),
        lambda: Slo(ttft_s=0.0),
        lambda: Slo(tpot_s=math.nan),
        lambda: Slo(ttft_s=0.01, overhead_s=0.02),
    ],
)
def test_contradictions_are_refused_by_name(make: object) -> None:
    assert callable(make)
    with pytest.raises(InvalidArgument):
        make()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 1e3) | st.just(math.nan),
            st.lists(st.sampled_from(Role), max_size=6),
            st.integers(1, 20_000),
            st.integers(1, 5_000),
            st.floats(0, 40),
        ),
        max_size=25,
    ),
    st.booleans(),
    st.integers(1, 5),
)
def test_whatever_comes_the_rules_hold(
    moments: list[tuple[float, list[Role], int, int, float]], scale: bool, budget: int
) -> None:
    """Never over the budget, never two at once, every reason given, no crash."""
    limits = BalanceLimits(slo=SLO, scale=scale, max_workers=budget, confirm_s=0, min_confirm_s=0, cooldown_s=1)
    controller, now_s = BalanceController(limits), 20.0
    for rate, roles, isl, osl, gap_s in moments:
        now_s += gap_s
        traffic = replace(traffic_of(2.0, isl, osl).snapshot(20.0), rate_per_s=rate)
        observation = Observation(workers=facts(*roles, heard_s=now_s), traffic=traffic, speed=SPEED)
        before = controller.pending
        decision = controller.step(observation, now_s)
        assert decision.reason
        if decision.action.lasting:
            assert before is None
            assert controller.pending is not None
        if decision.action is Action.SCALE_UP:
            assert scale
            assert len(roles) < budget
        if scale and not before and len(roles) > budget and math.isfinite(rate):
            assert decision.action is not Action.SCALE_UP
        for flip in decision.flips:
            mine = next(w for w in observation.workers if w.worker_id == flip.worker_id)
            assert flip.expected_epoch == mine.epoch
            assert flip.role is not mine.role
