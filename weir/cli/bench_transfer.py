"""``weir bench transfer``: a proven read beside a raw NIXL READ and a memcpy of the same bytes, in one run."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from weir.cli.read_peer import make_layout
from weir.cli.read_probe import probe_reads
from weir.clock import Clock, SystemClock
from weir.errors import InternalError, TransferUnavailable
from weir.transfer.plan import ReadReport
from weir.transfer.ucx import destroy_agent, start_agent

RAW_TIMEOUT_S = 30.0
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class TransferRow:
    """Medians for one size, in milliseconds; ``proven`` contains data, guard, checksums and the proof."""

    blocks: int
    bytes: int
    transport: str
    proven_ms: float
    data_ms: float
    guard_ms: float
    checksum_ms: float
    raw_ms: float
    memcpy_ms: float

    @property
    def over_raw(self) -> float:
        """Proven read over raw READ."""
        return self.proven_ms / self.raw_ms


class RawReader:
    """Reads the far process's buffer with one descriptor and a busy poll: as fast as NIXL goes."""

    def __init__(self, metadata: bytes, address: int, size: int, clock: Clock) -> None:
        self.buffer = np.zeros(size // 8, dtype=np.uint64)
        self._address = address
        self._clock = clock
        self._agent = start_agent("raw-near")
        self._registered = self._agent.register_memory([(self.buffer.ctypes.data, self.buffer.nbytes, 0, "")], "DRAM")
        name = self._agent.add_remote_agent(metadata)
        self._remote = name.decode() if isinstance(name, bytes) else name

    def read(self, size: int) -> float:
        """Read the first ``size`` bytes; seconds from building the request until it is done."""
        agent, clock = self._agent, self._clock
        started_s = clock.monotonic_s()
        here = agent.get_xfer_descs([(self.buffer.ctypes.data, size, 0)], "DRAM")
        there = agent.get_xfer_descs([(self._address, size, 0)], "DRAM")
        handle = agent.initialize_xfer("READ", here, there, self._remote)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
            if clock.monotonic_s() - started_s > RAW_TIMEOUT_S:
                raise TransferUnavailable("the raw READ did not end in time")
        took_s = clock.monotonic_s() - started_s
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise TransferUnavailable(f"the raw READ ended as {state}")
        return took_s

    def close(self) -> None:
        """Deregister and destroy the agent."""
        self._agent.deregister_memory(self._registered)
        destroy_agent(self._agent)


async def raw_reads(sizes: Sequence[int], repeats: int, clock: Clock) -> list[list[float]]:
    """Seconds of ``repeats`` raw READs of each size, after one that does not count."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "weir.cli.bench_raw_peer", str(max(sizes)),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        metadata, address = [base64.b64decode(await process.stdout.readline()) for _ in range(2)]
        reader = RawReader(metadata, int(address), max(sizes), clock)
        try:
            times = [[reader.read(size) for _ in range(repeats + 1)][1:] for size in sizes]
        finally:
            reader.close()
        if not bool((reader.buffer == np.arange(len(reader.buffer), dtype=np.uint64)).all()):
            raise InternalError("the raw READ brought other bytes")
    finally:
        process.kill()
        await process.wait()
    return times


def memcpy_times(sizes: Sequence[int], repeats: int, clock: Clock) -> list[list[float]]:
    """Seconds of ``repeats`` copies within this process, after one that does not count."""
    source = np.arange(max(sizes) // 8, dtype=np.uint64)
    target = np.zeros_like(source)

    def copy(size: int) -> float:
        started_s = clock.monotonic_s()
        np.copyto(target[: size // 8], source[: size // 8])
        return clock.monotonic_s() - started_s

    return [[copy(size) for _ in range(repeats + 1)][1:] for size in sizes]


async def measure_transfer(blocks: Sequence[int], repeats: int) -> list[TransferRow]:
    """One row for each number of blocks of the demo model's size.

    The three are measured in turn, ``ROUNDS`` times, so that all of them have seen the same machine.
    """
    layout, clock = make_layout(30, 3, 64), SystemClock()
    sizes = [count * layout.block_bytes for count in blocks]
    each = max(1, repeats // ROUNDS)
    copies: list[list[float]] = [[] for _ in blocks]
    raw: list[list[float]] = [[] for _ in blocks]
    proven: list[list[ReadReport]] = [[] for _ in blocks]
    for _ in range(ROUNDS):
        for place, times in enumerate(memcpy_times(sizes, each, clock)):
            copies[place] += times
        for place, times in enumerate(await raw_reads(sizes, each, clock)):
            raw[place] += times
        for place, reports in enumerate(await probe_reads(layout, blocks, each)):
            proven[place] += reports
    return [_row(*row) for row in zip(blocks, proven, raw, copies, strict=True)]


def _row(blocks: int, proven: Sequence[ReadReport], raw: Sequence[float], copies: Sequence[float]) -> TransferRow:
    def median_ms(value: Callable[[ReadReport], float]) -> float:
        return 1e3 * statistics.median(map(value, proven))

    return TransferRow(
        blocks=blocks,
        bytes=proven[0].bytes,
        transport=proven[0].transport,
        proven_ms=median_ms(lambda r: r.total_s),
        data_ms=median_ms(lambda r: r.data_s),
        guard_ms=median_ms(lambda r: r.guard_s),
        checksum_ms=median_ms(lambda r: r.checksum_s),
        raw_ms=1e3 * statistics.median(raw),
        memcpy_ms=1e3 * statistics.median(copies),
    )


async def run_bench_transfer(console: Console, blocks: Sequence[int], repeats: int, out: Path | None) -> dict[str, Any]:
    """Measure and print."""
    rows = await measure_transfer(blocks, repeats)
    table = Table(title=f"KV read, medians of {repeats}, blocks of 16 tokens ({rows[0].transport})")
    for heading in ("blocks", "MB", "proven ms", "data", "guard", "checksum", "raw READ ms", "memcpy ms", "proven/raw"):
        table.add_column(heading, justify="right")
    for r in rows:
        times = (r.proven_ms, r.data_ms, r.guard_ms, r.checksum_ms, r.raw_ms, r.memcpy_ms)
        table.add_row(str(r.blocks), f"{r.bytes / 1e6:.2f}", *(f"{t:.2f}" for t in times), f"{r.over_raw:.2f}")
    console.print(table)
    document = {"rows": [dataclasses.asdict(r) | {"over_raw": r.over_raw} for r in rows]}
    if out is not None:
        out.write_text(json.dumps(document, indent=1), encoding="utf-8")
    return document
