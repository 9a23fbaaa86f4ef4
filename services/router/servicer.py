"""RouterService: converts and delegates."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc.aio

from weir.errors import InvalidArgument
from weir.lifecycle import RequestState
from weir.rpc.convert import finish_to_pb, role_to_pb, sampling_from_pb, state_to_pb
from weir.rpc.tokens import TokenBook, authorization_in, tenant_for
from weir.rpc.v1 import common_pb2, router_pb2, router_pb2_grpc
from weir.services.router.answer import Accepted, Delta, Final, Usage
from weir.services.router.fleet import WorkerView
from weir.services.router.intake import Ask, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from weir.services.router.router import Router
from weir.services.router.timings import Timings
from weir.services.router.traces import TraceRecord, span_of
from weir.telemetry.spans import Attributes, SpanData
from weir.telemetry.tracing import traceparent_in

SERVICE_NAME = router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name
OPERATOR_METHODS = frozenset(f"/{SERVICE_NAME}/{name}" for name in ("ListWorkers", "GetRouterState", "GetTrace"))
"""What shows more than the caller's own requests."""
MAX_TIMEOUT_S = 86_400.0

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]
else:  # generic in the type stubs only
    Context = grpc.aio.ServicerContext


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """The gRPC door."""

    def __init__(self, router: Router, tokens: TokenBook | None = None) -> None:
        """``tokens`` None takes the tenant that a request names; otherwise its token decides."""
        self._router = router
        self._tokens = tokens

    async def Generate(self, request: router_pb2.GenerateRequest, context: Context) -> None:
        """Streams Accepted, Deltas and Final; a client that leaves cancels the request."""
        ask = _ask(request, context, self._tenant(request, context))
        generation = await self._router.generate(ask, on_leave=lambda leave: _when_over(context, leave))
        write = context.write
        try:
            async for event in generation:
                await write(_response(event))
        finally:
            generation.leave()

    def _tenant(self, request: router_pb2.GenerateRequest, context: Context) -> str:
        if self._tokens is None:
            return request.tenant
        name = self._tokens.name_of(authorization_in(context.invocation_metadata()))
        return tenant_for(name, request.tenant)

    async def Cancel(self, request: router_pb2.CancelRequest, context: Context) -> router_pb2.CancelResponse:
        """Whether the request was running here."""
        return router_pb2.CancelResponse(was_running=self._router.cancel(request.request_id))

    async def ListModels(
        self, request: router_pb2.ListModelsRequest, context: Context
    ) -> router_pb2.ListModelsResponse:
        """Models, by name."""
        models = [
            router_pb2.ListModelsResponse.Model(
                name=model.name,
                context_tokens=model.context_tokens,
                architecture=model.architecture,
                created_unix_s=model.created_unix_s,
            )
            for model in self._router.models()
        ]
        return router_pb2.ListModelsResponse(models=models)

    async def ListWorkers(
        self, request: router_pb2.ListWorkersRequest, context: Context
    ) -> router_pb2.ListWorkersResponse:
        """Workers, by id."""
        fleet = self._router.fleet
        views = sorted(fleet, key=lambda view: (view.key.worker_id, view.key.incarnation))
        return router_pb2.ListWorkersResponse(workers=[_worker(view) for view in views], stale=fleet.stale)

    async def GetRouterState(
        self, request: router_pb2.GetRouterStateRequest, context: Context
    ) -> router_pb2.GetRouterStateResponse:
        """Requests, sessions and tasks now."""
        state = self._router.state()
        return router_pb2.GetRouterStateResponse(
            active_requests=state.active_requests,
            queued_requests=state.queued_requests,
            open_sessions=state.open_sessions,
            tasks=state.tasks,
            ended=state.ended,
            requests=[
                router_pb2.GetRouterStateResponse.ActiveRequest(
                    request_id=active.request_id,
                    state=state_to_pb(RequestState(active.state)),
                    attempt=active.attempt,
                    prefill_worker=active.prefill_worker,
                    decode_worker=active.decode_worker,
                    tokens_sent=active.tokens_sent,
                    age_ms=active.age_ms,
                )
                for active in state.requests
            ],
        )

    async def GetTrace(self, request: router_pb2.GetTraceRequest, context: Context) -> router_pb2.GetTraceResponse:
        """How a request that has ended spent its time."""
        return _trace(self._router.trace(request.request_id))


def _when_over(context: Context, leave: Callable[[], None]) -> None:
    """grpc.aio tells of a client that left by this callback alone while a handler waits."""

    def over(_: Any) -> None:
        leave()

    context.add_done_callback(over)  # type: ignore[arg-type]  # the stubs expect a class


