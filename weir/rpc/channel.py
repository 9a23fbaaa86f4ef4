"""Channels to other services, and waiting until one is ready."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from weir.errors import Unavailable
from weir.rpc.health import SERVING
from weir.rpc.limits import RpcLimits, channel_options
from weir.rpc.security import Security

_RETRY_S = 0.05


def channel(address: str, *, limits: RpcLimits | None = None, security: Security | None = None) -> grpc.aio.Channel:
    """A lazy channel to ``address`` (host:port) with its own connection; the caller closes it.

    With ``security`` over TLS, to a service whose certificate carries ``security.server_name``.
    """
    options = channel_options(limits or RpcLimits())
    if security is None:
        return grpc.aio.insecure_channel(address, options=options)
    options += security.channel_options()
    return grpc.aio.secure_channel(address, security.channel_credentials(), options=options)


async def wait_ready(address: str, service: str = "", *, timeout_s: float, security: Security | None = None) -> None:
    """Return when ``service`` (empty: the whole server) at ``address`` is SERVING.

    Raises Unavailable with what was last seen after ``timeout_s``.
    """
    seen = ["no answer"]
    try:
        async with asyncio.timeout(timeout_s):
            async with channel(address, security=security) as probe:
                while not await _watch_until_serving(probe, service, seen):  # noqa: ASYNC110
                    await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        name = service or "server"
        raise Unavailable(f"{name} at {address} not ready after {timeout_s:g} s: {seen[0]}") from None


async def _watch_until_serving(probe: grpc.aio.Channel, service: str, seen: list[str]) -> bool:
    """True once SERVING; False when the watch broke off. Notes what it sees in ``seen[0]``."""
    call = health_pb2_grpc.HealthStub(probe).Watch(health_pb2.HealthCheckRequest(service=service))
    try:
        async for answer in call:
            if answer.status == SERVING:
                return True
            seen[0] = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    except grpc.aio.AioRpcError as error:
        seen[0] = f"{error.code().name}: {error.details()}"
    finally:
        call.cancel()
    return False
