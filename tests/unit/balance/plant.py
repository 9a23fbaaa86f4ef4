"""A simple fluid model of workers, to drive the balance controller with: queues, slots and flips, no tokens.

Prefill workers share one queue of prompt tokens; finished prompts wait as stock for one of ``batch`` slots of each
decode worker; a sequence holds its slot for OSL steps. A mixed worker prefills first, and decodes with what
is left of it. Flips and
starts take time; what they were asked for is what happens, unless ``broken`` says otherwise.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from weir.balance.decide import BalanceController
from weir.balance.decision import Action, Decision
from weir.balance.forecast import Constant, ForecastPanel, HoltWinters
from weir.balance.observe import Observation, Speed, WorkerFacts
from weir.balance.window import TrafficWindow
from weir.lifecycle import Role

TICK_S = 0.25
SPEED = Speed(prefill_tokens_per_s=10_000, step_base_s=0.03, max_batch=32, bytes_per_token=1e5, source="plant")
POOL_BYTES = 4e9


@dataclass
class Mix:
    """Traffic at one moment."""

    rate: float
    isl: int = 2000
    osl: int = 200


@dataclass
class Plant:
    """See the module. ``traffic(t)`` is the mix at second t."""

    roles: list[Role]
    traffic: Callable[[float], Mix]
    seed: int = 1
    flip_s: float = 1.0
    start_s: float = 20.0
    now_s: float = 0.0
    broken: set[str] = field(default_factory=set)
    starts_work: bool = True
    finished: int = 0
    arrived: int = 0
    late: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.window = TrafficWindow(span_s=30.0)
        self.window.start(0.0)
        self.panel = ForecastPanel([Constant(), HoltWinters()], horizon=5)
        self.workers: dict[str, WorkerFacts] = {}
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.queue: deque[list[float]] = deque()
        self.stock: deque[tuple[float, int, int]] = deque()
        self.active: list[tuple[float, float, int]] = []
        self.progress = 0.0
        self.lent = 0.0
        self._made = 0
        self._bucket = 0
        for role in self.roles:
            self.add(role)

    def add(self, role: Role) -> None:
        """Another worker is there."""
        self._made += 1
        worker_id = f"w{self._made:03d}"
        self.workers[worker_id] = WorkerFacts(worker_id, role, 1, self.now_s)

    def die(self, worker_id: str) -> None:
        """The worker is gone from the registry."""
        del self.workers[worker_id]

    def set_role(self, worker_id: str, role: Role) -> None:
        """A role change that is in force."""
        worker = self.workers.get(worker_id)
        if worker is not None:
            self.workers[worker_id] = replace(worker, role=role, epoch=worker.epoch + 1, draining=False)

    def carry_out(self, decision: Decision) -> None:
        """What an actuator does."""
        for flip in decision.flips:
            worker = self.workers[flip.worker_id]
            assert worker.epoch == flip.expected_epoch
            if flip.worker_id in self.broken:
                continue
            self.workers[flip.worker_id] = replace(worker, draining=True)
            self._later(self.flip_s, lambda f=flip: self.set_role(f.worker_id, f.role))  # type: ignore[misc]
        if decision.action is Action.SCALE_UP and self.starts_work:
            assert decision.role is not None
            self._later(self.start_s, lambda role=decision.role: self.add(role))  # type: ignore[misc]
        if decision.action is Action.SCALE_DOWN:
            self.die(decision.worker_id)

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.due, (self.now_s + seconds, len(self.due) + self.finished * 1000, what))

    def able(self, role: Role) -> int:
        """Workers of a role that take work."""
        return sum(worker.role is role and not worker.draining for worker in self.workers.values())

    def tick(self) -> None:
        """A quarter of a second."""
        self.now_s += TICK_S
        while self.due and self.due[0][0] <= self.now_s:
            heapq.heappop(self.due)[2]()
        mix = self.traffic(self.now_s)
        self._arrive(mix)
        self._prefill()
        self._decode()
        bucket = int(self.now_s)
        if bucket != self._bucket:
            self._bucket = bucket
            self.panel.observe(self.window.arrivals_by_bucket(self.now_s, 1)[0])

    def _arrive(self, mix: Mix) -> None:
        expected = mix.rate * TICK_S
        while expected > 0 and self.random.random() < min(1.0, expected):
            expected -= 1.0
            isl = max(16, int(self.random.gauss(mix.isl, mix.isl / 4)))
            osl = max(4, int(self.random.expovariate(1 / mix.osl)))
            self.arrived += 1
            self.window.arrived(self.now_s, isl)
            self.queue.append([float(isl), float(isl), float(osl), self.now_s])

    def _prefill(self) -> None:
        per_worker = SPEED.prefill_tokens_per_s * TICK_S
        mixed, pure = self.able(Role.MIXED), self.able(Role.PREFILL)
        room = (pure + mixed) * per_worker
        idle = room
        while self.queue and room > 0:
            first = self.queue[0]
            done = min(room, first[0])
            first[0] -= done
            room -= done
            if first[0] <= 0:
                self.queue.popleft()
                self.window.prefilled(self.now_s, first[1], 0)
                self.late += self.now_s - first[3] > 2.0
                self.stock.append((first[2], int(first[1]), int(first[2])))
        self.lent = max(0.0, (idle - room) / per_worker - pure)

    def _decode(self) -> None:
        able = self.able(Role.DECODE) + self.able(Role.MIXED)
        slots = able * SPEED.max_batch
        if slots and self.active:
            slow = min(1.0, slots / len(self.active)) * (able - self.lent) / able
            self.progress += TICK_S / SPEED.step_base_s * slow
        while self.active and self.active[0][0] <= self.progress:
            _, _, osl = heapq.heappop(self.active)
            self.finished += 1
            self.window.finished(self.now_s, osl, 0.5, SPEED.step_base_s)
        while self.stock and len(self.active) < slots:
            steps, prompt, tokens = self.stock.popleft()
            self.window.decode_began(self.now_s, prompt)
            heapq.heappush(self.active, (self.progress + steps, self.random.random(), tokens))

    def observe(self, **changes: object) -> Observation:
        """What a controller would be told now."""
        able = [w for w in self.workers.values() if w.role.prefills]
        queued = sum(one[0] for one in self.queue)
        stock = sum(isl for _, isl, _ in self.stock) * SPEED.bytes_per_token
        decoders = max(1, sum(w.role.decodes for w in self.workers.values()))
        seen = []
        for worker in self.workers.values():
            prefills, decodes = worker.role.prefills, worker.role.decodes
            seen.append(
                replace(
                    worker,
                    heard_s=self.now_s,
                    pending_prefill_tokens=int(queued / len(able)) if prefills else 0,
                    stock_bytes=min(stock / len(able), POOL_BYTES) if prefills else 0.0,
                    headroom_bytes=max(0.0, POOL_BYTES - stock / len(able)) if prefills else 0.0,
                    running=len(self.active) // decoders if decodes else 0,
                )
            )
        observation = Observation(
            workers=tuple(seen),
            traffic=self.window.snapshot(self.now_s),
            forecast=self.panel.forecast(),
            speed=SPEED,
            flip_s=self.flip_s,
        )
        return replace(observation, **changes)  # type: ignore[arg-type]

    def counts(self) -> tuple[int, int, int]:
        """Prefill, decode and mixed workers."""
        roles = [w.role for w in self.workers.values()]
        return roles.count(Role.PREFILL), roles.count(Role.DECODE), roles.count(Role.MIXED)


def drive(
    plant: Plant, controller: BalanceController, seconds: float, *, interval_s: float = 1.0, **changes: object
) -> list[Decision]:
    """Run both for ``seconds``; the lasting decisions and the cancellations."""
    made, until_s, next_s = [], plant.now_s + seconds, plant.now_s
    while plant.now_s < until_s:
        plant.tick()
        if plant.now_s >= next_s:
            next_s = plant.now_s + interval_s
            decision = controller.step(plant.observe(**changes), plant.now_s)
            if decision.action.lasting:
                assert controller.pending is not None
                plant.carry_out(decision)
            if decision.action is not Action.NONE or decision.cancels:
                made.append(decision)
    return made


def lasting(decisions: list[Decision]) -> list[Decision]:
    """Those that change something."""
    return [one for one in decisions if one.action.lasting]
