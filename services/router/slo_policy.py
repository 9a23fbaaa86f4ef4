"""Placement by predicted latency, in milliseconds. Pure; ``draw`` gives numbers in [0, 1).

    prefill(P)  = wait behind what was reported and sent since + time of the tokens that P has not cached
    decode(D)   = step with this sequence * (1 + PRESSURE k / (1 - k)) + KV read of the tokens that D has not cached
    local(M, D) = wait + prefill stretched by the steps in between + delay of those who decode there + decode

k is the share of the pool used once this sequence and the others there have grown to their expected length. The
placement that misses fewest SLOs wins, then the lowest score. Scores within NEAR of the best are equal: the least
recently used worker is taken, then by a salt that differs between routers. What this router sent counts at once,
and once more for every other router that the worker serves, so that neither reports' age nor the number of routers
makes them run after the same worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weir.services.router.fleet import WorkerView
from weir.services.router.policy import Choice, Demand, Forecast, has_room
from weir.services.router.prefixes import PrefixMap
from weir.services.router.roster import Group, Roster

PRESSURE = 0.15
MAX_USED = 0.98
NEAR, NEAR_MS = 1.05, 0.05
HOLDERS = 2
"""Workers looked at because they have the beginning of the prompt."""
CHUNK_TOKENS = 512
"""A prompt is computed in chunks of about this many tokens between decode steps."""
DELAYED = 0.1
"""Weight of the delay that a local prefill causes to each sequence that decodes there."""
BETTER = 0.8
"""A local prefill on a decode worker must be predicted this much better than another worker's."""
SATURATED_MS = 50.0
JOIN_STRETCH = 0.3
"""Sequences on their way to a decode worker may stretch its step by this share."""
MIN_JOINS = 4
NO_DECODE_MS = 100.0
"""Price of a prefill for which no decode worker has room yet."""
UNKNOWN_OUTPUT = 128
MISSED_BEATS = 2.5


@dataclass(frozen=True, slots=True)
class SloOptions:
    """``queue_ms``: requests wait in the router rather than at a worker once the wait there is longer.

    ``local_tokens``: prompts with at most this much to compute may be prefilled on a decode worker that is not
    forced to. ``max_joins``: sequences on their way to one decode worker. ``late_s``: a worker silent for this long,
    and for MISSED_BEATS of its heartbeats, gets nothing new.
    """

    queue_ms: float = 1_000.0
    local_tokens: int = 16
    max_joins: int = 32
    late_s: float = math.inf


class Quote(NamedTuple):
    """What one worker would make of a request, milliseconds. ``missed``: SLOs that it would not meet."""

    missed: int
    score: float
    view: WorkerView
    cached: int
    ttft_ms: float
    tpot_ms: float
    wait_ms: float
    compute_ms: float


