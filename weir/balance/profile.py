"""What a worker can do, as three small models fitted to measurements; times in seconds, sizes in tokens or bytes.

    prefill(tokens, cached) = a + b * tokens + c * tokens * (cached + tokens / 2)     linears, then causal attention
    step(batch, context)    = a + b * batch + c * context                             context: sum over the batch
    read(bytes)             = a + b * bytes                                           latency, 1 / bandwidth

Fits are least squares on relative errors with coefficients of at least 0, so that a prediction never falls when
work grows.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from weir.errors import InvalidArgument

PROFILE_VERSION = 1


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients of one model and how well it fits: R^2, and the largest relative residual."""

    coefficients: tuple[float, ...]
    r_squared: float
    max_residual: float
    points: int


@dataclass(frozen=True, slots=True)
class Profile:
    """A worker's fitted models. ``fingerprint`` is the hex digest that it was measured for."""

    fingerprint: str
    device: str
    threads: int
    prefill: Fit
    step: Fit
    read: Fit
    version: int = PROFILE_VERSION
    notes: dict[str, str] = field(default_factory=dict)

    def prefill_s(self, tokens: float, cached: float = 0.0) -> float:
        """Time to prefill ``tokens`` new tokens behind ``cached`` ones."""
        if tokens <= 0:
            return 0.0
        a, b, c = self.prefill.coefficients
        return a + b * tokens + c * tokens * (cached + tokens / 2)

    def step_s(self, batch: float, context: float) -> float:
        """Time of a decode step of ``batch`` sequences with ``context`` tokens in all."""
        if batch <= 0:
            return 0.0
        a, b, c = self.step.coefficients
        return a + b * batch + c * context

    def read_s(self, num_bytes: float) -> float:
        """Time to read ``num_bytes`` of KV from a peer."""
        if num_bytes <= 0:
            return 0.0
        a, b = self.read.coefficients
        return a + b * num_bytes

    def prefill_tokens_per_s(self, tokens: float = 1024.0) -> float:
        """Rate of prefilling prompts of ``tokens`` tokens."""
        return tokens / self.prefill_s(tokens)

    def to_json(self) -> str:
        """The stored form."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> Fit:
    """Non-negative least squares of ``seconds`` on ``rows`` (one row of features per measurement).

    Each equation is divided by its measured time, so that short and long measurements count alike. Raises
    InvalidArgument for fewer measurements than features, and for times that are not finite and positive.
    """
    if len(rows) != len(seconds) or not rows or len(rows) < len(rows[0]):
        raise InvalidArgument("measurements", len(rows), "at least one per coefficient")
    for value in seconds:
        if not (math.isfinite(value) and value > 0):
            raise InvalidArgument("seconds", value, "must be finite and above 0")
    scaled = [[x / t for x in row] for row, t in zip(rows, seconds, strict=True)]
    coefficients = _non_negative(scaled, [1.0] * len(rows))
    predicted = [sum(c * x for c, x in zip(coefficients, row, strict=True)) for row in rows]
    mean = sum(seconds) / len(seconds)
    total = sum((t - mean) ** 2 for t in seconds)
    rest = sum((t - p) ** 2 for t, p in zip(seconds, predicted, strict=True))
    worst = max(abs(p - t) / t for t, p in zip(seconds, predicted, strict=True))
    return Fit(tuple(coefficients), 1.0 - rest / total if total > 0 else 1.0, worst, len(rows))


def _non_negative(rows: list[list[float]], target: list[float]) -> list[float]:
    """Least squares over every subset of columns; the best whose solution has no negative coefficient.

    With three columns there are seven subsets, which is simpler than an active-set method and exact.
    """
    columns = len(rows[0])
    best: tuple[float, list[float]] | None = None
    for mask in range(1, 1 << columns):
        used = [i for i in range(columns) if mask >> i & 1]
        solution = _solve_normal([[row[i] for i in used] for row in rows], target)
        if solution is None or min(solution) < 0:
            continue
        full = [0.0] * columns
        for i, value in zip(used, solution, strict=True):
            full[i] = value
        error = sum(
            (sum(c * x for c, x in zip(full, row, strict=True)) - y) ** 2 for row, y in zip(rows, target, strict=True)
        )
        if best is None or error < best[0] - 1e-15:
            best = (error, full)
    assert best is not None, "a single positive column always has a positive solution"
    return best[1]


def _solve_normal(rows: list[list[float]], target: list[float]) -> list[float] | None:
    """Solve the normal equations by Gaussian elimination with scaling; None when they are singular."""
    n = len(rows[0])
    scale = [max(abs(row[i]) for row in rows) or 1.0 for i in range(n)]
    a = [[sum(row[i] * row[j] for row in rows) / scale[i] / scale[j] for j in range(n)] for i in range(n)]
    b = [sum(row[i] * y for row, y in zip(rows, target, strict=True)) / scale[i] for i in range(n)]
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(a[r][i]))
        if abs(a[pivot][i]) < 1e-12:
            return None
        a[i], a[pivot], b[i], b[pivot] = a[pivot], a[i], b[pivot], b[i]
        for r in range(i + 1, n):
            factor = a[r][i] / a[i][i]
            b[r] -= factor * b[i]
            for k in range(i, n):
                a[r][k] -= factor * a[i][k]
    x = [0.0] * n
    for i in reversed(range(n)):
        x[i] = (b[i] - sum(a[i][k] * x[k] for k in range(i + 1, n))) / a[i][i]
    return [value / scale[i] for i, value in enumerate(x)]


def prefill_features(tokens: float, cached: float) -> tuple[float, float, float]:
    """Features of one prefill measurement."""
    return (1.0, tokens, tokens * (cached + tokens / 2))


def step_features(batch: float, context: float) -> tuple[float, float, float]:
    """Features of one decode step; ``context`` is the sum over the batch."""
    return (1.0, batch, context)


def read_features(num_bytes: float) -> tuple[float, float]:
    """Features of one KV read."""
    return (1.0, num_bytes)


def profile_from_json(text: str, *, source: str = "profile") -> Profile:
    """Read a stored profile; InvalidArgument names ``source`` and what is wrong with it."""
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise InvalidArgument(source, text[:40], f"must be JSON: {error}") from error
    if not isinstance(raw, dict) or raw.get("version") != PROFILE_VERSION:
        version = raw.get("version") if isinstance(raw, dict) else type(raw).__name__
        raise InvalidArgument(f"{source}.version", version, f"must be {PROFILE_VERSION}")
    try:
        return Profile(
            fingerprint=str(raw["fingerprint"]),
            device=str(raw["device"]),
            threads=int(raw["threads"]),
            prefill=_fit_from(raw["prefill"], 3),
            step=_fit_from(raw["step"], 3),
            read=_fit_from(raw["read"], 2),
            notes=dict(raw.get("notes", {})),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(source, type(error).__name__, f"a complete profile: {error}") from error


def _fit_from(raw: Any, count: int) -> Fit:
    coefficients = tuple(float(value) for value in raw["coefficients"])
    sound = all(math.isfinite(value) and value >= 0 for value in coefficients)
    if len(coefficients) != count or not sound or not any(coefficients):
        raise ValueError(f"{count} finite coefficients of at least 0, not all 0, instead of {coefficients}")
    return Fit(coefficients, float(raw["r_squared"]), float(raw["max_residual"]), int(raw["points"]))
