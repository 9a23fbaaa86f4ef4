"""Which workers serve a request. Pure: workers, demand and time come in, a choice goes out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from weir.ids import WorkerKey
from weir.services.router.fleet import WorkerView
from weir.services.router.prefixes import PromptKeys
from weir.services.router.roster import Roster

PREFILL_TOKENS_PER_SEQUENCE = 64
"""How many pending prefill tokens weigh like one more sequence in a mixed worker's batch."""
STAYS = "KV cannot be moved"
"""Why a prompt is prefilled where it is decoded: the way from every prefill worker has failed it."""


@dataclass(slots=True)
class Demand:
    """What is to be placed: tokens to prefill, most tokens to generate, workers that failed it before.

    ``expected_tokens``: those that will be generated, by what is known; 0 is not known. SLOs in milliseconds, inf
    is none; ``received_s`` is when the TTFT began, on the router's clock (None: now). ``keys``: the prompt's block
    hashes, to find it in caches. ``too_small``: workers that said that they can never hold it. ``revision``: of the
    model that its answer was begun with; empty when nothing was answered. ``stays``: its KV did not get from any
    prefill worker to a decode worker: whoever decodes it has to prefill it too.
    """

    prompt_tokens: int
    max_tokens: int
    avoid: frozenset[WorkerKey] = frozenset()
    expected_tokens: int = 0
    slo_ttft_ms: float = math.inf
    slo_tpot_ms: float = math.inf
    received_s: float | None = None
    keys: PromptKeys | None = None
    too_small: frozenset[WorkerKey] = frozenset()
    revision: str = ""
    stays: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """``prefill`` None: prefill locally on ``decode``. ``decode`` None: bind one when it has room.

    ``reason`` says in words why, for logs, metrics and traces; ``scores`` are the numbers behind it, by name.
    ``cached_tokens``: of the prompt, as predicted, where it is prefilled.
    """

    prefill: WorkerView | None
    decode: WorkerView | None
    reason: str = ""
    scores: Mapping[str, float] = field(default_factory=dict)
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a request would get if it were placed now, at best: milliseconds.

    ``compute_ms`` is the part of ``ttft_ms`` that no waiting would shorten. ``known``: it rests on measurements.
    ``prefill_ms_per_token``: what a token in the queue costs all workers together.
    """

    ttft_ms: float
    tpot_ms: float
    compute_ms: float
    prefill_ms_per_token: float
    known: bool


class Policy(Protocol):
    """The seam: placed by load, or by predicted latency."""

    def choose(self, workers: Sequence[WorkerView], demand: Demand, now_s: float) -> Choice | None:
        """A placement among usable ``workers`` of one model, or None: the request waits."""
        ...

    def choose_decode(
        self, workers: Sequence[WorkerView], source: WorkerView, demand: Demand, now_s: float
    ) -> WorkerView | None:
        """Who decodes what ``source`` has prefilled, or None: it waits under its lease."""
        ...

    def forecast(self, workers: Sequence[WorkerView], demand: Demand, now_s: float) -> Forecast | None:
        """What the request would get; None when there is nobody to give it, or nothing to say it by."""
        ...


class LeastLoaded:
    """The least loaded compatible pair; mixed workers when they are less busy or there is no pair.

    P by prompt tokens it has yet to compute; D by sequences plus KV pressure k/(1-k), with room for the prompt;
    work sent since the last report counts, equal ones are taken in turn.
    """

    def choose(self, workers: Sequence[WorkerView], demand: Demand, now_s: float) -> Choice | None:
        roster = _roster(workers, demand)
        if demand.stays:
            view = self._local([*roster.mixed.views, *roster.decodes.views], demand, now_s)
            return None if view is None else Choice(None, view, STAYS)
        source = self._prefill(roster, now_s)
        mixed = self._local(roster.mixed.views, demand, now_s)
        if source is not None and (mixed is None or not _less_busy(mixed, source)):
            return Choice(source, self._decode(roster, source, demand, now_s), "least loaded pair")
        if mixed is not None:
            return Choice(None, mixed, "mixed worker")
        if roster.prefills.views:
            return None
        alone = self._local(roster.decodes.views, demand, now_s)
        return None if alone is None else Choice(None, alone, "no prefill worker")

    def choose_decode(
        self, workers: Sequence[WorkerView], source: WorkerView, demand: Demand, now_s: float
    ) -> WorkerView | None:
        return self._decode(_roster(workers, demand), source, demand, now_s)

    def forecast(self, workers: Sequence[WorkerView], demand: Demand, now_s: float) -> Forecast | None:
        """See Policy: load says nothing about latency."""
        return None

    def _decode(self, roster: Roster, source: WorkerView, demand: Demand, now_s: float) -> WorkerView | None:
        # When roles have changed and no decode worker is left, a mixed one takes what was prefilled for one.
        views = roster.decodes.views or roster.mixed.views
        wanted, prompt = source.fingerprint, demand.prompt_tokens
        able = [view for view in views if view.fingerprint == wanted and has_room(view, prompt, now_s)]
        return min(able, key=lambda view: _decode_score(view, prompt), default=None)

    def _prefill(self, roster: Roster, now_s: float) -> WorkerView | None:
        """The least busy P that has at least one compatible D, busy or not."""
        readable = roster.readable
        able = [
            view
            for view in roster.prefills.views
            if view.fingerprint in readable and view.refuses_prefill_until_s <= now_s
        ]
        return min(able, key=lambda view: (view.pending_prefill_tokens, view.last_used), default=None)

    def _local(self, views: Sequence[WorkerView], demand: Demand, now_s: float) -> WorkerView | None:
        prompt = demand.prompt_tokens
        able = [view for view in views if has_room(view, prompt, now_s)]
        return min(able, key=lambda view: _mixed_score(view, prompt), default=None)


def _roster(workers: Sequence[WorkerView], demand: Demand) -> Roster:
    """Those not to be avoided, by role."""
    kept = without(workers, demand.avoid)
    return kept if isinstance(kept, Roster) else Roster(kept)


def without(workers: Sequence[WorkerView], avoid: frozenset[WorkerKey]) -> Sequence[WorkerView]:
    """Without those to avoid, by role: one that is the last of its role is kept."""
    if not avoid:
        return workers
    kept = [view for view in workers if view.key not in avoid]
    roles = {view.info.role for view in kept}
    return kept + [view for view in workers if view.key in avoid and view.info.role not in roles]


def has_room(view: WorkerView, prompt_tokens: int, now_s: float) -> bool:
    """Whether a prompt of this length could begin there now.

    An idle worker always has room: what never fits is refused at the door or by the worker itself.
    """
    if view.refuses_decode_until_s > now_s:
        return False
    if view.sequences == 0 or not view.total_blocks:
        return True
    size = view.block_size
    return view.free_blocks >= (prompt_tokens // size + 1 if size else 0)


def _pressure(view: WorkerView, prompt_tokens: int) -> float:
    """k / (1 - k) of the pool's used share k with this prompt in it."""
    total = view.total_blocks
    if not total:
        return 0.0
    size = view.block_size
    used = min(total - view.free_blocks + (prompt_tokens // size + 1 if size else 0), total)
    return used / max(total - used, 0.5)


def _decode_score(view: WorkerView, prompt_tokens: int) -> tuple[float, int]:
    return view.sequences + _pressure(view, prompt_tokens), view.last_used


def _mixed_score(view: WorkerView, prompt_tokens: int) -> tuple[float, int]:
    pending = view.pending_prefill_tokens / PREFILL_TOKENS_PER_SEQUENCE
    return view.sequences + pending + _pressure(view, prompt_tokens), view.last_used


def _less_busy(mixed: WorkerView, source: WorkerView) -> bool:
    return mixed.pending_prefill_tokens < source.pending_prefill_tokens
