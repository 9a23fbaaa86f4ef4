"""Two workers in network namespaces of their own, with a cable of limited bandwidth between them for the KV.

    here ── bridge ──┬── ctl0  worker 0  kv0 ──┐
                     └── ctl0  worker 1  kv0 ──┘  ``tc tbf`` at both ends: nothing but KV goes this way

Shared memory would go round the cable (a network namespace does not stop it), so UCX may use TCP over ``kv0`` alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from weir.cli.cluster import Cluster
from weir.cli.process import ChildProcess
from weir.clock import Clock
from weir.errors import FailedPrecondition
from weir.events.nats_server import EmbeddedNats

WORKERS = 2
DEVICE = "kv0"
ENVIRONMENT = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": DEVICE}
BURST_BYTES = 256 * 1024
QUEUE_MS = 400
PROBE_S = 1.0
PROBE_PIECE_BYTES = 64 * 1024
PROBE_TIMEOUT_S = 60.0
_CLONE_NEWNET = 0x40000000
_NAMESPACES = Path("/run/netns")


def link_obstacle() -> str:
    """Why no limited link can be made here; empty when one can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} (iproute2) not found"
    probe = f"weir-link-{os.getpid()}-p"
    failed = _run("ip", "netns", "add", probe)
    if not failed:
        tbf = ("tbf", "rate", "1mbit", "burst", "32k", "latency", "10ms")
        failed = _run("tc", "-n", probe, "qdisc", "add", "dev", "lo", "root", *tbf)
        _run("ip", "netns", "del", probe)
    return f"network namespaces with tc tbf need root: {failed}" if failed else ""


