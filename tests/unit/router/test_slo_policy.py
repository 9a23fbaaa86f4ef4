"""Placement by predicted latency: who is chosen, and that work spreads."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest

from tests.unit.router.slo_fleet import BLOCK, PROFILE, Desk, key, spread
from tests.unit.router.stage import MODEL
from weir.balance.profile import Fit, Profile
from weir.ids import WorkerKey
from weir.lifecycle import Role
from weir.services.router.policy import Choice
from weir.services.router.slo_policy import SloOptions


def names(choice: Choice | None) -> tuple[str, str]:
    assert choice is not None
    return (
        choice.prefill.key.worker_id if choice.prefill else "",
        choice.decode.key.worker_id if choice.decode else "",
    )


# scores


def test_prefill_is_predicted_as_wait_and_compute() -> None:
    desk = Desk(prefills=1, decodes=1)
    desk.report("p0", pending_prefill_tokens=300)
    choice = desk.choose(desk.demand(200))
    assert choice is not None
    per_token = (5 + 0.5 * 256) / 256
    assert choice.scores["compute_ms"] == pytest.approx(105.0)
    assert choice.scores["wait_ms"] == pytest.approx(300 * per_token)
    assert choice.scores["ttft_ms"] == pytest.approx(105.0 + 300 * per_token)
    assert choice.scores["tpot_ms"] == pytest.approx(10.2)


def test_kv_that_cannot_be_moved_is_made_where_it_is_read() -> None:
    desk = Desk(prefills=2, decodes=2)
    choice = desk.choose(desk.demand(500, stays=True))
    assert choice is not None
    assert choice.prefill is None
    assert choice.decode is not None
    assert choice.decode.info.role is Role.DECODE
    assert choice.reason == "KV cannot be moved"


def test_the_shortest_wait_wins_and_work_sent_counts_at_once() -> None:
    desk = Desk(prefills=2, decodes=1)
    desk.report("p0", pending_prefill_tokens=400)
    assert names(desk.send(desk.demand(500)))[0] == "p1"
    assert names(desk.send(desk.demand(500)))[0] == "p0"


def test_a_slow_worker_gets_less() -> None:
    desk = Desk(prefills=2, decodes=1, options=SloOptions(queue_ms=1e9))
    desk.report("d0", running=90)
    desk.view("p0").speed._prefill.observe(3.0, desk.now_s)
    for _ in range(80):
        desk.send(desk.demand(100))
    assert desk.prefilled["p1"] / desk.prefilled["p0"] == pytest.approx(3.0, rel=0.2)


def test_decode_by_step_time_pressure_and_reads() -> None:
    desk = Desk(prefills=1, decodes=2)
    source = desk.view("p0")

    def decode(**fields: Any) -> str:
        view = desk.policy.choose_decode(desk.fleet.serving(MODEL), source, desk.demand(**fields), desk.now_s)
        assert view is not None
        return view.key.worker_id

    desk.report("d0", running=30, used_blocks=10)
    assert decode() == "d1"
    desk.report("d1", running=1, used_blocks=9_700, free_blocks=300)
    assert decode() == "d0"  # k / (1 - k) of d1 is over 30
    desk.report("d1", running=30, used_blocks=10)
    desk.view("d0").speed.saw_read(2_000.0, 20_000 * 100, "p0", desk.now_s)
    assert decode() == "d1"  # reads from p0 are slow on d0
    assert decode(tokens=0) in ("d0", "d1")


def test_expected_output_is_pressure() -> None:
    desk = Desk(prefills=1, decodes=2)
    desk.report("d0", running=4, used_blocks=5_000, free_blocks=5_000)
    desk.report("d1", running=4, used_blocks=5_000, free_blocks=5_000)
    desk.view("d0").bind("x", math.inf, 140_000)
    view = desk.policy.choose_decode(desk.fleet.serving(MODEL), desk.view("p0"), desk.demand(), desk.now_s)
    assert view is desk.view("d1")


def test_meeting_the_slo_goes_before_the_lowest_score() -> None:
    desk = Desk(prefills=1, mixed=1, decodes=1)
    desk.report("m0", running=30)  # its steps take 16 ms
    desk.report("p0", pending_prefill_tokens=700)
    desk.report("d0", running=5)
    assert names(desk.choose(desk.demand(100))) == ("", "m0")
    assert names(desk.choose(desk.demand(100, slo_tpot_ms=14.0))) == ("p0", "")


def test_cached_prefixes_are_followed_until_waiting_costs_more() -> None:
    desk = Desk(prefills=4, decodes=1)
    prompt = list(range(1_600))
    hashes = desk.demand(prompt=prompt).keys
    assert hashes is not None
    desk.prefixes.stored(key("p2"), hashes.hashes(b"same", BLOCK))
    choice = desk.choose(desk.demand(prompt=prompt))
    assert names(choice)[0] == "p2"
    assert choice is not None
    assert choice.cached_tokens == 1_584  # the last block is never whole in a cache
    desk.report("p2", pending_prefill_tokens=900)
    assert names(desk.choose(desk.demand(prompt=prompt)))[0] == "p2"
    desk.report("p2", pending_prefill_tokens=1_900)
    assert names(desk.choose(desk.demand(prompt=prompt)))[0] != "p2"


# spread


@pytest.mark.parametrize("prefix", [False, True])
def test_independent_prompts_spread_evenly(prefix: bool) -> None:
    desk = Desk(prefills=5, decodes=5, options=SloOptions(queue_ms=1e9, max_joins=1_000))
    rng = random.Random(3)
    for _ in range(256):
        prompt = [rng.randrange(30_000) for _ in range(rng.randrange(64, 512))]
        desk.send(desk.demand(prompt=prompt) if prefix else desk.demand(200))
    assert spread(desk.prefilled, 5) <= 1.2 or prefix
    if prefix:  # of unequal lengths: it is the work that is even
        work = Counter(
            {view.key.worker_id: view.pending_prefill_tokens for view in desk.fleet if view.info.role is Role.PREFILL}
        )
        assert spread(work, 5) <= 1.2
    assert spread(desk.decoded, 5) <= 1.2


def test_independent_prompts_spread_evenly_over_mixed_workers() -> None:
    desk = Desk(mixed=5, options=SloOptions(queue_ms=1e9))
    for _ in range(256):
        desk.send(desk.demand(200))
    assert spread(desk.alone, 5) <= 1.2


@pytest.mark.parametrize("roles", [{"prefills": 5, "decodes": 5}, {"mixed": 5}, {"prefills": 40, "decodes": 40}])
def test_sequential_traffic_uses_all_workers(roles: dict[str, Any]) -> None:
    desk = Desk(**roles)
    count = max(roles.values())
    for number in range(20 * count):
        desk.send(desk.demand(100))
        desk.settle(f"r{number + 1}")
    prefilled = desk.prefilled if "prefills" in roles else desk.alone
    assert len(prefilled) == len(desk.decoded) == count
    if count == 5:
        assert spread(prefilled, 5) <= 1.05


def test_a_shared_system_prompt_does_not_go_all_to_one() -> None:
    desk = Desk(prefills=8, decodes=8, options=SloOptions(queue_ms=1e9))
    system = list(range(1_024))
    first = desk.send(desk.demand(prompt=[*system, 7, 7]))
    assert first.prefill is not None
    keys = desk.demand(prompt=[*system, 7, 7]).keys
    assert keys is not None
    desk.prefixes.stored(first.prefill.key, keys.hashes(b"same", BLOCK))
    rng = random.Random(5)
    for _ in range(255):
        prompt = system + [rng.randrange(30_000) for _ in range(64)]
        choice = desk.send(desk.demand(prompt=prompt))
        assert choice.prefill is not None
        keys = desk.demand(prompt=prompt).keys
        assert keys is not None
        desk.prefixes.stored(choice.prefill.key, keys.hashes(b"same", BLOCK))
    assert len(desk.prefilled) == 8
    assert max(desk.prefilled.values()) <= 0.3 * 256
    assert desk.prefilled[first.prefill.key.worker_id] == max(desk.prefilled.values())  # and still it is used most


def test_several_routers_with_the_same_old_view_do_not_run_after_the_same_worker() -> None:
    """One of eight workers is reported idle, the others have half a second of work; four routers know no more."""
    routers = [Desk(prefills=8, decodes=1, seed=seed, options=SloOptions(queue_ms=1e9)) for seed in range(4)]
    for desk in routers:
        for number in range(8):
            desk.report(f"p{number}", pending_prefill_tokens=0 if number == 3 else 1_000, routers=4)
    got: Counter[str] = Counter()
    for _ in range(40):
        for desk in routers:
            choice = desk.send(desk.demand(100))
            assert choice.prefill is not None
            got[choice.prefill.key.worker_id] += 1
    # The idle one is worth 10 requests more than the others; all others are equal.
    fair = (160 - 10) / 8
    assert got["p3"] <= 1.5 * (fair + 10)
    assert max(count for name, count in got.items() if name != "p3") <= 1.5 * fair
    assert len(got) == 8


def test_routers_that_start_together_do_not_begin_with_the_same_worker() -> None:
    firsts = set()
    for seed in range(12):
        choice = Desk(prefills=8, decodes=1, seed=seed).send(Desk(1, 1).demand(100))
        assert choice.prefill is not None
        firsts.add(choice.prefill.key)
    assert len(firsts) >= 4


def test_among_many_workers_the_idle_and_the_cached_ones_are_found() -> None:
    desk = Desk(prefills=200, decodes=100)
    for number in range(200):
        desk.report(f"p{number}", pending_prefill_tokens=0 if number == 77 else 1_500)
    for number in range(100):
        desk.report(f"d{number}", running=2 if number == 55 else 60)
    choice = desk.send(desk.demand(100))
    assert names(choice)[0] == "p77"
    assert desk.decoded == Counter({"d55": 1})
    prompt = list(range(3_200))
    keys = desk.demand(prompt=prompt).keys
    assert keys is not None
    desk.prefixes.stored(key("p123"), keys.hashes(b"same", BLOCK))
    desk.report("p123", pending_prefill_tokens=300)
    assert names(desk.choose(desk.demand(prompt=prompt)))[0] == "p123"


# who is not chosen


def test_silent_broken_and_refusing_workers_get_nothing_new_while_there_are_others() -> None:
    desk = Desk(prefills=3, decodes=1, options=SloOptions(late_s=2.5))
    desk.now_s += 3.0
    for name in ("p1", "p2", "d0"):
        desk.view(name).heard_s = desk.now_s
    for _ in range(3):
        desk.view("p1").breaker.failed(desk.now_s)
    assert {names(desk.send(desk.demand()))[0] for _ in range(9)} == {"p2"}
    desk.view("p2").refuses_prefill_until_s = desk.now_s + 1
    assert names(desk.choose(desk.demand()))[0] == "" if desk.choose(desk.demand()) else True
    desk.view("p1").breaker.succeeded()
    lone = Desk(prefills=1, decodes=1, options=SloOptions(late_s=2.5))
    lone.now_s += 60.0  # everybody is silent: that is this router's trouble
    assert names(lone.choose(lone.demand()))[0] == "p0"


def test_a_worker_that_beats_slowly_is_not_late_before_it_misses_some() -> None:
    desk = Desk(prefills=1, decodes=1, options=SloOptions(late_s=2.5))
    desk.add("p9", Role.PREFILL, heartbeat_s=4.0)
    desk.now_s += 9.0
    desk.view("d0").heard_s = desk.now_s
    assert {names(desk.send(desk.demand()))[0] for _ in range(5)} == {"p9"}
    desk.now_s += 2.0
    desk.view("p0").heard_s = desk.now_s
    assert {names(desk.send(desk.demand()))[0] for _ in range(5)} == {"p0"}


def test_workers_that_failed_the_request_are_avoided_unless_they_are_the_last() -> None:
    desk = Desk(prefills=2, decodes=1)
    for _ in range(4):
        assert names(desk.send(desk.demand(avoid=frozenset({key("p0")}))))[0] == "p1"
    assert names(desk.send(desk.demand(avoid=frozenset({key("p0"), key("p1")}))))[0] in ("p0", "p1")


def test_without_a_decode_worker_that_can_read_it_a_prefill_worker_is_of_no_use() -> None:
    desk = Desk(prefills=1)
    assert desk.choose(desk.demand()) is None
    desk.add("d9", Role.DECODE, fingerprint=b"other")
    choice = desk.choose(desk.demand())
    assert choice is None or choice.prefill is None


# waiting in the router


def test_beyond_the_bound_of_a_workers_queue_requests_wait_here() -> None:
    desk = Desk(prefills=1, decodes=1, options=SloOptions(queue_ms=200.0))
    desk.report("p0", pending_prefill_tokens=1_000, running=8)
    desk.report("d0", running=8)
    assert desk.choose(desk.demand()) is None
    desk.now_s += 0.4  # it has worked since
    assert names(desk.choose(desk.demand()))[0] == "p0"


# local prefill


def test_short_prompts_and_cached_prompts_are_prefilled_where_they_are_decoded() -> None:
    desk = Desk(prefills=1, decodes=1)
    desk.report("p0", pending_prefill_tokens=60)
    choice = desk.choose(desk.demand(10))
    assert names(choice) == ("", "d0")
    assert choice is not None
    assert choice.reason == "short prompt"
    assert names(desk.choose(desk.demand(100))) == ("p0", "")
    prompt = list(range(1_605))
    keys = desk.demand(prompt=prompt).keys
    assert keys is not None
    desk.prefixes.stored(key("d0"), keys.hashes(b"same", BLOCK))
    choice = desk.choose(desk.demand(prompt=prompt))
    assert names(choice) == ("", "d0")
    assert choice is not None
    assert (choice.reason, choice.cached_tokens) == ("cached prompt", 1_600)


def test_not_without_slack_for_those_who_decode_there() -> None:
    desk = Desk(prefills=1, decodes=1)
    desk.report("p0", pending_prefill_tokens=100)
    desk.report("d0", running=2)
    desk.view("d0").bind("x", 15.0, 10)  # a step takes 10.6 ms, a prefill of 10 tokens 10 ms
    assert names(desk.choose(desk.demand(10))) == ("p0", "")
    desk.view("d0").unbind("x")
    desk.view("d0").bind("y", 30.0, 10)
    assert names(desk.choose(desk.demand(10))) == ("", "d0")


def test_a_saturated_prefill_pool_is_helped_if_that_is_much_better() -> None:
    desk = Desk(prefills=1, decodes=1)
    desk.report("p0", pending_prefill_tokens=1_500)
    choice = desk.choose(desk.demand(300))
    assert names(choice) == ("", "d0")
    assert choice is not None
    assert choice.reason == "prefill saturated"
    desk.report("d0", running=40)  # a chunk would make 40 others wait for 0.15 s
    assert names(desk.choose(desk.demand(300))) == ("p0", "")


def test_without_prefill_workers_decode_workers_do_it_all() -> None:
    desk = Desk(decodes=2)
    choice = desk.choose(desk.demand(500))
    assert choice is not None
    assert (choice.prefill, choice.reason) == (None, "no prefill worker")


# prefill waves


def test_finished_prefills_join_at_the_pace_that_the_step_time_allows() -> None:
    desk = Desk(prefills=1, decodes=1)
    desk.report("d0", running=10, used_blocks=100)  # 12 ms a step, 0.2 ms for each more: 18 for a stretch of 1.3
    bound = 0
    for number in range(32):
        view = desk.policy.choose_decode(desk.fleet.serving(MODEL), desk.view("p0"), desk.demand(), desk.now_s)
        if view is None:
            break
        view.bind(f"w{number}", math.inf, 100)
        bound += 1
    assert bound == 18
    desk.view("d0").joined("w0")
    assert desk.policy.choose_decode(desk.fleet.serving(MODEL), desk.view("p0"), desk.demand(), desk.now_s)


def test_promises_to_others_hold() -> None:
    desk = Desk(prefills=1, decodes=1)
    desk.report("d0", running=20)
    desk.view("d0").bind("x", 14.1, 10)
    desk.view("d0").joined("x")

    def decode() -> object:
        return desk.policy.choose_decode(desk.fleet.serving(MODEL), desk.view("p0"), desk.demand(), desk.now_s)

    assert decode() is None  # with one more a step takes 14.2 ms
    desk.report("d0", running=15)
    assert decode() is desk.view("d0")


def test_forecasts() -> None:
    desk = Desk(prefills=2, decodes=1)
    desk.report("p0", pending_prefill_tokens=2_000)
    desk.report("p1", pending_prefill_tokens=300)
    forecast = desk.policy.forecast(
        desk.fleet.serving(MODEL), desk.demand(200, received_s=desk.now_s - 0.05), desk.now_s
    )
    assert forecast is not None
    per_token = (5 + 0.5 * 256) / 256
    assert forecast.known
    assert forecast.ttft_ms == pytest.approx(50 + 300 * per_token + 105)
    assert forecast.compute_ms == pytest.approx(105.0)
    assert forecast.prefill_ms_per_token == pytest.approx(per_token / 2)
    assert Desk().policy.forecast(Desk().fleet.serving(MODEL), desk.demand(), 0.0) is None


def test_profiles_that_change_are_taken_over() -> None:
    desk = Desk(prefills=1, decodes=1)
    faster = Profile("", "", 1, Fit((0.0, 0.0001, 0.0), 1, 0, 9), PROFILE.step, PROFILE.read)
    desk.add("p0", Role.PREFILL, profile=faster)
    choice = desk.choose(desk.demand(200))
    assert choice is not None
    assert choice.scores["compute_ms"] == pytest.approx(20.0)
    assert isinstance(choice.prefill.key if choice.prefill else None, WorkerKey)


def test_the_tightest_promise_is_that_of_those_who_are_still_there() -> None:
    view = Desk(decodes=1).view("d0")
    for name, limit_ms in (("a", 50.0), ("b", 20.0), ("c", 20.0), ("d", math.inf)):
        view.bind(name, limit_ms, 10)
    limits = []
    for name in ("b", "c", "nobody", "a", "d"):
        view.unbind(name)
        limits.append(view.tpot_limit_ms)
    assert limits == [20.0, 50.0, 50.0, math.inf, math.inf]
    assert (view.joining, view.expected_tokens, view.bound) == (0, 0, set())
