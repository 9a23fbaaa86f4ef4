"""The Grafana dashboards, as code: ``python deploy/compose/grafana/dashboards.py`` writes dashboards/*.json.

A panel is a title, a unit and its queries; where it stands follows from the order. Tests run every query against a
real Prometheus, and check that the files are those that this script writes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent / "dashboards"
COLUMNS, WIDTH, HEIGHT = 3, 8, 7
ROUTER, WORKER = 'job="weir-router"', 'job="weir-worker"'


@dataclass(frozen=True, slots=True)
class Panel:
    """Queries (PromQL, legend) under one title. ``unit`` is Grafana's; ``stacked`` adds them up."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    stacked: bool = False


def rate(metric: str, by: str = "", where: str = "") -> str:
    """Per second, added up by labels."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{{{where}}}[$__rate_interval]))".replace("{}", "")


def quantile(share: float, metric: str, by: str = "", where: str = "") -> str:
    """A quantile of a histogram, by labels."""
    inner = rate(f"{metric}_bucket", ", ".join(filter(None, ("le", by))), where)
    return f"histogram_quantile({share}, {inner})"


def mean(metric: str, by: str) -> str:
    """Mean of a histogram, by labels."""
    return f"{rate(f'{metric}_sum', by)} / {rate(f'{metric}_count', by)}"


def percentiles(metric: str, where: str) -> tuple[tuple[str, str], ...]:
    """Median, 90th and 99th."""
    return tuple((quantile(share, metric, where=where), f"p{share * 100:g}") for share in (0.5, 0.9, 0.99))


SERVING = (
    Panel("Requests ended", "reqps", ((rate("weir_requests_ended_total", "state"), "{{state}}"),), stacked=True),
    Panel(
        "Goodput: finished within its SLOs",
        "reqps",
        (
            (rate("weir_requests_good_total"), "good"),
            (rate("weir_requests_ended_total", where='state="finished"'), "finished"),
        ),
    ),
    Panel("Requests under way", "short", (("sum by (state) (weir_requests_active)", "{{state}}"),), stacked=True),
    Panel("SLO missed", "reqps", ((rate("weir_requests_slo_missed_total", "slo"), "{{slo}}"),)),
    Panel("Refused at admission", "reqps", ((rate("weir_admission_refusals_total", "reason"), "{{reason}}"),)),
    Panel("Waiting for a worker", "short", ((f"sum(vllm:num_requests_waiting{{{ROUTER}}})", "waiting"),)),
    Panel("TTFT", "s", percentiles("vllm:time_to_first_token_seconds", ROUTER)),
    Panel(
        "TTFT p99 by input tokens and path",
        "s",
        ((quantile(0.99, "weir_ttft_seconds", "input_tokens, path"), "{{input_tokens}} {{path}}"),),
    ),
    Panel("Stages, mean", "s", ((mean("weir_request_stage_seconds", "stage"), "{{stage}}"),), stacked=True),
    Panel("ITL", "s", percentiles("vllm:inter_token_latency_seconds", ROUTER)),
    Panel(
        "ITL p99 by requests under way",
        "s",
        ((quantile(0.99, "weir_itl_seconds", "concurrency"), "{{concurrency}}"),),
    ),
    Panel(
        "TPOT p99 by requests under way",
        "s",
        ((quantile(0.99, "weir_tpot_seconds", "concurrency"), "{{concurrency}}"),),
    ),
    Panel("End to end", "s", percentiles("vllm:e2e_request_latency_seconds", ROUTER)),
    Panel(
        "Tokens",
        "short",
        (
            (rate("vllm:generation_tokens_total", where=ROUTER), "generated /s"),
            (rate("vllm:prompt_tokens_total", where=ROUTER), "prompt /s"),
        ),
    ),
    Panel(
        "Prompt tokens by source",
        "short",
        ((rate("vllm:prompt_tokens_by_source_total", "source", ROUTER), "{{source}} /s"),),
        stacked=True,
    ),
    Panel("Placements", "reqps", ((rate("weir_placements_total", "reason"), "{{reason}}"),), stacked=True),
    Panel("Retries", "reqps", ((rate("weir_request_retries_total", "reason"), "{{reason}}"),)),
    Panel("Breakers", "short", (("sum by (state) (weir_breakers)", "{{state}}"),), stacked=True),
    Panel("Prefix hits", "percentunit", (("weir:prefix_hit:ratio", "of prompt tokens"),)),
    Panel("Cost of a good request", "short", (("weir:cost_per_good_request:5m", "configured prices"),)),
    Panel("Sessions with workers", "short", (("sum by (instance, leg) (weir_sessions_open)", "{{instance}} {{leg}}"),)),
)

WORKERS = (
    Panel("Utilisation of the pools", "percentunit", (("weir:pool_utilisation:ratio", "{{pool}}"),)),
    Panel("Workers by role", "short", (("sum by (role) (weir_role_info)", "{{role}}"),), stacked=True),
    Panel(
        "Sequences",
        "short",
        (
            (f"sum by (instance) (vllm:num_requests_running{{{WORKER}}})", "{{instance}} running"),
            (f"sum by (instance) (vllm:num_requests_waiting{{{WORKER}}})", "{{instance}} waiting"),
        ),
    ),
    Panel("Queue time p99", "s", ((quantile(0.99, "weir_queue_seconds", "pool"), "{{pool}}"),)),
    Panel("Engine step, mean by kind", "s", ((mean("weir_step_seconds", "kind"), "{{kind}}"),)),
    Panel(
        "Decode step p99 by sequences",
        "s",
        ((quantile(0.99, "weir_decode_step_seconds", "concurrency"), "{{concurrency}}"),),
    ),
    Panel("KV blocks", "short", (("sum by (state) (weir_kv_blocks)", "{{state}}"),), stacked=True),
    Panel("KV memory in use", "percentunit", ((f"vllm:kv_cache_usage_perc{{{WORKER}}}", "{{instance}}"),)),
    Panel(
        "Stock and headroom",
        "bytes",
        (
            ("sum by (instance) (weir_stock_bytes)", "{{instance}} stock"),
            ("sum by (instance) (weir_headroom_bytes)", "{{instance}} headroom"),
        ),
    ),
    Panel("Leases open", "short", (("sum by (instance) (weir_leases_open)", "{{instance}}"),)),
    Panel("Leases ended", "ops", ((rate("weir_leases_ended_total", "reason"), "{{reason}}"),), stacked=True),
    Panel(
        "Prefix cache hits",
        "percentunit",
        (
            (
                f"{rate('vllm:prefix_cache_hits_total', 'instance')} / "
                f"{rate('vllm:prefix_cache_queries_total', 'instance')}",
                "{{instance}}",
            ),
        ),
    ),
    Panel(
        "KV read p99 by tokens and transport",
        "s",
        ((quantile(0.99, "weir_kv_read_seconds", "input_tokens, transport"), "{{input_tokens}} {{transport}}"),),
    ),
    Panel(
        "KV throughput of a read",
        "Bps",
        (
            (
                f"{rate('weir_kv_read_bytes_total', 'transport')} / {rate('weir_kv_read_seconds_sum', 'transport')}",
                "{{transport}}",
            ),
        ),
    ),
    Panel("KV read", "Bps", ((rate("weir_kv_read_bytes_total", "instance"), "{{instance}}"),)),
    Panel("Void reads", "ops", ((rate("weir_kv_reads_void_total", "reason"), "{{reason}}"),)),
    Panel(
        "KV read errors",
        "ops",
        ((rate("weir_kv_read_errors_total", "input_tokens, transport"), "{{input_tokens}} {{transport}}"),),
    ),
    Panel("KV reads under way", "short", (("sum by (instance) (weir_kv_reads_outstanding)", "{{instance}}"),)),
    Panel("Transports", "short", (("sum by (transport) (weir_kv_transport_info)", "{{transport}}"),), stacked=True),
    Panel("Cancel to clean, p99", "s", ((quantile(0.99, "weir_cancel_seconds", "instance"), "{{instance}}"),)),
    Panel("Prices an hour", "short", (("sum by (instance) (weir_worker_price_per_hour)", "{{instance}}"),)),
    Panel("Registered workers", "short", (("sum by (role) (weir_members)", "{{role}}"),), stacked=True),
    Panel("Role changes", "ops", ((rate("weir_role_changes_total", "outcome"), "{{outcome}}"),)),
    Panel("Balance decisions", "ops", ((rate("weir_decisions_total", "action"), "{{action}}"),)),
    Panel("Capacity in use", "percentunit", (("max(weir_capacity_used_ratio)", "demand over capacity"),)),
    Panel("Forecast error", "percentunit", (("max(weir_forecast_error_ratio)", "MAPE"),)),
    Panel("Registry stale", "short", (("max by (job, instance) (weir_registry_stale)", "{{job}} {{instance}}"),)),
    Panel(
        "Events",
        "ops",
        (
            (rate("weir_events_published_total", "job"), "{{job}} published"),
            (rate("weir_events_dropped_total", "job"), "{{job}} dropped"),
        ),
    ),
    Panel("NATS reconnects", "ops", ((rate("weir_nats_reconnects_total", "job, instance"), "{{job}} {{instance}}"),)),
    Panel("Spans", "ops", ((rate("weir_trace_spans_total", "job, outcome"), "{{job}} {{outcome}}"),)),
)

DASHBOARDS = {
    "weir-serving": ("Weir: serving", SERVING),
    "weir-workers": ("Weir: workers and balance", WORKERS),
}
DATASOURCE = {"type": "prometheus", "uid": "prometheus"}


def panel_json(number: int, panel: Panel) -> dict[str, Any]:
    """Grafana's object of a panel, the ``number``-th from 0."""
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": DATASOURCE,
        "gridPos": {
            "x": number % COLUMNS * WIDTH,
            "y": number // COLUMNS * HEIGHT,
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "custom": {
                    "fillOpacity": 20 if panel.stacked else 0,
                    "stacking": {"mode": "normal" if panel.stacked else "none"},
                },
            },
            "overrides": [],
        },
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": expr, "legendFormat": legend}
            for index, (expr, legend) in enumerate(panel.queries)
        ],
    }


def dashboard_json(uid: str, title: str, panels: Sequence[Panel]) -> str:
    """A dashboard's file."""
    dashboard = {
        "uid": uid,
        "title": title,
        "tags": ["weir"],
        "schemaVersion": 38,
        "version": 1,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "panels": [panel_json(number, panel) for number, panel in enumerate(panels)],
    }
    return json.dumps(dashboard, indent=1) + "\n"


def files() -> dict[Path, str]:
    """All files with their contents."""
    return {HERE / f"{uid}.json": dashboard_json(uid, *made) for uid, made in DASHBOARDS.items()}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
