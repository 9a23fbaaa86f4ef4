"""What ``weir.rpc.server.serve`` runs in place of a gRPC server: the production order of a process's life, on the
simulated network. A server that stops refuses new calls, gives open ones their grace, then breaks them off."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import patch

import weir.rpc.server
from tests.simulation.network import Network, SimServer
from tests.simulation.virtual_time import current_process
from weir.rpc.server import Register

LOOKS_S = 0.02


class SimRpcServer:
    """As much of ``RpcServer`` as ``serve`` uses. ``bind`` is the name of a host."""

    def __init__(self, network: Network, *, bind: str, **_: Any) -> None:
        self.address = bind
        self.port = 0
        self._network = network
        self._server = SimServer(current_process())

    async def start(self, register: Register) -> int:
        """Answer at the address from now on."""
        register(self._server)  # type: ignore[arg-type]
        self._network.servers[self.address] = self._server
        return self.port

    async def set_ready(self, ready: bool) -> None:
        """Nobody asks for its health here: the supervisor is told by the node."""

    async def stop(self, grace_s: float) -> None:
        """See the module."""
        loop = asyncio.get_running_loop()
        self._server.stopping = True
        ends_s = loop.time() + grace_s
        process = self._server.process
        while (process.open_calls or self._network.calls_served_by(process)) and loop.time() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(LOOKS_S)
        self._network.stopped(process)


def simulated_servers(network: Network) -> Any:
    """While this is entered, ``serve`` serves on ``network``."""

    def make(**settings: Any) -> SimRpcServer:
        return SimRpcServer(network, **settings)

    return patch.object(weir.rpc.server, "RpcServer", make)
