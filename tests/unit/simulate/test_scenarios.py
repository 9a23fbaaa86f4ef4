"""The production policy and the production controller over hours of simulated traffic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.unit.simulate.machines import SLO, WORKER
from weir.balance.decision import Action, BalanceLimits
from weir.balance.sizing import Roles
from weir.lifecycle import Role
from weir.simulate.balancing import BalancerOptions
from weir.simulate.cluster import ClusterOptions
from weir.simulate.scenario import Result, Scenario, kill, run
from weir.simulate.setup import policy
from weir.simulate.traffic import Arrival, Phase, phases, varying

SEED = 1
LIMITS = BalanceLimits(slo=SLO)
SCALING = replace(LIMITS, scale=True, confirm_down_s=60.0)


def simulate(scenario: Scenario) -> Result:
    """Run it; nothing may be lost."""
    result = run(scenario)
    summary = result.summary
    print(
        f"seed {SEED}: {summary.arrived} arrived, goodput {summary.goodput:.2f}/s, {summary.attainment:.1%}, "
        f"{len(result.changes)} changes, roles {result.roles}"
    )
    assert result.unfinished == 0
    assert summary.finished + summary.rejected == summary.arrived
    return result


def with_policy(scenario: Scenario, name: str) -> Scenario:
    """The same under a policy of this name."""
    return replace(scenario, policy=policy(name, SEED), cluster=ClusterOptions(lengths=name == "slo"))


@pytest.mark.parametrize("name", ["least-loaded", "slo"])
def test_constant_load_for_half_an_hour(name: str) -> None:
    """At most one change: none when the split is right, one when it is not."""
    steady = Phase(1800, rate=10, isl=1000, osl=200)
    base = Scenario(Roles(2, 2), WORKER, phases([steady], SEED), steady.seconds, SLO, limits=LIMITS)
    result = simulate(with_policy(base, name))
    assert len(result.changes) == 0
    assert result.considered == 1800
    assert result.summary.attainment > 0.99


def test_constant_load_on_the_wrong_split() -> None:
    steady = Phase(600, rate=15, isl=1000, osl=200)
    result = simulate(Scenario(Roles(1, 3), WORKER, phases([steady], SEED), steady.seconds, SLO, limits=LIMITS))
    assert [one.action for one in result.changes] == [Action.FLIP, Action.FLIP]
    assert result.changes[-1].at_s < 60
    assert result.roles[-1][1:] == (3, 1, 0)
    assert result.summary.attainment > 0.95


MIX_S = 600.0
PREFILL_HEAVY = Phase(MIX_S, rate=8, isl=4000, osl=50)
DECODE_HEAVY = Phase(MIX_S, rate=20, isl=300, osl=500)
MIX = (PREFILL_HEAVY, DECODE_HEAVY, PREFILL_HEAVY, DECODE_HEAVY)


def good_by_phase(result: Result) -> Sequence[float]:
    """Requests/s within the SLO among those that arrived in each phase."""
    return [result.metrics.good(i * MIX_S, (i + 1) * MIX_S) / MIX_S for i in range(len(MIX))]


def alone(arrivals: Sequence[Arrival], phase: int) -> list[Arrival]:
    """The arrivals of one phase, from 0."""
    begin_s = phase * MIX_S
    return [
        Arrival(one.at_s - begin_s, one.prompt, one.output) for one in arrivals if begin_s <= one.at_s < begin_s + MIX_S
    ]


def test_the_mix_flips_between_prefill_heavy_and_decode_heavy() -> None:
    """Within 5 % of the best fixed split per phase, each of which starts its phase empty; better than all of them.

    With the defaults. The controller has to notice, to flip workers one after the other, and to work off what has
    queued meanwhile.
    """
    arrivals = list(phases(MIX, SEED))
    splits = [Roles(p, 6 - p) for p in range(2, 6)]
    whole = {
        str(split): simulate(Scenario(split, WORKER, iter(arrivals), 4 * MIX_S, SLO)).summary.goodput
        for split in splits
    }
    best = []
    for phase in range(2):
        parts = [Scenario(split, WORKER, iter(alone(arrivals, phase)), MIX_S, SLO) for split in splits]
        best.append(max(simulate(part).summary.goodput for part in parts))
    auto = Scenario(Roles(3, 3), WORKER, iter(arrivals), 4 * MIX_S, SLO, limits=LIMITS)
    result = simulate(auto)
    shares = [good / best[phase % 2] for phase, good in enumerate(good_by_phase(result))]
    print("fixed", whole, "best per phase", best, "shares", [round(share, 3) for share in shares])
    assert min(shares) >= 0.95
    assert result.summary.goodput > 1.5 * max(whole.values())
    mixed = simulate(Scenario(Roles(mixed=6), WORKER, iter(arrivals), 4 * MIX_S, SLO))
    assert result.summary.goodput > mixed.summary.goodput


def test_traffic_stops() -> None:
    """All workers but the minimum go, down to one that can do everything."""
    busy = Phase(120, rate=15, isl=1000, osl=200)
    limits = replace(SCALING, max_workers=6)
    scenario = Scenario(Roles(2, 2), WORKER, phases([busy], SEED), busy.seconds, SLO, limits=limits, idle_s=3000.0)
    result = simulate(scenario)
    assert result.roles[-1][1:] == (0, 0, 1)
    assert result.metrics.retried == 0
    last = max(one.at_s for one in result.changes)
    assert not [one for one in result.decisions if one.at_s > last and one.action is not Action.NONE]


def test_a_worker_never_becomes_ready() -> None:
    """The decision expires, the budget is free again, and it is not tried at every tick."""
    busy = Phase(900, rate=30, isl=1000, osl=200)
    limits = replace(SCALING, max_workers=6, pending_s=60.0)
    scenario = Scenario(
        Roles(1, 1), WORKER, phases([busy], SEED), busy.seconds, SLO, limits=limits, starts=lambda role: False
    )
    result = simulate(scenario)
    asked = [one for one in result.changes if one.action is Action.SCALE_UP]
    expired = {one.cancels for one in result.decisions if one.cancels}
    assert asked
    assert {one.number for one in asked if one.at_s < 800} <= expired
    gaps = [after.at_s - before.at_s for before, after in itertools.pairwise(asked)]
    assert gaps == sorted(gaps), "each is waited for longer than the one before"
    assert all(gap >= limits.pending_s for gap in gaps)
    assert len(asked) <= 6
    assert sum(result.roles[-1][1:]) == 2


def test_budget_is_full() -> None:
    """Twice what four workers carry: never a fifth, and never without both kinds of work."""
    busy = Phase(600, rate=60, isl=1000, osl=200)
    scenario = Scenario(
        Roles(1, 1), WORKER, phases([busy], SEED), busy.seconds, SLO, limits=replace(SCALING, max_workers=4)
    )
    result = simulate(scenario)
    assert max(p + d + m for _, p, d, m in result.roles) == 4
    assert all((p or m) and (d or m) for _, p, d, m in result.roles)
    assert [one for one in result.decisions if one.action is Action.BACK_PRESSURE]


@pytest.mark.parametrize("victim", ["w0001", "w0003"])
@pytest.mark.parametrize("name", ["least-loaded", "slo"])
def test_a_worker_dies(victim: str, name: str) -> None:
    """Its requests are done elsewhere; the roles are put right, and were left alone before."""
    steady = Phase(600, rate=5, isl=1000, osl=200)
    base = Scenario(
        Roles(1, 3) if victim == "w0001" else Roles(2, 1),
        WORKER,
        phases([steady], SEED),
        steady.seconds,
        SLO,
        limits=LIMITS,
        faults=[(300.0, kill(victim))],
    )
    result = simulate(with_policy(base, name))
    assert result.metrics.retried > 0
    assert result.summary.rejected == 0
    repair = result.changes[0]
    assert 300.0 <= repair.at_s <= 302.0
    assert "no worker is left" in repair.reason
    assert result.roles[-1][1] + result.roles[-1][3] > 0
    assert result.roles[-1][2] + result.roles[-1][3] > 0


def test_every_worker_but_one_dies() -> None:
    steady = Phase(300, rate=3, isl=500, osl=100)
    faults = [(100.0 + i, kill(f"w{i:04d}")) for i in range(1, 4)]
    result = simulate(
        Scenario(Roles(2, 2), WORKER, phases([steady], SEED), steady.seconds, SLO, limits=LIMITS, faults=faults)
    )
    assert result.roles[-1][1:] == (0, 0, 1)
    assert result.summary.rejected == 0


def test_a_diurnal_day() -> None:
    """Workers follow the day; few changes, and the SLO is met."""
    day_s = 86_400.0
    slow = replace(
        WORKER,
        prefill=(0.05, 1e-3, 1e-8),
        small=replace(WORKER.small, base=0.03, per_sequence=1e-3),
        large=replace(WORKER.large, base=0.03, per_sequence=1e-3),
        max_batch=16,
        kv_tokens=60_000,
    )

    def rate_at(now_s: float) -> float:
        return 0.45 - 0.4 * math.cos(2 * math.pi * now_s / day_s)

    slo = replace(SLO, ttft_s=8.0, tpot_s=0.1)
    scenario = Scenario(
        Roles(1, 1),
        slow,
        varying(rate_at, 0.85, day_s, isl=1500, osl=150, seed=SEED),
        day_s,
        slo,
        limits=replace(SCALING, slo=slo, max_workers=8, confirm_s=60.0, confirm_down_s=900.0, cooldown_s=120.0),
        balancer=BalancerOptions(interval_s=10.0, start_s=60.0),
        window_s=600.0,
    )
    result = simulate(scenario)
    hours = [max(sum(row[1:]) for row in result.roles if row[0] <= hour * 3600) for hour in (3, 13)]
    assert hours[1] > hours[0]
    workers = [sum(row[1:]) for row in result.roles]
    assert max(workers) >= 2
    assert workers[-1] < max(workers)
    assert len(result.changes) <= 16
    assert result.summary.attainment > 0.95


def test_a_thousand_workers() -> None:
    """The load is spread, the controller keeps its peace."""
    busy = Phase(4, rate=1500, isl=1000, osl=100)
    base = Scenario(Roles(400, 600), WORKER, phases([busy], SEED), busy.seconds, SLO, limits=LIMITS)
    result = simulate(with_policy(base, "slo"))
    assert result.summary.attainment > 0.99
    assert len(result.changes) == 0
    prefilled = [worker.prefill_busy_s for worker in result.workers if worker.role is Role.PREFILL]
    assert sum(busy_s > 0 for busy_s in prefilled) > 390
    assert max(prefilled) < 3 * sum(prefilled) / len(prefilled)
