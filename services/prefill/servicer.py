"""PrefillService: the wire on one side, the prefill leg on the other. Converts and delegates."""

from weir.attempts.desk import AttemptStarted
from weir.attempts.leg import RouterSession
from weir.attempts.wire import SessionServicer, add_started, logprobs_to_pb, over_to_pb
from weir.engine.request import Mode
from weir.errors import WeirError
from weir.ids import RequestKey
from weir.rpc import convert
from weir.rpc.v1 import prefill_pb2, prefill_pb2_grpc
from weir.services.prefill.desk import FirstTokenMade, News, TicketIssued
from weir.services.prefill.leg import PrefillLeg


class PrefillServicer(
    SessionServicer[PrefillLeg, prefill_pb2.PrefillServiceSessionRequest, prefill_pb2.PrefillServiceSessionResponse],
    prefill_pb2_grpc.PrefillServiceServicer,
):
    """Sessions of the prefill leg."""

    def _welcome(self) -> prefill_pb2.PrefillServiceSessionResponse:
        return prefill_pb2.PrefillServiceSessionResponse(welcome=self._facts.welcome())

    def _handle(self, session: RouterSession, message: prefill_pb2.PrefillServiceSessionRequest) -> None:
        for cancel in message.cancel:
            self._leg.cancel(cancel.request_id, cancel.attempt, cancel.reason)
        for release in message.release:
            self._leg.release(RequestKey(release.request_id, release.attempt), release.lease_id)
        for begin in message.begin:
            self._begin(session, begin)
        self._leg.pump()

    def _begin(self, session: RouterSession, begin: prefill_pb2.BeginPrefill) -> None:
        key = RequestKey(begin.request_id, begin.attempt)
        try:
            self._facts.check_open()
            request = self._request(key, begin, Mode.PREFILL)
        except WeirError as error:
            self._leg.refuse(session, key, error)
            return
        self._leg.begin(session, request, begin.lease_ms / 1e3, begin.traceparent)

    def _to_wire(self, news: list[News]) -> prefill_pb2.PrefillServiceSessionResponse:
        message = prefill_pb2.PrefillServiceSessionResponse(load=self._facts.load())
        for item in news:
            if isinstance(item, AttemptStarted):
                add_started(message, item)
            elif isinstance(item, TicketIssued):
                message.kv_ready.add(ticket=convert.ticket_to_pb(item.ticket))
            elif isinstance(item, FirstTokenMade):
                message.first_tokens.append(_first_token(item))
            else:
                message.ended.append(over_to_pb(item))
        return message


def _first_token(made: FirstTokenMade) -> prefill_pb2.FirstToken:
    return prefill_pb2.FirstToken(
        request_id=made.key.request_id,
        attempt=made.key.attempt,
        token_id=made.token,
        index=made.index,
        logprobs=None if made.logprobs is None else logprobs_to_pb(made.logprobs),
        finish_reason=convert.finish_to_pb(made.finish),
        prefill_ms=made.prefill_s * 1e3,
        computed_tokens=made.usage.local_compute,
        cached_tokens=made.usage.local_cache_hit,
    )
