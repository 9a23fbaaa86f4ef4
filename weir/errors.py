"""Every error that Weir raises on purpose, as one tree.

    WeirError
    ├── InvalidArgument        the caller's input is wrong: names field, value, limit
    ├── NotFound               unknown model, request or worker
    ├── FailedPrecondition     right input, wrong moment: stale epoch, role does not fit
    ├── ResourceExhausted      a bound is reached: queue, pool, message size (retry later)
    ├── Unavailable            no worker, or the peer is gone (retry elsewhere)
    ├── DeadlineExceeded       the request's deadline has passed
    ├── RequestCancelled       the client left or cancelled
    ├── Unauthenticated        missing or wrong credentials
    ├── PermissionDenied       right credentials, but not for this
    ├── ModelError             a model cannot be loaded: names file, tensor, expectation
    ├── FingerprintMismatch    two workers cannot share KV: names field and both values
    ├── KvReadVoid             a KV read whose proof failed: names the reason
    ├── TransferUnavailable    the transport cannot start: names the reason
    └── InternalError          a fault of Weir itself

Each class carries a stable ``code`` (a gRPC status name) so that one mapping per boundary is enough:
``weir.rpc.status`` for gRPC, the HTTP door for OpenAI's error shape.
"""

from __future__ import annotations

from typing import ClassVar


class WeirError(Exception):
    """Base of all errors; ``code`` is the gRPC status name, ``retryable`` whether trying again may help."""

    code: ClassVar[str] = "UNKNOWN"
    retryable: ClassVar[bool] = False


class InvalidArgument(WeirError):
    """The input ``field`` holds ``value``, which breaks ``limit`` (a rule in words, with its number)."""

    code = "INVALID_ARGUMENT"

    def __init__(self, field: str, value: object, limit: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{field} = {shown}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class NotFound(WeirError):
    """There is no ``kind`` called ``name``."""

    code = "NOT_FOUND"

    def __init__(self, kind: str, name: str, known: str = "") -> None:
        super().__init__(f"{kind} {name!r} not found" + (f"; known: {known}" if known else ""))
        self.kind = kind
        self.name = name


class FailedPrecondition(WeirError):
    """The request is well-formed but the state does not allow it now."""

    code = "FAILED_PRECONDITION"


class ResourceExhausted(WeirError):
    """A bound was reached. ``retry_after_s`` is an honest estimate, or None when unknown."""

    code = "RESOURCE_EXHAUSTED"
    retryable = True

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(WeirError):
    """Nobody can serve this now: no worker, lost session, peer gone."""

    code = "UNAVAILABLE"
    retryable = True


class DeadlineExceeded(WeirError):
    """The request's deadline passed before it finished."""

    code = "DEADLINE_EXCEEDED"


class RequestCancelled(WeirError):
    """The client cancelled or left."""

    code = "CANCELLED"


class Unauthenticated(WeirError):
    """Credentials are missing or wrong."""

    code = "UNAUTHENTICATED"


class PermissionDenied(WeirError):
    """The credentials are good, but not for what was asked."""

    code = "PERMISSION_DENIED"


class ModelError(WeirError):
    """A model file cannot be used: ``file``, the ``tensor`` or key in it (if one), what was expected."""

    code = "FAILED_PRECONDITION"

    def __init__(self, file: str, tensor: str | None, expectation: str) -> None:
        where = file if tensor is None else f"{file}: {tensor}"
        super().__init__(f"{where}: {expectation}")
        self.file = file
        self.tensor = tensor
        self.expectation = expectation


class FingerprintMismatch(WeirError):
    """KV cannot be shared: ``field`` is ``ours`` here and ``theirs`` there."""

    code = "FAILED_PRECONDITION"

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"fingerprint differs in {field}: ours {ours!r}, theirs {theirs!r}")
        self.field = field
        self.ours = ours
        self.theirs = theirs


class KvReadVoid(WeirError):
    """A KV read is void: nothing read may be used. ``reason`` is a value of ``transfer.ticket.VoidReason``."""

    code = "ABORTED"
    retryable = True

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"KV read void ({reason})" + (f": {detail}" if detail else ""))
        self.reason = reason
        self.detail = detail


class TransferUnavailable(WeirError):
    """The KV transport cannot start or is gone; the message gives the reason."""

    code = "UNAVAILABLE"


class InternalError(WeirError):
    """A fault of Weir itself; always worth a report."""

    code = "INTERNAL"