def _ask(request: router_pb2.GenerateRequest, context: Context, tenant: str) -> Ask:
    sampling = request.sampling
    left_s = context.time_remaining()
    return Ask(
        prompt=_prompt(request),
        model=request.model,
        sampling=sampling_from_pb(sampling, default_max_tokens=1),
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        tenant=tenant,
        client_request_id=request.client_request_id,
        timeout_s=None if left_s is None else min(max(left_s, 1e-3), MAX_TIMEOUT_S),
        priority=request.priority,
        slo_ttft_ms=request.slo_ttft_ms,
        slo_tpot_ms=request.slo_tpot_ms,
        traceparent=traceparent_in(context.invocation_metadata()),
    )


def _prompt(request: router_pb2.GenerateRequest) -> Prompt:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return TextPrompt(request.text)
    if kind == "tokens":
        return TokenPrompt(tuple(request.tokens.token_ids))
    if kind == "chat":
        chat = request.chat
        messages = [{"role": message.role, "content": message.content} for message in chat.messages]
        opening = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
        return ChatPrompt(messages, add_generation_prompt=opening)
    raise InvalidArgument("prompt", None, "must be set to text, tokens or chat")


def _response(event: Accepted | Delta | Final) -> router_pb2.GenerateResponse:
    if isinstance(event, Delta):
        return router_pb2.GenerateResponse(
            delta=router_pb2.GenerateResponse.Delta(
                text=event.text,
                token_ids=event.token_ids,
                first_index=event.first_index,
                logprobs=event.logprobs,
            )
        )
    if isinstance(event, Accepted):
        return router_pb2.GenerateResponse(
            accepted=router_pb2.GenerateResponse.Accepted(
                request_id=event.request_id, prompt_tokens=event.prompt_tokens, model=event.model
            )
        )
    return router_pb2.GenerateResponse(
        final=router_pb2.GenerateResponse.Final(
            finish_reason=finish_to_pb(event.finish_reason),
            stop_string=event.stop_string,
            usage=_usage(event.usage),
            timings=_timings(event.timings),
        )
    )


def _usage(usage: Usage) -> common_pb2.Usage:
    return common_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        local_compute_tokens=usage.local_compute_tokens,
        local_cache_hit_tokens=usage.local_cache_hit_tokens,
        external_kv_tokens=usage.external_kv_tokens,
    )


def _timings(times: Timings) -> common_pb2.Timings:
    return common_pb2.Timings(
        admit_ms=times.admit_ms,
        queue_ms=times.queue_ms,
        prefill_ms=times.prefill_ms,
        first_token_ms=times.first_token_ms,
        ttft_ms=times.ttft_ms,
        second_token_ms=times.second_token_ms,
        decode_ms=times.decode_ms,
        e2e_ms=times.e2e_ms,
        tpot_ms=times.tpot_ms,
        kv_read=times.kv_read,
        prefill_worker=times.prefill_worker,
        decode_worker=times.decode_worker,
        attempts=times.attempts,
    )


def _worker(view: WorkerView) -> router_pb2.ListWorkersResponse.Worker:
    info = view.info
    return router_pb2.ListWorkersResponse.Worker(
        worker_id=info.key.worker_id,
        incarnation=info.key.incarnation,
        role=role_to_pb(info.role),
        role_epoch=info.role_epoch,
        address=info.address,
        connected=view.connected,
        draining=info.draining or not view.listed,
        load=view.load.report,
        model=info.model,
    )


def _trace(record: TraceRecord) -> router_pb2.GetTraceResponse:
    received_s, context = record.trace.received_s, record.trace.span.context
    return router_pb2.GetTraceResponse(
        request_id=record.end.request_id,
        trace_id=context.trace_id,
        sampled=context.sampled,
        model=record.accepted.model,
        state=state_to_pb(record.end.state),
        error="" if record.end.error is None else str(record.end.error),
        received_unix_s=record.accepted.created_unix_s,
        timings=_timings(record.end.timings),
        usage=_usage(record.usage),
        spans=[_span(parent, span, received_s) for parent, span in span_of(record).walk()],
    )


def _span(parent: int, span: SpanData, received_s: float) -> router_pb2.GetTraceResponse.Span:
    return router_pb2.GetTraceResponse.Span(
        name=span.name,
        parent=parent,
        start_ms=(span.start_s - received_s) * 1e3,
        length_ms=(span.end_s - span.start_s) * 1e3,
        attributes=_texts(span.attributes),
        error=span.error,
        events=[
            router_pb2.GetTraceResponse.Event(
                name=event.name, at_ms=(event.at_s - received_s) * 1e3, attributes=_texts(event.attributes)
            )
            for event in span.events
        ],
    )


def _texts(attributes: Attributes) -> dict[str, str]:
    return {name: _text(value) for name, value in attributes.items()}


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