def _run(*argv: str) -> str:
    """What the command complained of; empty when it succeeded."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip() or f"exit status {done.returncode}")


def _must(*argv: str) -> None:
    if failed := _run(*argv):
        raise FailedPrecondition(f"{' '.join(argv)}: {failed}")


@dataclass(slots=True)
class LimitedLink:
    """The namespaces and their cables while the context is open.

    ``mbit`` is the limit, each way, in 10^6 bits a second. Opening raises FailedPrecondition with what the system said;
    nothing is left then or afterwards. What processes that were killed have left is removed when the next link opens.
    """

    mbit: float
    pid: int = field(default_factory=os.getpid)

    @property
    def here(self) -> str:
        """This side's address, which the workers reach."""
        return f"198.19.{self.pid % 256}.1"

    def address(self, index: int) -> str:
        """Where worker ``index`` is reached for everything but KV."""
        return f"198.19.{self.pid % 256}.{2 + index}"

    def namespace(self, index: int) -> str:
        """The name of worker ``index``'s namespace."""
        return f"weir-link-{self.pid}-{index}"

    def __enter__(self) -> Self:
        _remove_leftovers()
        # Outside: when there is such a bridge already it is another link's, and stays.
        _must("ip", "link", "add", _bridge(self.pid), "type", "bridge")
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _make(self) -> None:
        bridge = _bridge(self.pid)
        _must("ip", "addr", "add", f"{self.here}/25", "dev", bridge)
        _must("ip", "link", "set", bridge, "up")
        for index in range(WORKERS):
            name, cable = self.namespace(index), f"{bridge}-{index}"
            _must("ip", "netns", "add", name)
            _must("ip", "link", "add", cable, "type", "veth", "peer", "name", "ctl0", "netns", name)
            _must("ip", "link", "set", cable, "master", bridge, "up")
            _must("ip", "-n", name, "addr", "add", f"{self.address(index)}/25", "dev", "ctl0")
        ends = [self.namespace(index) for index in range(WORKERS)]
        _must("ip", "-n", ends[0], "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", ends[1])
        for index, name in enumerate(ends):
            _must("ip", "-n", name, "addr", "add", f"{self._kv_address(index)}/25", "dev", DEVICE)
            for device in ("lo", "ctl0", DEVICE):
                _must("ip", "-n", name, "link", "set", device, "up")
            limit = ("tbf", "rate", f"{self.mbit}mbit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms")
            _must("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", *limit)

    def _kv_address(self, index: int) -> str:
        return f"198.19.{self.pid % 256}.{130 + index}"

    def _remove(self) -> None:
        for index in range(WORKERS):
            # By itself: a namespace takes its cables along some time after its end, and the next link wants the names.
            _run("ip", "link", "del", f"{_bridge(self.pid)}-{index}")
            _run("ip", "netns", "del", self.namespace(index))
        _run("ip", "link", "del", _bridge(self.pid))

    def command(self, index: int, argv: Sequence[str]) -> list[str]:
        """``argv`` as it runs in the namespace of worker ``index``."""
        program = shutil.which("ip")
        assert program is not None, "the link is open"
        return [program, "netns", "exec", self.namespace(index), *argv]

    async def measure_mb_s(self, clock: Clock) -> float:
        """10^6 bytes a second of one TCP stream from worker 0 to worker 1, over about a second."""
        with self._inside(1):
            listener = socket.create_server((self._kv_address(1), 0))
        with listener:
            with self._inside(0):
                source = socket.create_connection(listener.getsockname()[:2], timeout=PROBE_TIMEOUT_S)
            sink, _ = listener.accept()
        with source, sink:
            count = int(self.mbit * 1e6 / 8 * PROBE_S) + BURST_BYTES
            sending = asyncio.create_task(asyncio.to_thread(_send, source, count))
            speed = await asyncio.to_thread(_receive, sink, clock)
            await sending
        return speed

    @contextlib.contextmanager
    def _inside(self, index: int) -> Iterator[None]:
        """Sockets that this thread opens meanwhile are in the namespace of worker ``index``."""
        setns = ctypes.CDLL(None, use_errno=True).setns
        with Path("/proc/thread-self/ns/net").open() as own, (_NAMESPACES / self.namespace(index)).open() as there:
            assert setns(there.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            try:
                yield
            finally:
                assert setns(own.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


def _bridge(pid: int) -> str:
    return f"wl{pid}"


def _remove_leftovers() -> None:
    """Links whose process is gone: it was killed."""
    names = [entry.name for entry in _NAMESPACES.iterdir()] if _NAMESPACES.is_dir() else []
    found = {int(match[1]) for name in names if (match := re.fullmatch(r"weir-link-(\d+)-\w", name))}
    for pid in found:
        if not Path(f"/proc/{pid}").exists():
            LimitedLink(0.0, pid)._remove()


def _send(source: socket.socket, count: int) -> None:
    piece = bytes(PROBE_PIECE_BYTES)
    for _ in range(0, count, PROBE_PIECE_BYTES):
        source.sendall(piece)
    source.shutdown(socket.SHUT_WR)


def _receive(sink: socket.socket, clock: Clock) -> float:
    """Speed after the first ``BURST_BYTES``, which the limit lets through at once."""
    sink.settimeout(PROBE_TIMEOUT_S)
    total, counted_from, start_s = 0, 0, 0.0
    while piece := sink.recv(PROBE_PIECE_BYTES):
        total += len(piece)
        if not counted_from and total >= BURST_BYTES:
            counted_from, start_s = total, clock.monotonic_s()
    return (total - counted_from) / 1e6 / max(1e-9, clock.monotonic_s() - start_s)


@dataclass(slots=True)
class LinkedCluster(Cluster):
    """A cluster of two workers at the ends of an open link; router and controller stay here."""

    link: LimitedLink = field(default_factory=lambda: LimitedLink(0.0))

    async def _start_nats(self) -> str:
        self.nats = EmbeddedNats(self.spec.log_dir / "nats", host=self.link.here)
        return await self.nats.start()

    async def _spawn(self, name: str, argv: Sequence[str]) -> ChildProcess:
        workers = [f"{role.value}-{index}" for index, role in enumerate(self.spec.roles())]
        assert len(workers) == WORKERS, workers
        if name not in workers:
            return await Cluster._spawn(self, name, argv)
        index = workers.index(name)
        command = self.link.command(index, [*argv, "--bind", f"{self.link.address(index)}:0"])
        return await ChildProcess.start(name, command, self.spec.log_dir / f"{name}.log", ENVIRONMENT)
