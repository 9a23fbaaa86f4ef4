"""A worker as a process of the cluster."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tests.simulation.broker import SimBus, SimRegistry
from tests.simulation.fabric import SimTransfer
from tests.simulation.model import PoolModel, fingerprint_of, make_parts, profile_of
from tests.simulation.nodes import Node
from tests.simulation.plan import Fault
from tests.simulation.step_thread import SimStepLoop
from tests.simulation.virtual_time import Process
from weir.config import WorkerConfig
from weir.engine.engine import Engine
from weir.errors import WeirError
from weir.ids import WorkerKey, mint_incarnation
from weir.lifecycle import Role
from weir.services.worker.host import WorkerEdges, WorkerHost
from weir.services.worker.parts import WorkerParts

if TYPE_CHECKING:
    from tests.simulation.world import World

STARTS_AGAIN_S = 0.1
"""How long a supervisor takes to start a worker anew that has ended for want of an engine."""


class WorkerNode(Node):
    """A worker. ``address`` stays the same over restarts; ``weights`` are what the next process loads."""

    def __init__(self, world: World, host: str, config: WorkerConfig) -> None:
        super().__init__(world, host)
        self.config = config
        self.weights = 0
        self.worker: WorkerHost | None = None
        self.parts: WorkerParts | None = None
        self.model: PoolModel | None = None
        self.step_loop: type[SimStepLoop] | None = None

    @property
    def key(self) -> WorkerKey:
        """Of the process that runs, or ran last."""
        assert self.worker is not None
        return self.worker.key

    async def live(self, process: Process, stop: asyncio.Event) -> None:
        """See Node."""
        bus, registry = SimBus(self.link), SimRegistry(self.link, self.clock)
        worker = self.worker = self._compose(process, bus, registry)

        async def close() -> None:
            await worker.close()
            await self.leave_nats(bus, registry)

        await self.serve(
            stop,
            register=worker.register,
            start=partial(worker.start, self.host),
            drain=partial(self._drain, worker),
            close=close,
        )

    async def _drain(self, worker: WorkerHost) -> None:
        begun_s = self.world.loop.time()
        await worker.drain()
        if worker.address:
            self.world.checks.stops.drained(self, worker, begun_s)

    def _compose(self, process: Process, bus: SimBus, registry: SimRegistry) -> WorkerHost:
        world = self.world
        parts, self.model = make_parts(self.config, self.clock, self.weights)
        if world.plan.balance is not None:
            parts = replace(parts, profile=profile_of(world.plan.step_s, self.config.max_batch_tokens))
        self.parts = parts
        key = WorkerKey(self.host, mint_incarnation(self.random.getrandbits))
        transfer = SimTransfer(
            world.fabric,
            self.parts.pool,
            key,
            fingerprint_of(self.weights),
            clock=self.clock,
            network=world.network,
            fabric_faults=world.fabric_faults,
        )
        edges = WorkerEdges(transfer, bus, registry)
        self.step_loop = self._make_step_loop()
        fault = partial(self._engine_lost, process)
        worker = WorkerHost(key, self.config, self.parts, edges, self.clock, step_loop=self.step_loop, on_fault=fault)
        self._watch_roles(worker)
        return worker

    def _make_step_loop(self) -> type[SimStepLoop]:
        parts, world, random, slowness = self.parts, self.world, self.random, self.world.plan.step_s
        assert parts is not None

        def step_s(engine: Engine) -> float:
            return slowness * random.uniform(0.5, 1.5)

        def after_step(engine: Engine) -> None:
            parts.blocks.check_integrity()
            world.checks.after_step(self.host, parts)

        return type(
            "StepLoopOf" + self.host,
            (SimStepLoop,),
            {"step_s": staticmethod(step_s), "after_step": staticmethod(after_step)},
        )

    def _watch_roles(self, worker: WorkerHost) -> None:
        set_role = worker.set_role

        async def watched(role: Role, expected_epoch: int, drain_timeout_s: float | None) -> None:
            before = worker.gate.epoch, worker.gate.role
            await set_role(role, expected_epoch, drain_timeout_s)
            self.world.checks.roles.changed(worker, expected_epoch, before, role)

        worker.set_role = watched  # type: ignore[method-assign]

    def hurt(self, fault: Fault) -> None:
        """Something goes wrong inside of it, as it will also after a restart: other weights."""
        if fault.what == "reweigh":
            self.weights += 1
            if fault.other == "kill":
                self.crash(False)
                self.world.network.later(fault.for_s, self.start)
            else:
                self.terminate(fault.for_s)
        elif self.process is None or self.model is None or self.step_loop is None:
            return
        elif fault.what == "step fails":
            self.model.fail_next = True
        elif fault.what == "step spoilt":
            self.model.spoil_next = True
        elif fault.what == "step hangs":
            self.step_loop.hangs_s = fault.for_s
        else:
            assert fault.what == "thread dies", fault
            self.step_loop.dies = fault.other

    def _engine_lost(self, process: Process, error: WeirError) -> None:
        """It ends its process, in order; the supervisor starts another one."""
        if self.process is process and not self.stopping:
            self.terminate(STARTS_AGAIN_S)

    def _gone(self, silent: bool) -> None:
        if self.worker is not None:
            self.world.checks.worker_dies(self)
            self.world.fabric.kill(self.worker.key)
        super()._gone(silent)
        self.worker = None
