"""What ``weir up`` says once all is ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weir.cli.cluster import Cluster, ClusterSpec
from weir.cli.up import where_to_look


def running(http: str = "127.0.0.1:8000", **spec: Any) -> Cluster:
    cluster = Cluster(ClusterSpec(Path("m"), "m", Path("logs"), **spec))
    cluster.router_address, cluster.http_address, cluster.controller_address = "127.0.0.1:7600", http, "127.0.0.1:7401"
    return cluster


def test_the_page_is_named_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    page = "pools, requests and a chat at http://127.0.0.1:8000/ui"
    assert where_to_look(running()) == [
        "weir chat --router 127.0.0.1:7600",
        "OpenAI API at http://127.0.0.1:8000/v1",
        page,
        "",
    ]
    assert page not in where_to_look(running(ui=False))
    assert where_to_look(running(http="", controller_flags=("--mode", "auto"))) == [
        "weir chat --router 127.0.0.1:7600",
        "weir decisions --controller 127.0.0.1:7401",
        "",
    ]
    monkeypatch.setenv("WEIR_ROUTER_UI", "false")
    assert page not in where_to_look(running())
