"""Runs a plan in the generator's process and collects what it saw."""

from __future__ import annotations

import asyncio
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from weir.bench.plan import LoadPlan
from weir.bench.records import RequestRecord
from weir.bench.watchdog import GeneratorHealth
from weir.errors import InternalError
from weir.events.child import bound_to_parent

MAX_LINE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Records in the order of the plan; ``start_s`` is the run's start on the machine's monotonic clock."""

    records: tuple[RequestRecord, ...]
    start_s: float
    duration_s: float
    health: GeneratorHealth


def _ignore(_: Any) -> None:
    pass


async def run_load(
    plan: LoadPlan,
    *,
    on_started: Callable[[float], None] = _ignore,
    on_record: Callable[[RequestRecord], None] = _ignore,
) -> LoadResult:
    """Run ``plan``; the callbacks get the start (monotonic seconds, slightly ahead) and each record as it ends.

    Raises InternalError when the generator itself fails; failures of requests are in their records. Cancelling
    this ends the generator and thereby its requests.
    """
    process = await asyncio.create_subprocess_exec(
        *bound_to_parent([sys.executable, "-m", "weir.bench.generator"], signal.SIGKILL),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=MAX_LINE_BYTES,
    )
    try:
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(plan))
        process.stdin.close()
        result = await _collect(process, on_started, on_record)
    except BaseException:
        if process.returncode is None:
            process.kill()
        raise
    finally:
        code = await process.wait()
    if result is None or len(result.records) != len(plan.prompts):
        raise InternalError(f"the load generator ended with exit code {code} before its run was over")
    return result


async def _collect(
    process: asyncio.subprocess.Process,
    on_started: Callable[[float], None],
    on_record: Callable[[RequestRecord], None],
) -> LoadResult | None:
    assert process.stdout is not None
    start_s, records = 0.0, list[RequestRecord]()
    while line := await process.stdout.readline():
        event = orjson.loads(line)
        if event["event"] == "started":
            start_s = event["monotonic_s"]
            on_started(start_s)
        elif event["event"] == "record":
            fields = event["record"]
            records.append(RequestRecord(**{**fields, "token_times_s": tuple(fields["token_times_s"])}))
            on_record(records[-1])
        else:
            ordered = tuple(sorted(records, key=lambda r: r.index))
            return LoadResult(ordered, start_s, event["duration_s"], GeneratorHealth(**event["health"]))
    return None
