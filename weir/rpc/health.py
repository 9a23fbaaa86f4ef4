"""The gRPC health service (grpc.health.v1).

Not the servicer of grpcio-health-checking: there, a watcher that leaves takes the others' notifications along.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from weir.errors import NotFound, ResourceExhausted

SERVICE_NAME = "grpc.health.v1.Health"
PATH_PREFIX = f"/{SERVICE_NAME}/"
"""How the paths of its methods begin."""
SERVING: int = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: int = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN: int = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
MAX_WATCHERS = 1_024


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Status per service; the empty name stands for the whole server. All begin as NOT_SERVING."""

    def __init__(self) -> None:
        self._status: dict[str, int] = {"": NOT_SERVING}
        self._changed = asyncio.Condition()
        self._watchers = 0

    async def set_all(self, services: tuple[str, ...], status: int) -> None:
        """Give the whole server and ``services`` this status, and tell the watchers."""
        async with self._changed:
            self._status.update(dict.fromkeys(("", *services), status))
            self._changed.notify_all()

    async def Check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """The status now; NotFound for a service that is not here."""
        status = self._status.get(request.service)
        if status is None:
            raise NotFound("service", request.service, ", ".join(filter(None, self._status)))
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        """The status now and after each change, for ever."""
        if self._watchers >= MAX_WATCHERS:
            raise ResourceExhausted(f"{MAX_WATCHERS} health watchers are connected")
        self._watchers += 1
        try:
            last: int | None = None
            while True:
                async with self._changed:
                    while self._of(request.service) == last:
                        await self._changed.wait()
                    last = self._of(request.service)
                yield health_pb2.HealthCheckResponse(status=last)
        finally:
            self._watchers -= 1

    def _of(self, service: str) -> int:
        return self._status.get(service, SERVICE_UNKNOWN)
