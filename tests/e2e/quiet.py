"""Nothing is left: the question every test asks at its end."""

from __future__ import annotations

import asyncio

from weir.cli.cluster import Cluster
from weir.cli.workers import worker_state
from weir.client import AsyncClient

SETTLE_TIMEOUT_S = 10.0


async def assert_quiet(cluster: Cluster, within_s: float = SETTLE_TIMEOUT_S) -> None:
    """Router has no request; workers have no used, leased or quarantined block, no lease, no read."""
    async with AsyncClient(cluster.router_address) as client:
        try:
            async with asyncio.timeout(within_s):
                while found := await _busy(cluster, client):  # noqa: ASYNC110 - other processes
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"left behind: {found}") from None


async def _busy(cluster: Cluster, client: AsyncClient) -> list[str]:
    state = await client.state()
    busy = [f"router: {state.active_requests} active"] if state.active_requests else []
    for worker_id, address in cluster.worker_addresses.items():
        worker = await worker_state(address, check_integrity=False)
        blocks = worker.load.blocks
        assert blocks.free + blocks.used + blocks.cached + blocks.leased + blocks.quarantined == blocks.total
        held = blocks.used + blocks.leased + blocks.quarantined
        load = worker.load
        if held or load.open_leases or load.outstanding_reads or load.running or load.waiting:
            busy.append(
                f"{worker_id}: {held} blocks, {load.open_leases} leases, {load.outstanding_reads} reads, "
                f"{load.running} running, {load.waiting} waiting"
            )
    return busy
