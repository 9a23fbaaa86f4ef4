"""``weir workers`` and ``weir role``: look at workers, change what they do."""

from __future__ import annotations

import grpc
from rich.console import Console
from rich.table import Table

from weir.cli.doors import open_channel, open_client
from weir.cli.up import ROLE_WORDS, Rates, workers_table
from weir.errors import InvalidArgument, NotFound
from weir.rpc.status import from_rpc_error
from weir.rpc.v1 import common_pb2, router_pb2, worker_pb2, worker_pb2_grpc

STATE_TIMEOUT_S = 10.0
ROLE_VALUES: dict[str, common_pb2.Role] = {word: value for value, word in ROLE_WORDS.items()}


async def run_workers(console: Console, router: str, check: bool) -> None:
    """Print the router's view; with ``check`` each worker's own state too."""
    async with open_client(router) as client:
        answer = await client.workers()
    console.print(workers_table(answer, Rates(), 0.0))
    if check:
        table = Table(title="workers' own state", title_justify="left", header_style="bold")
        headings = ["worker", "free", "used", "cached", "leased", "quarantined", "total", "leases", "void reads"]
        headings += ["RSS", "files"]
        for heading in headings:
            table.add_column(heading, justify="left" if heading == "worker" else "right")
        for worker in answer.workers:
            state = await worker_state(worker.address)
            blocks = state.load.blocks
            counts = (
                blocks.free,
                blocks.used,
                blocks.cached,
                blocks.leased,
                blocks.quarantined,
                blocks.total,
            )
            mark = "" if sum(counts[:5]) == blocks.total else " [red](does not add up)[/]"
            table.add_row(
                worker.worker_id + mark,
                *map(str, counts),
                str(state.load.open_leases),
                str(sum(state.void_reads.values())),
                f"{state.rss_bytes / 1e6:.0f} MB",
                str(state.open_files),
            )
        console.print(table)


async def worker_state(address: str, *, check_integrity: bool = False) -> worker_pb2.GetStateResponse:
    """A worker's own state."""
    async with open_channel(address) as link:
        stub = worker_pb2_grpc.WorkerServiceStub(link)
        try:
            request = worker_pb2.GetStateRequest(check_integrity=check_integrity)
            state: worker_pb2.GetStateResponse = await stub.GetState(request, timeout=STATE_TIMEOUT_S)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
    return state


async def run_set_role(console: Console, router: str, worker_id: str, role: str, epoch: int | None) -> None:
    """Change a role, with the epoch as the guard against a stale view."""
    if role not in ROLE_VALUES:
        raise InvalidArgument("role", role, f"must be one of {', '.join(ROLE_VALUES)}")
    async with open_client(router) as client:
        answer = await client.workers()
    worker = _find(answer, worker_id)
    request = worker_pb2.SetRoleRequest(
        role=ROLE_VALUES[role], expected_epoch=worker.role_epoch if epoch is None else epoch
    )
    async with open_channel(worker.address) as link:
        try:
            done = await worker_pb2_grpc.WorkerServiceStub(link).SetRole(request)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
    console.print(f"{worker_id} is {ROLE_WORDS[done.role]} (epoch {done.role_epoch}), took {done.took_ms:.1f} ms")


def _find(answer: router_pb2.ListWorkersResponse, worker_id: str) -> router_pb2.ListWorkersResponse.Worker:
    for worker in answer.workers:
        if worker.worker_id == worker_id:
            return worker
    raise NotFound("worker", worker_id, ", ".join(w.worker_id for w in answer.workers))
