"""What waits to be published: bounded, oldest dropped first, counted. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MAX_TRIES = 5


@dataclass(slots=True)
class Outgoing:
    """A message on its way; ``tries`` counts refusals by a server that was there."""

    subject: str
    payload: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    durable: bool = False
    tries: int = 0


class Outbox:
    """A queue of at most ``limit`` messages; a full one drops its oldest."""

    def __init__(self, limit: int) -> None:
        assert limit > 0, limit
        self._limit = limit
        self._queue: deque[Outgoing] = deque()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, message: Outgoing) -> None:
        """Append; may drop the oldest."""
        if len(self._queue) >= self._limit:
            self._queue.popleft()
            self.dropped += 1
        self._queue.append(message)

    def take(self, most: int) -> list[Outgoing]:
        """Remove and return up to ``most`` of the oldest messages, all durable or all not."""
        batch: list[Outgoing] = []
        while self._queue and len(batch) < most:
            if batch and self._queue[0].durable != batch[0].durable:
                break
            batch.append(self._queue.popleft())
        return batch

    def give_back(self, batch: Sequence[Outgoing]) -> None:
        """Put unsent messages back in front, in order; those refused MAX_TRIES times are dropped."""
        for message in reversed(batch):
            if message.tries >= MAX_TRIES or len(self._queue) >= self._limit:
                self.dropped += 1
            else:
                self._queue.appendleft(message)
