"""Logs on stderr, one line an entry: time, level, service, message, then key=value; or the same as JSON.

Modules log through ``logging.getLogger(__name__)``; fields go in ``extra={"fields": {...}}`` or through ``log``.
"""

from __future__ import annotations

import datetime
import json
import logging
import re
import sys
from collections.abc import Mapping
from typing import TextIO

MAX_ONCE_KEYS = 4_096
MAX_FIELD_CHARS = 2_048

_PLAIN = re.compile(r"[^\s\"=\\\x00-\x1f\x7f]+")
_BREAKS = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
# Libraries that say little of use below a warning.
_QUIET = ("grpc", "nats", "asyncio", "httpx", "uvicorn")


def configure_logging(service: str, *, level: str = "info", form: str = "line", stream: TextIO | None = None) -> None:
    """Send all logs of the process to ``stream`` (stderr when None); replaces handlers set before.

    ``level`` and ``form`` as in ``TelemetryConfig``.
    """
    assert level in _LEVELS, level
    assert form in ("line", "json"), form
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(service) if form == "json" else LineFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS[level])
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(_LEVELS[level], logging.WARNING))


def log(logger: logging.Logger, level: int, message: str, /, **fields: object) -> None:
    """Write ``message`` with ``fields`` after it."""
    logger.log(level, message, extra={"fields": fields}, stacklevel=2)


class OnceLog:
    """Writes each message once per key; at most MAX_ONCE_KEYS keys are remembered, then it is silent."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._seen: set[str] = set()

    def __call__(self, level: int, key: str, message: str, /, **fields: object) -> bool:
        """Whether the message was written."""
        if key in self._seen or len(self._seen) >= MAX_ONCE_KEYS:
            return False
        self._seen.add(key)
        log(self._logger, level, message, **fields)
        return True


class LineFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z INFO router: message key=value``, never more than one line."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The entry, without a line end."""
        head = f"{_time(record)} {record.levelname} {self._service}: {_one_line(record.getMessage())}"
        fields = {**_fields(record), **_exception(record)}
        return " ".join([head, *(f"{key}={_shown(value)}" for key, value in fields.items())])


class JsonFormatter(logging.Formatter):
    """The same entry as one JSON object: time, level, service, logger, message, and the fields."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The entry, without a line end."""
        entry = {
            **_fields(record),
            **_exception(record),
            "time": _time(record),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        return json.dumps(entry, ensure_ascii=False, default=str)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1_000:03d}Z"


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, Mapping) else {}


def _exception(record: logging.LogRecord) -> Mapping[str, object]:
    if not record.exc_info or record.exc_info[0] is None:
        return {}
    return {"exception": logging.Formatter().formatException(record.exc_info)}


def _shown(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if _PLAIN.fullmatch(text):
        return text if len(text) <= MAX_FIELD_CHARS else text[:MAX_FIELD_CHARS] + "..."
    # A traceback's end says what happened.
    text = text if len(text) <= MAX_FIELD_CHARS else "..." + text[-MAX_FIELD_CHARS:]
    return _one_line(json.dumps(text, ensure_ascii=False))


def _one_line(text: str) -> str:
    return _BREAKS.sub(lambda found: found.group().encode("unicode_escape").decode(), text)
