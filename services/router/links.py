"""The links to all workers: made when one is listed, given up when it is gone or silent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from weir.clock import Clock
from weir.ids import WorkerKey
from weir.rpc.channel import channel
from weir.rpc.limits import RpcLimits
from weir.rpc.v1 import prefill_pb2
from weir.services.router.sessions import LinkOwner, OpenChannel, WorkerLink

_log = logging.getLogger(__name__)

FLUSH_S = 0.25
SILENCE_S = 2.0
"""A worker that is no longer listed and says nothing for this long is gone, whatever its connection says."""


class Links:
    """``want`` and ``unwant`` follow the registry; the links do the rest."""

    def __init__(
        self,
        owner: LinkOwner,
        router_id: str,
        incarnation: int,
        *,
        clock: Clock,
        limits: RpcLimits,
        connect_timeout_s: float,
        random: Callable[[], float],
        open_channel: OpenChannel = channel,
    ) -> None:
        self._owner = owner
        self._router_id = router_id
        self._incarnation = incarnation
        self._clock = clock
        self._limits = limits
        self._connect_timeout_s = connect_timeout_s
        self._random = random
        self._open_channel = open_channel
        self._links: dict[WorkerKey, WorkerLink] = {}
        self._unwanted: dict[WorkerKey, asyncio.TimerHandle] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, worker: WorkerKey) -> WorkerLink | None:
        """The link, up or not."""
        return self._links.get(worker)

    @property
    def up(self) -> int:
        """Links that are up; each has two sessions."""
        return sum(link.up for link in self._links.values())

    def want(self, worker: WorkerKey, address: str) -> None:
        """Keep a link to ``worker``; a link to an older life of it is broken, and one to another address."""
        for key in [key for key in self._links if key.worker_id == worker.worker_id and key != worker]:
            self._give_up(key)
        timer = self._unwanted.pop(worker, None)
        if timer is not None:
            timer.cancel()
        link = self._links.get(worker)
        if link is not None and link.address == address and link.keep:
            return
        if link is not None:
            self._give_up(worker)
        link = WorkerLink(
            worker,
            address,
            prefill_pb2.SessionHello(
                router_id=self._router_id,
                router_incarnation=self._incarnation,
                worker_id=worker.worker_id,
                worker_incarnation=worker.incarnation,
            ),
            self._owner,
            clock=self._clock,
            limits=self._limits,
            connect_timeout_s=self._connect_timeout_s,
            random=self._random,
            open_channel=self._open_channel,
        )
        self._links[worker] = link
        link.start()

    def unwant(self, worker: WorkerKey) -> None:
        """``worker`` is not listed any more: running work may end as long as it is heard of."""
        link = self._links.get(worker)
        if link is None:
            return
        if not link.up:
            self._give_up(worker)
            return
        self._watch_silence(worker, link)

    def _watch_silence(self, worker: WorkerKey, link: WorkerLink) -> None:
        loop = asyncio.get_running_loop()
        heard_s = link.heard_s

        def look() -> None:
            self._unwanted.pop(worker, None)
            if self._links.get(worker) is not link:
                return
            if not link.up or link.heard_s == heard_s:
                _log.info("%s is not listed and silent for %g s: given up", worker, SILENCE_S)
                self._give_up(worker)
            else:
                self._watch_silence(worker, link)

        self._unwanted[worker] = loop.call_later(SILENCE_S, look)

    def _give_up(self, worker: WorkerKey) -> None:
        link = self._links.pop(worker)
        timer = self._unwanted.pop(worker, None)
        if timer is not None:
            timer.cancel()
        task = asyncio.get_running_loop().create_task(link.close(), name=f"close link {worker}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Send what waits, for at most FLUSH_S, then break all links and wait until they are gone."""
        try:
            async with asyncio.timeout(FLUSH_S):
                while any(link.unsent for link in self._links.values()):  # noqa: ASYNC110
                    await asyncio.sleep(FLUSH_S / 50)
        except TimeoutError:
            _log.warning("closing with commands unsent: a worker does not read")
        for worker in list(self._links):
            self._give_up(worker)
        await asyncio.gather(*self._closing, return_exceptions=True)
