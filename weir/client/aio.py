"""The asyncio client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc
import grpc.aio

from weir.client.messages import Collector, chat_request, event_from_pb, generate_request, models_from_pb
from weir.client.spans import ClientSpan
from weir.client.types import Completion, Event, Message, ModelInfo, Options
from weir.rpc.channel import channel
from weir.rpc.security import Security
from weir.rpc.status import from_rpc_error
from weir.rpc.v1 import router_pb2, router_pb2_grpc


class AsyncClient:
    """Talks to one router. Every call raises an error of ``weir.errors``, nothing else.

    Leaving an iterator early (break, cancellation, ``aclose``) cancels the request on the cluster.
    """

    def __init__(self, address: str, *, token: str | None = None, security: Security | None = None) -> None:
        """``address`` is host:port of a router's gRPC door; ``token`` is sent as a bearer token.

        With ``security`` over TLS; InvalidArgument when one of its files cannot be read.
        """
        self._channel = channel(address, security=security)
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; running requests are cancelled."""
        await self._channel.close(None)

    def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> AsyncIterator[Event]:
        """Stream a completion of text or token ids: Accepted, then Deltas, then Final."""
        return self._stream(generate_request(prompt, options), options.get("timeout_s"))

    def chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> AsyncIterator[Event]:
        """Stream an answer to a chat, rendered with the model's own template."""
        return self._stream(chat_request(messages, options), options.get("timeout_s"))

    async def complete(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Completion:
        """The whole completion at once."""
        return await _collect(self.generate(prompt, **options))

    async def complete_chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Completion:
        """The whole answer at once."""
        return await _collect(self.chat(messages, **options))

    async def cancel(self, request_id: str) -> bool:
        """Cancel a running request by its identity; whether it was running."""
        try:
            request = router_pb2.CancelRequest(request_id=request_id)
            answer = await self._stub.Cancel(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return bool(answer.was_running)

    async def models(self) -> list[ModelInfo]:
        """Models that are served."""
        try:
            answer = await self._stub.ListModels(router_pb2.ListModelsRequest(), metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return models_from_pb(answer)

    async def workers(self) -> router_pb2.ListWorkersResponse:
        """Workers as the router sees them."""
        try:
            request = router_pb2.ListWorkersRequest()
            answer: router_pb2.ListWorkersResponse = await self._stub.ListWorkers(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return answer

    async def state(self) -> router_pb2.GetRouterStateResponse:
        """The router's own state."""
        try:
            call = self._stub.GetRouterState(router_pb2.GetRouterStateRequest(), metadata=self._metadata)
            answer: router_pb2.GetRouterStateResponse = await call
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return answer

    async def trace(self, request_id: str = "last") -> router_pb2.GetTraceResponse:
        """How a request that has ended spent its time; NotFound when the router does not remember it."""
        try:
            call = self._stub.GetTrace(router_pb2.GetTraceRequest(request_id=request_id), metadata=self._metadata)
            answer: router_pb2.GetTraceResponse = await call
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return answer

    async def _stream(self, request: router_pb2.GenerateRequest, timeout_s: float | None) -> AsyncIterator[Event]:
        span = ClientSpan(request)
        call = self._stub.Generate(request, timeout=timeout_s, metadata=span.metadata(self._metadata))
        try:
            async for response in call:
                event = event_from_pb(response)
                span.saw(event)
                yield event
        except grpc.RpcError as error:
            raised = from_rpc_error(error)
            span.failed(raised)
            raise raised from None
        finally:
            call.cancel()
            span.end()


async def _collect(stream: AsyncIterator[Event]) -> Completion:
    collector = Collector()
    async for event in stream:
        collector.add(event)
    return collector.completion()
