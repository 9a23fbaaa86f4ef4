"""Line plots as SVG text: small, self-contained, readable without scripts. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 440, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 26, 28, 58
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
MOST_TICKS = 6
ROUND = (1.0, 2.0, 5.0)
MAX_POINTS = 400


@dataclass(frozen=True, slots=True)
class Series:
    """A named line of (x, y) points in order of x."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


def cdf(samples: Sequence[float]) -> list[tuple[float, float]]:
    """(value, share of samples at most this), thinned to a few hundred points; the last one is kept."""
    ordered = sorted(samples)
    step = max(1, len(ordered) // MAX_POINTS)
    points = [(value, (place + 1) / len(ordered)) for place, value in enumerate(ordered)]
    return points[::step] + ([points[-1]] if points and (len(points) - 1) % step else [])


def plot(title: str, series: Sequence[Series], *, x_label: str, y_label: str = "", log_x: bool = False) -> str:
    """An <svg> element. With ``log_x`` values of 0 or less are moved to the smallest positive one."""
    points = [p for s in series for p in s.points]
    if not points:
        return f"<p>{html.escape(title)}: no samples</p>"
    least = min((x for x, _ in points if x > 0), default=1.0)

    def shown(x: float) -> float:
        return math.log10(max(x, least)) if log_x else x

    xs, ys = [shown(x) for x, _ in points], [y for _, y in points]
    x_axis = _Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y_axis = _Axis(min(0.0, *ys), max(ys), HEIGHT - BOTTOM, TOP)
    body = [f'<text x="{LEFT}" y="16" class="title">{html.escape(title)}</text>', _grid(x_axis, y_axis, log_x)]
    for number, line in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x_axis.at(shown(x)):.1f},{y_axis.at(y):.1f}" for x, y in line.points)
        dash = ' stroke-dasharray="5 3"' if line.dashed else ""
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>')
        x = LEFT + (number % 2) * 190
        y = HEIGHT - 22 + 14 * (number // 2)
        body.append(f'<text x="{x}" y="{y}" fill="{colour}">{html.escape(line.name)}</text>')
    body.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - BOTTOM + 26}" text-anchor="end">{html.escape(x_label)}</text>')
    body.append(f'<text x="{WIDTH - RIGHT}" y="16" text-anchor="end">{html.escape(y_label)}</text>')
    height = HEIGHT + 14 * max(0, (len(series) - 1) // 2)
    return f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">{"".join(body)}</svg>'


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        span = self.high - self.low
        return self.start + (self.end - self.start) * ((value - self.low) / span if span else 0.5)

    def ticks(self) -> list[float]:
        """Multiples of 1, 2 or 5 times a power of ten."""
        span = self.high - self.low
        if not span:
            return [self.low]
        least = span / MOST_TICKS
        unit = 10.0 ** math.floor(math.log10(least))
        step = next(factor * unit for factor in (*ROUND, 10.0) if factor * unit >= least)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [place * step for place in range(first, last + 1)]

    def log_ticks(self) -> list[float]:
        """Logarithms of 1, 2 and 5 times powers of ten, of the powers alone where there are many; two at least."""
        decades = range(math.floor(self.low), math.ceil(self.high) + 1)
        for factors in (ROUND, ROUND[:1]):
            marks = [decade + math.log10(factor) for decade in decades for factor in factors]
            shown = [mark for mark in marks if self.low <= mark <= self.high]
            if len(shown) <= MOST_TICKS:
                break
        return shown if len(shown) > 1 else [self.low, self.high]


def _grid(x_axis: _Axis, y_axis: _Axis, log_x: bool) -> str:
    parts = []
    for value in x_axis.log_ticks() if log_x else x_axis.ticks():
        x, text = x_axis.at(value), _short(10**value if log_x else value)
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" class="grid"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 13}" text-anchor="middle">{text}</text>')
    for value in y_axis.ticks():
        y = y_axis.at(value)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{y + 3:.1f}" text-anchor="end">{_short(value)}</text>')
    return "".join(parts)


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
