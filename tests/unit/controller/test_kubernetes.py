"""Scaling against a recorded Kubernetes API: the calls, the bodies, the refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weir.balance.decision import Action, Decision
from weir.errors import FailedPrecondition, Unavailable
from weir.lifecycle import Role
from weir.services.controller.kubernetes import DELETION_COST, KubernetesApi, KubernetesScale


class ApiError(Exception):
    """As the official client's: with a reason."""

    reason = "Forbidden"


class RecordedApi:
    """AppsV1Api and CoreV1Api as far as they are used: answers by name, remembers what was written."""

    def __init__(self, replicas: dict[str, int], labels: dict[str, str]) -> None:
        self.counts = replicas
        self.labels = labels
        self.calls: list[tuple[Any, ...]] = []
        self.fails = False

    def _note(self, *call: Any) -> None:
        if self.fails:
            raise ApiError
        self.calls.append(call)

    def read_namespaced_deployment_scale(self, name: str, namespace: str, *, _request_timeout: float) -> Any:
        self._note("read scale", name, namespace, _request_timeout)
        return SimpleNamespace(spec=SimpleNamespace(replicas=self.counts[name] or None))

    def patch_namespaced_deployment_scale(
        self, name: str, namespace: str, body: Any, *, _request_timeout: float
    ) -> None:
        self._note("patch scale", name, namespace, body)
        self.counts[name] = body["spec"]["replicas"]

    def read_namespaced_pod(self, name: str, namespace: str, *, _request_timeout: float) -> Any:
        self._note("read pod", name, namespace)
        labels = {"app.kubernetes.io/name": self.labels[name]} if name in self.labels else None
        return SimpleNamespace(metadata=SimpleNamespace(labels=labels))

    def patch_namespaced_pod(self, name: str, namespace: str, body: Any, *, _request_timeout: float) -> None:
        self._note("patch pod", name, namespace, body)


def made(labels: dict[str, str] | None = None, max_workers: int = 4) -> tuple[RecordedApi, KubernetesScale]:
    api = RecordedApi({"weir-prefill": 1, "weir-decode": 2, "weir-mixed": 0}, labels or {})
    return api, KubernetesScale(KubernetesApi(api, api, "llm"), "weir", max_workers=max_workers)


def up(role: Role) -> Decision:
    return Decision(1, Action.SCALE_UP, 0.0, "more", role=role)


def down(worker_id: str) -> Decision:
    return Decision(2, Action.SCALE_DOWN, 0.0, "less", worker_id=worker_id, role=Role.PREFILL)


async def test_growing_asks_for_one_replica_more() -> None:
    api, scale = made()
    await scale.carry_out(up(Role.PREFILL))
    assert api.counts == {"weir-prefill": 2, "weir-decode": 2, "weir-mixed": 0}
    assert ("patch scale", "weir-prefill", "llm", {"spec": {"replicas": 2}}) in api.calls
    assert ("read scale", "weir-mixed", "llm", 10.0) in api.calls


async def test_replicas_that_are_still_starting_count_against_the_budget() -> None:
    api, scale = made(max_workers=3)
    with pytest.raises(FailedPrecondition, match="3 replicas are asked for, the budget is 3"):
        await scale.carry_out(up(Role.DECODE))
    assert not [call for call in api.calls if call[0] == "patch scale"]


async def test_shrinking_names_the_pod_that_goes_whatever_its_role_is_now() -> None:
    api, scale = made({"weir-decode-x": "weir-decode"})
    await scale.carry_out(down("weir-decode-x"))
    assert api.counts["weir-decode"] == 1
    kinds = [call[0] for call in api.calls]
    assert kinds.index("patch pod") < kinds.index("patch scale"), "the cost first, or the wrong pod goes"
    body = {"metadata": {"annotations": {DELETION_COST: "-1000"}}}
    assert ("patch pod", "weir-decode-x", "llm", body) in api.calls


async def test_foreign_pods_are_left_alone_and_api_errors_have_a_name() -> None:
    api, scale = made({"other": "nginx"})
    for pod in ("other", "unlabelled"):
        with pytest.raises(FailedPrecondition, match="has no label"):
            await scale.carry_out(down(pod))
    api.fails = True
    with pytest.raises(Unavailable, match="Kubernetes, weir-prefill: Forbidden"):
        await scale.carry_out(up(Role.PREFILL))


def test_without_the_client_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "kubernetes", None)
    with pytest.raises(Unavailable, match="not installed"):
        KubernetesApi.in_cluster("default")
