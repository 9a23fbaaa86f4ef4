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

from weir.services.router.advice import Counsel
from weir.services.router.fleet import WorkerView
from weir.services.router.policy import STAYS, Choice, Demand, Forecast, has_room
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
ADVISED_WORSE = 2.0
"""One that the balance controller advises may be predicted this much worse."""
SATURATED, ADVISED = "prefill saturated", "advised"
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


_Row = tuple[int, float, WorkerView, int, float, float, float, float]
"""A Quote that is not chosen yet: most never are, and a plain tuple is made in a fifth of the time."""


class _Case:
    """One request to place now, and what all quotes for it have in common."""

    __slots__ = (
        "_hashes",
        "_held",
        "context",
        "demand",
        "grown",
        "now_s",
        "prefixes",
        "prompt",
        "roster",
        "searched",
        "waited_ms",
    )

    def __init__(self, roster: Roster, demand: Demand, now_s: float, prefixes: PrefixMap) -> None:
        self.roster = roster
        self.demand = demand
        self.now_s = now_s
        self.prefixes = prefixes
        self.prompt = demand.prompt_tokens
        expected = demand.expected_tokens
        self.context = self.prompt + (expected or UNKNOWN_OUTPUT) / 2
        """Its tokens halfway through its answer."""
        self.grown = self.prompt + (expected or min(demand.max_tokens, UNKNOWN_OUTPUT))
        received_s = demand.received_s
        self.waited_ms = 0.0 if received_s is None else max(0.0, now_s - received_s) * 1e3
        self.searched = demand.keys is not None and len(prefixes) > 0
        """Whether some of the prompt may be in a cache."""
        self._hashes: list[bytes] | None = None
        """The prompt's block hashes, when all workers need the same."""
        self._held: list[WorkerView] | None = None
        if self.searched and demand.keys is not None and len(roster.kinds) == 1:
            self._hashes = demand.keys.hashes(*roster.kinds[0])

    def depth(self, view: WorkerView, near: int) -> int:
        """Blocks of the prompt that ``view`` is thought to have; ``near`` is a guess. For those ``searched``."""
        if self._hashes is not None:
            return self.prefixes.depth(view.key, self._hashes, near)
        assert self.demand.keys is not None
        return self.prefixes.depth(view.key, self.demand.keys.hashes(view.fingerprint, view.block_size), near)

    def held(self) -> list[WorkerView]:
        """Workers that have most of the prompt's beginning, a few of each kind."""
        if self._held is None:
            keys, members = self.demand.keys, self.roster.members
            found = []
            if keys is not None and self.searched:
                for fingerprint, size in self.roster.kinds:
                    for key in self.prefixes.holders(keys.hashes(fingerprint, size), HOLDERS):
                        if key in members:
                            found.append(members[key])
            self._held = found
        return self._held


