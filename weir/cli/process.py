"""One child process of the local cluster: started, awaited until READY, stopped; never outlives its parent."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from weir.errors import Unavailable
from weir.events.child import bound_to_parent

READY = "READY "
LOG_TAIL_LINES = 15


class ChildProcess:
    """A service process. ``ready`` holds the words after READY on its stdout; stderr goes to a log file."""

    def __init__(self, name: str, argv: Sequence[str], process: asyncio.subprocess.Process, log_path: Path) -> None:
        self.name = name
        self.argv = tuple(argv)
        """What it was started with."""
        self.log_path = log_path
        self.ready: list[str] = []
        self._process = process
        self._drain: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, name: str, argv: Sequence[str], log_path: Path, environment: Mapping[str, str] | None = None
    ) -> ChildProcess:
        """Start ``argv`` in a session of its own, so that Ctrl-C reaches only the parent, which stops it in order."""
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *bound_to_parent(argv, signal.SIGTERM),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        return cls(name, argv, process, log_path)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit status, or None while it runs."""
        return self._process.returncode

    async def wait_ready(self, timeout_s: float) -> list[str]:
        """The words after READY; Unavailable with the end of the log when it exits or is late."""
        try:
            async with asyncio.timeout(timeout_s):
                self.ready = await self._read_until_ready()
        except TimeoutError:
            raise Unavailable(f"{self.name} was not ready within {timeout_s:g} s\n{self.log_tail()}") from None
        self._drain = asyncio.create_task(self._discard_output(), name=f"drain-{self.name}")
        return self.ready

    async def _read_until_ready(self) -> list[str]:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            text = line.decode(errors="replace").strip()
            if text.startswith(READY):
                return text.split()[1:]
        code = await self._process.wait()
        raise Unavailable(f"{self.name} ended with exit code {code} before it was ready\n{self.log_tail()}")

    async def _discard_output(self) -> None:
        assert self._process.stdout is not None
        while await self._process.stdout.read(4096):
            pass

    async def wait(self) -> int:
        """Wait for the end; the exit status."""
        return await self._process.wait()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, if it still runs."""
        if self._process.returncode is None:
            self._process.send_signal(number)

    async def stop(self, grace_s: float) -> int:
        """SIGTERM, then SIGKILL after ``grace_s``; the exit status."""
        if self._process.returncode is None:
            self._process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                code = await self._process.wait()
        except (TimeoutError, asyncio.CancelledError):
            self.kill()
            code = await self._process.wait()
        if self._drain is not None:
            await self._drain
        return code

    def log_tail(self) -> str:
        """The last lines of its log, for error messages."""
        if not self.log_path.exists():
            return ""
        lines = self.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join(f"  {self.name} | {line}" for line in lines)
