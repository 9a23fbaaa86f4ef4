"""``sglang-router`` (Rust, PD mode) over mock HTTP workers, measured as ``weir bench router`` measures Weir's."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from weir.bench.mock_http import MODEL
from weir.bench.plan import Target
from weir.cli.cluster import READY_TIMEOUT_S, STOP_GRACE_S
from weir.cli.process import ChildProcess
from weir.errors import Unavailable

MODULE = "sglang_router.launch_router"
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Peer:
    """A running peer router."""

    target: Target
    pid: int


async def has_peer(python: str) -> bool:
    """Whether ``python`` can import it."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang_router') is None)"
    process = await asyncio.create_subprocess_exec(python, "-c", code)
    return await process.wait() == 0


@contextlib.asynccontextmanager
async def running_peer(python: str, log_dir: Path, step_ms: float) -> AsyncIterator[Peer]:
    """One prefill and one decode mock, and the router in front of them."""
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for name in ("peer-prefill", "peer-decode"):
            argv = [sys.executable, "-m", "weir.bench.mock_http", "--step-ms", f"{step_ms:g}"]
            child = await ChildProcess.start(name, argv, log_dir / f"{name}.log")
            stack.push_async_callback(child.stop, STOP_GRACE_S)
            words = await child.wait_ready(READY_TIMEOUT_S)
            urls.append(f"http://127.0.0.1:{words[-1].partition('=')[2]}")
        port, metrics_port = _free_port(), _free_port()
        argv = [python, "-m", MODULE, "--host", "127.0.0.1", "--port", str(port), "--pd-disaggregation"]
        argv += ["--prefill", urls[0], "9000", "--decode", urls[1], "--policy", "round_robin"]
        argv += ["--prometheus-port", str(metrics_port), "--log-level", "warn"]
        router = await ChildProcess.start("sglang-router", argv, log_dir / "sglang-router.log")
        stack.push_async_callback(router.stop, STOP_GRACE_S)
        await _answers(router, port)
        yield Peer(Target("openai", f"http://127.0.0.1:{port}", MODEL), router.pid)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _answers(router: ChildProcess, port: int) -> None:
    """Wait until it takes requests: its port opens before its workers are known."""
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not await _ready(port):
                if router.exit_code is not None:
                    raise Unavailable(f"sglang-router ended with exit code {router.exit_code}\n{router.log_tail()}")
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise Unavailable(f"sglang-router was not ready within {START_TIMEOUT_S:g} s\n{router.log_tail()}") from None


async def _ready(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(b"GET /readiness HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return b" 200 " in await reader.readline()
    finally:
        writer.close()
