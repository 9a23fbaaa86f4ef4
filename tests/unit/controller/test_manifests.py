"""The Kubernetes manifests fit what the controller asks of the API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weir.config.flags import parse_command_line
from weir.config.sections import ControllerConfig
from weir.services.controller.balancing import limits_of
from weir.services.controller.kubernetes import APP_LABEL

yaml = pytest.importorskip("yaml")
FOLDER = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes"


def objects() -> dict[tuple[str, str], Any]:
    """All objects by kind and name."""
    found = {}
    for file in sorted(FOLDER.glob("*.yaml")):
        for one in yaml.safe_load_all(file.read_text()):
            found[one["kind"], one["metadata"]["name"]] = one
    return found


def test_every_role_has_a_deployment_whose_pods_carry_its_name() -> None:
    found = objects()
    for role in ("prefill", "decode", "mixed"):
        template = found["Deployment", f"weir-{role}"]["spec"]["template"]
        assert template["metadata"]["labels"][APP_LABEL] == f"weir-{role}"
        container = template["spec"]["containers"][0]
        assert f"--role={role}" in container["args"]
        names = {entry["name"]: entry for entry in container["env"]}
        assert names["WEIR_WORKER_WORKER_ID"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"


def test_the_controller_may_do_what_it_does_and_no_more() -> None:
    found = objects()
    rules = found["Role", "weir-controller"]["rules"]
    assert rules[0]["resourceNames"] == ["weir-prefill", "weir-decode", "weir-mixed"]
    assert [(rule["resources"], rule["verbs"]) for rule in rules] == [
        (["deployments/scale"], ["get", "patch"]),
        (["pods"], ["get", "patch"]),
    ]
    assert found["Deployment", "weir-controller"]["spec"]["replicas"] == 1


def test_the_controllers_flags_are_settings() -> None:
    container = objects()["Deployment", "weir-controller"]["spec"]["template"]["spec"]["containers"][0]
    given = parse_command_line(container["args"][1:], prog="controller", section="controller")
    config = given.load(ControllerConfig, "controller", environ={})
    limits = limits_of(config)
    assert (config.mode, config.actuator, limits.scale, limits.max_workers) == ("auto", "kubernetes", True, 8)
