"""The workers that may be given new work for one model, by role, with the least busy ones at hand. Pure.

A group of up to SMALL workers is looked at as a whole. A larger one offers its least busy, kept in a heap that is
brought up to date as workers change, and some drawn at random: the draw is what keeps several routers with the
same, slightly old view from all running after the same worker.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from weir.lifecycle import Role

if TYPE_CHECKING:
    from weir.services.router.fleet import WorkerView

SMALL = 8
LEAST_BUSY = 3
DRAWN = 2
STALE_SHARE = 4
"""The heap is made anew once it has this many entries per worker."""


class Group:
    """Workers of one role. ``followed``: whoever changes the load of one calls ``touch`` of the view's group."""

    __slots__ = ("_heap", "_serial", "views")

    def __init__(self, views: Sequence[WorkerView], *, followed: bool) -> None:
        self.views = views
        self._serial = 0
        self._heap: list[tuple[float, int, float, int, int, WorkerView]] | None = None
        if not followed:
            return
        for view in views:
            view.group = self
        if len(views) > SMALL:
            self._rebuild()

    def touch(self, view: WorkerView) -> None:
        """``view`` has another load, or was used."""
        heap = self._heap
        if heap is None:
            return
        if len(heap) > STALE_SHARE * len(self.views):
            self._rebuild()
            return
        heapq.heappush(heap, self._item(view))
        # Here rather than in a decision: whoever waits for one should not pay for many changes at once.
        while heap[0][4] != heap[0][5].version:
            heapq.heappop(heap)

    def candidates(self, draw: Callable[[], float]) -> Sequence[WorkerView]:
        """All of a small group; of a large one the least busy and some drawn by ``draw`` (numbers in [0, 1))."""
        if self._heap is None:
            return self.views
        found = self._least_busy()
        size = len(self.views)
        for _ in range(DRAWN):
            view = self.views[int(draw() * size)]
            if view not in found:
                found.append(view)
        return found

    def _least_busy(self) -> list[WorkerView]:
        heap = self._heap
        assert heap is not None
        taken = []
        found: list[WorkerView] = []
        while heap and len(found) < LEAST_BUSY:
            item = heapq.heappop(heap)
            view = item[5]
            if item[4] == view.version:
                taken.append(item)
                found.append(view)
        for item in taken:
            heapq.heappush(heap, item)
        return found

    def _rebuild(self) -> None:
        self._heap = [self._item(view) for view in self.views]
        heapq.heapify(self._heap)

    def _item(self, view: WorkerView) -> tuple[float, int, float, int, int, WorkerView]:
        self._serial += 1
        return (view.rough_load_ms(), view.last_used, view.salt, self._serial, view.version, view)


class Roster(list["WorkerView"]):
    """All of them, as a list that is not changed, and by role. Only one roster at a time follows a worker."""

    def __init__(self, views: Iterable[WorkerView], *, followed: bool = False) -> None:
        super().__init__(views)
        self.decodes = Group([view for view in self if view.info.role is Role.DECODE], followed=followed)
        self.mixed = Group([view for view in self if view.info.role is Role.MIXED], followed=followed)
        self.members = {view.key: view for view in self}
        self.readable = frozenset(view.info.fingerprint for view in self.decodes.views)
        """Fingerprints of KV that some decode worker can read."""
        read: list[WorkerView] = []
        unread: list[WorkerView] = []
        for view in self:
            if view.info.role is Role.PREFILL:
                (read if view.info.fingerprint in self.readable else unread).append(view)
        self.prefills = Group(read, followed=followed)
        self.unread = Group(unread, followed=followed)
        """Prefill workers of no use as long as nobody can read their KV."""
        self.kinds = list(dict.fromkeys((view.info.fingerprint, view.info.block_size) for view in self))
        """What prompts must be hashed for."""
        self._prompt_limits = sorted({view.info.prompt_tokens for view in self})
        self._request_limits = sorted({view.info.request_tokens for view in self})
        self._holding: dict[tuple[int, int], Roster] = {}
        revisions = {view.info.revision for view in self}
        self._only_revision = revisions.pop() if len(revisions) == 1 else None
        self._revisions: dict[str, Roster] = {}

    @property
    def decodes_any(self) -> bool:
        """Whether somebody decodes."""
        return bool(self.decodes.views or self.mixed.views)

    def strands(self, fingerprint: bytes) -> bool:
        """Whether somebody decodes, but nobody who can read KV of ``fingerprint``."""
        if self.decodes.views:
            return fingerprint not in self.readable
        return bool(self.mixed.views) and all(view.fingerprint != fingerprint for view in self.mixed.views)

    def holding(self, prompt_tokens: int, max_tokens: int) -> Roster:
        """Those that could hold such a request, not followed; itself when all could. Kept, by what is alike."""
        tokens = prompt_tokens + max_tokens
        size = (bisect_left(self._prompt_limits, prompt_tokens), bisect_left(self._request_limits, tokens))
        if size == (0, 0):
            return self
        found = self._holding.get(size)
        if found is None:
            found = Roster(view for view in self if view.info.holds(prompt_tokens, max_tokens))
            self._holding[size] = found
        return found

    def of_revision(self, revision: str) -> Roster:
        """Those that compute as ``revision`` does, not followed; itself when all do. Kept."""
        if revision == self._only_revision:
            return self
        found = self._revisions.get(revision)
        if found is None:
            found = self._revisions[revision] = Roster(view for view in self if view.info.revision == revision)
        return found