class SloPolicy:
    """See the module. ``prefixes`` is kept up to date by its owner."""

    def __init__(self, prefixes: PrefixMap, options: SloOptions, draw: Callable[[], float]) -> None:
        self._prefixes = prefixes
        self._options = options
        self._draw = draw

    # Policy

    def choose(self, workers: Sequence[WorkerView], demand: Demand, now_s: float) -> Choice | None:
        """See Policy."""
        roster = _roster(workers)
        best = self._best(roster, demand, now_s)
        if best is None:
            return None
        quote, kind = best
        if quote.wait_ms > self._options.queue_ms:
            return None
        if kind:
            return Choice(None, quote.view, kind, _scores(quote), quote.cached)
        return Choice(quote.view, None, "", _scores(quote), quote.cached)

    def choose_decode(
        self, workers: Sequence[WorkerView], source: WorkerView, demand: Demand, now_s: float
    ) -> WorkerView | None:
        """See Policy. Finished prefills join a decode worker at the pace that its step time allows.

        When roles have changed and no decode worker is left, a mixed one takes what was prefilled for one.
        """
        roster = _roster(workers)
        group = roster.decodes if roster.decodes.views else roster.mixed
        quotes = [
            quote
            for quote in self._decodes(roster, demand, now_s, source, group)
            if self._may_join(quote.view, now_s) and not _breaks_promise(quote)
        ]
        best = _pick(quotes)
        return None if best is None else best.view

    def forecast(self, workers: Sequence[WorkerView], demand: Demand, now_s: float) -> Forecast | None:
        """See Policy."""
        roster = _roster(workers)
        best = self._best(roster, demand, now_s)
        if best is None:
            return None
        quote, _ = best
        computing = len(roster.prefills.views) or len(roster.mixed.views) or len(roster.decodes.views)
        view = quote.view
        return Forecast(
            ttft_ms=quote.ttft_ms,
            tpot_ms=quote.tpot_ms,
            compute_ms=quote.compute_ms,
            prefill_ms_per_token=view.speed.queue_ms(1, now_s) / max(computing, 1),
            known=view.speed.known,
        )

    # the best placement

    def _best(self, roster: Roster, demand: Demand, now_s: float) -> tuple[Quote, str] | None:
        """The best quote, and why the prompt is prefilled where it is decoded, or "" when it is not."""
        best: tuple[Quote, str] | None = None
        cached_on_decode = 0
        source = _pick(self._prefills(roster, demand, now_s)) if roster.prefills.views else None
        if source is not None:
            decodes = self._decodes(roster, demand, now_s, source.view)
            cached_on_decode = max([quote.cached for quote in decodes], default=0)
            best = (_pair(source, _pick(decodes)), "")
        if roster.mixed.views:
            mixed = _pick(self._locals(roster.mixed, roster, demand, now_s))
            if mixed is not None and (best is None or _better(mixed, best[0])):
                best = (mixed, "mixed worker")
        if not roster.decodes.views:
            return best
        if best is None:
            return self._alone(roster, demand, now_s)
        reason = self._local_reason(demand, best[0], cached_on_decode)
        return best if not reason else self._local_on_decode(roster, demand, now_s, best, reason)

    def _alone(self, roster: Roster, demand: Demand, now_s: float) -> tuple[Quote, str] | None:
        """Nobody else prefills: decode workers do, unless prefill workers are there and only busy."""
        gone = not roster.prefills.views
        if not gone and any(view.refuses_prefill_until_s <= now_s for view in roster.prefills.views):
            return None
        best = _pick(self._locals(roster.decodes, roster, demand, now_s))
        if best is None or not (gone or _has_slack(best, demand, now_s)):
            return None
        return best, "no prefill worker" if gone else "prefill saturated"

    def _local_reason(self, demand: Demand, rival: Quote, cached: int) -> str:
        """Why a decode worker might do it better than ``rival``; "" when there is no reason to look."""
        if demand.prompt_tokens - cached <= self._options.local_tokens:
            return "cached prompt" if cached else "short prompt"
        if rival.missed or rival.wait_ms > max(SATURATED_MS, 2 * rival.compute_ms):
            return "prefill saturated"
        return ""

    def _local_on_decode(
        self, roster: Roster, demand: Demand, now_s: float, rival: tuple[Quote, str], reason: str
    ) -> tuple[Quote, str]:
        """``rival``, or a decode worker that is predicted to be much better and has the slack."""
        quotes = self._locals(roster.decodes, roster, demand, now_s)
        if reason != "prefill saturated":
            quotes = [one for one in quotes if demand.prompt_tokens - one.cached <= self._options.local_tokens]
        best = _pick([quote for quote in quotes if _has_slack(quote, demand, now_s)])
        return rival if best is None or not _much_better(best, rival[0]) else (best, reason)

    # quotes

    def _prefills(self, roster: Roster, demand: Demand, now_s: float) -> list[Quote]:
        able = [
            view
            for view in self._candidates(roster.prefills, roster, demand, now_s)
            if view.refuses_prefill_until_s <= now_s and view.info.fingerprint in roster.readable
        ]
        waited_ms = _waited_ms(demand, now_s)
        quotes = []
        for view in able:
            cached = self._cached(view, demand)
            wait = view.wait_ms(now_s)
            compute = view.speed.prefill_ms(demand.prompt_tokens - cached, cached, now_s)
            ttft = waited_ms + wait + compute
            missed = 1 if ttft > demand.slo_ttft_ms else 0
            quotes.append(Quote(missed, wait + compute, view, cached, ttft, 0.0, wait, compute))
        return quotes

    def _decodes(
        self, roster: Roster, demand: Demand, now_s: float, source: WorkerView, group: Group | None = None
    ) -> list[Quote]:
        """Quotes of ``group`` (default: the decode workers) for what ``source`` prefills."""
        wanted, name = source.info.fingerprint, source.info.key.worker_id
        quotes = []
        for view in self._candidates(roster.decodes if group is None else group, roster, demand, now_s):
            info = view.info
            if info.fingerprint != wanted or not has_room(view, demand, now_s):
                continue
            cached = self._cached(view, demand)
            num_bytes = (demand.prompt_tokens - cached) * info.kv_bytes_per_token
            read = view.speed.read_ms(num_bytes, name, now_s)
            step = _step_ms(view, demand, now_s)
            missed = 1 if step > demand.slo_tpot_ms or step > view.tpot_limit_ms else 0
            score = step * (1.0 + PRESSURE * _pressure(view, demand)) + read
            quotes.append(Quote(missed, score, view, cached, 0.0, step, 0.0, read))
        return quotes

    def _locals(self, group: Group, roster: Roster, demand: Demand, now_s: float) -> list[Quote]:
        """Quotes of workers that would prefill and decode it."""
        waited_ms = _waited_ms(demand, now_s)
        quotes = []
        for view in self._candidates(group, roster, demand, now_s):
            if not has_room(view, demand, now_s):
                continue
            cached = self._cached(view, demand)
            step = _step_ms(view, demand, now_s)
            tokens = demand.prompt_tokens - cached
            running = view.sequences
            compute = view.speed.prefill_ms(tokens, cached, now_s)
            if running:
                compute += step * -(-tokens // CHUNK_TOKENS)
            wait = view.wait_ms(now_s)
            ttft = waited_ms + wait + compute
            missed = (ttft > demand.slo_ttft_ms) + (step > min(demand.slo_tpot_ms, view.tpot_limit_ms))
            score = wait + compute * (1.0 + DELAYED * running) + step * (1.0 + PRESSURE * _pressure(view, demand))
            quotes.append(Quote(missed, score, view, cached, ttft, step, wait, compute))
        return quotes

    def _cached(self, view: WorkerView, demand: Demand) -> int:
        """Tokens of the prompt that ``view`` is thought to have."""
        if demand.keys is None or not self._prefixes:
            return 0
        info = view.info
        size = info.block_size
        return size * self._prefixes.depth(info.key, demand.keys.hashes(info.fingerprint, size))

    def _candidates(self, group: Group, roster: Roster, demand: Demand, now_s: float) -> Sequence[WorkerView]:
        """Workers to be looked at: least busy, some drawn, those with the prefix.

        Those that failed this request, broken and silent ones only when there are no others: better than nobody.
        """
        views = group.candidates(self._draw)
        if views is not group.views and demand.keys is not None and self._prefixes:
            views = self._with_holders(views, group, roster, demand)
        if demand.avoid:
            views = [view for view in views if view.info.key not in demand.avoid] or views
        well = [view for view in views if view.breaker.allows(now_s) and not self._late(view, now_s)]
        return well or [view for view in views if view.breaker.allows(now_s)] or views

    def _late(self, view: WorkerView, now_s: float) -> bool:
        silent_s = now_s - view.heard_s
        return silent_s > self._options.late_s and silent_s > MISSED_BEATS * view.info.heartbeat_s

    def _with_holders(
        self, views: Sequence[WorkerView], group: Group, roster: Roster, demand: Demand
    ) -> Sequence[WorkerView]:
        assert demand.keys is not None
        found = dict.fromkeys(views)
        for fingerprint, size in roster.kinds:
            for key in self._prefixes.holders(demand.keys.hashes(fingerprint, size), HOLDERS):
                view = roster.members.get(key)
                if view is not None and view.group is group:
                    found[view] = None
        return list(found)

    def _may_join(self, view: WorkerView, now_s: float) -> bool:
        """Whether one more sequence on its way there stretches its steps by a bearable share only."""
        joining = view.joining
        if joining < MIN_JOINS:
            return True
        if joining >= self._options.max_joins:
            return False
        running = view.load.running
        if not running:
            return True
        speed, context = view.speed, view.context_tokens
        now = speed.step_ms(running, context, now_s)
        return speed.step_ms(running + joining + 1, context, now_s) <= (1.0 + JOIN_STRETCH) * now


def _roster(workers: Sequence[WorkerView]) -> Roster:
    return workers if isinstance(workers, Roster) else Roster(workers)


def _waited_ms(demand: Demand, now_s: float) -> float:
    return 0.0 if demand.received_s is None else max(0.0, now_s - demand.received_s) * 1e3


def _step_ms(view: WorkerView, demand: Demand, now_s: float) -> float:
    """A step there with this sequence, halfway through its answer."""
    context = view.context_tokens + demand.prompt_tokens + (demand.expected_tokens or UNKNOWN_OUTPUT) / 2
    return view.speed.step_ms(view.sequences + 1, context, now_s)


def _pressure(view: WorkerView, demand: Demand) -> float:
    """k / (1 - k) of the share k of the pool in use once all there have grown."""
    total = view.total_blocks
    if not total:
        return 0.0
    output = demand.expected_tokens or min(demand.max_tokens, UNKNOWN_OUTPUT)
    grown = demand.prompt_tokens + output + view.expected_tokens // 2
    used = min((total - view.free_blocks + view.blocks_for(grown)) / total, MAX_USED)
    return used / (1.0 - used)


def _breaks_promise(quote: Quote) -> bool:
    """Whether those who decode there would miss the TPOT that they were promised."""
    return quote.tpot_ms > quote.view.tpot_limit_ms


def _pick(quotes: Sequence[Quote]) -> Quote | None:
    """The best; among those that are nearly as good the one used longest ago."""
    if not quotes:
        return None
    fewest = min(quote.missed for quote in quotes)
    lowest = min(quote.score for quote in quotes if quote.missed == fewest)
    bound = lowest * NEAR + NEAR_MS
    found: Quote | None = None
    for quote in quotes:
        if quote.missed == fewest and quote.score <= bound:
            view = quote.view
            if found is None or (view.last_used, view.salt) < (found.view.last_used, found.view.salt):
                found = quote
    return found


def _scores(quote: Quote) -> dict[str, float]:
    return {
        "score_ms": quote.score,
        "ttft_ms": quote.ttft_ms,
        "tpot_ms": quote.tpot_ms,
        "wait_ms": quote.wait_ms,
        "compute_ms": quote.compute_ms,
        "cached_tokens": float(quote.cached),
        "missed_slos": float(quote.missed),
    }


def _pair(source: Quote, decode: Quote | None) -> Quote:
    """A prefill worker, priced with the best decode worker for it."""
    if decode is None:
        return source._replace(score=source.score + NO_DECODE_MS)
    missed, score = source.missed + decode.missed, source.score + decode.score
    return source._replace(missed=missed, score=score, tpot_ms=decode.tpot_ms)


def _better(one: Quote, other: Quote) -> bool:
    return (one.missed, one.score) < (other.missed, other.score)


def _much_better(one: Quote, other: Quote) -> bool:
    return one.missed < other.missed or (one.missed == other.missed and one.score < BETTER * other.score)


def _has_slack(quote: Quote, demand: Demand, now_s: float) -> bool:
    """Whether those who decode there can bear the pause that a chunk of this prompt is.

    Where no TPOT was promised, the pause may be as long as a step.
    """
    view = quote.view
    if not view.sequences:
        return True
    tokens = min(demand.prompt_tokens - quote.cached, CHUNK_TOKENS)
    pause = view.speed.prefill_ms(tokens, quote.cached, now_s)
    limit = view.tpot_limit_ms
    return quote.tpot_ms + pause <= (limit if limit < math.inf else 2.0 * quote.tpot_ms)
