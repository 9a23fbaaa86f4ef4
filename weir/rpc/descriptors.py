"""File descriptors: how many this process may have and has, and who is refused before there are none left.

    |-- in use: own files, links to workers, clients ----------------------|-- reserve --|
    0                                                                      room          limit

Up to ``room`` everybody is served. From there on what would be *new* is refused by name: a client's connection at the
HTTP door, a gRPC client that has just connected, a KV connection to another worker. What is connected is served on, and
the reserve is what that, and saying no, may still need. gRPC's core accepts connections by itself: a server is given a
bound of them, ``connections``, beyond which it closes new ones at once.
"""

from __future__ import annotations

import logging
import os
import resource
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from weir.clock import Clock
from weir.errors import ResourceExhausted

_log = logging.getLogger(__name__)

SAMPLE_S = 0.05
"""How old a count may be: counting takes some 0.1 µs a descriptor."""
MIN_RESERVE, RESERVE_SHARE = 32, 16
RETRY_AFTER_S = 1.0
MAX_KNOWN_PEERS = 1 << 16
MIN_CONNECTIONS = 8
_ENDLESS = 1 << 20
_FOLDERS = ("/proc/self/fd", "/dev/fd")


def open_descriptors() -> int | None:
    """How many this process has open; None when not even that can be found out, because none is left."""
    for folder in _FOLDERS:
        try:
            return len(os.listdir(folder)) - 1  # without the one that lists them
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return 0


def descriptor_limit() -> int:
    """How many it may have now (the soft RLIMIT_NOFILE); 2^20 when there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _ENDLESS if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit() -> int:
    """Raise the soft limit to the hard one, up to 2^20, and say so in the log; returns the limit then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENDLESS if hard == resource.RLIM_INFINITY else min(hard, _ENDLESS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        _log.info("file descriptors: at most %d", descriptor_limit())
        return descriptor_limit()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        _log.warning("file descriptors: at most %d, the limit cannot be raised to %d: %s", soft, wanted, error)
        return descriptor_limit()
    _log.info("file descriptors: at most %d, raised from %d", wanted, soft)
    return wanted


@dataclass(frozen=True, slots=True)
class DescriptorStats:
    """What is exported: descriptors open and allowed, and who was refused, by door."""

    open: int
    limit: int
    refused: dict[str, int] = field(default_factory=dict)


class Descriptors:
    """The process's own; not thread-safe. ``count`` and ``limit`` are replaced by tests."""

    def __init__(
        self,
        clock: Clock,
        *,
        count: Callable[[], int | None] = open_descriptors,
        limit: Callable[[], int] = descriptor_limit,
    ) -> None:
        self._clock = clock
        self._count = count
        self._limit = limit
        self._sampled_s = -SAMPLE_S
        self._open = 0
        self._at_most = 0
        self._refused: Counter[str] = Counter()
        most = limit()
        self.connections = max(MIN_CONNECTIONS, (most - reserve_of(most) - (count() or 0)) // 2)
        """How many connections each door may hold: half of what there was room for when this was made."""

    @property
    def full(self) -> bool:
        """Whether nothing new may be opened; as of SAMPLE_S ago at most."""
        self._sample()
        return self._open >= self._at_most - reserve_of(self._at_most)

    def check(self, door: str, what: str, held: int = 0) -> None:
        """Raise ResourceExhausted, counted under ``door``, when ``what`` needs a descriptor that is not to be had.

        ``held``: connections that ``door`` holds already.
        """
        if held >= self.connections:
            self._refused[door] += 1
            raise ResourceExhausted(f"{held} connections are open, the limit: no room for {what}", RETRY_AFTER_S)
        if self.full:
            self._refused[door] += 1
            text = f"{self._open} of {self._at_most} file descriptors are open: no room for {what}"
            raise ResourceExhausted(text, RETRY_AFTER_S)

    def stats(self) -> DescriptorStats:
        """Now."""
        self._sampled_s = -SAMPLE_S
        self._sample()
        return DescriptorStats(self._open, self._at_most, dict(self._refused))

    def _sample(self) -> None:
        now_s = self._clock.monotonic_s()
        if now_s - self._sampled_s < SAMPLE_S:
            return
        self._sampled_s = now_s
        self._at_most = self._limit()
        count = self._count()
        self._open = self._at_most if count is None else count


class PeerGate:
    """Lets gRPC clients in: one that it knows always, a new one while there is room. Raises ResourceExhausted."""

    def __init__(self, descriptors: Descriptors) -> None:
        self._descriptors = descriptors
        self._known: OrderedDict[str, None] = OrderedDict()

    def __call__(self, peer: str) -> None:
        """``peer`` (address and port: one connection) makes a call."""
        if peer in self._known:
            return
        self._descriptors.check("grpc", "a new client")
        self._known[peer] = None
        if len(self._known) > MAX_KNOWN_PEERS:
            self._known.popitem(last=False)


def reserve_of(limit: int) -> int:
    """Descriptors that are not given to what is new."""
    return min(max(MIN_RESERVE, limit // RESERVE_SHARE), limit // 2)
