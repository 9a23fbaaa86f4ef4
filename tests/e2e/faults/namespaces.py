"""A cluster whose every process has a network namespace of its own, so that its cable can be pulled.

test ── veth ─┐
              switch (a namespace with a bridge) ── veth ── one namespace for each process
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from weir.cli.cluster import Cluster
from weir.cli.process import ChildProcess
from weir.events.nats_server import EmbeddedNats

ANY_HOST = "0.0.0.0"
_PREFIX = "weir"
_OWN_NAMESPACE = Path("/proc/self/ns/net")
_CLONE_NEWNET = 0x40000000


def unavailable() -> str:
    """Why namespaces cannot be made here; empty when they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    probe = f"{_PREFIX}-{os.getpid()}-probe"
    if _run("ip", "netns", "add", probe):
        return "network namespaces need CAP_NET_ADMIN and CAP_SYS_ADMIN"
    failed = _run("ip", "-n", probe, "link", "add", "br0", "type", "bridge")
    _run("ip", "netns", "del", probe)
    return "no bridge can be made" if failed else ""


def filters_unavailable() -> str:
    """Why packets cannot be dropped one way here; empty when they can."""
    return unavailable() or ("" if shutil.which("nft") else "nftables is not installed")


def _run(*argv: str) -> int:
    return subprocess.run(argv, capture_output=True, check=False).returncode


def _must(*argv: str) -> None:
    subprocess.run(argv, capture_output=True, check=True)


@dataclass(slots=True)
class Fabric:
    """A switch and the cables to it; ``close`` removes all. Addresses are of the range for benchmarks."""

    subnet: str = field(default_factory=lambda: f"198.18.{os.getpid() % 256}")
    nodes: dict[str, str] = field(default_factory=dict)
    """Address by node."""

    def __post_init__(self) -> None:
        switch, own = self.namespace("switch"), self._own_end
        _must("ip", "netns", "add", switch)
        _must("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _must("ip", "-n", switch, "link", "set", "br0", "up")
        _must("ip", "link", "add", own, "type", "veth", "peer", "name", "test", "netns", switch)
        _must("ip", "-n", switch, "link", "set", "test", "master", "br0", "up")
        _must("ip", "addr", "add", f"{self.subnet}.1/24", "dev", own)
        _must("ip", "link", "set", own, "up")

    @property
    def _own_end(self) -> str:
        return f"{_PREFIX}{os.getpid()}"

    def namespace(self, node: str) -> str:
        """Its name to ``ip netns``."""
        return f"{_PREFIX}-{os.getpid()}-{node}"

    def add(self, node: str) -> None:
        """A namespace with one cable."""
        name, switch = self.namespace(node), self.namespace("switch")
        address = f"{self.subnet}.{len(self.nodes) + 2}"
        _must("ip", "netns", "add", name)
        _must("ip", "-n", switch, "link", "add", node, "type", "veth", "peer", "name", "eth0", "netns", name)
        _must("ip", "-n", switch, "link", "set", node, "master", "br0", "up")
        _must("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _must("ip", "-n", name, "link", "set", device, "up")
        self.nodes[node] = address

    def close(self) -> None:
        """Remove everything. The processes inside must have ended."""
        for node in [*self.nodes, "switch"]:
            _run("ip", "netns", "del", self.namespace(node))
        _run("ip", "link", "del", self._own_end)

    @contextmanager
    def cut(self, node: str) -> Iterator[None]:
        """Nothing reaches ``node`` and nothing leaves it. Its own end stays up: connections learn nothing."""
        switch = self.namespace("switch")
        _must("ip", "-n", switch, "link", "set", node, "down")
        try:
            yield
        finally:
            _must("ip", "-n", switch, "link", "set", node, "up")

    @contextmanager
    def slowed(self, node: str, rate: str) -> Iterator[None]:
        """What goes to ``node`` goes at ``rate`` (in the words of ``tc``)."""
        tc = ("tc", "-n", self.namespace("switch"), "qdisc")
        _must(*tc, "add", "dev", node, "root", "tbf", "rate", rate, "burst", "32k", "latency", "300ms")
        try:
            yield
        finally:
            _must(*tc, "del", "dev", node, "root")

    @contextmanager
    def dropping(self, node: str, *rules: str) -> Iterator[None]:
        """Packets that match one of ``rules`` are lost at ``node``; a rule begins with ``input`` or ``output``."""
        nft = ("ip", "netns", "exec", self.namespace(node), "nft")
        _must(*nft, "add table ip cut")
        for hook in ("input", "output"):
            _must(*nft, f"add chain ip cut {hook} {{ type filter hook {hook} priority 0; }}")
        for rule in rules:
            _must(*nft, f"add rule ip cut {rule} drop")
        try:
            yield
        finally:
            _must(*nft, "delete table ip cut")

    @contextmanager
    def parted(self, node: str, other: str) -> Iterator[None]:
        """These two do not reach each other; all others do."""
        address = self.nodes[other]
        with self.dropping(node, f"input ip saddr {address}", f"output ip daddr {address}"):
            yield

    @contextmanager
    def inside(self, node: str) -> Iterator[None]:
        """What this thread starts meanwhile is in the namespace of ``node``."""
        setns = ctypes.CDLL(None, use_errno=True).setns
        with _OWN_NAMESPACE.open() as own, Path("/run/netns", self.namespace(node)).open() as there:
            assert setns(there.fileno(), _CLONE_NEWNET) == 0
            try:
                yield
            finally:
                assert setns(own.fileno(), _CLONE_NEWNET) == 0


@dataclass(slots=True)
class PartedCluster(Cluster):
    """A cluster on a fabric. Shared memory ends at a machine's edge, so KV goes over TCP here."""

    fabric: Fabric = field(default_factory=Fabric)

    async def _start_nats(self) -> str:
        self.fabric.add("nats")
        self.nats = EmbeddedNats(self.spec.log_dir / "nats", host=self.fabric.nodes["nats"])
        with self.fabric.inside("nats"):
            await self.nats.start()
        return self.nats.url

    async def _spawn(self, name: str, argv: Sequence[str]) -> ChildProcess:
        if name not in self.fabric.nodes:
            self.fabric.add(name)
        program = shutil.which("ip")
        assert program is not None
        own = [word.replace(ANY_HOST, self.fabric.nodes[name]) for word in argv]
        command = [program, "netns", "exec", self.fabric.namespace(name), *own]
        log = self.spec.log_dir / f"{name}.log"
        return await ChildProcess.start(name, command, log, {"UCX_TLS": "tcp"})

    async def stop(self) -> None:
        """Stop all processes, then remove their network."""
        await Cluster.stop(self)
        self.fabric.close()
