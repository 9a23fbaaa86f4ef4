"""KV reads between the workers of a schedule: the in-memory transfer with its real proof, over a bad network."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random

from tests.simulation.network import Network
from weir.clock import Clock
from weir.errors import KvReadVoid
from weir.ids import RequestKey, WorkerKey
from weir.kvcache.pool import KvPool
from weir.transfer.fingerprint import Fingerprint
from weir.transfer.local import Faults, LocalFabric, LocalTransfer
from weir.transfer.plan import Completion, Destination, ReadReport, Run
from weir.transfer.ticket import Ticket, VoidReason

HANGS_S = 3_600.0


class FabricFaults:
    """Shares of reads: ``slow`` take up to ``slow_s`` more at some point, ``flip`` have a byte turned over.

    ``lost`` completions never arrive.
    """

    def __init__(self, random: Random, *, slow: float, slow_s: float, flip: float, lost: float) -> None:
        self.random = random
        self.slow = slow
        self.slow_s = slow_s
        self.flip = flip
        self.lost = lost
        self.proven: set[RequestKey] = set()
        """Attempts whose last read was proven."""

    def faults(self) -> Faults:
        """For the fabric."""
        return Faults(
            before_data_s=lambda ticket: self._wait_s(0.002),
            per_run_s=lambda ticket: self._wait_s(0.0005),
            before_guard_s=lambda ticket: self._wait_s(0.0005),
            notification=self._delivers,
        )

    def _wait_s(self, usual_s: float) -> float:
        if self.random.random() < self.slow:
            return self.random.uniform(0.0, self.slow_s)
        return self.random.uniform(0.0001, usual_s)

    def _delivers(self, done: Completion) -> bool:
        self.proven.add(done.key)
        return self.random.random() >= self.lost


class SimTransfer(LocalTransfer):
    """One worker's end. A cut link hangs; one that is cut in mid-read fails."""

    def __init__(
        self,
        fabric: LocalFabric,
        pool: KvPool,
        worker: WorkerKey,
        fingerprint: Fingerprint,
        *,
        clock: Clock,
        network: Network,
        fabric_faults: FabricFaults,
    ) -> None:
        super().__init__(fabric, pool, worker, fingerprint, clock=clock)
        self._network = network
        self._faults = fabric_faults

    def _cut_off(self, source: WorkerKey) -> bool:
        return self._network.is_cut(self.worker.worker_id, source.worker_id)

    async def _read(self, ticket: Ticket, pairs: Sequence[Destination], notify: bool) -> ReadReport:
        if self._cut_off(ticket.source):
            await asyncio.sleep(HANGS_S)
        return await super()._read(ticket, pairs, notify)

    def _copy(self, ticket: Ticket, run: Run) -> None:
        if self._cut_off(ticket.source):
            raise KvReadVoid(VoidReason.TRANSPORT.value, "the link broke")
        super()._copy(ticket, run)
        if self._faults.random.random() < self._faults.flip:
            view = self.pool.block_view(run.dst + self._faults.random.randrange(run.count))
            view[self._faults.random.randrange(len(view))] ^= 0x10
