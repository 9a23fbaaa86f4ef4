"""The documentation lists every metric and alert; rules and dashboards only use metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from weir.telemetry.metrics_table import rows, updated

ROOT = Path(__file__).resolve().parents[3]
COMPOSE = ROOT / "deploy" / "compose"
OPERATIONS = ROOT / "docs" / "operations.md"
NAME = re.compile(r"\b(?:weir_|vllm:)[a-z0-9_]+")
SERIES = ("_bucket", "_sum", "_count")
EXPRESSION = re.compile(r"expr: (\|\n(?: {10,}.*\n)+|.*\n)")


def known(name: str) -> bool:
    """Whether a series of that name is exported by some process."""
    found = rows()
    if name in found:
        return found[name].kind != "histogram"
    return any(name == f"{metric}{end}" for metric, row in found.items() if row.kind == "histogram" for end in SERIES)


def expressions() -> list[tuple[str, str]]:
    """(where, PromQL) of all rules and panels."""
    found = [
        (path.name, match[1])
        for path in (COMPOSE / "prometheus" / "alerts.yaml", COMPOSE / "prometheus" / "recording.yaml")
        for match in EXPRESSION.finditer(path.read_text())
    ]
    for path in sorted((COMPOSE / "grafana" / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            found += [(f"{path.name}: {panel['title']}", target["expr"]) for target in panel["targets"]]
    return found


def test_the_table_of_metrics_is_fresh() -> None:
    document = OPERATIONS.read_text()
    assert document == updated(document), "python -m weir.telemetry.metrics_table docs/operations.md"


def test_a_document_without_marks_is_refused() -> None:
    with pytest.raises(AssertionError, match="has no <!-- metrics: begin -->"):
        updated("# Metrics\n")


def test_every_alert_says_what_to_do() -> None:
    alerts = re.findall(r"- alert: (\w+)", (COMPOSE / "prometheus" / "alerts.yaml").read_text())
    table = re.findall(r"^\| `(Weir\w+)` \|", OPERATIONS.read_text(), re.MULTILINE)
    assert len(alerts) == 22
    assert table == alerts


def test_rules_and_panels_only_use_what_is_exported() -> None:
    found = expressions()
    assert sum(1 for where, _ in found if where.endswith(".yaml")) == 28
    unknown = [(where, name) for where, expr in found for name in NAME.findall(expr) if not known(name)]
    assert unknown == []
    assert not known("weir_ttft_seconds")
    assert known("weir_ttft_seconds_bucket")


def test_every_metric_but_a_few_is_on_a_dashboard_or_in_a_rule() -> None:
    text = " ".join(expr for _, expr in expressions())
    shown = {name.removesuffix(end) for name in NAME.findall(text) for end in ("", *SERIES)}
    assert {name for name in rows() if name not in shown} == {
        "vllm:cache_config_info",
        "vllm:nixl_bytes_transferred",
        "vllm:nixl_num_descriptors",
        "vllm:nixl_num_failed_transfers_total",
        "vllm:nixl_xfer_time_seconds",
        "vllm:request_time_per_output_token_seconds",
        "weir_breaker_openings_total",
        "weir_events_handler_errors_total",
        "weir_events_pending",
        "weir_events_received_total",
    }
