"""WorkerService: administration of a worker. Converts and delegates."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from weir.errors import InvalidArgument
from weir.lifecycle import Role
from weir.rpc import convert
from weir.rpc.v1 import worker_pb2, worker_pb2_grpc
from weir.telemetry.spans import AttributeValue, SpanData
from weir.telemetry.tracing import traceparent_in

if TYPE_CHECKING:
    from weir.services.worker.host import WorkerHost

MAX_DRAIN_TIMEOUT_S = 3_600.0
MAX_LISTED_BLOCKS = 100_000
"""Hashes in one answer: 1.8 MB."""


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """What operators, the controller and tests ask."""

    def __init__(self, host: "WorkerHost") -> None:
        self._host = host

    async def GetState(self, request: worker_pb2.GetStateRequest, context: Any) -> worker_pb2.GetStateResponse:
        """The state, and the result of the integrity check when asked for."""
        return await self._host.state(check_integrity=request.check_integrity)

    async def SetRole(self, request: worker_pb2.SetRoleRequest, context: Any) -> worker_pb2.SetRoleResponse:
        """Change the role; answers when the new one is in force."""
        role = convert.role_from_pb(request.role)
        drain_timeout_s = request.drain_timeout_ms / 1e3
        if not 0 <= drain_timeout_s <= MAX_DRAIN_TIMEOUT_S:
            limit = f"must lie in [0, {MAX_DRAIN_TIMEOUT_S * 1e3:g}]"
            raise InvalidArgument("drain_timeout_ms", request.drain_timeout_ms, limit)
        begun_s = self._host.clock.monotonic_s()
        with self._flip_span(role, traceparent_in(context.invocation_metadata())):
            await self._host.set_role(role, request.expected_epoch, drain_timeout_s or None)
        return worker_pb2.SetRoleResponse(
            role=convert.role_to_pb(self._host.gate.role),
            role_epoch=self._host.gate.epoch,
            took_ms=(self._host.clock.monotonic_s() - begun_s) * 1e3,
        )

    @contextlib.contextmanager
    def _flip_span(self, role: Role, traceparent: str) -> Iterator[None]:
        """A span around a change of role, in the caller's trace or one of its own; always sampled: changes are rare."""
        tracer, clock = self._host.tracer, self._host.clock
        if tracer is None or not tracer.enabled:
            yield
            return
        span, begun_s = tracer.open(traceparent, always=True), clock.monotonic_s()
        old, error = self._host.gate.role, ""
        try:
            yield
        except BaseException as raised:
            error = str(raised) or type(raised).__name__
            raise
        finally:
            attributes: dict[str, AttributeValue] = {
                "weir.worker": self._host.key.worker_id,
                "weir.role.from": old.value,
                "weir.role.to": role.value,
                "weir.role.epoch": self._host.gate.epoch,
            }
            tracer.close(span, SpanData("role_flip", begun_s, clock.monotonic_s(), attributes, error=error))

    async def ListBlocks(self, request: worker_pb2.ListBlocksRequest, context: Any) -> worker_pb2.ListBlocksResponse:
        """Hashes of what the prefix cache has, between two steps."""
        limit = min(request.limit or MAX_LISTED_BLOCKS, MAX_LISTED_BLOCKS)
        if limit < 0:
            raise InvalidArgument("limit", request.limit, "at least 0")
        hashes = await self._host.step_loop.call(lambda engine: self._host.parts.blocks.known_hashes(limit))
        return worker_pb2.ListBlocksResponse(hashes=hashes)

    async def GetDescriptor(
        self, request: worker_pb2.GetDescriptorRequest, context: Any
    ) -> worker_pb2.GetDescriptorResponse:
        """How to read this worker's KV."""
        descriptor = self._host.edges.transfer.descriptor()
        return worker_pb2.GetDescriptorResponse(descriptor=convert.descriptor_to_pb(descriptor))
