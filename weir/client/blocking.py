"""The blocking client, for scripts and threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc

from weir.client.messages import Collector, chat_request, event_from_pb, generate_request, models_from_pb
from weir.client.spans import ClientSpan
from weir.client.types import Completion, Event, Message, ModelInfo, Options
from weir.rpc.limits import RpcLimits, channel_options
from weir.rpc.security import Security
from weir.rpc.status import from_rpc_error
from weir.rpc.v1 import router_pb2, router_pb2_grpc


class Client:
    """Talks to one router; the same calls as AsyncClient with ordinary iterators."""

    def __init__(self, address: str, *, token: str | None = None, security: Security | None = None) -> None:
        """``address`` is host:port of a router's gRPC door; ``token`` is sent as a bearer token.

        With ``security`` over TLS; InvalidArgument when one of its files cannot be read.
        """
        options = channel_options(RpcLimits())
        if security is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            options += security.channel_options()
            self._channel = grpc.secure_channel(address, security.channel_credentials(), options=options)
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; running requests are cancelled."""
        self._channel.close()

    def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Iterator[Event]:
        """Stream a completion of text or token ids: Accepted, then Deltas, then Final."""
        return self._stream(generate_request(prompt, options), options.get("timeout_s"))

    def chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Iterator[Event]:
        """Stream an answer to a chat, rendered with the model's own template."""
        return self._stream(chat_request(messages, options), options.get("timeout_s"))

    def complete(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Completion:
        """The whole completion at once."""
        return _collect(self.generate(prompt, **options))

    def complete_chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Completion:
        """The whole answer at once."""
        return _collect(self.chat(messages, **options))

    def models(self) -> list[ModelInfo]:
        """Models that are served."""
        try:
            answer = self._stub.ListModels(router_pb2.ListModelsRequest(), metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return models_from_pb(answer)

    def _stream(self, request: router_pb2.GenerateRequest, timeout_s: float | None) -> Iterator[Event]:
        span = ClientSpan(request)
        call = self._stub.Generate(request, timeout=timeout_s, metadata=span.metadata(self._metadata))
        try:
            for response in call:
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


def _collect(stream: Iterator[Event]) -> Completion:
    collector = Collector()
    for event in stream:
        collector.add(event)
    return collector.completion()
