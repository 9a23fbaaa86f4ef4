"""``weir doctor``: what this machine can do, found out by doing it."""

from __future__ import annotations

import importlib.metadata
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from rich.console import Console

from weir.cli.doors import open_client
from weir.cli.paths import DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT
from weir.cli.workers import worker_state
from weir.errors import InternalError, Unavailable, WeirError
from weir.events.nats_server import EmbeddedNats, find_nats_server
from weir.rpc.v1 import kv_pb2


async def run_doctor(console: Console, router: str | None) -> bool:
    """Run every check and print a line for each; whether all passed."""
    checks: list[tuple[str, Callable[[], Awaitable[str]]]] = [
        ("python and packages", check_packages),
        ("nats-server", check_nats),
        ("NIXL READ between two processes", check_read),
        ("ports", check_ports),
    ]
    if router is not None:
        checks.append((f"cluster at {router}", lambda: check_cluster(router)))
    passed = True
    for name, check in checks:
        try:
            said, mark = await check(), "[green]ok  [/]"
        except (WeirError, OSError, ImportError) as error:
            said, mark, passed = str(error), "[red]FAIL[/]", False
        console.print(f"{mark} {name}: {said}", highlight=False, soft_wrap=True)
    return passed


async def check_packages() -> str:
    """Versions of what matters."""
    versions = [f"Python {sys.version.split()[0]}"]
    for package in ("grpcio", "nats-py", "torch", "nixl", "triton"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{package} missing")
    return ", ".join(versions)


async def check_nats() -> str:
    """Start the embedded server once."""
    binary = find_nats_server()
    with tempfile.TemporaryDirectory(prefix="weir-doctor-") as scratch:
        server = EmbeddedNats(Path(scratch))
        url = await server.start()
        await server.stop()
    return f"{binary} starts ({url})"


async def check_read() -> str:
    """Read KV blocks of another process and prove them."""
    from weir.cli.read_peer import make_layout  # torch and nixl load only here
    from weir.cli.read_probe import probe_reads

    reports = await probe_reads(make_layout(8, 4, 64), [16], repeats=3)
    best = min(reports[0], key=lambda report: report.total_s)
    rate = best.bytes / best.data_s / 1e9
    return f"{best.bytes / 1e6:.1f} MB proven over {best.transport}, {rate:.1f} GB/s, {best.total_s * 1e3:.2f} ms"


async def check_ports() -> str:
    """Whether the default ports of ``weir up`` are free."""
    taken = []
    for port in (DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                taken.append(str(port))
    if taken:
        raise Unavailable(f"{', '.join(taken)} in use: give weir up other ones with --grpc and --http")
    return f"{DEFAULT_GRPC_PORT} (gRPC) and {DEFAULT_HTTP_PORT} (HTTP) are free"


async def check_cluster(router: str) -> str:
    """Every worker answers, and all of one model have the same fingerprint."""
    async with open_client(router) as client:
        answer = await client.workers()
    if not answer.workers:
        raise Unavailable("the router knows no worker")
    first: kv_pb2.KvFingerprint | None = None
    for worker in answer.workers:
        state = await worker_state(worker.address)
        blocks = state.load.blocks
        if blocks.free + blocks.used + blocks.cached + blocks.leased + blocks.quarantined != blocks.total:
            raise InternalError(f"blocks of {worker.worker_id} do not add up: {blocks}")
        if first is None:
            first = state.fingerprint
        for field in first.DESCRIPTOR.fields:
            ours, theirs = getattr(first, field.name), getattr(state.fingerprint, field.name)
            if ours != theirs and field.name != "tp_degree":
                raise InternalError(f"{worker.worker_id} differs in {field.name}: {theirs!r}, not {ours!r}")
    assert first is not None
    stale = ", registry out of reach" if answer.stale else ""
    return f"{len(answer.workers)} worker(s), one fingerprint ({first.architecture}, {first.kv_dtype}){stale}"
