"""Workers against their peers: the far slower ones are left alone for a while, the unseen ones are like them. Pure.

A slow worker's score grows with its factor, so it gets less as it is; one that is LIMIT times worse than the
median of its role would still hurt whoever is sent there. At most a third of a role is left out at a time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from weir.services.router.fleet import WorkerView
from weir.services.router.roster import Group, Roster

LIMIT = 4.0
LEAST_PEERS = 3
PAUSE_S = 10.0
LOOK_S = 1.0
FADE = 0.98
"""What is believed of workers of which none was seen is scaled by this with each look: in a minute to a third."""


class Outliers:
    """``look`` now and then; it looks at most once in LOOK_S."""

    def __init__(self) -> None:
        self.ejected = 0
        self._looked_s: dict[str, float] = {}

    def look(self, model: str, roster: Roster, now_s: float) -> None:
        """Eject the slow ones of each role of ``roster``, the workers of ``model``."""
        if now_s < self._looked_s.get(model, 0.0):
            return
        self._looked_s[model] = now_s + LOOK_S
        for group in (roster.prefills, roster.decodes, roster.mixed):
            _share(group, now_s)
            if len(group.views) >= LEAST_PEERS:
                self._look_at(group, now_s)

    def _look_at(self, group: Group, now_s: float) -> None:
        factors = [(_slowness(view, now_s), view) for view in group.views]
        bound = LIMIT * statistics.median(factor for factor, _ in factors)
        slow = sorted((pair for pair in factors if pair[0] > bound), key=lambda pair: -pair[0])
        room = len(group.views) // 3 - _out(group.views, now_s)
        for _, view in slow[: max(room, 0)]:
            if view.breaker.allows(now_s):
                view.breaker.eject(now_s, PAUSE_S)
                self.ejected += 1


def _share(group: Group, now_s: float) -> None:
    """What is seen of some workers of a role is believed of those of which nothing was seen for long."""
    for which in range(3):
        factors = [view.speed.factors[which] for view in group.views]
        fresh = [log for factor in factors if (log := factor.fresh(now_s)) is not None]
        prior = statistics.median(fresh) if fresh else None
        for factor in factors:
            factor.prior = FADE * factor.prior if prior is None else prior


def _out(views: Sequence[WorkerView], now_s: float) -> int:
    return sum(not view.breaker.allows(now_s) for view in views)


def _slowness(view: WorkerView, now_s: float) -> float:
    return max(view.speed.prefill_factor(now_s), view.speed.step_factor(now_s))
