"""A schedule, made from its seed alone: the cluster, what clients ask of it, and what goes wrong when."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from tests.simulation.model import BLOCK, CONTEXT, EOS, VOCAB
from weir.engine.sampling import SamplingParams
from weir.lifecycle import Role

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
    "everything": 5,
}
"""What a schedule is about, and how often."""

ARRIVALS_S = 2.5


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker at the start."""

    name: str
    role: Role
    num_blocks: int
    max_batch_tokens: int
    max_running: int
    max_waiting: int


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request. ``leaves_s``: when after its start its client is gone, if ever."""

    name: str
    at_s: float
    router: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    tenant: str
    priority: int
    timeout_s: float | None
    leaves_s: float | None
    leaves_by: str
    reads_every_s: float


@dataclass(frozen=True, slots=True)
class Fault:
    """``what`` befalls ``who`` (and ``other``) at ``at_s`` and is mended ``for_s`` later."""

    at_s: float
    what: str
    who: str
    for_s: float
    other: str = ""

    def __str__(self) -> str:
        between = f" - {self.other}" if self.other else ""
        return f"{self.at_s:.3f} s: {self.what} {self.who}{between} for {self.for_s:.3f} s"


@dataclass(slots=True)
class Plan:
    """See the module. Shares and times are explained where they are used."""

    seed: int
    kind: str
    workers: list[WorkerSpec] = field(default_factory=list)
    routers: int = 1
    requests: list[RequestSpec] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    step_s: float = 0.01
    spikes: float = 0.0
    keepalive_s: float = 2.0
    bus_loss: float = 0.0
    bus_repeat: float = 0.0
    bus_disorder_s: float = 0.0
    slow_reads: float = 0.0
    slow_read_s: float = 0.0
    flips: float = 0.0
    lost_completions: float = 0.0
    lease_s: float = 20.0
    read_timeout_s: float = 1.5
    session_grace_s: float = 1.0
    checksums: bool = True
    skew_s: float = 0.02

    @property
    def hosts(self) -> list[str]:
        """All but the broker."""
        return [f"router{n}" for n in range(self.routers)] + [worker.name for worker in self.workers]

    def describe(self) -> list[str]:
        """The plan as text."""
        lines = [f"seed {self.seed}: {self.kind}; {self.routers} routers, leases {self.lease_s:.3f} s"]
        lines += [
            f"  {w.name}: {w.role.value}, {w.num_blocks} blocks, {w.max_batch_tokens} tokens a step, "
            f"{w.max_running} running, {w.max_waiting} waiting"
            for w in self.workers
        ]
        for r in self.requests:
            leaves = "" if r.leaves_s is None else f", leaves after {r.leaves_s:.3f} s by {r.leaves_by}"
            timeout = "" if r.timeout_s is None else f", {r.timeout_s:.3f} s allowed"
            lines.append(
                f"  {r.name} at {r.at_s:.3f} s: {len(r.prompt)} + {r.sampling.max_tokens} tokens, "
                f"temperature {r.sampling.temperature:g}{timeout}{leaves}"
            )
        return lines + [f"  {fault}" for fault in self.faults]


def make_plan(seed: int, kind: str | None = None) -> Plan:
    """The schedule of ``seed``; ``kind`` overrides what it is about."""
    random = Random(f"plan/{seed}")
    drawn = random.choices(list(KINDS), weights=list(KINDS.values()))[0]
    plan = Plan(seed, kind or drawn)
    _shape(plan, random)
    _settings(plan, random)
    _workload(plan, random)
    _FAULTS[plan.kind](plan, random)
    if not plan.checksums:
        plan.flips = 0.0  # nothing else could notice a flipped byte
    plan.faults.sort(key=lambda fault: fault.at_s)
    return plan


def _shape(plan: Plan, random: Random) -> None:
    roles = [Role.PREFILL] * random.choice([1, 1, 2, 3]) + [Role.DECODE] * random.choice([1, 2, 2, 3])
    roles += [Role.MIXED] * (random.random() < 0.25)
    if random.random() < 0.04:
        roles = [Role.MIXED] * random.choice([1, 2])
    if plan.kind == "decode deaths":
        roles = [Role.PREFILL] * random.choice([1, 2]) + [Role.DECODE] * random.choice([2, 3])
    if plan.kind == "churn":
        roles = [Role.PREFILL, Role.DECODE]
    same = 12 if plan.kind == "churn" else random.choice([0, 0, 12, 40])
    for number, role in enumerate(roles):
        batch = random.choice([6, 10, 24, 64])
        plan.workers.append(
            WorkerSpec(
                name=f"{role.value[0]}{number}",
                role=role,
                num_blocks=same or random.choice([9, 10, 12, 14, 16, 20, 24, 32, 40]),
                max_batch_tokens=batch,
                max_running=min(batch, random.choice([1, 2, 4, 6])),
                max_waiting=random.choice([1, 2, 64]),
            )
        )
    plan.routers = 2 if plan.kind == "routers" or random.random() < 0.2 else 1


def _settings(plan: Plan, random: Random) -> None:
    plan.step_s = random.choice([0.002, 0.01, 0.03])
    plan.spikes = random.choice([0.0, 0.02, 0.2])
    plan.slow_reads = random.choice([0.0, 0.0, 0.05])
    plan.slow_read_s = 0.3
    plan.checksums = random.random() < 0.9


def _workload(plan: Plan, random: Random) -> None:
    churns = plan.kind == "churn"
    stems = [tuple(random.randrange(3, VOCAB) for _ in range(24)) for _ in range(3)]
    most = min(min(worker.num_blocks for worker in plan.workers) * BLOCK, CONTEXT)
    burst = random.random() < 0.3
    for number in range(random.choice([18, 26] if churns else [3, 6, 9, 12, 16])):
        prompt = _prompt(random, stems, min(most - 2, 44))
        sampling = _sampling(random, min(most - len(prompt), 14))
        plan.requests.append(
            RequestSpec(
                name=f"q{number}",
                at_s=0.4 if burst else 0.4 + random.uniform(0.0, 1.0 if churns else ARRIVALS_S),
                router=random.randrange(plan.routers),
                prompt=prompt,
                sampling=sampling,
                tenant=random.choice(["", "", "a", "b"]),
                priority=random.choice([0, 0, 0, 1]),
                timeout_s=None,
                leaves_s=None,
                leaves_by="",
                reads_every_s=random.choice([0.0, 0.0, 0.2]),
            )
        )


def _prompt(random: Random, stems: list[tuple[int, ...]], longest: int) -> tuple[int, ...]:
    stem = random.choice(stems)[: random.choice([0, 4, 8, 12, 24])]
    tail = tuple(random.randrange(3, VOCAB) for _ in range(random.choice([1, 1, 2, 3, 4, 7, 16, 20])))
    return (stem + tail)[:longest]


def _sampling(random: Random, most: int) -> SamplingParams:
    greedy = random.random() < 0.5
    stop = (chr(0x41 + random.randrange(VOCAB)),) if random.random() < 0.15 else ()
    max_tokens = random.randint(1, most)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=random.choice([0, 0, 0, min(3, max_tokens)]),
        temperature=0.0 if greedy else random.choice([0.7, 1.0, 1.5]),
        top_k=0 if greedy else random.choice([0, 0, 5]),
        top_p=1.0 if greedy else random.choice([1.0, 1.0, 0.9]),
        repetition_penalty=random.choice([1.0, 1.0, 1.0, 1.3]),
        presence_penalty=random.choice([0.0, 0.0, 0.0, 0.7]),
        seed=random.getrandbits(40),
        stop=stop,
        stop_token_ids=tuple(random.randrange(VOCAB) for _ in range(random.choice([0, 0, 0, 2]))),
        ignore_eos=random.random() < 0.5 and EOS >= 0,
    )


# -- what goes wrong, by kind ---------------------------------------------------------------------------


def _nothing(plan: Plan, random: Random) -> None:
    pass


def _leaving(plan: Plan, random: Random, share: float = 0.6) -> None:
    from dataclasses import replace

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


def _everything(plan: Plan, random: Random) -> None:
    for make in random.sample([_leaving, _deaths, _pauses, _network, _broker, _reads, _leases, _roles, _routers], 4):
        make(plan, random)


_FAULTS = {
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
    "everything": _everything,
}
