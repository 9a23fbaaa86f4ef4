"""A whole cluster on this machine: nats-server, controller, router and workers, as separate processes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weir.cli.doors import open_client, security
from weir.cli.process import ChildProcess
from weir.errors import NotFound, Unavailable
from weir.events.nats_server import EmbeddedNats, ServerTls
from weir.lifecycle import Role
from weir.rpc.security import Part

READY_TIMEOUT_S = 120.0
STOP_GRACE_S = 10.0
DRAIN_GRACE_S = 40.0
WATCH_S = 1.0
CONNECT_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What to start. ``nats_url`` None starts an embedded server; ports 0 are chosen by the system."""

    model_dir: Path
    model_name: str
    log_dir: Path
    prefill: int = 1
    decode: int = 1
    mixed: int = 0
    nats_url: str | None = None
    host: str = "127.0.0.1"
    grpc_port: int = 0
    http_port: int = 0
    routers: int = 1
    ui: bool = True
    worker_flags: tuple[str, ...] = ()
    router_flags: tuple[str, ...] = ()
    controller_flags: tuple[str, ...] = ()
    device: str = "cpu"
    chat_template: str = ""

    def roles(self) -> list[Role]:
        """The role of each worker, in start order."""
        return [Role.PREFILL] * self.prefill + [Role.DECODE] * self.decode + [Role.MIXED] * self.mixed


