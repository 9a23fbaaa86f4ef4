"""Names on the bus, built and checked in one place."""

from __future__ import annotations

import re

from weir.errors import InvalidArgument
from weir.lifecycle import RequestState

PREFIX = "weir.v1"
ALL_REQUESTS = f"{PREFIX}.request.*"
ALL_CANCELS = f"{PREFIX}.cancel.*"
ALL_TRANSFERS = f"{PREFIX}.transfer.*"
ALL_LOADS = f"{PREFIX}.load.*"
ALL_KV = f"{PREFIX}.kv.*"
DECISION = f"{PREFIX}.decision"
SCALE = f"{PREFIX}.scale"

REGISTRY_BUCKET = "weir_v1_workers"
REQUEST_STREAM = "weir_v1_requests"
REQUEST_STREAM_SUBJECTS = (f"{PREFIX}.request.>",)

MAX_TOKEN_CHARS = 128
_TOKEN = re.compile(r"[A-Za-z0-9_=-]{1,128}")
_SUBJECT = re.compile(r"[^\s.*>]+(\.[^\s.*>]+)*")
_PATTERN = re.compile(r"([^\s.*>]+|\*)(\.([^\s.*>]+|\*))*(\.>)?|>")


def check_token(field: str, token: str) -> str:
    """``token`` when it can be one part of a subject and a registry key; InvalidArgument otherwise."""
    if not _TOKEN.fullmatch(token):
        raise InvalidArgument(field, token, f"1 to {MAX_TOKEN_CHARS} of the characters A-Z a-z 0-9 _ = -")
    return token


def request_subject(state: RequestState) -> str:
    """``weir.v1.request.<state>``: LifecycleEvent."""
    return f"{PREFIX}.request.{state.value}"


def cancel_subject(request_id: str) -> str:
    """``weir.v1.cancel.<request_id>``: CancelEvent."""
    return f"{PREFIX}.cancel.{check_token('request_id', request_id)}"


def transfer_subject(source_worker_id: str) -> str:
    """``weir.v1.transfer.<source worker>``: TransferCompletedEvent."""
    return f"{PREFIX}.transfer.{check_token('worker_id', source_worker_id)}"


def load_subject(worker_id: str) -> str:
    """``weir.v1.load.<worker>``: LoadEvent."""
    return f"{PREFIX}.load.{check_token('worker_id', worker_id)}"


def kv_subject(worker_id: str) -> str:
    """``weir.v1.kv.<worker>``: KvBlocksEvent."""
    return f"{PREFIX}.kv.{check_token('worker_id', worker_id)}"


def message_id(request_id: str, attempt: int, event: str) -> str:
    """``request.attempt.event``: the same for every repetition of one event."""
    return f"{request_id}.{attempt}.{event}"


def check_subject(subject: str) -> None:
    """Raise InvalidArgument unless ``subject`` can be published to (no wildcard, no empty part)."""
    if not _SUBJECT.fullmatch(subject):
        raise InvalidArgument("subject", subject, "parts separated by dots, without wildcards or spaces")


def check_pattern(pattern: str) -> None:
    """Raise InvalidArgument unless ``pattern`` can be subscribed to."""
    if not _PATTERN.fullmatch(pattern):
        raise InvalidArgument("subject", pattern, "parts separated by dots; * is one part, > at the end the rest")


def matches(pattern: str, subject: str) -> bool:
    """Whether a subscription to ``pattern`` gets messages of ``subject``."""
    wanted, parts = pattern.split("."), subject.split(".")
    for index, part in enumerate(wanted):
        if part == ">":
            return len(parts) > index
        if index >= len(parts) or part not in ("*", parts[index]):
            return False
    return len(parts) == len(wanted)
