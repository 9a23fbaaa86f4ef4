"""What schedules are about: what goes wrong, by kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from tests.simulation.model import CONTEXT, VOCAB
from tests.simulation.plan import ARRIVALS_S, Fault, Plan
from weir.config import ControllerConfig
from weir.lifecycle import Role

CONTROLLER = "controller"

KINDS = {
    "calm": 3,
    "leaving": 4,
    "decode deaths": 3,
    "deaths": 4,
    "pauses": 2,
    "network": 4,
    "broker": 3,
    "reads": 4,
    "leases": 4,
    "churn": 4,
    "roles": 2,
    "routers": 2,
    "drains": 4,
    "steps": 4,
    "balance": 4,
    "weights": 3,
    "tenants": 2,
    "sizes": 4,
    "everything": 6,
}
"""What a schedule is about, and how often."""


def _nothing(plan: Plan, random: Random) -> None:
    pass


def _leaving(plan: Plan, random: Random, share: float = 0.6) -> None:
    for index, request in enumerate(plan.requests):
        if random.random() < share:
            leaves_s = random.choice([0.0, random.uniform(0.0, 0.03), random.uniform(0.0, 0.3), random.uniform(0, 2)])
            by = random.choice(["leave", "leave", "cancel", "event"])
            request = replace(request, leaves_s=leaves_s, leaves_by=by)
        if random.random() < 0.2:
            request = replace(request, timeout_s=random.choice([0.02, 0.1, random.uniform(0.05, 1.0), 3.0]))
        plan.requests[index] = request


def _some(plan: Plan, random: Random, what: str, who: list[str], count: int, longest_s: float) -> None:
    for _ in range(count):
        at_s = 0.35 + random.uniform(0.0, ARRIVALS_S + 0.5)
        plan.faults.append(Fault(at_s, what, random.choice(who), random.uniform(0.01, longest_s)))


def _names(plan: Plan, *roles: Role) -> list[str]:
    return [worker.name for worker in plan.workers if worker.role in roles] or [plan.workers[0].name]


def _decode_deaths(plan: Plan, random: Random) -> None:
    plan.slow_reads, plan.slow_read_s = random.choice([0.0, 0.3]), 1.0
    _some(plan, random, random.choice(["kill", "unplug"]), _names(plan, Role.DECODE), random.choice([1, 1, 2]), 2.0)


def _deaths(plan: Plan, random: Random) -> None:
    workers = [worker.name for worker in plan.workers]
    for _ in range(random.choice([1, 2, 3, 4])):
        _some(plan, random, random.choice(["kill", "kill", "unplug"]), workers, 1, random.choice([0.05, 0.5, 3.0]))


def _pauses(plan: Plan, random: Random) -> None:
    _some(plan, random, "pause", plan.hosts, random.choice([1, 2, 3]), random.choice([0.3, 2.0, 6.0]))


def _network(plan: Plan, random: Random) -> None:
    plan.spikes = random.choice([0.02, 0.3])
    for _ in range(random.choice([1, 2, 3])):
        one, other = random.sample([*plan.hosts, "nats"], 2)
        what = random.choice(["cut", "cut", "reset", "isolate"])
        at_s = 0.35 + random.uniform(0.0, ARRIVALS_S)
        plan.faults.append(Fault(at_s, what, one, random.uniform(0.05, random.choice([0.5, 5.0])), other))


def _broker(plan: Plan, random: Random) -> None:
    plan.bus_loss = random.choice([0.0, 0.2, 0.6])
    plan.bus_repeat = random.choice([0.0, 0.3])
    plan.bus_disorder_s = random.choice([0.0, 0.2, 1.0])
    _some(plan, random, "broker down", ["nats"], random.choice([0, 1, 2]), 5.0)
    if random.random() < 0.5:
        at_s = 0.35 + random.uniform(0.0, ARRIVALS_S)
        plan.faults.append(Fault(at_s, "cut", random.choice(plan.hosts), random.uniform(0.1, 5.0), "nats"))


def _reads(plan: Plan, random: Random) -> None:
    plan.slow_reads = random.choice([0.2, 0.6])
    plan.slow_read_s = random.choice([0.05, 0.6, 4.0])
    plan.read_timeout_s = random.choice([0.3, 1.5])
    if plan.checksums:
        plan.flips = random.choice([0.0, 0.05, 0.3])
    plan.lost_completions = random.choice([0.0, 0.5, 1.0])


def _leases(plan: Plan, random: Random) -> None:
    """Leases that lapse while reads are slow and the pools churn."""
    plan.lease_s = random.choice([0.05, 0.15, 0.5])
    plan.slow_reads = random.choice([0.2, 0.5])
    plan.slow_read_s = random.choice([0.2, 2.0])
    plan.checksums = random.random() < 0.5
    _leaving(plan, random, share=0.2)


def _churn(plan: Plan, random: Random) -> None:
    """Small pools whose blocks are handed on all the time, under slow reads and clocks that disagree."""
    plan.step_s = 0.002
    plan.lease_s = random.choice([0.1, 0.1, 0.3, 20.0])
    plan.skew_s = 0.4
    plan.read_timeout_s = 0.6
    plan.slow_reads = random.choice([0.5, 0.9])
    plan.slow_read_s = random.choice([0.2, 0.5])
    plan.checksums = random.random() < 0.3
    _leaving(plan, random, share=random.choice([0.2, 0.6]))
    _some(plan, random, "pause", _names(plan, Role.DECODE), random.choice([0, 1, 3]), 0.5)


def _roles(plan: Plan, random: Random) -> None:
    for _ in range(random.choice([1, 2, 3])):
        at_s = 0.35 + random.uniform(0.0, ARRIVALS_S)
        role = random.choice(list(Role)).value
        plan.faults.append(Fault(at_s, "flip", random.choice(plan.workers).name, random.uniform(0.2, 4.0), role))


def _routers(plan: Plan, random: Random) -> None:
    hosts = [f"router{number}" for number in range(plan.routers)]
    _some(plan, random, random.choice(["kill", "unplug", "pause"]), hosts, random.choice([1, 1, 2]), 3.0)
    _leaving(plan, random, share=0.2)


def _drains(plan: Plan, random: Random) -> None:
    """SIGTERM in the midst of load, a second one, and SIGKILL for who takes too long."""
    for _ in range(random.choice([1, 2, 3])):
        at_s = 0.35 + random.uniform(0.0, ARRIVALS_S)
        who, again_s = random.choice([*plan.hosts, CONTROLLER]), random.uniform(0.01, 1.0)
        plan.faults.append(Fault(at_s, "terminate", who, again_s))
        if random.random() < 0.2:
            plan.faults.append(
                Fault(at_s + random.uniform(0.0, 0.3), random.choice(["terminate", "kill"]), who, again_s)
            )


def _steps(plan: Plan, random: Random) -> None:
    """Steps that raise, have no finite logits, take long; step threads that die."""
    plan.retry_budget_min = 1_000
    workers = [worker.name for worker in plan.workers]
    for _ in range(random.choice([1, 2, 3])):
        at_s = 0.35 + random.uniform(0.0, ARRIVALS_S)
        what = random.choice(["step fails", "step fails", "step spoilt", "step hangs", "thread dies", "thread dies"])
        moment = random.choice(["before", "after"]) if what == "thread dies" else ""
        plan.faults.append(Fault(at_s, what, random.choice(workers), random.choice([0.2, 1.5]), moment))


def _balance(plan: Plan, random: Random) -> None:
    """The controller decides for itself, under its own faults and those of others."""
    cooldown_s = random.choice([0.3, 0.8])
    plan.balance = ControllerConfig(
        mode="auto",
        interval_s=random.choice([0.05, 0.1, 0.25]),
        window_s=random.choice([1.0, 2.0]),
        slo_ttft_ms=random.choice([50.0, 300.0]),
        mixed_fallback=random.random() < 0.5,
        busy=random.choice([0.05, 0.2]),
        spare=0.04,
        band=random.choice([0.02, 0.08]),
        confirm_s=random.choice([0.1, 0.25]),
        confirm_down_s=1.0,
        cooldown_s=cooldown_s,
        pending_s=random.choice([0.5, 2.0]),
        drain_ms=random.choice([0.0, 200.0]),
    )
    _turn_the_traffic(plan, random)
    trouble = random.choice([_nothing, _nothing, _deaths, _network, _broker, _roles, _drains, _steps, _leaving])
    trouble(plan, random)
    if random.random() < 0.4:
        _some(plan, random, random.choice(["kill", "pause", "terminate"]), [CONTROLLER], 1, 1.5)
    if random.random() < 0.3:
        at_s, role = 0.35 + random.uniform(0.0, ARRIVALS_S), random.choice(list(Role)).value
        plan.faults.append(Fault(at_s, "turn", random.choice(plan.workers).name, 0.0, role))
    plan.forgiving = trouble in (_nothing, _drains, _leaving)


def _turn_the_traffic(plan: Plan, random: Random) -> None:
    """Long prompts with short answers first, then the other way round, or the reverse of that; and more of both."""
    first = random.random() < 0.5
    for request in list(plan.requests):
        at_s, name = 0.4 + random.uniform(0.0, ARRIVALS_S), f"q{len(plan.requests)}"
        plan.requests.append(replace(request, name=name, at_s=at_s))
    for index, request in enumerate(plan.requests):
        long_prompt = (request.at_s < 0.4 + ARRIVALS_S / 2) is first
        sampling, prompt = request.sampling, request.prompt
        if long_prompt:
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, 2), min_tokens=0)
        else:
            prompt = prompt[:5]
        plan.requests[index] = replace(request, sampling=sampling, prompt=prompt)


def _weights(plan: Plan, random: Random) -> None:
    """Workers come back with other weights, one after another, or some of them for good."""
    workers = [worker.name for worker in plan.workers]
    random.shuffle(workers)
    plan.slow_reads, plan.slow_read_s = random.choice([0.0, 0.3]), 0.5
    at_s = 0.35 + random.uniform(0.0, 1.0)
    for name in workers[: random.choice([1, 2, len(workers)])]:
        how = random.choice(["kill", "terminate"])
        plan.faults.append(Fault(at_s, "reweigh", name, random.choice([0.01, 0.3]), how))
        at_s += random.uniform(0.05, 1.5)


def _tenants(plan: Plan, random: Random) -> None:
    """More than each tenant may have, by deadlines and priorities."""
    plan.tenant_max_active = random.choice([0, 2, 4])
    plan.tenant_max_queued = random.choice([0, 1, 3])
    plan.step_s = 0.02
    plan.workers = [replace(worker, max_running=1, max_waiting=1) for worker in plan.workers]
    _leaving(plan, random, share=0.1)
    for index, request in enumerate(plan.requests):
        at_s = 0.4 + random.choice([0.0, random.uniform(0.0, 0.4)])
        plan.requests[index] = replace(
            request, at_s=at_s, priority=random.choice([0, 1, 2]), tenant=random.choice(["a", "a", "b", "c"])
        )
    plan.forgiving = True


def _sizes(plan: Plan, random: Random) -> None:
    """Pools of all sizes; requests that one of them can hold, or all, or none."""
    plan.workers = [replace(worker, num_blocks=random.choice([6, 9, 14, 20, 30])) for worker in plan.workers]
    for index, request in enumerate(plan.requests):
        length = random.choice([random.randrange(1, 12), random.randrange(12, 60), random.randrange(60, CONTEXT - 2)])
        prompt = (*request.prompt, *(random.randrange(3, VOCAB) for _ in range(length)))[:length]
        most = random.choice([1, 8, 40, 60])
        sampling = replace(request.sampling, max_tokens=min(random.randint(1, most), CONTEXT - length), min_tokens=0)
        plan.requests[index] = replace(request, prompt=prompt, sampling=sampling)
    trouble = random.choice([_nothing, _nothing, _leaving, _deaths, _drains, _roles])
    trouble(plan, random)
    plan.forgiving = trouble in (_nothing, _leaving)


def _everything(plan: Plan, random: Random) -> None:
    some = [_leaving, _deaths, _pauses, _network, _broker, _reads, _leases, _roles, _routers]
    for make in random.sample([*some, _drains, _steps, _balance, _weights, _tenants], 4):
        make(plan, random)
    plan.forgiving = False


FAULTS: dict[str, Callable[[Plan, Random], None]] = {
    "calm": _nothing,
    "leaving": _leaving,
    "decode deaths": _decode_deaths,
    "deaths": _deaths,
    "pauses": _pauses,
    "network": _network,
    "broker": _broker,
    "reads": _reads,
    "leases": _leases,
    "churn": _churn,
    "roles": _roles,
    "routers": _routers,
    "drains": _drains,
    "steps": _steps,
    "balance": _balance,
    "weights": _weights,
    "tenants": _tenants,
    "sizes": _sizes,
    "everything": _everything,
}
