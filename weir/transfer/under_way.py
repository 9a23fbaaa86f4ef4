"""Reads and probes as the read thread holds them while they are under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from weir.errors import WeirError
from weir.transfer.plan import Destination, ReadReport, Run
from weir.transfer.ticket import PeerDescriptor, Ticket

Outcome = ReadReport | WeirError


@dataclass(slots=True, eq=False)
class Posted:
    """A posted transfer and the own blocks it fills (none for a guard)."""

    handle: Any
    blocks: list[int]


@dataclass(slots=True, eq=False)
class Read:
    """One read. ``settle`` is called once, on the thread, when no byte of it can land any more."""

    peer: PeerDescriptor
    ticket: Ticket
    destinations: Sequence[Destination]
    notify: bool
    started_s: float
    deadline_s: float
    settle: Callable[[Outcome], None]
    cancelled: bool = False
    slot: int = -1
    unposted: deque[list[Run]] = field(default_factory=deque)
    posted: list[Posted] = field(default_factory=list)
    reads_guard: bool = False
    checksums: list[tuple[list[int], Future[list[int]]]] = field(default_factory=list)
    descriptors: int = 0
    begun_s: float = 0.0
    post_s: float = 0.0
    data_done_s: float = 0.0
    polled_s: float = 0.0
    pause_s: float = 0.0


@dataclass(slots=True, eq=False)
class Probe:
    """A first read of one guard entry: it makes the connection and finds the transport, ahead of any request.

    ``settle`` is called once with None or why the peer cannot be read.
    """

    peer: PeerDescriptor
    deadline_s: float
    settle: Callable[[WeirError | None], None]
    handle: Any = None
