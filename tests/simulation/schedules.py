"""A schedule, made from its seed alone: its cluster and its requests; what goes wrong is by its kind."""

from __future__ import annotations

from random import Random

from tests.simulation.kinds import FAULTS, KINDS
from tests.simulation.model import BLOCK, CONTEXT, EOS, VOCAB
from tests.simulation.plan import ARRIVALS_S, Plan, RequestSpec, WorkerSpec
from weir.engine.sampling import SamplingParams
from weir.lifecycle import Role


def make_plan(seed: int, kind: str | None = None) -> Plan:
    """The schedule of ``seed``; ``kind`` overrides what it is about."""
    random = Random(f"plan/{seed}")
    drawn = random.choices(list(KINDS), weights=list(KINDS.values()))[0]
    plan = Plan(seed, kind or drawn)
    _shape(plan, random)
    _settings(plan, random)
    _workload(plan, random)
    FAULTS[plan.kind](plan, random)
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
