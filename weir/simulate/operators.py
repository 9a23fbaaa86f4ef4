"""Step times from a profile of a model's operators, as LLMServingSim publishes them (microseconds, one layer).

    step = embedding + layers * (norms + projections + rotary + attention + feed-forward) + final norm     (tokens)
         + lm_head + sampler                                                                       (sequences sampled)

Attention is measured over (prefill tokens, their earlier KV, decodes, their KV); between grid points everything is
linear, but for the attention of a chunk to itself, which is quadratic: a factor of two lies between grid points. Tokens
are padded to the sizes that CUDA graphs are captured for.
"""

from __future__ import annotations

import bisect
import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from weir.errors import InvalidArgument, NotFound
from weir.simulate.models import Chunk

US = 1e-6
PER_LAYER = {
    "layernorm": 2,
    "qkv_proj": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
ONCE = ("embedding", "final_layernorm")
PER_SEQUENCE = ("lm_head", "sampler")
GRAPH_SIZES: tuple[int, ...] = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
"""What vLLM captures by default."""

Key = tuple[int, int, int, int]


class Curve:
    """A function through points, linear between and beyond them."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        ordered = sorted(points)
        self._x = [x for x, _ in ordered]
        self._y = [y for _, y in ordered]

    def __call__(self, x: float) -> float:
        place = min(max(bisect.bisect_right(self._x, x), 1), len(self._x) - 1)
        x0, x1, y0, y1 = self._x[place - 1], self._x[place], self._y[place - 1], self._y[place]
        return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


class OperatorTimes:
    """``layers`` of one measured layer. ``load`` reads the three tables of a profile."""

    def __init__(
        self,
        dense: Mapping[str, Curve],
        per_sequence: Mapping[str, Curve],
        attention: Mapping[Key, float],
        layers: int,
    ) -> None:
        self._once = [dense[name] for name in ONCE]
        self._layer = [(count, dense[name]) for name, count in PER_LAYER.items()]
        self._sampled = [per_sequence[name] for name in PER_SEQUENCE]
        self._attention = attention
        self._layers = layers
        self._axes = [sorted({key[axis] for key in attention}) for axis in range(4)]

    @classmethod
    def load(cls, folder: Path, name: str, *, layers: int) -> OperatorTimes:
        """The profile ``profile_<name>_*.csv`` in ``folder``. Raises NotFound, or InvalidArgument for a bad table."""
        dense = _curves(folder / f"profile_{name}_dense.csv", "tokens")
        sampled = _curves(folder / f"profile_{name}_per_sequence.csv", "sequences")
        source = folder / f"profile_{name}_attention.csv"
        attention: dict[Key, float] = {}
        for row in _rows(source):
            key = (int(row["prefill_chunk"]), int(row["kv_prefill"]), int(row["n_decode"]), int(row["kv_decode"]))
            attention[key] = float(row["time_us"])
        missing = [name for name in (*PER_LAYER, *ONCE) if name not in dense]
        missing += [name for name in PER_SEQUENCE if name not in sampled]
        if missing:
            raise InvalidArgument(f"profile_{name}", missing, "operators are missing")
        return cls(dense, sampled, attention, layers)

    def step_s(self, chunks: Sequence[Chunk], decodes: int, context: float) -> float:
        """One step of prefill ``chunks`` and ``decodes`` sequences with ``context`` tokens of KV in all."""
        prefill = sum(new for new, _ in chunks)
        tokens = _captured(prefill + decodes)
        dense = sum(count * curve(tokens) for count, curve in self._layer)
        past = 0.0
        if prefill:
            area = sum(new * (old + new / 2) for new, old in chunks)
            past = max(0.0, area / prefill - prefill / 2)
        layer = dense + self._attention_us(prefill, past, decodes, context / decodes if decodes else 0.0)
        sampled = sum(curve(len(chunks) + decodes) for curve in self._sampled)
        return (sum(curve(tokens) for curve in self._once) + self._layers * layer + sampled) * US

    def _attention_us(self, prefill: float, past: float, decodes: float, context: float) -> float:
        """Linear in each of the four sizes, but for the prefill's own: that grows with the area of its triangle."""
        first, *others = self._axes
        corners = [_between(first, prefill, area=True)]
        corners += [_between(axis, x) for axis, x in zip(others, (past, decodes, context), strict=True)]
        total = 0.0
        for p, p_weight in corners[0]:
            for q, q_weight in corners[1] if p else [(0, 1.0)]:
                for n, n_weight in corners[2]:
                    for c, c_weight in corners[3] if n else [(0, 1.0)]:
                        weight = p_weight * q_weight * n_weight * c_weight
                        if weight:
                            total += weight * self._attention_at(p, q, n, c)
        return total

    def _attention_at(self, prefill: int, past: int, decodes: int, context: int) -> float:
        if not prefill and not decodes:
            return 0.0
        least = self._axes[3][1]
        return self._attention[prefill, past, decodes, max(context, least) if decodes else 0]


def _between(axis: Sequence[int], x: float, *, area: bool = False) -> list[tuple[int, float]]:
    """The grid points around ``x`` and their weights; the last one stretches. ``area``: by squares, inside the grid."""
    place = bisect.bisect_right(axis, x)
    if place >= len(axis):
        place = len(axis) - 1
    low, high = axis[max(place - 1, 0)], axis[max(place, 1)]
    share = (x - low) / (high - low)
    if area and share <= 1:
        share = (x * x - low * low) / (high * high - low * low)
    return [(low, 1 - share), (high, share)]


def _captured(tokens: int) -> int:
    if tokens > GRAPH_SIZES[-1]:
        return tokens
    return GRAPH_SIZES[bisect.bisect_left(GRAPH_SIZES, tokens)]


def _rows(source: Path) -> list[dict[str, str]]:
    if not source.is_file():
        raise NotFound("operator profile", str(source))
    with source.open() as lines:
        return list(csv.DictReader(lines))


def _curves(source: Path, size: str) -> dict[str, Curve]:
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in _rows(source):
        points[row["layer"]].append((float(row[size]), float(row["time_us"])))
    return {layer: Curve(found) for layer, found in points.items()}
