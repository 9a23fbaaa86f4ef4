"""The balance controller's mind: observations and the time come in, decisions go out. Pure; never blocks.

    step ─► pending? ─► done | gone | superseded | expired ─► otherwise wait for it
         ─► faults? stale? ─► nothing
         ─► a pool is broken ─► repair at once
         ─► over the budget ─► down first
         ─► no traffic ─► towards the minimum
         ─► the roles of least effort that carry the demand ─► confirmed for a while ─► one action

Rules: a need must last ``confirm_s`` (less when the stock would run out before) and gain at least ``band``; after a
change, ours or an operator's, nothing for ``cooldown_s`` but more of the same flips; a flip back soon after needs
twice the band. One action is pending at a time; it is done when it is *observed*, expires, and a worker or a scaling
that failed is left alone for a time that doubles. The same object drives production and simulation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from weir.balance.assess import Assessment, assess, ready_workers, roles_of
from weir.balance.decision import Action, BalanceLimits, Decision, Flip
from weir.balance.observe import Observation, WorkerFacts
from weir.balance.pending import Penalties, Pending, judge
from weir.balance.sizing import Roles
from weir.lifecycle import Role

PRESSURE_ENDS = 0.9
"""Back-pressure that was advised is advised until less than this share of the capacity is asked for."""
CHUNK_TOKENS = 512
"""A prompt is computed in chunks of about this many tokens between decode steps."""
CHANGE_CONFIRMS = 3.0
"""A change of the traffic that is certain confirms as much as this many times as long a wait."""
PROBING = 1.1
"""Under back-pressure this many times what was served lately is admitted, whatever the model says."""
REVERSAL_COOLDOWNS = 4
"""A flip back within this many cooldowns needs twice the band."""


class BalanceController:
    """``step`` at each interval; ``failed`` when an action could not be done; ``cancel`` by an operator."""

    def __init__(self, limits: BalanceLimits) -> None:
        self.limits = limits
        self.pending: Pending | None = None
        self.changes = 0
        """Lasting actions decided since start."""
        self._number = 0
        self._quiet_until_s = -math.inf
        self._wish: tuple[str, float] | None = None
        self._last_flip: tuple[Role, float] | None = None
        self._under_way_to: Role | None = None
        self._pressed = False
        self._had_workers = False
        self._epochs: dict[str, tuple[int, int]] = {}
        self._penalties = Penalties(limits.cooldown_s)

    def step(self, seen: Observation, now_s: float) -> Decision:
        """The decision now. A lasting one becomes pending: whoever calls is expected to carry it out."""
        decision = self._settle(seen, now_s)
        if not seen.stale:
            self._epochs = {worker.worker_id: (worker.incarnation, worker.epoch) for worker in seen.workers}
        if decision is None:
            faults = seen.faults()
            if faults:
                self._wish = None
                decision = self._nothing(now_s, "not acted on: " + "; ".join(faults[:3]))
            else:
                decision = self._judge(seen, now_s)
        return decision

    def failed(self, number: int, reason: str, now_s: float) -> None:
        """Decision ``number`` could not be carried out: it is no more pending, and not tried again at once."""
        if self.pending is not None and self.pending.decision.number == number:
            self._end_pending(now_s, well=False)

    def cancel(self, now_s: float) -> Decision | None:
        """Give up what is pending; the decision that says so, None when nothing is."""
        if self.pending is None:
            return None
        number = self.pending.decision.number
        self._end_pending(now_s, well=True)
        self._under_way_to = None
        return self._nothing(now_s, f"decision {number} was cancelled", cancels=number)

    # what is pending

    def _settle(self, seen: Observation, now_s: float) -> Decision | None:
        if self.pending is None:
            return self._note_manual_changes(seen, now_s)
        decision = self.pending.decision
        what = "" if seen.stale else judge(self.pending, ready_workers(seen, now_s, self.limits.stale_s), seen)
        if what:
            well = what.startswith("done")
            self._end_pending(now_s, well=well)
            return self._nothing(now_s, f"decision {decision.number}, {decision.action.value}: {what}")
        if now_s >= decision.expires_s:
            self._end_pending(now_s, well=False)
            waited_s = now_s - decision.at_s
            text = f"decision {decision.number}, {decision.action.value}: not seen within {waited_s:.1f} s, given up"
            return self._nothing(now_s, text, cancels=decision.number)
        return self._nothing(now_s, f"decision {decision.number}, {decision.action.value}, is under way")

    def _note_manual_changes(self, seen: Observation, now_s: float) -> Decision | None:
        """An epoch that grew without us: somebody changed a role. Look again from there, after a pause."""
        if seen.stale or seen.faults():
            return None
        changed = [
            worker.worker_id
            for worker in seen.workers
            if worker.worker_id in self._epochs
            and self._epochs[worker.worker_id][0] == worker.incarnation
            and self._epochs[worker.worker_id][1] < worker.epoch
        ]
        if not changed:
            return None
        self._wish = self._under_way_to = None
        self._quiet_until_s = max(self._quiet_until_s, now_s + self.limits.cooldown_s)
        text = f"roles were changed by hand ({', '.join(changed[:5])}): taken as they are"
        return self._nothing(now_s, text)

    def _end_pending(self, now_s: float, *, well: bool) -> None:
        assert self.pending is not None
        decision, self.pending = self.pending.decision, None
        self._wish = None
        self._quiet_until_s = now_s + self.limits.cooldown_s
        self._under_way_to = decision.flips[0].role if well and decision.flips else None
        keys = [flip.worker_id for flip in decision.flips] or [decision.action.value]
        for key in keys:
            self._penalties.note(key, well, now_s)

    # deciding

    def _judge(self, seen: Observation, now_s: float) -> Decision:
        limits = self.limits
        ready = ready_workers(seen, now_s, limits.stale_s)
        if not ready:
            return self._no_worker(seen, now_s)
        self._had_workers = True
        if broken := self._repair(seen, ready, now_s):
            return broken
        if limits.scale and len(seen.workers) > limits.max_workers:
            over = f"{len(seen.workers)} workers, the budget is {limits.max_workers}"
            return self._down(seen, ready, over, now_s, at_once=True)
        if seen.traffic.empty and not any(worker.load for worker in ready):
            return self._idle(seen, ready, now_s)
        if seen.speed is None or not seen.traffic.isl.count:
            return self._hold(now_s, "speed and traffic are not known yet")
        found = assess(seen, seen.speed, ready, limits)
        return self._act(found, seen, ready, now_s)

    def _act(self, found: Assessment, seen: Observation, ready: Sequence[WorkerFacts], now_s: float) -> Decision:
        """The least action that helps."""
        limits, inputs = self.limits, inputs_of(found, seen)
        if not self._in_need(found):
            self._pressed = False
            if down := self._spare_worker(found, seen, ready, now_s):
                return replace(down, inputs=inputs)
            text = f"{found.now} carry {found.capacity:.3g} requests/s, {found.used:.0%} of it is asked"
            return replace(self._hold(now_s, text), inputs=inputs)
        if limits.local_prefill and (local := self._local_prefill(found, seen, now_s)):
            return replace(local, inputs=inputs)
        if flip := self._flip(found, seen, ready, now_s):
            return replace(flip, inputs=inputs)
        if limits.scale and (up := self._up(found, seen, now_s)):
            return replace(up, inputs=inputs)
        self._pressed = found.used > (PRESSURE_ENDS if self._pressed else 1.0)
        if self._pressed:
            text = f"{found.demand:.3g} requests/s are asked, {found.now} carry {found.capacity:.3g}: {found.why}"
            advice = self._advice(now_s, seen, Action.BACK_PRESSURE, text)
            return replace(advice, admit_per_s=_carried(found, seen), inputs=inputs)
        text = f"{found.now} are busy at {found.used:.0%}; no other roles carry {limits.band:.0%} more: {found.why}"
        return replace(self._hold(now_s, text), inputs=inputs)

    def _in_need(self, found: Assessment) -> bool:
        """Busy by the model, or by what is seen to wait."""
        slow = found.queued_s > self.limits.slo.ttft_s / 2
        return found.used > self.limits.busy or slow or found.crowded > 0.5

    def _local_prefill(self, found: Assessment, seen: Observation, now_s: float) -> Decision | None:
        """Prefill is short by less than decode can lend without missing the TPOT."""
        now, work, limits = found.now, found.sizing.work, self.limits
        if not (now.prefill and now.decode) or found.prefill_used <= limits.busy:
            return None
        excess = found.demand * work.prefill_s - limits.busy * (now.prefill + now.mixed)
        share = excess / now.decode
        room = share <= limits.local_share and found.decode_used + share <= limits.busy
        # Routers lend a decode worker only where the pause of one chunk leaves its sequences their TPOT.
        pause_s = CHUNK_TOKENS / found.sizing.prefill_tokens_per_s
        if not room or found.sizing.step_s + pause_s > limits.slo.tpot_s:
            return None
        text = f"prefill is used {found.prefill_used:.0%}; {share:.1%} of decode's time takes the rest"
        self._wish = None
        lent = excess / (found.demand * work.prefill_s)
        return replace(self._advice(now_s, seen, Action.LOCAL_PREFILL, text), local_share=lent)

    def _advice(self, now_s: float, seen: Observation, action: Action, text: str) -> Decision:
        """What routers shall heed until it expires, as long as the roles are those that it rests on."""
        epochs = sum(worker.epoch for worker in seen.workers)
        return replace(self._new(now_s, action, text), expires_s=now_s + self.limits.advice_s, epochs=epochs)

    def _flip(
        self, found: Assessment, seen: Observation, ready: Sequence[WorkerFacts], now_s: float
    ) -> Decision | None:
        if found.gain < self.limits.band - 1e-9:
            return None
        flips = self._flips(found, ready, now_s)
        if not flips:
            return None
        role = flips[0].role
        if self._last_flip is not None and self._last_flip[0] is not role:
            soon = now_s - self._last_flip[1] < REVERSAL_COOLDOWNS * self.limits.cooldown_s
            if soon and found.gain < 2 * self.limits.band:
                return None
        action = Action.ALL_MIXED if role is Role.MIXED else Action.FLIP
        text = (
            f"{found.now} carry {found.capacity:.3g} requests/s of {found.demand:.3g}; {found.best} would carry "
            f"{found.best_capacity:.3g}: {found.why}"
        )
        wish, patience_s = f"flip to {role.value}", self._patience_s(found, seen)
        if role is self._under_way_to:
            # The same way on: what a pause guards against is turning back.
            patience_s = self.limits.min_confirm_s
        pause = role is not self._under_way_to
        return self._when_confirmed(wish, now_s, patience_s, action, text, pause=pause, flips=flips)

    def _flips(self, found: Assessment, ready: Sequence[WorkerFacts], now_s: float) -> tuple[Flip, ...]:
        """The next workers on the way to the best roles: mixed ones first, then the least loaded."""
        now, best = found.now, found.best
        short = {
            Role.PREFILL: best.prefill - now.prefill,
            Role.DECODE: best.decode - now.decode,
            Role.MIXED: best.mixed - now.mixed,
        }
        role = max(short, key=lambda one: short[one])
        if short[role] <= 0:
            return ()
        most = min(short[role], max(1, math.ceil(self.limits.flip_share * len(ready) - 1e-9)))
        over = {one: -count for one, count in short.items() if count < 0}
        chosen: list[Flip] = []
        candidates = [w for w in ready if w.role in over and not self._penalties.holds(w.worker_id, now_s)]
        for worker in sorted(candidates, key=lambda w: (w.role is not Role.MIXED, w.load, w.worker_id)):
            if len(chosen) < most and over[worker.role] > 0:
                over[worker.role] -= 1
                chosen.append(Flip(worker.worker_id, role, worker.epoch))
        return tuple(chosen)

    def _up(self, found: Assessment, seen: Observation, now_s: float) -> Decision | None:
        limits = self.limits
        if len(seen.workers) >= limits.max_workers or self._penalties.holds(Action.SCALE_UP.value, now_s):
            return None
        role = _role_to_add(found)
        text = (
            f"{found.now} carry {found.capacity:.3g} requests/s, {found.demand:.3g} are asked ({found.used:.0%}); "
            f"{len(seen.workers)} of {limits.max_workers} workers are used"
        )
        wish = f"up {role.value}"
        return self._when_confirmed(wish, now_s, self._patience_s(found, seen), Action.SCALE_UP, text, role=role)

    def _spare_worker(
        self, found: Assessment, seen: Observation, ready: Sequence[WorkerFacts], now_s: float
    ) -> Decision | None:
        """One worker less would still carry the demand with room to spare."""
        limits, left = self.limits, len(ready) - 1
        if not limits.scale or left < limits.min_workers:
            return None
        mixed = left < 2 or not (found.best.prefill or found.best.decode)
        needed = found.sizing.workers_for(found.demand / limits.spare, left, mixed=mixed)
        if needed is None:
            return None
        text = f"{needed} workers carry {found.demand:.3g} requests/s at {limits.spare:.0%} use, {len(ready)} are there"
        return self._down(seen, ready, text, now_s)

    def _idle(self, seen: Observation, ready: Sequence[WorkerFacts], now_s: float) -> Decision:
        text = f"no request for {seen.traffic.span_s:.0f} s"
        if self.limits.scale and len(ready) > self.limits.min_workers:
            return self._down(seen, ready, text, now_s)
        return self._hold(now_s, f"{text}; {len(ready)} workers stay")

    # repairs and scaling

    def _no_worker(self, seen: Observation, now_s: float) -> Decision:
        limits = self.limits
        free = len(seen.workers) < limits.max_workers and not self._penalties.holds(Action.SCALE_UP.value, now_s)
        if limits.scale and free:
            # Before the first one was ready they are most likely starting.
            patience_s = limits.confirm_s if self._had_workers else limits.confirm_down_s
            text = "no worker is ready"
            return self._when_confirmed("up mixed", now_s, patience_s, Action.SCALE_UP, text, role=Role.MIXED)
        return self._hold(now_s, "no worker is ready")

    def _repair(self, seen: Observation, ready: Sequence[WorkerFacts], now_s: float) -> Decision | None:
        """Nobody prefills, or nobody decodes: at once when requests come; else others may be starting."""
        roles = roles_of(ready)
        prefills, decodes = roles.prefill + roles.mixed, roles.decode + roles.mixed
        if prefills and decodes:
            return None
        free = [worker for worker in ready if not self._penalties.holds(worker.worker_id, now_s)]
        missing = Role.DECODE if prefills else Role.PREFILL
        if not free:
            return self._hold(now_s, f"no worker is left that can {missing.value}, and none may flip now")
        worker = min(free, key=lambda one: (one.load, one.worker_id))
        role = Role.MIXED if len(ready) == 1 else missing
        action = Action.ALL_MIXED if role is Role.MIXED else Action.FLIP
        text = f"{roles}: no worker is left that can {missing.value}"
        flips = (Flip(worker.worker_id, role, worker.epoch),)
        idle = seen.traffic.empty and seen.traffic.refused_per_s <= 0 and not any(one.load for one in ready)
        if idle:
            return self._when_confirmed("repair", now_s, self.limits.confirm_down_s, action, text, flips=flips)
        return self._begin(now_s, action, text, flips=flips)

    def _down(
        self,
        seen: Observation,
        ready: Sequence[WorkerFacts],
        text: str,
        now_s: float,
        *,
        at_once: bool = False,
    ) -> Decision:
        """Stop the least loaded worker that the rest can do without; of the last pair one becomes mixed first."""
        if self._penalties.holds(Action.SCALE_DOWN.value, now_s):
            return self._hold(now_s, f"{text}; stopping a worker failed lately")
        patience_s = 0.0 if at_once else self.limits.confirm_down_s
        victim = _removable(ready)
        if victim is not None:
            made = self._when_confirmed(
                "down", now_s, patience_s, Action.SCALE_DOWN, text, worker_id=victim.worker_id, role=victim.role
            )
        else:
            keeper = min(ready, key=lambda one: (one.role is not Role.DECODE, one.worker_id))
            flips = (Flip(keeper.worker_id, Role.MIXED, keeper.epoch),)
            made = self._when_confirmed("down", now_s, patience_s, Action.ALL_MIXED, text, flips=flips)
        return made or self._nothing(now_s, f"{text}; waits")

    # patience

    def _patience_s(self, found: Assessment, seen: Observation) -> float:
        """``confirm_s``, or what the stock leaves after tau.

        Less once the traffic is known to be another: patience guards against chance, which that is not.
        """
        confirm_s = self.limits.confirm_s
        if seen.traffic.changed_s <= CHANGE_CONFIRMS * confirm_s:
            confirm_s /= CHANGE_CONFIRMS
        left_s = found.stock.end_s - found.tau_s
        return max(self.limits.min_confirm_s, min(confirm_s, left_s))

    def _when_confirmed(
        self,
        wish: str,
        now_s: float,
        patience_s: float,
        action: Action,
        text: str,
        *,
        pause: bool = True,
        **fields: Any,
    ) -> Decision:
        """The action once the wish has lasted and no change is recent; until then nothing, with the reason."""
        if self._wish is None or self._wish[0] != wish:
            self._wish = (wish, now_s)
        lasted_s = now_s - self._wish[1]
        if lasted_s < patience_s:
            return self._nothing(now_s, f"{wish}? lasts {lasted_s:.1f} of {patience_s:.1f} s; {text}")
        if pause and now_s < self._quiet_until_s:
            return self._nothing(now_s, f"{wish}? the last change is recent; {text}")
        return self._begin(now_s, action, text, **fields)

    def _begin(self, now_s: float, action: Action, text: str, **fields: Any) -> Decision:
        assert action.lasting, action
        assert self.pending is None, "one action at a time"
        decision = replace(self._new(now_s, action, text), expires_s=now_s + self.limits.pending_s, **fields)
        self.pending = Pending(decision, frozenset(self._epochs))
        self._wish = None
        self.changes += 1
        if decision.flips:
            self._last_flip = (decision.flips[0].role, now_s)
        return decision

    def _hold(self, now_s: float, text: str) -> Decision:
        """Nothing is wanted."""
        self._wish = self._under_way_to = None
        return self._nothing(now_s, text)

    def _nothing(self, now_s: float, text: str, *, cancels: int = 0) -> Decision:
        return replace(self._new(now_s, Action.NONE, text), cancels=cancels)

    def _new(self, now_s: float, action: Action, text: str) -> Decision:
        self._number += 1
        return Decision(self._number, action, now_s, text)


def _removable(ready: Sequence[WorkerFacts]) -> WorkerFacts | None:
    """The least loaded worker, of the more numerous role, without which both kinds of work are still done."""
    roles = roles_of(ready)
    prefills, decodes = roles.prefill + roles.mixed, roles.decode + roles.mixed
    counts = {Role.PREFILL: roles.prefill, Role.DECODE: roles.decode, Role.MIXED: roles.mixed}
    able = [worker for worker in ready if prefills - worker.role.prefills >= 1 and decodes - worker.role.decodes >= 1]
    return min(able, key=lambda one: (one.load, -counts[one.role], one.worker_id), default=None)


def _role_to_add(found: Assessment) -> Role:
    """What one worker more should be: the role that the balanced split of N + 1 has more of."""
    if not (found.best.prefill or found.best.decode):
        return Role.MIXED
    split = found.sizing.best_split(found.now.total + 1)
    wanted = Roles(split.prefill, split.decode)
    missing_p = wanted.prefill - found.now.prefill
    return Role.PREFILL if missing_p > 0 and missing_p >= wanted.decode - found.now.decode else Role.DECODE


def _carried(found: Assessment, seen: Observation) -> float:
    """Requests/s to admit: what the roles carry by the model, or somewhat more than is seen to be prefilled.

    The second, so that a model that thinks too little of the workers does not hold them back.
    """
    traffic = seen.traffic
    served = traffic.produced_tokens_per_s / traffic.isl.mean if traffic.isl.mean > 0 else 0.0
    return max(found.capacity, PROBING * served)


def inputs_of(found: Assessment, seen: Observation) -> dict[str, float]:
    """What a decision rests on, in seconds, tokens, bytes and requests/s."""
    traffic, sizing, forecast = seen.traffic, found.sizing, seen.forecast
    values = {
        "rate": traffic.rate_per_s,
        "demand": found.demand,
        "isl_mean": traffic.isl.mean,
        "isl_p90": traffic.isl.p90,
        "osl_mean": traffic.osl.mean,
        "osl_p90": traffic.osl.p90,
        "hit_ratio": traffic.hit_ratio,
        "t_p_s": sizing.work.prefill_s,
        "t_d_s": sizing.work.decode_s,
        "phi": sizing.work.prefill_share,
        "batch": float(sizing.batch),
        "capacity": found.capacity,
        "best_capacity": found.best_capacity,
        "used": found.used,
        "queued_s": found.queued_s,
        "crowded": found.crowded,
        "delta_bytes_per_s": found.stock.delta,
        "stock_bytes": found.stock.held,
        "stock_capacity_bytes": found.stock.capacity,
        "stock_end_s": found.stock.end_s,
        "stranded_bytes_per_s": found.stock.stranded,
        "safety_stock_bytes": found.stock.safety,
        "survivable_shortfall": found.survivable,
        "tau_s": found.tau_s,
    }
    if forecast is not None:
        values |= {"forecast": forecast.value, "forecast_error": forecast.error}
    return values
