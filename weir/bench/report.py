"""The matrix's report as one HTML file without scripts or outside parts. Pure."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from weir.bench.svg import Series, cdf, plot

STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:66rem;padding:0 1rem;color:#222;background:#fff}
table{border-collapse:collapse;margin:.6rem 0}td,th{border:1px solid #ccc;padding:.2rem .5rem;text-align:right}
td:first-child,th:first-child{text-align:left}svg{margin:.3rem .6rem .3rem 0}svg text{font:11px system-ui,sans-serif}
svg .title{font-weight:600;font-size:12px}svg .grid{stroke:#ddd;stroke-width:.7}.win{color:#176b2c}.lose{color:#a11}
.note{background:#fff6dd;padding:.3rem .6rem}td.text{text-align:left}
th.text{text-align:left}
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
    parts = [f"<h1>{html.escape(report['title'])}</h1>", _verdicts(report), _goodputs(report), _machine(report)]
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
    return f"<h2>How it was measured</h2><table>{rows}</table>"


def _verdicts(report: Mapping[str, Any]) -> str:
    rows = []
    for scenario in report["scenarios"]:
        verdict, name = scenario["verdict"], html.escape(scenario["name"])
        rows.append(
            f'<tr><td><a href="#{name}">{name}</a></td>'
            f'<td class="text {verdict["outcome"]}">{html.escape(verdict["text"])}</td></tr>'
        )
    for name, why in report.get("left_out", {}).items():
        rows.append(f'<tr><td>{html.escape(name)}</td><td class="text">not run: {html.escape(why)}</td></tr>')
    head = '<tr><th>scenario</th><th class="text">the split beside its aggregated baseline on the same cores</th></tr>'
    return f"<h2>Verdict</h2><table>{head}{''.join(rows)}</table>{_bottlenecks(report)}"


def _bottlenecks(report: Mapping[str, Any]) -> str:
    """Whose figures are the load generator's own: said first, where nobody overlooks it."""
    runs = [(scenario["name"], run) for scenario in report["scenarios"] for run in scenario["runs"]]
    bad = [f"{name} / {run['layout']}" for name, run in runs if run["figures"]["generator"]["verdict"]]
    if not bad:
        return f"<p>The load generator kept its schedule in all of the {len(runs)} runs.</p>"
    listed = html.escape(", ".join(bad))
    return f'<p class="note">The load generator was a bottleneck in {len(bad)} of {len(runs)} runs: {listed}.</p>'


def _goodputs(report: Mapping[str, Any]) -> str:
    """Scenarios against systems, at the first rate."""
    layouts = list(dict.fromkeys(run["layout"] for scenario in report["scenarios"] for run in scenario["runs"]))
    rows = []
    for scenario in report["scenarios"]:
        found = {run["layout"]: run["figures"] for run in _first_rate(scenario["runs"])}
        cells = "".join(f"<td>{_goodput_cell(found.get(layout))}</td>" for layout in layouts)
        objectives = html.escape(", ".join(scenario.get("objectives", ())))
        rows.append(f"<tr><td>{html.escape(scenario['name'])}</td><td>{objectives}</td>{cells}</tr>")
    head = "".join(f"<th>{html.escape(layout)}</th>" for layout in layouts)
    return (
        "<h2>Goodput: requests a second that met every objective</h2>"
        f"<table><tr><th>scenario</th><th>objectives, ms</th>{head}</tr>{''.join(rows)}</table>"
    )


def _goodput_cell(figures: Mapping[str, Any] | None) -> str:
    if figures is None:
        return "–"
    requests = figures["completed"] + figures["failed"]
    met = round(figures["request_goodput"] * figures["duration"])
    return f"{figures['request_goodput']:.2f} ({met} of {requests})"


def _first_rate(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [run for run in runs if run["rate_scale"] == runs[0]["rate_scale"]]


def _scenario(scenario: Mapping[str, Any]) -> str:
    flows = "; ".join(
        f"{f['kind']}: {f['rate_per_s']:g}/s, {f['input_tokens']} in, {f['output_tokens']} out, "
        f"burstiness {f['burstiness']:g}"
        for f in scenario["flows"]
    )
    name = html.escape(scenario["name"])
    parts = [f'<h2 id="{name}">{name}</h2><p>{html.escape(flows)}</p>']
    if scenario.get("link"):
        parts.append(f"<p>{html.escape(scenario['link'])}</p>")
    parts += [_checklist(scenario.get("checklist", ())), _table(scenario["runs"])]
    for run in scenario["runs"]:
        verdict = run["figures"]["generator"]["verdict"]
        if verdict:
            parts.append(f'<p class="note">{html.escape(run["layout"])}: {html.escape(verdict)}</p>')
        for kind, count in run["figures"]["errors_by_kind"].items():
            parts.append(f'<p class="note">{html.escape(run["layout"])}: {count} × {html.escape(kind)}</p>')
    first = _first_rate(scenario["runs"])
    parts += [_latency_plot(first, "ttft", "TTFT"), _latency_plot(first, "itl", "ITL"), _goodput_plot(scenario["runs"])]
    parts += [_timeline_plot(run) for run in first]
    return "".join(parts)


def _checklist(findings: Sequence[Mapping[str, Any]]) -> str:
    """What speaks for which layout, and by what measurement."""
    if not findings:
        return ""
    colours = {"split": "win", "mixed": "lose"}
    rows = "".join(
        f'<tr><td>{html.escape(f["question"])}</td><td class="text">{html.escape(f["answer"])}</td>'
        f'<td class="{colours.get(f["speaks_for"], "")}">{html.escape(f["speaks_for"])}</td></tr>'
        for f in findings
    )
    return f'<table><tr><th>checklist</th><th class="text">measured</th><th>speaks for</th></tr>{rows}</table>'


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
    timeline = [point for point in run["timeline"] if point["at_s"] >= 0]  # the warm-up came before
    if not timeline:
        return ""
    series = [
        Series("waiting", [(p["at_s"], p["waiting"]) for p in timeline]),
        Series("running", [(p["at_s"], p["running"]) for p in timeline]),
        Series("stock (leased blocks)", [(p["at_s"], p["leased_blocks"]) for p in timeline], dashed=True),
    ]
    return plot(f"{run['layout']}: queues and stock", series, x_label="seconds")
