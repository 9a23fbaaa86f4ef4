"""``weir bench handover``: what splitting costs one request, against a mixed worker in the same run."""

from __future__ import annotations

import itertools
import json
import random
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from weir.cli.cluster import Cluster, ClusterSpec
from weir.client import AsyncClient, Delta, Final
from weir.clock import SystemClock
from weir.errors import InternalError

OUTPUT_TOKENS = 16
FIRST_ID, LAST_ID = 200, 40_000


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its client saw it, in milliseconds; ``kv_*`` are zero on a mixed worker."""

    ttft_ms: float
    second_gap_ms: float
    step_ms: float
    kv_bytes: int
    kv_busy_ms: float
    kv_exposed_ms: float
    kv_guard_ms: float
    kv_checksum_ms: float
    descriptors: int
    transport: str


async def one_request(client: AsyncClient, prompt: list[int]) -> Sample:
    """Send one request of token ids, greedy, and time its tokens at the client."""
    clock = SystemClock()
    start_s = clock.monotonic_s()
    arrivals: list[float] = []
    final: Final | None = None
    async for event in client.generate(prompt, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True):
        if isinstance(event, Delta):
            arrivals.extend([clock.monotonic_s()] * len(event.token_ids))
        elif isinstance(event, Final):
            final = event
    if final is None or len(arrivals) != OUTPUT_TOKENS:
        raise InternalError(f"{len(arrivals)} tokens instead of {OUTPUT_TOKENS}")
    gaps_ms = [1e3 * (b - a) for a, b in itertools.pairwise(arrivals)]
    kv = final.timings.kv_read
    return Sample(
        ttft_ms=1e3 * (arrivals[0] - start_s),
        second_gap_ms=gaps_ms[0],
        step_ms=statistics.median(gaps_ms[1:]),
        kv_bytes=kv.bytes if kv else 0,
        kv_busy_ms=kv.busy_ms if kv else 0.0,
        kv_exposed_ms=kv.exposed_ms if kv else 0.0,
        kv_guard_ms=kv.guard_ms if kv else 0.0,
        kv_checksum_ms=kv.checksum_ms if kv else 0.0,
        descriptors=kv.descriptors if kv else 0,
        transport=kv.transport if kv else "",
    )


async def measure(
    console: Console, model_dir: Path, *, prefill: int, decode: int, mixed: int, tokens: int, runs: int
) -> list[Sample]:
    """Samples of ``runs`` requests, one at a time, each with a prompt never seen before."""
    source = random.Random(tokens)
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as scratch:
        spec = ClusterSpec(model_dir, model_dir.name, Path(scratch), prefill=prefill, decode=decode, mixed=mixed)
        async with Cluster(spec) as cluster, AsyncClient(cluster.router_address) as client:
            samples = []
            for index in range(runs + 1):
                sample = await one_request(client, [source.randrange(FIRST_ID, LAST_ID) for _ in range(tokens)])
                if index > 0:  # the first one warms up
                    samples.append(sample)
                    console.print(
                        f"  ttft {sample.ttft_ms:8.1f} ms  2nd {sample.second_gap_ms:6.1f} ms", style="grey50"
                    )
            return samples


def summary(split: list[Sample], mixed: list[Sample]) -> dict[str, Any]:
    """Medians and the ratios that matter."""

    def median(samples: list[Sample], name: str) -> float:
        return float(statistics.median(getattr(s, name) for s in samples))

    step_ms = median(split, "step_ms")
    busy_ms = median(split, "kv_busy_ms")
    kv_bytes = median(split, "kv_bytes")
    return {
        "pd_ttft_ms": median(split, "ttft_ms"),
        "mixed_ttft_ms": median(mixed, "ttft_ms"),
        "ttft_ratio": median(split, "ttft_ms") / median(mixed, "ttft_ms"),
        "step_ms": step_ms,
        "second_token_ms": median(split, "second_gap_ms"),
        "second_token_over_step_ms": median(split, "second_gap_ms") - step_ms,
        "mixed_second_token_ms": median(mixed, "second_gap_ms"),
        "kv_bytes": kv_bytes,
        "kv_gb_per_s": kv_bytes / busy_ms / 1e6 if busy_ms else 0.0,
        "kv_busy_ms": busy_ms,
        "kv_exposed_ms": median(split, "kv_exposed_ms"),
        "kv_guard_ms": median(split, "kv_guard_ms"),
        "kv_checksum_ms": median(split, "kv_checksum_ms"),
        "descriptors": median(split, "descriptors"),
        "transport": split[0].transport,
    }


async def run_bench_handover(console: Console, model_dir: Path, tokens: int, runs: int, out: Path | None) -> None:
    """Measure one pair, then one mixed worker, and print the comparison."""
    console.print(f"prefill + decode, {runs} prompts of {tokens} tokens")
    split = await measure(console, model_dir, prefill=1, decode=1, mixed=0, tokens=tokens, runs=runs)
    console.print("mixed")
    # Two of them, so that each has as many cores as a worker of the pair.
    mixed = await measure(console, model_dir, prefill=0, decode=0, mixed=2, tokens=tokens, runs=runs)
    figures = summary(split, mixed)
    table = Table(title=f"hand-over of {tokens} tokens (medians of {runs})", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.3f}" if isinstance(value, float) else str(value))
    console.print(table)
    if out is not None:
        samples = {"pd": [asdict(s) for s in split], "mixed": [asdict(s) for s in mixed]}
        out.write_text(json.dumps({"figures": figures, "samples": samples}, indent=1))