@dataclass(slots=True)
class Cluster:
    """Running processes; an async context manager that leaves nothing behind.

    ``say`` is called with a line of progress for people.
    """

    spec: ClusterSpec
    say: Callable[[str], None] = lambda line: None
    nats: EmbeddedNats | None = None
    nats_url: str = ""
    controller: ChildProcess | None = None
    routers: list[ChildProcess] = field(default_factory=list)
    workers: list[ChildProcess] = field(default_factory=list)
    router_address: str = ""
    http_address: str = ""
    controller_address: str = ""
    worker_addresses: dict[str, str] = field(default_factory=dict)
    _added: int = 0

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _start(self) -> None:
        self.nats_url = self.spec.nats_url or await self._start_nats()
        starting: list[Coroutine[Any, Any, object]] = [self._start_controller()]
        starting += [self.start_router(index) for index in range(self.spec.routers)]
        starting += [self.start_worker(role, index) for index, role in enumerate(self.spec.roles())]
        await _all_or_first_error(starting)
        await self.wait_connected()

    async def _start_nats(self) -> str:
        trust = security(Part.ROUTER)
        tls = None if trust is None else ServerTls(trust.ca_file, trust.cert_file, trust.key_file)
        self.nats = EmbeddedNats(self.spec.log_dir / "nats", tls=tls)
        await self.nats.start()
        self.say(f"nats-server   {self.nats.url}")
        return self.nats.url

    async def _spawn(self, name: str, argv: Sequence[str]) -> ChildProcess:
        """Start one process; where and how is for subclasses to change."""
        return await ChildProcess.start(name, argv, self.spec.log_dir / f"{name}.log")

    async def _start_controller(self) -> None:
        argv = [sys.executable, "-m", "weir.services.controller", "--nats", self.nats_url]
        argv += ["--bind", f"{self.spec.host}:0", *self.spec.controller_flags]
        self.controller = await self._spawn("controller", argv)
        words = await self.controller.wait_ready(READY_TIMEOUT_S)
        self.controller_address = words[-1]
        self.say(f"controller    {self.controller_address}")

    async def start_router(self, index: int) -> ChildProcess:
        """Start a router; the first one takes the ports of the spec."""
        spec = self.spec
        argv = [sys.executable, "-m", "weir.services.router", "--nats", self.nats_url]
        argv += ["--bind", f"{spec.host}:{spec.grpc_port if index == 0 else 0}"]
        argv += ["--http", f"{spec.host}:{spec.http_port if index == 0 else 0}"]
        argv += ["--model", str(spec.model_dir), "--model-name", spec.model_name, *spec.router_flags]
        argv += ["--chat-template", spec.chat_template] if spec.chat_template else []
        argv += [] if spec.ui else ["--no-ui"]
        router = await self._spawn(f"router-{index}", argv)
        self.routers.append(router)
        await router.wait_ready(READY_TIMEOUT_S)
        grpc, http = router_doors(router)
        if index == 0:
            self.router_address, self.http_address = grpc, http
        self.say(f"router        gRPC {grpc}   HTTP {http or 'off'}")
        return router

    async def start_worker(self, role: Role, index: int, *flags: str) -> ChildProcess:
        """Start one more worker on the core that ``index`` falls on, and wait until it is ready.

        ``flags`` go after, and so before, those of the spec.
        """
        spec = self.spec
        argv = [sys.executable, "-m", "weir.services.worker", "--role", role.value, "--nats", self.nats_url]
        argv += ["--bind", f"{spec.host}:0", "--model", str(spec.model_dir), "--model-name", spec.model_name]
        argv += ["--device", spec.device]
        if spec.device == "cpu":
            argv += cpu_flags(index, len(spec.roles()))
        worker = await self._spawn(f"{role.value}-{index}", [*argv, *spec.worker_flags, *flags])
        self.workers.append(worker)
        words = await worker.wait_ready(READY_TIMEOUT_S)
        worker_id, address = words[1], words[-1]
        self.worker_addresses[worker_id] = address
        self.say(f"{role.value:<13} {address}   {worker_id}, pid {worker.pid}")
        return worker

    def worker_count(self) -> int:
        """Worker processes now, starting ones too."""
        return len(self.workers)

    async def add_worker(self, role: Role) -> str:
        """Start one more worker, and wait until it is ready; its id. Raises Unavailable, and leaves nothing then."""
        self._added += 1
        before = set(self.worker_addresses)
        try:
            await self.start_worker(role, len(self.spec.roles()) + self._added - 1)
        except BaseException:
            for worker in [one for one in self.workers if not one.ready]:
                self.workers.remove(worker)
                await worker.stop(STOP_GRACE_S)
            raise
        return (set(self.worker_addresses) - before).pop()

    async def stop_worker(self, worker_id: str) -> None:
        """Let a worker drain and end. Raises NotFound."""
        for worker in self.workers:
            if worker.ready[1:2] == [worker_id]:
                self.workers.remove(worker)
                self.worker_addresses.pop(worker_id, None)
                await worker.stop(DRAIN_GRACE_S)
                return
        raise NotFound("worker", worker_id, ", ".join(self.worker_addresses))

    async def restart_worker(self, ended: ChildProcess) -> ChildProcess:
        """Start a worker that has ended again, at its address and under its id: a new incarnation of it."""
        assert ended.exit_code is not None, f"{ended.name} runs"
        worker_id, address = ended.ready[1], ended.ready[-1]
        argv = [*ended.argv, "--worker-id", worker_id, "--bind", address]
        worker = await ChildProcess.start(ended.name, argv, ended.log_path)
        self.workers[self.workers.index(ended)] = worker
        await worker.wait_ready(READY_TIMEOUT_S)
        return worker

    async def restart_router(self, ended: ChildProcess) -> ChildProcess:
        """Start a router that has ended again, at its addresses."""
        assert ended.exit_code is not None, f"{ended.name} runs"
        grpc, http = router_doors(ended)
        router = await ChildProcess.start(
            ended.name, [*ended.argv, "--bind", grpc, *(["--http", http] if http else [])], ended.log_path
        )
        self.routers[self.routers.index(ended)] = router
        await router.wait_ready(READY_TIMEOUT_S)
        return router

    async def wait_connected(self, timeout_s: float = 30.0) -> None:
        """Wait until the router has sessions with every worker that is up."""
        wanted = set(self.worker_addresses)
        seen: set[str] = set()
        try:
            async with asyncio.timeout(timeout_s), open_client(self.router_address) as client:
                while not wanted <= seen:
                    answer = await client.workers()
                    seen = {w.worker_id for w in answer.workers if w.connected}
                    await asyncio.sleep(CONNECT_POLL_S)
        except TimeoutError:
            missing = ", ".join(sorted(wanted - seen))
            raise Unavailable(f"router did not connect to {missing} within {timeout_s:g} s") from None

    def processes(self) -> list[ChildProcess]:
        """All children but nats-server."""
        head = [self.controller] if self.controller is not None else []
        return [*head, *self.routers, *self.workers]

    async def wait_any_exit(self) -> ChildProcess:
        """The first child that ends by itself. Workers that come and go by request are followed."""
        waiting: dict[asyncio.Task[int], ChildProcess] = {}
        try:
            while True:
                watched = set(waiting.values())
                waiting |= {asyncio.create_task(p.wait()): p for p in self.processes() if p not in watched}
                done, _ = await asyncio.wait(waiting, timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    ended = waiting.pop(task)
                    if ended in self.processes():
                        return ended
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def stop(self) -> None:
        """Stop everything in order: routers (they finish their streams), workers, controller, NATS."""
        await asyncio.gather(*(p.stop(STOP_GRACE_S) for p in self.routers))
        await asyncio.gather(*(p.stop(STOP_GRACE_S) for p in self.workers))
        if self.controller is not None:
            await self.controller.stop(STOP_GRACE_S)
        if self.nats is not None:
            await self.nats.stop()
            self.nats = None


def router_doors(router: ChildProcess) -> tuple[str, str]:
    """The gRPC and the HTTP address of a router that is ready; the latter is empty when that door is shut."""
    words = dict(word.split("=", 1) for word in router.ready if "=" in word)
    return words["grpc"], words.get("http", "")


async def _all_or_first_error(starting: Sequence[Coroutine[Any, Any, object]]) -> None:
    tasks = [asyncio.create_task(work) for work in starting]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def cpu_flags(index: int, workers: int) -> list[str]:
    """Flags that give worker ``index`` of ``workers`` its own share of this process's cores."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // max(1, workers))
    first = index * share % len(cores)
    mine = cores[first : first + share]
    return ["--cpus", ",".join(map(str, mine)), "--threads", str(len(mine))]
