"""Scaling by Kubernetes: one Deployment per role at start; which pod goes is said by its deletion cost.

A worker's id is its pod's name. A pod keeps the Deployment that started it when its role flips, so a worker that is to
stop is looked up by its pod's label, not by its role.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from weir.balance.decision import Action, Decision
from weir.errors import FailedPrecondition, Unavailable

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
APP_LABEL = "app.kubernetes.io/name"
GO_FIRST = "-1000"


class Cluster(Protocol):
    """The few calls of the official client that are used, blocking. Shapes as in AppsV1Api and CoreV1Api."""

    def replicas(self, deployment: str) -> int:
        """Replicas that are asked for now."""
        ...

    def set_replicas(self, deployment: str, replicas: int) -> None:
        """Ask for another number."""
        ...

    def pod_label(self, pod: str, label: str) -> str:
        """A label of a pod; empty when the pod or the label is not there."""
        ...

    def annotate_pod(self, pod: str, name: str, value: str) -> None:
        """Set an annotation."""
        ...


class KubernetesScale:
    """Grows ``PREFIX-<role>`` by one; shrinks the Deployment of the worker that is to stop."""

    def __init__(self, cluster: Cluster, prefix: str, *, max_workers: int) -> None:
        self._cluster = cluster
        self._prefix = prefix
        self._max_workers = max_workers

    async def carry_out(self, decision: Decision) -> None:
        """See Actuator. Raises Unavailable when the API does not answer, FailedPrecondition when a rule forbids it."""
        step = self._grow if decision.action is Action.SCALE_UP else self._shrink
        await asyncio.to_thread(step, decision)

    def _grow(self, decision: Decision) -> None:
        assert decision.role is not None
        all_replicas = sum(self._cluster.replicas(f"{self._prefix}-{role}") for role in ("prefill", "decode", "mixed"))
        if all_replicas >= self._max_workers:
            # Pods that are still starting are not in the registry: the Deployments have the last word on the budget.
            raise FailedPrecondition(f"{all_replicas} replicas are asked for, the budget is {self._max_workers}")
        name = f"{self._prefix}-{decision.role.value}"
        self._cluster.set_replicas(name, self._cluster.replicas(name) + 1)

    def _shrink(self, decision: Decision) -> None:
        pod = decision.worker_id
        name = self._cluster.pod_label(pod, APP_LABEL)
        if not name.startswith(f"{self._prefix}-"):
            raise FailedPrecondition(f"pod {pod!r} has no label {APP_LABEL}={self._prefix}-<role>")
        replicas = self._cluster.replicas(name)
        if replicas < 1:
            raise FailedPrecondition(f"{name} has no replica")
        self._cluster.annotate_pod(pod, DELETION_COST, GO_FIRST)
        self._cluster.set_replicas(name, replicas - 1)


class KubernetesApi:
    """``Cluster`` over the official client, which is an optional dependency (extra ``kubernetes``)."""

    def __init__(self, apps: Any, core: Any, namespace: str, *, timeout_s: float = 10.0) -> None:
        self._apps = apps
        self._core = core
        self._namespace = namespace
        self._timeout_s = timeout_s

    @classmethod
    def in_cluster(cls, namespace: str) -> KubernetesApi:
        """With the pod's service account, else the user's kubeconfig. Raises Unavailable with the reason."""
        try:
            from kubernetes import client, config
        except ImportError:
            raise Unavailable("the kubernetes client is not installed: pip install 'weir[kubernetes]'") from None
        try:
            config.load_incluster_config()
        except config.ConfigException:
            try:
                config.load_kube_config()
            except config.ConfigException as error:
                raise Unavailable(f"no Kubernetes configuration: {error}") from None
        return cls(client.AppsV1Api(), client.CoreV1Api(), namespace)

    def replicas(self, deployment: str) -> int:
        """See Cluster."""
        scale = self._call(self._apps.read_namespaced_deployment_scale, deployment)
        return int(scale.spec.replicas or 0)

    def set_replicas(self, deployment: str, replicas: int) -> None:
        """See Cluster."""
        body = {"spec": {"replicas": replicas}}
        self._call(self._apps.patch_namespaced_deployment_scale, deployment, body)

    def pod_label(self, pod: str, label: str) -> str:
        """See Cluster."""
        found = self._call(self._core.read_namespaced_pod, pod)
        return str((found.metadata.labels or {}).get(label, ""))

    def annotate_pod(self, pod: str, name: str, value: str) -> None:
        """See Cluster."""
        self._call(self._core.patch_namespaced_pod, pod, {"metadata": {"annotations": {name: value}}})

    def _call(self, function: Any, name: str, *arguments: Any) -> Any:
        try:
            return function(name, self._namespace, *arguments, _request_timeout=self._timeout_s)
        except Exception as error:
            reason = getattr(error, "reason", None) or error
            raise Unavailable(f"Kubernetes, {name}: {reason}") from error
