"""Identities: who a request, a worker process and a lease are. Formats are fixed so that logs can be grepped.

``request_id``   ``r-<8 hex router>-<12 hex counter>``  minted by the router, never taken from a client
``worker_id``    ``<role at start>-<6 hex>`` or given; stable over a restart on the same address if given
``incarnation``  64-bit, new for every process start: a restarted worker is another worker
``lease_id``     64-bit, unique within one incarnation
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MAX_LABEL_CHARS = 256

RequestId = str
WorkerId = str


@dataclass(frozen=True, slots=True, order=True)
class RequestKey:
    """One attempt of one request; everything about an older attempt of the same request is ignored.

    Ordered, so that heaps of (moment, key) take two keys of one moment.
    """

    request_id: RequestId
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}.{self.attempt}"


@dataclass(frozen=True, slots=True)
class WorkerKey:
    """One process lifetime of one worker."""

    worker_id: WorkerId
    incarnation: int

    def __str__(self) -> str:
        return f"{self.worker_id}@{self.incarnation:x}"


class RequestIdMint:
    """Makes request ids that no other router makes: a random router part, then a counter."""

    def __init__(self, random_bits: Callable[[int], int]) -> None:
        self._prefix = f"r-{random_bits(32):08x}-"
        self._next = 0

    def mint(self) -> RequestId:
        """A new request id."""
        self._next += 1
        return f"{self._prefix}{self._next:012x}"


def mint_incarnation(random_bits: Callable[[int], int]) -> int:
    """A non-zero 63-bit number (63, so that it fits signed fields everywhere)."""
    return random_bits(62) + 1


def mint_worker_id(role: str, random_bits: Callable[[int], int]) -> WorkerId:
    """``prefill-3fa9c1``: readable, and unlikely to meet another."""
    return f"{role}-{random_bits(24):06x}"
