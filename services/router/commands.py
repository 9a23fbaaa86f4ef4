"""What the request book asks the outside to do: plain values, in the order in which they must be done. Pure.

Not modified once made; only freezing them would cost each request three times the time to make them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weir.engine.sampling import SamplingParams
from weir.errors import WeirError
from weir.ids import WorkerKey
from weir.lifecycle import FinishReason, RequestState
from weir.services.router.answer import Usage
from weir.services.router.journal import Mark
from weir.services.router.timings import Timings


@dataclass(slots=True)
class Admission:
    """A checked request on its way into the book. Times on the router's monotonic clock; SLOs of 0 are none."""

    request_id: str
    model: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    received_s: float
    deadline_s: float
    tenant: str = ""
    tenant_salt: bytes = b""
    priority: int = 0
    traceparent: str = ""
    slo_ttft_ms: float = 0.0
    slo_tpot_ms: float = 0.0


@dataclass(slots=True)
class SendBeginPrefill:
    """To ``worker``: prefill the prompt, then ``generated``."""

    worker: WorkerKey
    attempt: int
    admission: Admission
    generated: tuple[int, ...]
    timeout_ms: float
    lease_ms: float


@dataclass(slots=True)
class SendBeginDecode:
    """To ``worker``: decode; read the KV from ``source``, or compute it there when None."""

    worker: WorkerKey
    attempt: int
    admission: Admission
    generated: tuple[int, ...]
    timeout_ms: float
    source: WorkerKey | None


@dataclass(slots=True)
class SendKvReady:
    """To ``worker``: this KV may be read. ``ticket`` is passed on as it came."""

    worker: WorkerKey
    ticket: Any


@dataclass(slots=True)
class SendFirstToken:
    """To ``worker``: the first token of the attempt. ``token`` is passed on as it came."""

    worker: WorkerKey
    token: Any


@dataclass(slots=True)
class SendCancel:
    """To ``worker``, on the leg ``prefill`` or its other one: stop the attempt and older ones."""

    worker: WorkerKey
    prefill: bool
    request_id: str
    attempt: int
    reason: str


@dataclass(slots=True)
class SendRelease:
    """To ``worker``: the lease may end."""

    worker: WorkerKey
    request_id: str
    attempt: int
    lease_id: int


@dataclass(slots=True)
class Emit:
    """To the consumer: new tokens, each position once and in order."""

    request_id: str
    first_index: int
    tokens: Sequence[int]
    logprobs: Sequence[Any]


@dataclass(slots=True)
class End:
    """The request is over. FINISHED has a ``finish_reason`` and no ``error``; the others an error.

    ``path`` is how its first token came (see ``Entry.path``), empty when it was never placed; SLOs of 0 are none.
    """

    request_id: str
    state: RequestState
    finish_reason: FinishReason
    error: WeirError | None
    stop_string: str
    usage: Usage
    timings: Timings
    marks: Sequence[Mark] = ()
    path: str = ""
    slo_ttft_ms: float = 0.0
    slo_tpot_ms: float = 0.0


@dataclass(slots=True)
class PublishState:
    """Tell the world that a request changed its state. ``worker`` is the one concerned, if any."""

    request_id: str
    attempt: int
    state: RequestState
    worker_id: str
    model: str
    tenant: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    age_ms: float
    error: str = ""
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class PublishCancel:
    """Tell all workers by NATS too, for those whose session is broken."""

    request_id: str
    attempt: int
    reason: str
    traceparent: str = ""


Command = (
    SendBeginPrefill
    | SendBeginDecode
    | SendKvReady
    | SendFirstToken
    | SendCancel
    | SendRelease
    | Emit
    | End
    | PublishState
    | PublishCancel
)
