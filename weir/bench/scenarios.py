"""The traffic of the field's scenarios, and what theory expects of a split for each. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weir.bench.arrivals import arrival_times_s
from weir.bench.plan import Prompt
from weir.bench.synthetic import Vocabulary
from weir.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Flow:
    """One kind of request in a scenario."""

    kind: str
    rate_per_s: float
    input_tokens: int
    output_tokens: int
    burstiness: float = 1.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """Flows that run together. ``split_should`` is win, lose or either; ``why`` says so in words.

    ``objectives`` are what its requests are promised (``weir.bench.goodput``), unless the run says otherwise.
    ``kill_at`` is the share of the duration after which a worker that decodes is killed and, as a supervisor
    would, started again. ``link_mbit`` limits the way of the KV between the two workers, in 10^6 bits a second;
    0 leaves it as it is.
    """

    name: str
    flows: tuple[Flow, ...]
    split_should: str
    why: str
    objectives: tuple[str, ...] = ("ttft:2000", "tpot:100")
    kill_at: float | None = None
    link_mbit: float = 0.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Prompts with their arrivals, in order."""

    prompts: tuple[Prompt, ...]
    arrivals_s: tuple[float, ...]


_CHAT = Flow("chat", 0.7, 192, 32)
# A server's core prefills the demo model at about 800 tokens/s and decodes it in 24 to 41 ms a step (batch 1 to 8).
# A prefill of 1,024 in the middle of a mixed worker's answer of 64 costs each token 20 ms more: past the objective.
# `weir simulate` of 30 s with these figures: all requests in time split, 40 to 60 % of them on two mixed workers.
_LONG = (Flow("long", 0.65, 1024, 64),)
_LONG_OBJECTIVES = ("ttft:10000", "tpot:42")

SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "steady",
        (_CHAT,),
        "either",
        "Short prompts disturb decoding little; a split halves the decode cores and pays a hand-over.",
    ),
    Scenario(
        "burst",
        (dataclasses.replace(_CHAT, burstiness=0.15),),
        "either",
        "Bursts of prompts stall the decoding of an aggregated worker; a split queues them on one prefill core.",
    ),
    Scenario(
        "long-prompt",
        _LONG,
        "win",
        "A long prefill holds up every decode step that shares its core; split, no step ever waits for one.",
        _LONG_OBJECTIVES,
    ),
    Scenario(
        "decode-heavy",
        (Flow("writer", 1.8, 32, 96),),
        "lose",
        "Almost no prefill: its core idles while one core decodes what two could share.",
        ("ttft:2000", "tpot:40"),
    ),
    Scenario(
        "worker-loss",
        (_CHAT,),
        "lose",
        "A pair has one worker of each kind: while the lost one starts again nothing can take its place.",
        kill_at=1 / 3,
    ),
    Scenario(
        "network-degradation",
        _LONG,
        "lose",
        "The long prompts again, over a link that carries KV slower than it is made: every answer waits for the link.",
        _LONG_OBJECTIVES,
        link_mbit=150.0,
    ),
)


def choose_scenarios(names: Sequence[str]) -> list[Scenario]:
    """Those named, in the order of the table; all when none is named. InvalidArgument for an unknown name."""
    known = {scenario.name for scenario in SCENARIOS}
    for name in names:
        if name not in known:
            raise InvalidArgument("--scenario", name, f"must be one of {', '.join(s.name for s in SCENARIOS)}")
    return [scenario for scenario in SCENARIOS if not names or scenario.name in names]


def make_traffic(
    scenario: Scenario, duration_s: float, rate_scale: float, seed: int, vocabulary: Vocabulary
) -> Traffic:
    """Requests that arrive within ``duration_s``; equal arguments give equal traffic, whoever serves it."""
    place = next(i for i, s in enumerate(SCENARIOS) if s.name == scenario.name)
    arrived: list[tuple[float, Prompt]] = []
    for number, flow in enumerate(scenario.flows):
        random = np.random.default_rng([seed, place, number, round(1000 * rate_scale)])
        rate = flow.rate_per_s * rate_scale
        count = max(1, round(rate * duration_s))
        for at_s in arrival_times_s(count, rate, flow.burstiness, random):
            ids = vocabulary.draw(flow.input_tokens, random)
            arrived.append((at_s, Prompt(flow.output_tokens, ids, kind=flow.kind)))
    arrived.sort(key=lambda pair: pair[0])
    return Traffic(tuple(prompt for _, prompt in arrived), tuple(at_s for at_s, _ in arrived))


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a split did beside its aggregated baseline."""

    scenario: str
    goodput_ratio: float | None
    itl_p99_ratio: float
    ttft_p99_ratio: float
    outcome: str
    text: str


WIN_RATIO = 1.1


def judge_split(scenario: Scenario, split: dict[str, float], mixed: dict[str, float]) -> Verdict:
    """Compare two summaries of ``weir.bench.metrics.summarise``.

    Goodput decides; where it is within 10 % the run is a draw, whatever the latencies did, and where no request met
    the objectives on either side it is undecided.
    """
    goodput = _ratio(split["request_goodput"], mixed["request_goodput"])
    itl = _ratio(split["p99_itl_ms"], mixed["p99_itl_ms"]) or 0.0
    ttft = _ratio(split["p99_ttft_ms"], mixed["p99_ttft_ms"]) or 0.0
    outcome = "draw"
    if goodput is None:
        outcome = "win" if split["request_goodput"] > 0 else "undecided"
    elif goodput >= WIN_RATIO:
        outcome = "win"
    elif goodput <= 1 / WIN_RATIO:
        outcome = "lose"
    expected = {"win": "as expected", "lose": "as expected"}.get(outcome, "")
    if outcome == "undecided":
        expected = "no request met the objectives on either side"
    elif scenario.split_should in {"win", "lose"} and outcome != scenario.split_should:
        expected = f"theory said {scenario.split_should}"
    elif scenario.split_should == "either":
        expected = "theory leaves it open"
    text = (
        f"{outcome}: goodput {split['request_goodput']:.2f} against {mixed['request_goodput']:.2f} requests/s, "
        f"ITL p99 × {itl:.2f}, TTFT p99 × {ttft:.2f}" + (f" ({expected})" if expected else "") + f". {scenario.why}"
    )
    return Verdict(scenario.name, goodput, itl, ttft, outcome, text)


def _ratio(above: float, below: float) -> float | None:
    return above / below if below > 0 else None
