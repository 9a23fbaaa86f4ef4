"""The workers as the router knows them: who, where, how loaded, and what was sent since they last said so. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from weir.ids import WorkerKey
from weir.lifecycle import Role

REPORT_LAG_S = 0.05
"""A load report may have been made this long before it arrives: work sent later is not yet in it."""
MAX_NOTED = 4096


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker's registry entry says. ``fingerprint`` is its digest; sizes are 0 when unknown."""

    key: WorkerKey
    role: Role
    role_epoch: int
    address: str
    draining: bool
    model: str
    fingerprint: bytes
    block_size: int
    num_blocks: int
    context_tokens: int
    model_path: str = ""
    max_running: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """A load report, newest by ``sequence``. ``free_blocks`` counts cached ones, which can be evicted."""

    sequence: int
    running: int
    waiting: int
    pending_prefill_tokens: int
    free_blocks: int
    total_blocks: int
    decode_step_ms: float = 0.0
    prefill_tokens_per_s: float = 0.0
    report: Any | None = None
    """The message it came in, for those who show it."""


NO_LOAD = Load(0, 0, 0, 0, 0, 0)


class WorkerView:
    """One worker. Read by policies; changed only by ``Fleet``."""

    __slots__ = (
        "_blocks_noted",
        "_decodes_noted",
        "_noted",
        "_tokens_noted",
        "connected",
        "info",
        "last_used",
        "listed",
        "load",
        "refuses_decode_until_s",
        "refuses_prefill_until_s",
    )

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info
        self.load = NO_LOAD
        self.connected = False
        self.listed = True
        self.last_used = 0
        """Grows with every dispatch in the fleet: the smallest is the least recently used."""
        self.refuses_prefill_until_s = 0.0
        self.refuses_decode_until_s = 0.0
        self._noted: dict[str, tuple[float, int, int, int]] = {}
        self._tokens_noted = 0
        self._decodes_noted = 0
        self._blocks_noted = 0

    @property
    def key(self) -> WorkerKey:
        """One process lifetime of the worker."""
        return self.info.key

    @property
    def usable(self) -> bool:
        """Whether it may be given new work."""
        return self.connected and self.listed and not self.info.draining

    @property
    def pending_prefill_tokens(self) -> int:
        """Prompt tokens it has yet to compute: reported, and sent since."""
        return self.load.pending_prefill_tokens + self._tokens_noted

    @property
    def sequences(self) -> int:
        """Sequences it decodes or will: reported, and sent since."""
        return self.load.running + self.load.waiting + self._decodes_noted

    @property
    def free_blocks(self) -> int:
        """Blocks that a new sequence could take, as far as known."""
        free = self.load.free_blocks if self.load.total_blocks else self.info.num_blocks
        return free - self._blocks_noted

    @property
    def total_blocks(self) -> int:
        """Blocks of its pool."""
        return self.load.total_blocks or self.info.num_blocks

    def blocks_for(self, tokens: int) -> int:
        """Blocks that ``tokens`` take there."""
        size = self.info.block_size
        return -(-tokens // size) if size else 0

    def note(self, request_id: str, now_s: float, tokens: int, decodes: int, blocks: int) -> None:
        """Count work sent until a report can contain it, or until it is over (``settle``)."""
        if len(self._noted) >= MAX_NOTED:
            self.settle(next(iter(self._noted)))
        self.settle(request_id)
        self._noted[request_id] = (now_s, tokens, decodes, blocks)
        self._tokens_noted += tokens
        self._decodes_noted += decodes
        self._blocks_noted += blocks

    def settle(self, request_id: str) -> None:
        """The work sent for this request is done, or will not be done."""
        noted = self._noted.pop(request_id, None)
        if noted is not None:
            _, tokens, decodes, blocks = noted
            self._tokens_noted -= tokens
            self._decodes_noted -= decodes
            self._blocks_noted -= blocks

    def take_report(self, load: Load, now_s: float) -> bool:
        """Take a report unless a newer one is known; whether it was taken."""
        if load.sequence <= self.load.sequence:
            return False
        self.load = load
        for request_id in self._contained(now_s - REPORT_LAG_S):
            self.settle(request_id)
        return True

    def _contained(self, sent_by_s: float) -> list[str]:
        """Requests noted until then; they are noted in the order of time."""
        contained = []
        for request_id, noted in self._noted.items():
            if noted[0] > sent_by_s:
                break
            contained.append(request_id)
        return contained


class Fleet:
    """All workers by identity. ``stale``: the registry cannot be reached and this is its last word."""

    def __init__(self) -> None:
        self._workers: dict[WorkerKey, WorkerView] = {}
        self._uses = 0
        self.stale = False

    def __iter__(self) -> Iterator[WorkerView]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, key: WorkerKey) -> WorkerView | None:
        """The worker, or None when it is not known."""
        return self._workers.get(key)

    def by_id(self, worker_id: str, incarnation: int) -> WorkerView | None:
        """As ``get``, from the parts."""
        return self._workers.get(WorkerKey(worker_id, incarnation))

    def put(self, info: WorkerInfo) -> WorkerView:
        """Add a worker or renew what is known of it."""
        view = self._workers.get(info.key)
        if view is None:
            view = self._workers[info.key] = WorkerView(info)
        elif info.role_epoch >= view.info.role_epoch:
            view.info = info
        view.listed = True
        return view

    def remove(self, key: WorkerKey) -> None:
        """Forget a worker."""
        self._workers.pop(key, None)

    def serving(self, model: str) -> list[WorkerView]:
        """Workers that may be given new work for ``model``."""
        return [view for view in self._workers.values() if view.usable and view.info.model == model]

    def token_limit(self, model: str) -> int:
        """Most tokens that one request can have on the best worker of ``model``; 0 when none is known."""
        limits = [_token_limit(view) for view in self._workers.values() if view.info.model == model]
        known = [limit for limit in limits if limit]
        return max(known) if known else 0

    def settle(self, worker: WorkerKey, request_id: str) -> None:
        """See WorkerView.settle."""
        view = self._workers.get(worker)
        if view is not None:
            view.settle(request_id)

    def used(self, view: WorkerView) -> None:
        """Note that ``view`` was given work now."""
        self._uses += 1
        view.last_used = self._uses


def _token_limit(view: WorkerView) -> int:
    pool = view.total_blocks * view.info.block_size
    context = view.info.context_tokens
    return min(pool, context) if pool and context else pool or context
