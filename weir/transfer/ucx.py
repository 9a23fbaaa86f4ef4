"""NIXL agents on UCX as Weir needs them, and which transport UCX really chose.

The only file that imports nixl. Two things about nixl's Python class are put right here: its progress thread
spins (a core per process, even idle) unless it is given a poll interval, and its INFO lines go to the console.
"""

import contextlib
import ctypes
import logging
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

from weir.errors import InternalError, TransferUnavailable

UNRESOLVED = "ucx (unresolved)"
# How long UCX's progress thread sleeps when no event wakes it; NIXL rounds up to whole milliseconds.
_PROGRESS_INTERVAL_US = 10_000
# UCX's own default connects with a blocking call, under a lock: a peer whose packets are dropped would stop all reads,
# those from other peers too, for as long as TCP tries (two minutes).
_TCP_CONNECTS_WITHOUT_BLOCKING = (b"UCX_TCP_CONN_NB", b"y")
_READ_TITLE = "remote memory read by ucp_get"
_ROW = re.compile(r"\|\s*(\d+)(?:\.\.(\d+|inf))?\s*\|([^|]*)\|([^|]*)\|")

log = logging.getLogger(__name__)


def start_agent(name: str) -> Any:
    """A ``nixl_agent`` called ``name`` with the UCX back end. Raises TransferUnavailable with the reason."""
    _UcxLog.prepare()
    # For UCX alone, and not over what the operator has set.
    ctypes.CDLL(None).setenv(*_TCP_CONNECTS_WITHOUT_BLOCKING, 0)
    try:
        from nixl import _api as api
    except Exception as error:
        raise TransferUnavailable(f"NIXL cannot be imported: {error}") from error
    logging.getLogger("nixl").setLevel(logging.WARNING)
    try:
        agent = _construct(api, name)
    except Exception as error:
        raise TransferUnavailable(f"NIXL cannot start: {type(error).__name__}: {error}") from error
    if "UCX" not in agent.backends:
        raise TransferUnavailable(f"NIXL has no UCX back end; it has: {sorted(agent.plugin_list)}")
    _UcxLog.opened()
    return agent


def destroy_agent(agent: Any) -> None:
    """Destroy ``agent`` now, with its endpoints and all transfers it posted.

    Raises InternalError, and destroys nothing, if something else still refers to it.
    """
    bound, agent.agent = agent.agent, None
    references = sys.getrefcount(bound) - 2  # beside the name here and the call's argument
    if references:
        agent.agent = bound
        raise InternalError(f"NIXL agent {agent.name} is still referred to {references} times")
    del bound


def _construct(api: Any, name: str) -> Any:
    """Construct the agent with a poll interval, which nixl's constructor fixes at 0 (busy)."""
    bindings = api.nixlBind
    api.nixlBind = _PatientBindings(bindings)
    try:
        return api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"], enable_prog_thread=True))
    finally:
        api.nixlBind = bindings


class _PatientBindings:
    """nixl's bindings, but an agent's progress thread waits for events instead of spinning."""

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)

    def nixlAgent(self, name: str, config: Any) -> Any:
        config.pthrDelay = _PROGRESS_INTERVAL_US
        return self._bindings.nixlAgent(name, config)


def transport_in(text: str, size: int) -> str | None:
    """The transport of the last protocol table for reads in UCX's log ``text``, for ``size`` bytes.

    ``ucx:cma``, ``ucx:tcp``, ``ucx:rc_mlx5``; None when there is no such table.
    """
    found = None
    in_table = False
    for line in text.splitlines():
        if " by ucp_" in line:
            in_table = _READ_TITLE in line
            continue
        row = _ROW.search(line) if in_table else None
        if row is None:
            continue
        first, last = int(row[1]), row[2] or row[1]
        if first <= size and (last == "inf" or size <= int(last)):
            found = "ucx:" + row[4].split("/")[0].split()[-1]
    return found


def new_log_text() -> str:
    """What UCX has logged in this process since the last call."""
    return _UcxLog.drain()


class _UcxLog:
    """UCX's log, in a file without a name. UCX reads its settings once, when it is loaded: one per process."""

    _path: Path | None = None
    _file: BinaryIO | None = None

    @classmethod
    def prepare(cls) -> None:
        """Before nixl is imported: ask UCX to log its choice of protocols to a file."""
        if cls._path is not None:
            return
        cls._path = Path(tempfile.mkdtemp(prefix="weir-ucx-")) / "log"
        # putenv: for UCX alone. Neither this process's os.environ nor its children see it.
        os.putenv("UCX_PROTO_INFO", "y")
        os.putenv("UCX_LOG_FILE", str(cls._path))

    @classmethod
    def opened(cls) -> None:
        """After UCX has loaded: keep the file, drop its name."""
        if cls._path is None or cls._file is not None:
            return
        if cls._path.exists():
            cls._file = cls._path.open("rb")
            cls._path.unlink()
        with contextlib.suppress(OSError):
            cls._path.parent.rmdir()

    @classmethod
    def drain(cls) -> str:
        if cls._file is None:
            return ""
        # UCX's stream is buffered by the C library and UCX does not flush it.
        ctypes.CDLL(None).fflush(None)
        return cls._file.read().decode(errors="replace")
