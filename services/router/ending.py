"""How a request ends: its error, its token counts, its stages. Pure."""

from __future__ import annotations

from typing import Any

from weir.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    RequestCancelled,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    WeirError,
)
from weir.ids import WorkerKey
from weir.lifecycle import FinishReason, RequestState
from weir.services.router.answer import Usage
from weir.services.router.commands import End
from weir.services.router.entry import Entry
from weir.services.router.timings import Served, measure

TOO_LARGE = "OUT_OF_RANGE"
"""How a worker says that it can never hold the request; a larger one may."""


def error_of(code: str, message: str, worker: WorkerKey, retry_after_ms: float) -> WeirError:
    """The error that a worker ended an attempt with, by its status name, which is not OK."""
    assert code != "OK", "OK is no reason: say what is missing"
    text = f"{worker.worker_id}: {message or _said(code)}"
    if code == "INVALID_ARGUMENT":
        return InvalidArgument("request", worker.worker_id, message or "refused by the worker")
    if code == "RESOURCE_EXHAUSTED":
        return ResourceExhausted(text, retry_after_ms / 1e3 if retry_after_ms > 0 else None)
    classes: dict[str, type[WeirError]] = {
        "DEADLINE_EXCEEDED": DeadlineExceeded,
        "FAILED_PRECONDITION": FailedPrecondition,
        "CANCELLED": RequestCancelled,
        "UNAUTHENTICATED": Unauthenticated,
        "INTERNAL": InternalError,
    }
    return classes.get(code, Unavailable)(text)


def _said(code: str) -> str:
    return f"ended it with {code} and no word of why" if code else "ended it without a status"


def ended_too_early(entry: Entry, worker: WorkerKey, prefill: bool) -> WeirError:
    """A leg of ``entry`` on ``worker`` has ended as it should, but without what was still to come from it."""
    name = worker.worker_id
    if not prefill:
        return Unavailable(f"{name} ended it without its last token")
    if entry.first_token is None:
        return Unavailable(f"{name} ended it without its first token")
    if entry.decode is not None:
        return Unavailable(f"{name} gave its KV up before {entry.decode_name} had said that it was read")
    reader = entry.decode_name or "a decode worker"
    return Unavailable(f"{name} gave its KV up, for {reader} had read it, and was lost before it decoded")


def too_large(entry: Entry, limit: int, said: str = "") -> WeirError:
    """No worker can hold it: the one with most room takes ``limit`` tokens, 0 is not known."""
    demand = entry.demand
    tokens = demand.prompt_tokens + demand.max_tokens
    most = f"at most {limit} tokens, on the worker with most room" if limit else "more than any worker holds"
    return InvalidArgument("prompt + max_tokens", tokens, f"{most} ({said})" if said else most)


def exhausted(entry: Entry) -> WeirError:
    """It failed too often."""
    return Unavailable(f"gave up after {entry.failures} attempts: {entry.story}")


def over_budget(entry: Entry) -> WeirError:
    """No retry was allowed."""
    return Unavailable(f"not tried again, the retry budget is used up: {entry.story}")


def end_of(
    entry: Entry,
    now_s: float,
    state: RequestState,
    reason: FinishReason,
    error: WeirError | None,
    stop_string: str,
    usage: Any | None,
) -> End:
    """The last command about a request."""
    tokens = len(entry.generated)
    decoded = entry.local or tokens > 1
    served = Served(entry.kv_read, entry.prefill_name, entry.decode_name if decoded else "", entry.attempt)
    timings = measure(entry.stamps, end_s=now_s, tokens=tokens, served=served)
    return End(
        request_id=entry.request_id,
        state=state,
        finish_reason=reason,
        error=error,
        stop_string=stop_string,
        usage=usage_of(entry, usage),
        timings=timings,
        marks=entry.journal.marks,
        path=entry.path,
        slo_ttft_ms=entry.admission.slo_ttft_ms,
        slo_tpot_ms=entry.admission.slo_tpot_ms,
    )


def usage_of(entry: Entry, reported: Any | None) -> Usage:
    """Token counts by where the serving worker had the prompt's KV from.

    The decode worker's own report is taken if it adds up to the prompt; otherwise (a stop string or the first
    token ended the request, or it was resumed) the same numbers are put together from what was said before.
    """
    prompt = len(entry.admission.prompt)
    cached = entry.cached_tokens
    if reported is not None:
        parts = (
            reported.local_compute_tokens,
            reported.local_cache_hit_tokens,
            reported.external_kv_tokens,
        )
        if sum(parts) == prompt and min(parts) >= 0:
            return Usage(prompt, len(entry.generated), cached, *parts)
    if entry.first_token is not None and not entry.local and len(entry.generated) > entry.resumed_tokens + 1:
        hit = min(entry.local_hit_tokens, prompt)
        return Usage(prompt, len(entry.generated), cached, 0, hit, prompt - hit)
    hit = min(entry.prefill_cached_tokens, prompt)
    return Usage(prompt, len(entry.generated), cached, prompt - hit, hit, 0)
