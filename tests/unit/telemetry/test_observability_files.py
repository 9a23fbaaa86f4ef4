"""The observability overlay fits together: what is mounted exists, what is named is there."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from weir.config.sections import SECTIONS

yaml = pytest.importorskip("yaml")

COMPOSE = Path(__file__).resolve().parents[3] / "deploy" / "compose"


def loaded(name: str) -> Any:
    return yaml.safe_load((COMPOSE / name).read_text())


def test_mounts_exist_and_volumes_are_declared() -> None:
    overlay = loaded("compose.observability.yaml")
    sources = {mount.split(":")[0] for service in overlay["services"].values() for mount in service.get("volumes", ())}
    folders = {source for source in sources if source.startswith("./")}
    assert folders == {"./otel/collector.yaml", "./prometheus", "./grafana/provisioning", "./grafana/dashboards"}
    assert all((COMPOSE / folder).exists() for folder in folders)
    assert sources - folders == set(overlay["volumes"])


def test_services_of_the_cluster_are_told_and_scraped() -> None:
    overlay, base = loaded("compose.observability.yaml"), loaded("compose.yaml")
    told = {name for name, service in overlay["services"].items() if name in base["services"]}
    assert told == {"controller", "router", "prefill", "decode"}
    for name in told:
        for variable in overlay["services"][name]["environment"]:
            section, field = variable.removeprefix("WEIR_").lower().split("_", 1)
            assert field in {one.name for one in fields(SECTIONS[section])}, variable
    jobs = loaded("prometheus/prometheus.yml")["scrape_configs"]
    scraped = {(name, found["port"]) for job in jobs for found in job["dns_sd_configs"] for name in found["names"]}
    assert scraped == {("router", 8000), ("prefill", 9400), ("decode", 9400), ("controller", 9400)}


def test_dashboards_use_the_source_that_is_provisioned() -> None:
    sources = {one["uid"]: one["url"] for one in loaded("grafana/provisioning/datasources/weir.yaml")["datasources"]}
    assert sources["prometheus"] == "http://prometheus:9090"
    uids = set()
    for path in (COMPOSE / "grafana" / "dashboards").glob("*.json"):
        dashboard = json.loads(path.read_text())
        assert path.stem == dashboard["uid"]
        uids |= {panel["datasource"]["uid"] for panel in dashboard["panels"]}
        titles = [panel["title"] for panel in dashboard["panels"]]
        assert len(titles) == len(set(titles))
    assert uids == {"prometheus"}


def test_the_collector_passes_spans_to_a_service_that_is_there() -> None:
    collector = loaded("otel/collector.yaml")
    pipeline = collector["service"]["pipelines"]["traces"]
    for kind in ("receivers", "processors", "exporters"):
        assert set(pipeline[kind]) == set(collector[kind])
    host = collector["exporters"]["otlp/jaeger"]["endpoint"].split(":")[0]
    assert host in loaded("compose.observability.yaml")["services"]
