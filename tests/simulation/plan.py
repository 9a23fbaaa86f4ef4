"""A schedule as values: the cluster, what clients ask of it, and what goes wrong when."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.simulation.model import BLOCK, CONTEXT
from weir.config import ControllerConfig
from weir.engine.sampling import SamplingParams
from weir.lifecycle import Role

ARRIVALS_S = 2.5


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker at the start."""

    name: str
    role: Role
    num_blocks: int
    max_batch_tokens: int
    max_running: int
    max_waiting: int


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request. ``leaves_s``: when after its start its client is gone, if ever."""

    name: str
    at_s: float
    router: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    tenant: str
    priority: int
    timeout_s: float | None
    leaves_s: float | None
    leaves_by: str
    reads_every_s: float

    @property
    def tokens(self) -> int:
        """Prompt plus output, at most."""
        return len(self.prompt) + self.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class Fault:
    """``what`` befalls ``who`` (and ``other``) at ``at_s`` and is mended ``for_s`` later."""

    at_s: float
    what: str
    who: str
    for_s: float
    other: str = ""

    def __str__(self) -> str:
        between = f" - {self.other}" if self.other else ""
        return f"{self.at_s:.3f} s: {self.what} {self.who}{between} for {self.for_s:.3f} s"


@dataclass(slots=True)
class Plan:
    """See the module. Shares and times are explained where they are used."""

    seed: int
    kind: str
    workers: list[WorkerSpec] = field(default_factory=list)
    routers: int = 1
    requests: list[RequestSpec] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    step_s: float = 0.01
    spikes: float = 0.0
    keepalive_s: float = 2.0
    bus_loss: float = 0.0
    bus_repeat: float = 0.0
    bus_disorder_s: float = 0.0
    slow_reads: float = 0.0
    slow_read_s: float = 0.0
    flips: float = 0.0
    lost_completions: float = 0.0
    lease_s: float = 20.0
    read_timeout_s: float = 1.5
    session_grace_s: float = 1.0
    checksums: bool = True
    skew_s: float = 0.02
    retry_budget_min: int = 10
    tenant_max_active: int = 0
    tenant_max_queued: int = 0
    forgiving: bool = False
    """No request may fail."""
    balance: ControllerConfig | None = None
    """How the controller balances; None: it is off."""

    @property
    def hosts(self) -> list[str]:
        """All but the broker."""
        return [f"router{n}" for n in range(self.routers)] + [worker.name for worker in self.workers]

    def room(self, *, everywhere: bool = False) -> int:
        """Most tokens, prompt plus output, that a worker as planned can hold; or that each can."""
        if everywhere:
            return min(CONTEXT, *(worker.num_blocks * BLOCK for worker in self.workers))
        return min(CONTEXT, max(worker.num_blocks * BLOCK for worker in self.workers if worker.role.decodes))

    def describe(self) -> list[str]:
        """The plan as text."""
        lines = [f"seed {self.seed}: {self.kind}; {self.routers} routers, leases {self.lease_s:.3f} s"]
        lines += [
            f"  {w.name}: {w.role.value}, {w.num_blocks} blocks, {w.max_batch_tokens} tokens a step, "
            f"{w.max_running} running, {w.max_waiting} waiting"
            for w in self.workers
        ]
        for r in self.requests:
            leaves = "" if r.leaves_s is None else f", leaves after {r.leaves_s:.3f} s by {r.leaves_by}"
            timeout = "" if r.timeout_s is None else f", {r.timeout_s:.3f} s allowed"
            lines.append(
                f"  {r.name} at {r.at_s:.3f} s: {len(r.prompt)} + {r.sampling.max_tokens} tokens, "
                f"temperature {r.sampling.temperature:g}{timeout}{leaves}"
            )
        return lines + [f"  {fault}" for fault in self.faults]
