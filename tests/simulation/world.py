"""One schedule: the cluster of a plan under virtual time, from its start until nothing is left to happen."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.simulation.broker import Broker
from tests.simulation.checks import Checks
from tests.simulation.clients import Client
from tests.simulation.controller_node import ControllerNode
from tests.simulation.fabric import FabricFaults
from tests.simulation.history import History
from tests.simulation.kinds import CONTROLLER
from tests.simulation.model import PLANTED
from tests.simulation.network import Network
from tests.simulation.nodes import Node
from tests.simulation.plan import Fault, Plan
from tests.simulation.router_node import RouterNode
from tests.simulation.serving import simulated_servers
from tests.simulation.virtual_time import VirtualLoop
from tests.simulation.worker_node import WorkerNode
from weir.config import LimitsConfig, RouterConfig, WorkerConfig
from weir.lifecycle import Role
from weir.transfer.local import LocalFabric

SETTLE_S = 12.0
"""After the last fault is mended and the last request begun: everything must have ended within this."""
WATCH_S = 0.25
RUNS_PER_COLLECTION = 10
_RUNS = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a schedule went. ``failures`` is empty when every check held."""

    plan: Plan
    failures: tuple[str, ...]
    digest: str
    history: tuple[str, ...]
    virtual_s: float
    turns: int
    counts: dict[str, int]


class World:
    """Everything of one schedule."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.loop = VirtualLoop()
        self.history = History(self.loop.time)
        self.network = Network(
            self.loop, self._random("network"), self.history, spikes=plan.spikes, keepalive_s=plan.keepalive_s
        )
        self.broker = Broker(
            self.network,
            self._random("broker"),
            loss=plan.bus_loss,
            repeat=plan.bus_repeat,
            disorder_s=plan.bus_disorder_s,
        )
        self.fabric_faults = FabricFaults(
            self._random("fabric"),
            slow=plan.slow_reads,
            slow_s=plan.slow_read_s,
            flip=plan.flips,
            lost=plan.lost_completions,
        )
        self.fabric = LocalFabric(self.fabric_faults.faults())
        self.checks = Checks(self)
        self.workers = {
            spec.name: WorkerNode(self, spec.name, _worker_config(plan, index))
            for index, spec in enumerate(plan.workers)
        }
        self.routers = [
            RouterNode(self, f"router{number}", _router_config(plan, number), LimitsConfig())
            for number in range(plan.routers)
        ]
        self.controller = ControllerNode(self, CONTROLLER)
        self.clients = [Client(self, spec) for spec in plan.requests]
        self._mending = 0

    def _random(self, part: str) -> Random:
        return Random(f"{self.plan.seed}/{part}")

    @property
    def nodes(self) -> dict[str, Node]:
        """Every process by its host."""
        nodes: dict[str, Node] = {**self.workers, CONTROLLER: self.controller}
        return nodes | {node.host: node for node in self.routers}

    # -- the run ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """From start to quiescence; what is wrong is in ``checks.failures``."""
        for node in self.nodes.values():
            node.start()
        for client in self.clients:
            self.network.later(client.spec.at_s, client.begin)
        for fault in self.plan.faults:
            self.network.later(fault.at_s, self._strike, fault)
        self.network.later(WATCH_S, self._watch)
        ends_s = max([fault.at_s + fault.for_s for fault in self.plan.faults], default=0.0)
        begun_s = max(client.spec.at_s for client in self.clients)
        await asyncio.sleep(max(ends_s, begun_s) + 0.001)
        await self._mend()
        self.checks.mended_s = self.loop.time()
        until_s = self.loop.time() + SETTLE_S
        await self._until(lambda: all(client.over for client in self.clients), until_s)
        await asyncio.sleep(self._rest_s())
        await self._until(self.checks.fleets_agree, until_s)
        if self.plan.balance is not None:
            await self._until(self.checks.roles.capable, until_s)
        self.checks.at_the_end()

    async def _until(self, condition: Callable[[], bool], latest_s: float) -> None:
        """Look from time to time, as an operator would; nothing in the cluster tells that all is over."""
        while self.loop.time() < latest_s and not condition():  # noqa: ASYNC110
            await asyncio.sleep(WATCH_S)

    def _rest_s(self) -> float:
        """Time for what requests have left behind: graces, leases and reads end by themselves."""
        plan = self.plan
        return max(plan.session_grace_s, plan.read_timeout_s) + 1.0

    def _watch(self) -> None:
        self.checks.while_it_runs()
        self.network.later(WATCH_S, self._watch)

    async def _mend(self) -> None:
        """Everything is there again and as it was planned."""
        self.network.heal_all()
        self.fabric_faults.slow = self.fabric_faults.flip = 0.0
        if not self.broker.up:
            self.broker.set_up(True)
        self.broker.changed()
        for node in self.nodes.values():
            node.resume()
            node.start()
        await self._until(lambda: all(node.ready for node in self.nodes.values()), float("inf"))

    # -- faults -----------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        self.history.note("world", f"{fault}")
        later = self.network.later
        if fault.what == "reset":
            self.network.reset(fault.who, fault.other)
        elif fault.what in ("cut", "isolate"):
            self._cut(fault)
        elif fault.what == "broker down":
            self.broker.set_up(False)
            later(fault.for_s, self.broker.set_up, True)
        elif fault.what == "flip":
            home = next(spec.role for spec in self.plan.workers if spec.name == fault.who)
            self.controller.flip(fault.who, Role(fault.other))
            later(fault.for_s, self.controller.flip, fault.who, home)
        elif fault.what == "turn":
            self.controller.flip(fault.who, Role(fault.other))
        elif fault.what in ("kill", "unplug"):
            node = self.nodes[fault.who]
            node.crash(fault.what == "unplug")
            later(fault.for_s, node.start)
        elif fault.what == "pause":
            self.nodes[fault.who].pause()
            later(fault.for_s, self.nodes[fault.who].resume)
        elif fault.what == "terminate":
            self.nodes[fault.who].terminate(fault.for_s)
        else:
            self.workers[fault.who].hurt(fault)

    def _cut(self, fault: Fault) -> None:
        others = [fault.other]
        if fault.what == "isolate":
            others = [host for host in [*self.plan.hosts, "nats", CONTROLLER] if host != fault.who]
        for other in others:
            self.network.cut(fault.who, other)
        self.broker.changed()
        self.network.later(fault.for_s, self._heal, fault.who, others)

    def _heal(self, who: str, others: list[str]) -> None:
        for other in others:
            self.network.heal(who, other)
        self.broker.changed()


def _worker_config(plan: Plan, index: int) -> WorkerConfig:
    spec = plan.workers[index]
    return WorkerConfig(
        role=spec.role,
        num_blocks=spec.num_blocks,
        max_batch_tokens=spec.max_batch_tokens,
        max_running=spec.max_running,
        max_waiting=spec.max_waiting,
        transfer="local",
        checksums=plan.checksums,
        lease_s=plan.lease_s,
        read_timeout_s=plan.read_timeout_s,
        session_grace_s=plan.session_grace_s,
        role_drain_timeout_s=1.0,
    )


def _router_config(plan: Plan, number: int) -> RouterConfig:
    return RouterConfig(
        router_id=f"router{number}",
        queue_timeout_s=8.0,
        lease_s=plan.lease_s,
        worker_connect_timeout_s=1.0,
        max_attempts=5,
        retry_budget_min=plan.retry_budget_min,
        tenant_max_active=plan.tenant_max_active,
        tenant_max_queued=plan.tenant_max_queued,
    )


class _LogWatch(logging.Handler):
    """What production code logs as an error is a failure of the schedule."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.INFO)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self._world.history.note("log", f"{record.name.rsplit('.', 1)[-1]}: {text}")
        if record.levelno >= logging.ERROR:
            error = record.exc_info[1] if record.exc_info else None
            if PLANTED in f"{text} {error}":
                return
            self._world.checks.fail("log", f"{text} ({type(error).__name__}: {error})" if error else text)


