"""What the balance controller decides, and the limits that it decides within. Values only."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from weir.balance.sizing import Slo
from weir.errors import InvalidArgument
from weir.lifecycle import Role


class Action(enum.Enum):
    """From the least to the most. Values are the words in events, logs and the command line."""

    NONE = "none"
    LOCAL_PREFILL = "local_prefill"
    FLIP = "flip"
    ALL_MIXED = "all_mixed"
    SCALE_UP = "scale_up"
    SCALE_DOWN = "scale_down"
    BACK_PRESSURE = "back_pressure"

    @property
    def lasting(self) -> bool:
        """Whether it takes time and is pending until it is observed."""
        return self in _LASTING


_LASTING = frozenset({Action.FLIP, Action.ALL_MIXED, Action.SCALE_UP, Action.SCALE_DOWN})


@dataclass(frozen=True, slots=True)
class Flip:
    """One worker to another role; refused by the worker unless its epoch is still ``expected_epoch``."""

    worker_id: str
    role: Role
    expected_epoch: int


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision. ``number`` counts all of a controller; ``inputs`` is what ``reason`` rests on.

    FLIP and ALL_MIXED carry ``flips``, SCALE_UP ``role``, SCALE_DOWN ``worker_id``. ``expires_s`` is when a lasting one
    is given up, or advice is void, by the controller's clock. ``cancels`` is the number of an earlier decision that
    must not go on. LOCAL_PREFILL carries ``local_share``, of the prompt tokens that decode workers shall prefill;
    BACK_PRESSURE ``admit_per_s``, requests that all routers together shall admit; both are about the workers whose
    role epochs add up to ``epochs``.
    """

    number: int
    action: Action
    at_s: float
    reason: str
    flips: tuple[Flip, ...] = ()
    role: Role | None = None
    worker_id: str = ""
    expires_s: float = math.inf
    cancels: int = 0
    local_share: float = 0.0
    admit_per_s: float = 0.0
    epochs: int = 0
    inputs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BalanceLimits:
    """Bounds and patience. Raises InvalidArgument for what contradicts itself.

    ``scale``: whether workers can be started and stopped; without it the budget is what is there. ``busy``: nothing is
    done while less than this share of the capacity is asked for; ``spare``: a worker goes only when the rest would be
    used less than this. ``band``: the least gain in capacity for which roles change. ``confirm_s``: how long a need
    must last, shorter when the stock would not. ``cooldown_s``: after a change. ``max_loss``: of a split, beyond it all
    workers are mixed. ``forecast_error``: forecasts with more are not used. ``local_share``: of decode's time that may
    go to local prefill. ``advice_s``: how long advice to routers counts unless it is given again. ``flip_share``: of
    the workers that may flip at once, at least one.
    """

    slo: Slo = field(default_factory=Slo)
    min_workers: int = 1
    max_workers: int = 1 << 20
    scale: bool = False
    mixed: bool = True
    local_prefill: bool = True
    busy: float = 0.7
    spare: float = 0.55
    band: float = 0.15
    confirm_s: float = 15.0
    confirm_down_s: float = 120.0
    min_confirm_s: float = 3.0
    cooldown_s: float = 30.0
    pending_s: float = 60.0
    stale_s: float = 10.0
    max_loss: float = 0.4
    forecast_error: float = 0.3
    local_share: float = 0.15
    flip_share: float = 0.1
    assumed_flip_s: float = 1.0
    advice_s: float = 5.0

    def __post_init__(self) -> None:
        if self.min_workers < 1:
            raise InvalidArgument("min_workers", self.min_workers, "at least 1: the mixed fallback")
        if self.max_workers < self.min_workers:
            limit = f"at least min_workers = {self.min_workers}"
            raise InvalidArgument("max_workers", self.max_workers, limit)
        for name in ("busy", "spare", "max_loss", "flip_share"):
            share = getattr(self, name)
            if not 0 < share <= 1:
                raise InvalidArgument(name, share, "must lie in (0, 1]")
        if self.spare >= self.busy:
            raise InvalidArgument("spare", self.spare, f"must lie below busy = {self.busy:g}, or workers come and go")
        for name in (
            "band",
            "forecast_error",
            "local_share",
            "confirm_s",
            "confirm_down_s",
            "min_confirm_s",
            "cooldown_s",
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidArgument(name, value, "must be a finite number of at least 0")
        for name in ("pending_s", "stale_s", "assumed_flip_s", "advice_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidArgument(name, value, "must be a finite number above 0")
