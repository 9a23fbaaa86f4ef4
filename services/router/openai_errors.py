"""Errors as OpenAI's clients expect them: a status and ``{"error": {message, type, param, code}}``. Pure."""

from __future__ import annotations

import math

import orjson

from weir.errors import InvalidArgument, WeirError

DEFAULT_RETRY_AFTER_S = 1.0

_STATUS = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "FAILED_PRECONDITION": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "INTERNAL": 500,
    "UNKNOWN": 500,
    "ABORTED": 503,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {"RESOURCE_EXHAUSTED": "rate_limit_exceeded"}
_CHALLENGE = (("www-authenticate", "Bearer"),)
_RETRY_LATER = (429, 503)


class HttpRefusal(Exception):
    """A request that gets an error instead of an answer. ``retry_after_s`` is sent rounded up, at least 1."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self._retry_after_s = retry_after_s
        self._headers = headers

    def body(self) -> bytes:
        """The JSON of the error."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        fields = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": fields})

    def headers(self) -> dict[str, str]:
        """Headers that belong to the status."""
        headers = {"content-type": "application/json", **dict(self._headers)}
        if self.status in _RETRY_LATER:
            wait_s = DEFAULT_RETRY_AFTER_S if self._retry_after_s is None else self._retry_after_s
            headers["retry-after"] = str(max(1, math.ceil(wait_s)))
        return headers


def refusal_of(error: WeirError) -> HttpRefusal:
    """The one mapping of Weir's errors to HTTP."""
    status = _STATUS.get(error.code, 500)
    if isinstance(error, InvalidArgument):
        return _refusal_of_input(error)
    return HttpRefusal(
        status,
        str(error),
        code=_CODES.get(error.code, error.code.lower()),
        retry_after_s=getattr(error, "retry_after_s", None),
        headers=_CHALLENGE if status == 401 else (),
    )


def _refusal_of_input(error: InvalidArgument) -> HttpRefusal:
    if error.field == "model" and error.value and isinstance(error.value, str):
        return HttpRefusal(404, str(error), code="model_not_found", param="model")
    code = "context_length_exceeded" if error.field == "prompt + max_tokens" else "invalid_value"
    return HttpRefusal(400, str(error), code=code, param=error.field)
