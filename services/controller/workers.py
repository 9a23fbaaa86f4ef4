"""The seam to the workers: asking one for another role over gRPC."""

from __future__ import annotations

import contextvars
from dataclasses import dataclass
from typing import Protocol

import grpc

from weir.lifecycle import Role
from weir.rpc.channel import channel
from weir.rpc.convert import role_from_pb, role_to_pb
from weir.rpc.limits import RpcLimits
from weir.rpc.security import Security
from weir.rpc.status import from_rpc_error
from weir.rpc.v1 import worker_pb2, worker_pb2_grpc

current_traceparent: contextvars.ContextVar[str] = contextvars.ContextVar("current_traceparent", default="")
"""The trace that what is asked of workers belongs to; empty is none."""


@dataclass(frozen=True, slots=True)
class RoleAnswer:
    """A worker's role after it was asked."""

    role: Role
    epoch: int
    took_ms: float


class WorkerPort(Protocol):
    """What the controller asks of workers."""

    async def set_role(
        self, address: str, role: Role, *, expected_epoch: int, drain_timeout_ms: float, timeout_s: float
    ) -> RoleAnswer:
        """Change the role of the worker at ``address``; raises what the worker raised, or Unavailable."""
        ...


class GrpcWorkers:
    """WorkerPort over gRPC, with a channel per call: changes are rare and workers come and go."""

    def __init__(self, limits: RpcLimits, security: Security | None = None) -> None:
        self._limits = limits
        self._security = security

    async def set_role(
        self, address: str, role: Role, *, expected_epoch: int, drain_timeout_ms: float, timeout_s: float
    ) -> RoleAnswer:
        """See WorkerPort."""
        request = worker_pb2.SetRoleRequest(
            role=role_to_pb(role), expected_epoch=expected_epoch, drain_timeout_ms=drain_timeout_ms
        )
        trace = current_traceparent.get()
        metadata = (("traceparent", trace),) if trace else ()
        async with channel(address, limits=self._limits, security=self._security) as opened:
            try:
                stub = worker_pb2_grpc.WorkerServiceStub(opened)
                answer = await stub.SetRole(request, timeout=timeout_s, metadata=metadata)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from None
        return RoleAnswer(role_from_pb(answer.role), answer.role_epoch, answer.took_ms)
