"""Whether a request is worth beginning: refused before any work when its SLO would be missed. Pure.

The prediction is that of the best placement now, plus the wait for those that are before it in the queue. A refusal
says when trying again may help: once the work that is in the way will have been done.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import islice

from weir.errors import ResourceExhausted
from weir.services.router.commands import Admission
from weir.services.router.entry import NEVER_S, Entry
from weir.services.router.fleet import Fleet
from weir.services.router.policy import Demand, Forecast, Policy
from weir.services.router.queue import FairQueue

MARGIN = 0.9
"""Share of an SLO that the prediction may use up; the rest is for what cannot be predicted."""
MIN_RETRY_S, MAX_RETRY_S = 0.05, 60.0
ROUTERS_ASKED = 8
"""Workers whose word is taken for how many routers there are."""
UNKNOWN_RETRY_S = 1.0
"""Least wait after a refusal for a bound: what ends, and when, is not foreseen."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What an admitted request can expect. ``until_s``: when waiting for a worker makes no sense any more."""

    until_s: float


class Gate:
    """``check`` each request once, before it is queued."""

    def __init__(self, fleet: Fleet, policy: Policy) -> None:
        self.refusals: Counter[str] = Counter()
        """Requests refused, by reason."""
        self._fleet = fleet
        self._policy = policy

    def check(self, entry: Entry, queue: FairQueue | None, now_s: float) -> Promise:
        """Raises ResourceExhausted with an honest ``retry_after_s`` when its SLO is predicted to be missed.

        And when the balance controller holds the cluster to fewer requests than come, whatever their SLOs. For its
        SLO nobody is refused for want of knowledge: without workers, or measurements of them, all may wait.
        """
        promise = self._promise(entry, queue, now_s)
        self._heed_back_pressure(entry.admission.model, now_s)
        return promise

    def _promise(self, entry: Entry, queue: FairQueue | None, now_s: float) -> Promise:
        demand = entry.demand
        if demand.slo_ttft_ms == NEVER_S and demand.slo_tpot_ms == NEVER_S:
            return Promise(NEVER_S)
        forecast = self._policy.forecast(self._fleet.able(entry.admission.model, demand), demand, now_s)
        if forecast is None or not forecast.known:
            return Promise(NEVER_S)
        ahead = queue.work_ahead(entry.admission.tenant, demand.prompt_tokens) if queue is not None else 0
        queue_ms = ahead * forecast.prefill_ms_per_token
        self._check_ttft(demand, forecast, queue_ms)
        self._check_tpot(demand, forecast)
        if demand.slo_ttft_ms == NEVER_S:
            return Promise(NEVER_S)
        received_s = now_s if demand.received_s is None else demand.received_s
        return Promise(received_s + (demand.slo_ttft_ms - forecast.compute_ms) / 1e3)

    def _heed_back_pressure(self, model: str, now_s: float) -> None:
        advice = self._fleet.counsel.current(now_s)
        if advice is None:
            return
        views = islice(self._fleet.serving(model), ROUTERS_ASKED)
        routers = max((view.load.routers for view in views), default=1)
        wait_s = self._fleet.counsel.wait_s(routers, now_s)
        if wait_s > 0.0:
            self.refusals["back_pressure"] += 1
            what = f"the cluster carries {advice.admit_per_s:.3g} requests/s, more are asked (decision {advice.number})"
            raise ResourceExhausted(what, _bounded(wait_s))

    def retry_after_s(self, admission: Admission, queue: FairQueue | None, now_s: float) -> float:
        """When a request like this one, refused for a bound, may find room: once what is before it is worked off."""
        tokens = len(admission.prompt)
        forecast = self._policy.forecast(self._fleet.serving(admission.model), Demand(tokens, 1), now_s)
        if forecast is None:
            return UNKNOWN_RETRY_S
        ahead = queue.work_ahead(admission.tenant, tokens) if queue is not None else 0
        wait_ms = forecast.ttft_ms - forecast.compute_ms + ahead * forecast.prefill_ms_per_token
        return _bounded(max(wait_ms / 1e3, UNKNOWN_RETRY_S))

    def _check_ttft(self, demand: Demand, forecast: Forecast, queue_ms: float) -> None:
        predicted, limit = forecast.ttft_ms + queue_ms, MARGIN * demand.slo_ttft_ms
        if predicted <= limit:
            return
        self.refusals["slo_ttft"] += 1
        what = f"TTFT would be about {predicted:.0f} ms, the SLO is {demand.slo_ttft_ms:g} ms"
        if forecast.compute_ms > limit:
            text = f"{what}: computing the prompt alone takes {forecast.compute_ms:.0f} ms on the best worker"
            raise ResourceExhausted(text, MAX_RETRY_S)
        raise ResourceExhausted(what, _bounded((predicted - limit) / 1e3))

    def _check_tpot(self, demand: Demand, forecast: Forecast) -> None:
        if forecast.tpot_ms <= MARGIN * demand.slo_tpot_ms:
            return
        self.refusals["slo_tpot"] += 1
        what = f"TPOT would be about {forecast.tpot_ms:.1f} ms, the SLO is {demand.slo_tpot_ms:g} ms"
        # A batch is left by its sequences one by one, each after about its expected length: half of one on average.
        excess = 1.0 - MARGIN * demand.slo_tpot_ms / forecast.tpot_ms
        length_s = (demand.expected_tokens or 1) * forecast.tpot_ms / 1e3
        raise ResourceExhausted(what, _bounded(excess * length_s))


def _bounded(seconds: float) -> float:
    return min(max(seconds, MIN_RETRY_S), MAX_RETRY_S) if math.isfinite(seconds) else MAX_RETRY_S