class SloPolicy:
    """See the module. ``prefixes`` is kept up to date by its owner, and so is ``counsel``: local prefill is heeded."""

    def __init__(
        self, prefixes: PrefixMap, options: SloOptions, draw: Callable[[], float], counsel: Counsel | None = None
    ) -> None:
        self._prefixes = prefixes
        self.counsel = counsel
        self._options = options
        self._draw = draw

    # Policy

    def choose(self, workers: Sequence[WorkerView], demand: Demand, now_s: float) -> Choice | None:
        """See Policy."""
        best = self._best(self._case(workers, demand, now_s))
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
        case = self._case(workers, demand, now_s)
        group = case.roster.decodes if case.roster.decodes.views else case.roster.mixed
        able = [view for view in self._candidates(group, case) if self._may_join(view, now_s)]
        # One that would break a promise made to others is not taken.
        rows = [row for row in _decode_rows(able, case, source) if row[5] <= row[2].tpot_limit_ms]
        return _pick_row(rows)[2] if rows else None

    def forecast(self, workers: Sequence[WorkerView], demand: Demand, now_s: float) -> Forecast | None:
        """See Policy."""
        case = self._case(workers, demand, now_s)
        best = self._best(case)
        if best is None:
            return None
        quote, _ = best
        roster = case.roster
        computing = len(roster.prefills.views) or len(roster.mixed.views) or len(roster.decodes.views)
        view = quote.view
        return Forecast(
            ttft_ms=quote.ttft_ms,
            tpot_ms=quote.tpot_ms,
            compute_ms=quote.compute_ms,
            prefill_ms_per_token=view.speed.queue_ms(1, now_s) / max(computing, 1),
            known=view.speed.known,
        )

    def _case(self, workers: Sequence[WorkerView], demand: Demand, now_s: float) -> _Case:
        roster = workers if isinstance(workers, Roster) else Roster(workers)
        return _Case(roster, demand, now_s, self._prefixes)

    # the best placement

    def _best(self, case: _Case) -> tuple[Quote, str] | None:
        """The best quote, and why the prompt is prefilled where it is decoded, or "" when it is not."""
        roster = case.roster
        if case.demand.stays:
            alone = _pick([*self._locals(roster.mixed, case), *self._locals(roster.decodes, case)])
            return None if alone is None else (alone, STAYS)
        best: tuple[Quote, str] | None = None
        cached_on_decode = 0
        source = _pick(self._prefills(case)) if roster.prefills.views else None
        if source is not None:
            rows = _decode_rows(self._candidates(roster.decodes, case), case, source.view)
            cached_on_decode = max([row[3] for row in rows], default=0)
            best = (_pair(source, _pick(rows)), "")
        if roster.mixed.views:
            mixed = _pick(self._locals(roster.mixed, case))
            if mixed is not None and (best is None or _better(mixed, best[0])):
                best = (mixed, "mixed worker")
        if not roster.decodes.views:
            return best
        if best is None:
            return self._alone(case)
        reason = self._local_reason(case, best[0], cached_on_decode)
        return best if not reason else self._local_on_decode(case, best, reason)

    def _alone(self, case: _Case) -> tuple[Quote, str] | None:
        """Nobody else prefills: decode workers do, unless prefill workers are there and only busy."""
        prefills = case.roster.prefills.views
        if prefills and any(view.refuses_prefill_until_s <= case.now_s for view in prefills):
            return None
        best = _pick(self._locals(case.roster.decodes, case))
        if best is None or (prefills and not _has_slack(best, case)):
            return None
        return best, SATURATED if prefills else "no prefill worker"

    def _local_reason(self, case: _Case, rival: Quote, cached: int) -> str:
        """Why a decode worker might do it better than ``rival``; "" when there is no reason to look."""
        if case.prompt - cached <= self._options.local_tokens:
            return "cached prompt" if cached else "short prompt"
        if rival.missed or rival.wait_ms > max(SATURATED_MS, 2 * rival.compute_ms):
            return SATURATED
        if self.counsel is not None and self.counsel.local_due(case.now_s):
            return ADVISED
        return ""

    def _local_on_decode(self, case: _Case, rival: tuple[Quote, str], reason: str) -> tuple[Quote, str]:
        """``rival``, or a decode worker that has the slack and is predicted to be much better.

        Where the controller advises it, one that misses no more SLOs and is not much worse.
        """
        rows = self._locals(case.roster.decodes, case)
        if reason not in (SATURATED, ADVISED):
            rows = [row for row in rows if case.prompt - row[3] <= self._options.local_tokens]
        best = _pick([row for row in rows if _has_slack(Quote(*row), case)])
        if best is None:
            return rival
        if reason == ADVISED:
            bearable = best.missed <= rival[0].missed and best.score <= ADVISED_WORSE * rival[0].score
            return (best, reason) if bearable else rival
        return (best, reason) if _much_better(best, rival[0]) else rival

    # quotes

    def _prefills(self, case: _Case) -> list[_Row]:
        now_s, prompt, waited_ms, slo_ms = case.now_s, case.prompt, case.waited_ms, case.demand.slo_ttft_ms
        readable = case.roster.readable
        rows: list[_Row] = []
        searched, depth = case.searched, 0
        for view in self._candidates(case.roster.prefills, case):
            if view.refuses_prefill_until_s > now_s or view.fingerprint not in readable:
                continue
            cached = 0
            if searched:
                depth = case.depth(view, depth)
                cached = depth * view.block_size
            wait = view.wait_ms(now_s)
            compute = view.speed.prefill_ms(prompt - cached, cached, now_s)
            ttft = waited_ms + wait + compute
            rows.append((1 if ttft > slo_ms else 0, wait + compute, view, cached, ttft, 0.0, wait, compute))
        return rows

    def _locals(self, group: Group, case: _Case) -> list[_Row]:
        """Quotes of workers that would prefill and decode it."""
        now_s, demand, prompt = case.now_s, case.demand, case.prompt
        rows: list[_Row] = []
        searched, depth = case.searched, 0
        for view in self._candidates(group, case):
            if not has_room(view, prompt, now_s):
                continue
            cached = 0
            if searched:
                depth = case.depth(view, depth)
                cached = depth * view.block_size
            speed, running = view.speed, view.sequences
            step = speed.step_ms(running + 1, view.context_tokens + case.context, now_s)
            tokens = prompt - cached
            compute = speed.prefill_ms(tokens, cached, now_s)
            if running:
                compute += step * -(-tokens // CHUNK_TOKENS)
            wait = view.wait_ms(now_s)
            ttft = case.waited_ms + wait + compute
            missed = (ttft > demand.slo_ttft_ms) + (step > min(demand.slo_tpot_ms, view.tpot_limit_ms))
            score = wait + compute * (1.0 + DELAYED * running) + step * (1.0 + PRESSURE * _pressure(view, case.grown))
            rows.append((missed, score, view, cached, ttft, step, wait, compute))
        return rows

    def _candidates(self, group: Group, case: _Case) -> Sequence[WorkerView]:
        """Workers to be looked at: least busy, some drawn, those with the prefix.

        Those that failed this request, broken and silent ones only when there are no others: better than nobody.
        """
        now_s = case.now_s
        views = group.candidates(self._draw)
        if case.searched and views is not group.views:
            for view in case.held():
                if view.group is group and view not in views:
                    views = [*views, view]
        avoid = case.demand.avoid
        if avoid:
            views = [view for view in views if view.key not in avoid] or views
        late_s = self._options.late_s
        well = [
            view
            for view in views
            if (not view.breaker.opened or view.breaker.allows(now_s))
            and (now_s - view.heard_s <= late_s or not self._late(view, now_s))
        ]
        return well or [view for view in views if view.breaker.allows(now_s)] or views

    def _late(self, view: WorkerView, now_s: float) -> bool:
        silent_s = now_s - view.heard_s
        return silent_s > self._options.late_s and silent_s > MISSED_BEATS * view.info.heartbeat_s

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


def _decode_rows(views: Sequence[WorkerView], case: _Case, source: WorkerView) -> list[_Row]:
    """Quotes of ``views`` for what ``source`` prefills."""
    wanted, name, now_s, demand = source.fingerprint, source.key.worker_id, case.now_s, case.demand
    slo_ms, context, prompt, grown = demand.slo_tpot_ms, case.context, case.prompt, case.grown
    rows: list[_Row] = []
    searched, depth = case.searched, 0
    for view in views:
        if view.fingerprint != wanted or not has_room(view, prompt, now_s):
            continue
        cached = 0
        if searched:
            depth = case.depth(view, depth)
            cached = depth * view.block_size
        speed = view.speed
        read = speed.read_ms((prompt - cached) * view.kv_bytes_per_token, name, now_s)
        step = speed.step_ms(view.sequences + 1, view.context_tokens + context, now_s)
        missed = 1 if step > slo_ms or step > view.tpot_limit_ms else 0
        score = step * (1.0 + PRESSURE * _pressure(view, grown)) + read
        rows.append((missed, score, view, cached, 0.0, step, 0.0, read))
    return rows


def _pressure(view: WorkerView, grown: int) -> float:
    """k / (1 - k) of the share k of the pool in use once all there, and this one, have grown."""
    total = view.total_blocks
    if not total:
        return 0.0
    size = view.block_size
    blocks = -(-(grown + view.expected_tokens // 2) // size) if size else 0
    used = (total - view.free_blocks + blocks) / total
    return used / (1.0 - used) if used < MAX_USED else MAX_USED / (1.0 - MAX_USED)


def _pick(rows: Sequence[_Row]) -> Quote | None:
    """The best; among those that are nearly as good the one used longest ago."""
    return Quote(*_pick_row(rows)) if rows else None


def _pick_row(rows: Sequence[_Row]) -> _Row:
    fewest, lowest = rows[0][0], rows[0][1]
    for row in rows:
        if row[0] < fewest or (row[0] == fewest and row[1] < lowest):
            fewest, lowest = row[0], row[1]
    bound = lowest * NEAR + NEAR_MS
    found: _Row | None = None
    for row in rows:
        if row[0] == fewest and row[1] <= bound:
            view = row[2]
            if found is None or (view.last_used, view.salt) < (found[2].last_used, found[2].salt):
                found = row
    assert found is not None, "the best one is as good as itself"
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
    missed, score, view, cached, ttft, tpot, wait, compute = source
    if decode is None:
        return Quote(missed, score + NO_DECODE_MS, view, cached, ttft, tpot, wait, compute)
    missed, score = missed + decode.missed, score + decode.score
    return Quote(missed, score, view, cached, ttft, decode.tpot_ms, wait, compute)


def _better(one: Quote, other: Quote) -> bool:
    return (one.missed, one.score) < (other.missed, other.score)


def _much_better(one: Quote, other: Quote) -> bool:
    return one.missed < other.missed or (one.missed == other.missed and one.score < BETTER * other.score)


def _has_slack(quote: Quote, case: _Case) -> bool:
    """Whether those who decode there can bear the pause that a chunk of this prompt is.

    Where no TPOT was promised, the pause may be as long as a step.
    """
    view = quote.view
    if not view.sequences:
        return True
    tokens = min(case.prompt - quote.cached, CHUNK_TOKENS)
    pause = view.speed.prefill_ms(tokens, quote.cached, case.now_s)
    limit = view.tpot_limit_ms
    return quote.tpot_ms + pause <= (limit if limit < math.inf else 2.0 * quote.tpot_ms)
