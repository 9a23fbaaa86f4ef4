"""What must hold when a process is told to stop: it ends its work, says so, and is gone in time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weir.rpc.v1.events_pb2 import WorkerRecord
from weir.services.worker.host import END_GRACE_S, WorkerHost

if TYPE_CHECKING:
    from tests.simulation.nodes import Node
    from tests.simulation.worker_node import WorkerNode
    from tests.simulation.world import World

SPARE_S = 1.0


class StopChecks:
    """Told of each SIGTERM, of each drain that a worker ends, and of each process that ends by itself."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._told_s: dict[str, float] = {}

    def told(self, node: Node) -> None:
        """``node`` gets SIGTERM."""
        self._told_s[node.host] = self._world.loop.time()

    def drained(self, node: WorkerNode, worker: WorkerHost, begun_s: float) -> None:
        """A worker says that it is drained: nothing runs there, nobody finds it any more."""
        checks, parts = self._world.checks, worker.parts
        left = {
            "prefill attempts": len(worker.prefill.desk),
            "decode attempts": len(worker.decode.desk),
            "leases": worker.prefill.desk.leases.open_count,
            "sessions": worker.prefill.open_sessions - sum(s.ended for s in worker.prefill._sessions.values()),
        }
        if worker.step_loop.dead is None:
            left |= {"running": parts.engine.load().running, "waiting": parts.engine.load().waiting}
        if any(left.values()):
            checks.fail("drain", f"{node.host} is drained and has { {k: n for k, n in left.items() if n} }")
        took_s = self._world.loop.time() - begun_s
        most_s = node.config.role_drain_timeout_s + self._world.plan.read_timeout_s + SPARE_S
        if self._world.plan.kind == "drains" and took_s > most_s:
            checks.fail("drain", f"{node.host} took {took_s:.3f} s to drain")
        if node.link.connected and self._listed(worker):
            checks.fail("drain", f"{node.host} is drained and still listed")
        checks.counts["drains"] += 1

    def _listed(self, worker: WorkerHost) -> bool:
        """Whether the server still has its record, and could have been told."""
        broker, key = self._world.broker, worker.key
        record = broker.fetch(key.worker_id)
        if record is None or not broker.reaches(key.worker_id):
            return False
        return WorkerRecord.FromString(record[0]).incarnation == key.incarnation

    def ended(self, node: Node) -> None:
        """``node`` has ended by itself: nobody was cut off, and it did not take for ever."""
        checks = self._world.checks
        for client in self._world.clients:
            if client._process is node.process and not client.over:
                checks.fail("drain", f"{client.spec.name} is cut off by the end of {node.host}")
        told_s = self._told_s.get(node.host)
        if self._world.plan.kind == "drains" and told_s is not None:
            took_s = self._world.loop.time() - told_s
            if took_s > END_GRACE_S + 2 * SPARE_S + self._slowest_s():
                checks.fail("drain", f"{node.host} took {took_s:.3f} s to stop")

    def _slowest_s(self) -> float:
        """How long the requests of the schedule may take, one after another on the slowest worker."""
        tokens = sum(r.sampling.max_tokens + len(r.prompt) for r in self._world.plan.requests)
        reads = max((r.reads_every_s * r.sampling.max_tokens for r in self._world.plan.requests), default=0.0)
        return 2 * self._world.plan.step_s * tokens + reads
