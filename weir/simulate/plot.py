"""A run as one SVG: requests/s asked and good over time, and the workers by role below."""

from __future__ import annotations

from collections.abc import Sequence

from weir.simulate.scenario import Result

WIDTH, TOP, BOTTOM, LEFT, GAP = 900, 260, 120, 60, 40
BUCKETS = 120
COLOURS = {"asked": "#888888", "finished": "#1f77b4", "good": "#2ca02c"}
ROLES = (("prefill", "#ff7f0e"), ("decode", "#1f77b4"), ("mixed", "#9467bd"))

Point = tuple[float, float]


def svg(result: Result, seconds: float, title: str, asked: Sequence[float] = ()) -> str:
    """The drawing; ``asked`` are requests/s by bucket if they are to be shown."""
    bucket_s = seconds / BUCKETS
    done, good = result.metrics.good_by_bucket(bucket_s, seconds)
    curves = {"finished": done, "good": good} | ({"asked": asked} if asked else {})
    most = max((max(values) for values in curves.values()), default=1.0) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{TOP + BOTTOM + 3 * GAP}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{_escaped(title)}</text>',
    ]
    for place, (name, values) in enumerate(curves.items()):
        points = [(i / len(values), value / most) for i, value in enumerate(values)]
        parts.append(_line(points, GAP, TOP, COLOURS[name]))
        parts.append(_legend(name, COLOURS[name], place, GAP - 6))
    parts += _axis(GAP, TOP, f"{most:.3g} requests/s", f"{seconds:.4g} s")
    if result.roles:
        parts += _roles(result, seconds)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _roles(result: Result, seconds: float) -> list[str]:
    top = TOP + 2 * GAP
    most = max(sum(row[1:]) for row in result.roles)
    parts = []
    for place, (name, colour) in enumerate(ROLES):
        points: list[Point] = []
        for row in result.roles:
            at = min(1.0, row[0] / seconds)
            if points:
                points.append((at, points[-1][1]))
            points.append((at, row[place + 1] / most))
        points.append((1.0, points[-1][1]))
        parts += [_line(points, top, BOTTOM, colour), _legend(name, colour, place, top - 6)]
    return parts + _axis(top, BOTTOM, f"{most} workers", f"{seconds:.4g} s")


def _line(points: Sequence[Point], top: int, height: int, colour: str) -> str:
    wide = WIDTH - LEFT - 20
    path = " ".join(f"{LEFT + x * wide:.1f},{top + height * (1 - y):.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def _legend(name: str, colour: str, place: int, y: int) -> str:
    return f'<text x="{WIDTH - 260 + 80 * place}" y="{y}" fill="{colour}">{name}</text>'


def _axis(top: int, height: int, highest: str, longest: str) -> list[str]:
    base, right = top + height, WIDTH - 20
    return [
        f'<path d="M{LEFT},{top} V{base} H{right}" fill="none" stroke="black"/>',
        f'<text x="{LEFT}" y="{top - 6}">{highest}</text>',
        f'<text x="{right}" y="{base + 16}" text-anchor="end">{longest}</text>',
        f'<text x="{LEFT - 14}" y="{base}">0</text>',
    ]


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
