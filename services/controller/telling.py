"""Decisions as messages and log lines. Pure."""

from __future__ import annotations

import math
from collections import deque

from weir.balance.decision import Action, Decision
from weir.clock import Clock
from weir.rpc.convert import role_to_pb
from weir.rpc.v1 import events_pb2

ACTIONS: dict[Action, events_pb2.BalanceAction] = {
    action: getattr(events_pb2, f"BALANCE_ACTION_{action.name}") for action in Action
}
STANDING = (events_pb2.BALANCE_ACTION_LOCAL_PREFILL, events_pb2.BALANCE_ACTION_BACK_PRESSURE)
MAX_REASON_CHARS = 2_000
SHOWN = ("rate", "isl_mean", "osl_mean", "hit_ratio", "phi", "capacity", "used", "tau_s", "forecast", "forecast_error")


def decision_event(
    decision: Decision, origin: events_pb2.EventOrigin, clock: Clock, *, dry_run: bool
) -> events_pb2.DecisionEvent:
    """The decision as it is published."""
    event = events_pb2.DecisionEvent(
        origin=origin,
        number=decision.number,
        action=ACTIONS[decision.action],
        reason=decision.reason[:MAX_REASON_CHARS],
        worker_id=decision.worker_id,
        cancels=decision.cancels,
        inputs=dict(decision.inputs),
        dry_run=dry_run,
        local_share=decision.local_share,
        admit_per_s=decision.admit_per_s,
        epochs=decision.epochs,
    )
    for flip in decision.flips:
        event.flips.append(
            events_pb2.RoleFlip(
                worker_id=flip.worker_id, role=role_to_pb(flip.role), expected_epoch=flip.expected_epoch
            )
        )
    if decision.role is not None:
        event.role = role_to_pb(decision.role)
    if math.isfinite(decision.expires_s):
        event.expires_unix_s = clock.unix_s() + decision.expires_s - clock.monotonic_s()
    return event


def log_fields(decision: Decision) -> dict[str, object]:
    """What a log line of the decision says."""
    fields: dict[str, object] = {"number": decision.number, "action": decision.action.value}
    if decision.flips:
        fields["flips"] = ",".join(f"{f.worker_id}:{f.role.value}@{f.expected_epoch}" for f in decision.flips)
    if decision.role is not None:
        fields["role"] = decision.role.value
    if decision.worker_id:
        fields["worker"] = decision.worker_id
    if decision.local_share:
        fields["local_share"] = f"{decision.local_share:.4g}"
    if decision.admit_per_s:
        fields["admit_per_s"] = f"{decision.admit_per_s:.4g}"
    if decision.cancels:
        fields["cancels"] = decision.cancels
    fields |= {name: f"{decision.inputs[name]:.4g}" for name in SHOWN if name in decision.inputs}
    return fields | {"reason": decision.reason}


class DecisionLog:
    """The last ``most_kept`` decisions that changed something or are news, and the last one of all.

    Doing nothing is no news; nor is advice (local prefill, back-pressure) that was given the last time too.
    """

    def __init__(self, most_kept: int) -> None:
        assert most_kept > 0, most_kept
        self.kept: deque[events_pb2.DecisionEvent] = deque(maxlen=most_kept)
        self.latest: events_pb2.DecisionEvent | None = None

    def add(self, event: events_pb2.DecisionEvent) -> None:
        """Note a decision."""
        again = self.latest is not None and self.latest.action == event.action and event.action in STANDING
        self.latest = event
        if (event.action != events_pb2.BALANCE_ACTION_NONE and not again) or event.cancels:
            self.kept.append(event)
