"""Server-sent events out of bytes as they arrive. Pure."""

from __future__ import annotations

from weir.errors import ResourceExhausted

MAX_PENDING_BYTES = 16 << 20


class SseReader:
    """``feed`` bytes, get the data of the events that they complete. Comments and other fields are dropped."""

    def __init__(self) -> None:
        self._pending = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Data of each event that ends within ``piece``; ResourceExhausted for an endless line."""
        lines = (self._pending + piece).split(b"\n")
        self._pending = lines.pop()
        if len(self._pending) > MAX_PENDING_BYTES:
            raise ResourceExhausted(f"a line of more than {MAX_PENDING_BYTES} bytes in an event stream")
        events = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
