"""Which workers serve a request. Pure: workers, demand and time come in, a choice goes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from weir.ids import WorkerKey
from weir.lifecycle import Role
from weir.services.router.fleet import WorkerView

PREFILL_TOKENS_PER_SEQUENCE = 64
"""How many pending prefill tokens weigh like one more sequence in a mixed worker's batch."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be placed: tokens to prefill, most tokens to generate, workers that failed it before."""

    prompt_tokens: int
    max_tokens: int
    avoid: frozenset[WorkerKey] = frozenset()


@dataclass(frozen=True, slots=True)
class Choice:
    """``prefill`` None: prefill locally on ``decode``. ``decode`` None: bind one when it has room.

    ``reason`` says in words why, for logs and traces; ``scores`` are the numbers behind it, by name.
    """

    prefill: WorkerView | None
    decode: WorkerView | None
    reason: str = ""
    scores: Mapping[str, float] = field(default_factory=dict)


class Policy(Protocol):
    """The seam: placed here today by load, later by predicted latency."""

    def choose(self, workers: Sequence[WorkerView], demand: Demand, now_s: float) -> Choice | None:
        """A placement among usable ``workers`` of one model, or None: the request waits."""
        ...

    def choose_decode(
        self, workers: Sequence[WorkerView], source: WorkerView, demand: Demand, now_s: float
    ) -> WorkerView | None:
        """Who decodes what ``source`` has prefilled, or None: it waits under its lease."""
        ...


class LeastLoaded:
    """The least loaded compatible pair; mixed workers when they are less busy or there is no pair.

    P by prompt tokens it has yet to compute; D by sequences plus KV pressure k/(1-k), with room for the prompt;
    work sent since the last report counts, equal ones are taken in turn.
    """

    def choose(self, workers: Sequence[WorkerView], demand: Demand, now_s: float) -> Choice | None:
        candidates = _without(workers, demand.avoid)
        source = self._prefill(candidates, now_s)
        mixed = self._local(candidates, demand, now_s, Role.MIXED)
        if source is not None and (mixed is None or not _less_busy(mixed, source)):
            decode = self.choose_decode(candidates, source, demand, now_s)
            return Choice(source, decode, "least loaded pair", _scores(source, decode))
        if mixed is not None:
            return Choice(None, mixed, "mixed worker", _scores(None, mixed))
        if any(view.info.role is Role.PREFILL for view in candidates):
            return None
        alone = self._local(candidates, demand, now_s, Role.DECODE)
        return None if alone is None else Choice(None, alone, "no prefill worker", _scores(None, alone))

    def choose_decode(
        self, workers: Sequence[WorkerView], source: WorkerView, demand: Demand, now_s: float
    ) -> WorkerView | None:
        able = [
            view
            for view in _without(workers, demand.avoid)
            if view.info.role is Role.DECODE
            and view.info.fingerprint == source.info.fingerprint
            and _has_room(view, demand, now_s)
        ]
        return min(able, key=lambda view: _decode_score(view, demand), default=None)

    def _prefill(self, workers: Sequence[WorkerView], now_s: float) -> WorkerView | None:
        """The least busy P that has at least one compatible D, busy or not."""
        readable = {view.info.fingerprint for view in workers if view.info.role is Role.DECODE}
        able = [
            view
            for view in workers
            if view.info.role is Role.PREFILL
            and view.info.fingerprint in readable
            and view.refuses_prefill_until_s <= now_s
        ]
        return min(able, key=lambda view: (view.pending_prefill_tokens, view.last_used), default=None)

    def _local(self, workers: Sequence[WorkerView], demand: Demand, now_s: float, role: Role) -> WorkerView | None:
        able = [view for view in workers if view.info.role is role and _has_room(view, demand, now_s)]
        return min(able, key=lambda view: _mixed_score(view, demand), default=None)


def _scores(source: WorkerView | None, decode: WorkerView | None) -> dict[str, float]:
    """What the choice was made by, before the request itself counts."""
    scores: dict[str, float] = {}
    if source is not None:
        scores["prefill_pending_tokens"] = source.pending_prefill_tokens
    if decode is not None:
        scores["decode_sequences"] = decode.sequences
        scores["decode_free_blocks"] = decode.free_blocks
    return scores


def _without(workers: Sequence[WorkerView], avoid: frozenset[WorkerKey]) -> Sequence[WorkerView]:
    """Without those to avoid, by role: one that is the last of its role is kept."""
    if not avoid:
        return workers
    kept = [view for view in workers if view.key not in avoid]
    roles = {view.info.role for view in kept}
    return kept + [view for view in workers if view.key in avoid and view.info.role not in roles]


def _has_room(view: WorkerView, demand: Demand, now_s: float) -> bool:
    """An idle worker always has room: what never fits is refused at the door or by the worker itself."""
    if view.refuses_decode_until_s > now_s:
        return False
    if view.sequences == 0 or not view.total_blocks:
        return True
    return view.free_blocks >= view.blocks_for(demand.prompt_tokens + 1)


def _pressure(view: WorkerView, demand: Demand) -> float:
    """k / (1 - k) of the pool's used share k with this prompt in it."""
    total = view.total_blocks
    if not total:
        return 0.0
    used = min(total - view.free_blocks + view.blocks_for(demand.prompt_tokens + 1), total)
    return used / max(total - used, 0.5)


def _decode_score(view: WorkerView, demand: Demand) -> tuple[float, int]:
    return view.sequences + _pressure(view, demand), view.last_used


def _mixed_score(view: WorkerView, demand: Demand) -> tuple[float, int]:
    pending = view.pending_prefill_tokens / PREFILL_TOKENS_PER_SEQUENCE
    return view.sequences + pending + _pressure(view, demand), view.last_used


def _less_busy(mixed: WorkerView, source: WorkerView) -> bool:
    return mixed.pending_prefill_tokens < source.pending_prefill_tokens
