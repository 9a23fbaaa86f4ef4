"""The matrix's report as one HTML file without scripts or outside parts. Pure."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from weir.bench.svg import Series, cdf, plot

STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:62rem;padding:0 1rem;color:#222;background:#fff}
table{border-collapse:collapse;margin:.6rem 0}td,th{border:1px solid #ccc;padding:.2rem .5rem;text-align:right}
td:first-child,th:first-child{text-align:left}svg{margin:.3rem .6rem .3rem 0}svg text{font:11px system-ui,sans-serif}
svg .title{font-weight:600;font-size:12px}svg .grid{stroke:#ddd;stroke-width:.7}.win{color:#176b2c}.lose{color:#a11}
.note{background:#fff6dd;padding:.3rem .6rem}
"""
COLUMNS = (
    ("completed", "completed", 0),
    ("failed", "failed", 0),
    ("request_goodput", "goodput/s", 2),
    ("output_throughput", "tokens/s", 1),
    ("median_ttft_ms", "TTFT p50", 0),
    ("p99_ttft_ms", "TTFT p99", 0),
    ("median_tpot_ms", "TPOT p50", 1),
    ("p99_tpot_ms", "TPOT p99", 1),
    ("median_itl_ms", "ITL p50", 1),
    ("p99_itl_ms", "ITL p99", 1),
)


def render_report(report: Mapping[str, Any]) -> str:
    """HTML of a report as ``weir bench matrix`` writes it to JSON."""
    parts = [f"<h1>{html.escape(report['title'])}</h1>", _machine(report), _verdicts(report)]
    for scenario in report["scenarios"]:
        parts.append(_scenario(scenario))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(report['title'])}</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>"
    )


def _machine(report: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(k)}</td><td>{html.escape(str(v))}</td></tr>" for k, v in report["setup"].items()
    )
    return f"<table>{rows}</table>"


def _verdicts(report: Mapping[str, Any]) -> str:
    items = []
    for scenario in report["scenarios"]:
        verdict = scenario["verdict"]
        name = html.escape(scenario["name"])
        items.append(f'<li class="{verdict["outcome"]}"><b>{name}</b>: {html.escape(verdict["text"])}</li>')
    return f"<h2>Verdict: the split beside its aggregated baseline</h2><ul>{''.join(items)}</ul>"


def _scenario(scenario: Mapping[str, Any]) -> str:
    flows = "; ".join(
        f"{f['kind']}: {f['rate_per_s']:g}/s, {f['input_tokens']} in, {f['output_tokens']} out, "
        f"burstiness {f['burstiness']:g}"
        for f in scenario["flows"]
    )
    parts = [f"<h2>{html.escape(scenario['name'])}</h2><p>{html.escape(flows)}</p>", _table(scenario["runs"])]
    for run in scenario["runs"]:
        verdict = run["figures"]["generator"]["verdict"]
        if verdict:
            parts.append(f'<p class="note">{html.escape(run["layout"])}: {html.escape(verdict)}</p>')
        for kind, count in run["figures"]["errors_by_kind"].items():
            parts.append(f'<p class="note">{html.escape(run["layout"])}: {count} × {html.escape(kind)}</p>')
    first = [run for run in scenario["runs"] if run["rate_scale"] == scenario["runs"][0]["rate_scale"]]
    parts += [_latency_plot(first, "ttft", "TTFT"), _latency_plot(first, "itl", "ITL"), _goodput_plot(scenario["runs"])]
    parts += [_timeline_plot(run) for run in first]
    return "".join(parts)


def _table(runs: Sequence[Mapping[str, Any]]) -> str:
    head = "".join(f"<th>{title}</th>" for _, title, _ in COLUMNS)
    rows = []
    for run in runs:
        cells = "".join(f"<td>{run['figures'][key]:,.{digits}f}</td>" for key, _, digits in COLUMNS)
        rows.append(f"<tr><td>{html.escape(run['layout'])} × {run['rate_scale']:g}</td>{cells}</tr>")
    return f"<table><tr><th>layout × rate</th>{head}</tr>{''.join(rows)}</table>"


def _latency_plot(runs: Sequence[Mapping[str, Any]], name: str, title: str) -> str:
    series = [Series(run["layout"], cdf(run["samples_ms"][name])) for run in runs]
    return plot(f"{title}: share of samples", series, x_label="milliseconds (log)", log_x=True)


def _goodput_plot(runs: Sequence[Mapping[str, Any]]) -> str:
    layouts = list(dict.fromkeys(run["layout"] for run in runs))
    points = {
        layout: sorted((r["offered_per_s"], r["figures"]["request_goodput"]) for r in runs if r["layout"] == layout)
        for layout in layouts
    }
    if all(len(line) < 2 for line in points.values()):
        return ""
    series = [Series(layout, line) for layout, line in points.items()]
    return plot("goodput against offered rate", series, x_label="offered requests/s", y_label="requests/s")


def _timeline_plot(run: Mapping[str, Any]) -> str:
    timeline = run["timeline"]
    if not timeline:
        return ""
    series = [
        Series("waiting", [(p["at_s"], p["waiting"]) for p in timeline]),
        Series("running", [(p["at_s"], p["running"]) for p in timeline]),
        Series("stock (leased blocks)", [(p["at_s"], p["leased_blocks"]) for p in timeline], dashed=True),
    ]
    return plot(f"{run['layout']}: queues and stock", series, x_label="seconds", y_label="sequences, blocks")
