"""``weir profile``: what this machine does with a model, fitted and stored for the router and the controller."""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from weir.balance.profile import Fit, Profile, fit, prefill_features, read_features, step_features
from weir.cli.paths import model_dir
from weir.clock import Clock, SystemClock
from weir.config.folders import profile_path

if TYPE_CHECKING:
    from weir.services.worker.parts import WorkerParts

CHUNK_TOKENS = 512
PREFILLS = [(16, 0), (64, 0), (128, 0), (256, 0), (512, 0), (1024, 0), (64, 512), (256, 512), (64, 1024), (256, 1024)]
STEPS = [(1, 64), (1, 1024), (2, 256), (4, 64), (4, 512), (8, 256), (8, 1024), (16, 64), (16, 256)]
READ_BLOCKS = [1, 2, 4, 8, 16, 32, 64]
REPEATS = 3


def run_profile(console: Console, model: str, threads: int, json: Path | None) -> None:
    """Measure, print the fits with their errors, and store the profile under the fingerprint's digest."""
    from weir.config import WorkerConfig
    from weir.services.worker.parts import build_parts  # torch loads only here

    cores = sorted(os.sched_getaffinity(0))[-threads:]
    os.sched_setaffinity(0, cores)
    import torch

    torch.set_num_threads(threads)
    clock = SystemClock()
    with console.status("loading the model"):
        parts = build_parts(WorkerConfig(model_path=str(model_dir(model)), num_blocks=1040), clock)
    with console.status("measuring"):
        profile = measure(parts, clock, threads)
    console.print(report(profile))
    path = json or profile_path(profile.fingerprint, profile.device, threads)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(profile.to_json())
    console.print(f"written to {path}", highlight=False, soft_wrap=True)


def measure(parts: WorkerParts, clock: Clock, threads: int) -> Profile:
    """Time the model on this process's cores, and reads between two processes."""
    prefill = fit(
        [prefill_features(*size) for size in PREFILLS],
        [_median(lambda size=size: _prefill_s(parts, clock, *size)) for size in PREFILLS],  # type: ignore[misc]
    )
    step = fit(
        [step_features(batch, batch * context) for batch, context in STEPS],
        [_median(lambda size=size: _step_s(parts, clock, *size)) for size in STEPS],  # type: ignore[misc]
    )
    return Profile(parts.fingerprint.digest().hex(), "cpu", threads, prefill, step, _read_fit(parts))


def _read_fit(parts: WorkerParts) -> Fit:
    from weir.cli.read_probe import probe_reads

    layout = parts.pool.layout
    reports = asyncio.run(probe_reads(layout, READ_BLOCKS, REPEATS))
    sizes = [each[0].bytes for each in reports]
    return fit(
        [read_features(size) for size in sizes],
        [statistics.median(report.total_s for report in each) for each in reports],
    )


def _median(once: Callable[[], float]) -> float:
    once()
    return statistics.median(once() for _ in range(REPEATS))


def _prefill_s(parts: WorkerParts, clock: Clock, tokens: int, cached: int) -> float:
    """Seconds to prefill ``tokens`` behind ``cached`` in chunks, as a worker does it."""
    from weir.services.worker.profile import prefill_batch

    start_s = clock.monotonic_s()
    done = 0
    while done < tokens:
        chunk = min(CHUNK_TOKENS, tokens - done)
        parts.runner.run(prefill_batch(cached + done, chunk, parts.pool.layout.block_size))
        done += chunk
    return clock.monotonic_s() - start_s


def _step_s(parts: WorkerParts, clock: Clock, batch: int, context: int) -> float:
    """Seconds of one decode step of ``batch`` sequences with ``context`` tokens each."""
    from weir.services.worker.profile import decode_batch

    work = decode_batch(batch, context, parts.pool.layout.block_size)
    start_s = clock.monotonic_s()
    parts.runner.run(work)
    return clock.monotonic_s() - start_s


def report(profile: Profile) -> Table:
    """The fits as a table."""
    table = Table(title=f"profile of {profile.fingerprint[:12]} on {profile.device}, {profile.threads} thread(s)")
    for heading in ("model", "fit", "R2", "largest residual", "at a typical size"):
        table.add_column(heading)

    def row(name: str, formula: str, fitted: Fit, typical: str) -> None:
        table.add_row(name, formula, f"{fitted.r_squared:.4f}", f"{100 * fitted.max_residual:.0f} %", typical)

    a, b, c = (1e3 * value for value in profile.prefill.coefficients)
    typical = f"1,024 tokens: {1e3 * profile.prefill_s(1024):.0f} ms"
    row("prefill, ms", f"{a:.2f} + {b:.4f} n + {c:.2e} n (cached + n/2)", profile.prefill, typical)
    a, b, c = (1e3 * value for value in profile.step.coefficients)
    typical = f"8 x 256 tokens: {1e3 * profile.step_s(8, 2048):.1f} ms"
    row("decode step, ms", f"{a:.2f} + {b:.3f} batch + {c:.2e} context", profile.step, typical)
    latency, per_byte = profile.read.coefficients
    rate = 1e-9 / per_byte if per_byte else float("inf")
    typical = f"47 MB: {1e3 * profile.read_s(47e6):.1f} ms"
    row("KV read, ms", f"{1e3 * latency:.2f} + bytes / {rate:.1f} GB/s", profile.read, typical)
    return table