def run_plan(plan: Plan) -> Outcome:
    """Run a schedule to its end."""
    collecting = gc.isenabled()
    _freeze()
    gc.disable()  # finalizers would run in the midst of a schedule, at moments that differ between runs
    world = World(plan)
    watch, logger = _LogWatch(world), logging.getLogger("weir")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(watch)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        asyncio.set_event_loop(world.loop)
        try:
            with simulated_servers(world.network):
                world.loop.run_until_complete(world.run())
        except AssertionError as error:
            world.checks.fail("end", f"{type(error).__name__}: {error}")
        world.checks.loop_faults()
        checks = world.checks
        return Outcome(
            plan,
            tuple(checks.failures),
            world.history.digest(),
            tuple(world.history.lines),
            world.loop.time(),
            world.loop.turns,
            dict(checks.counts),
        )
    finally:
        logger.removeHandler(watch)
        logger.setLevel(level)
        logger.propagate = propagate
        _dispose(world)
        if collecting:
            gc.enable()


@functools.cache
def _freeze() -> None:
    """What was there before the first schedule is never looked at again by the collector."""
    gc.collect()
    gc.freeze()


def _collect() -> None:
    if next(_RUNS) % RUNS_PER_COLLECTION == 0:
        gc.collect()


def _dispose(world: World) -> None:
    """Let go of tasks that never end. Their ``finally`` blocks run here, for nobody, and may complain."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    logging.disable()
    try:
        world.loop.dispose()
        asyncio.set_event_loop(None)
        world.clients.clear()
        world.workers.clear()
        world.routers.clear()
        _collect()
    finally:
        logging.disable(logging.NOTSET)
        sys.unraisablehook = hook
