"""Leases that lapse while the reader dawdles and the pool is in great demand: reads are void, answers never wrong."""

from __future__ import annotations

import asyncio
import functools
import random
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.integration.worker_rig import Bench, Pair, begin_decode, begin_prefill, cancel, running_worker
from tests.unit.worker.pool_model import continuation
from weir.lifecycle import Role
from weir.rpc.v1 import decode_pb2, prefill_pb2
from weir.transfer.local import Faults

LEASE_MS = 50.0
LATE_S = 0.3
POOL_BLOCKS = 24
REQUESTS = 12
D = decode_pb2.DecodeServiceSessionRequest
P = prefill_pb2.PrefillServiceSessionRequest


@pytest.mark.parametrize(
    ("lease_ms", "reasons"),
    [(LEASE_MS, {"timeout", "lease_expired"}), (10_000.0, {"generation"})],
    ids=["lapsed", "ended"],
)
async def test_reads_that_come_too_late(lease_ms: float, reasons: set[str]) -> None:
    """P has 24 blocks and reuses them all the time; first reads land long after their lease lapsed or was ended."""
    seed = 11
    source, bench = random.Random(seed), Bench()
    bench.fabric.faults = Faults(before_data_s=lambda ticket: LATE_S if ticket.key.attempt == 1 else 0.0)
    async with AsyncExitStack() as stack:
        p = await stack.enter_async_context(running_worker(bench, Role.PREFILL, "p", num_blocks=POOL_BLOCKS))
        d = await stack.enter_async_context(running_worker(bench, Role.DECODE, "d", num_blocks=64))
        pair = await Pair(p, d).open()
        churn = asyncio.create_task(_churn(pair, random.Random(seed + 1)))
        prompts = [[source.randrange(3, 64) for _ in range(source.randrange(17, 44))] for _ in range(REQUESTS)]
        try:
            answers = [await _served(pair, f"late-{i}", prompt, lease_ms) for i, prompt in enumerate(prompts)]
        finally:
            churn.cancel()
            await asyncio.gather(churn, return_exceptions=True)
        assert answers == [continuation(prompt, 6) for prompt in prompts]
        voids = dict((await d.state()).void_reads)
        assert sum(voids.get(reason, 0) for reason in reasons) >= REQUESTS // 2, voids
        assert set(voids) <= {"generation", "checksum", "lease_expired", "timeout"}, voids
        await pair.close()
        await p.at_baseline()
        await d.at_baseline()


async def _churn(pair: Pair, source: random.Random) -> None:
    """Prompts that take the blocks of lapsed leases; they want one token and hold nothing."""
    number = 0
    while True:
        number += 1
        prompt = [source.randrange(3, 64) for _ in range(30)]
        await asyncio.shield(asyncio.ensure_future(pair.p.send(begin_prefill(f"churn-{number}", prompt, 1))))
        await pair.p.ended(f"churn-{number}")


async def _served(pair: Pair, name: str, prompt: list[int], lease_ms: float) -> list[int]:
    """Attempt after attempt, as a router does after a void read, until one is read to its end."""
    for attempt in range(1, 20):
        await pair.d.send(begin_decode(name, prompt, 6, pair.source, attempt=attempt))
        await pair.p.send(begin_prefill(name, prompt, 6, attempt=attempt, lease_ms=lease_ms))
        if attempt == 1 and lease_ms > LEASE_MS:
            await pair.p.expect(lambda message: any(made.request_id == name for made in message.first_tokens))
            await pair.p.send(cancel(P, name, attempt))
        void = await pair.d.expect(functools.partial(_outcome, name, attempt))
        if not isinstance(void, decode_pb2.KvReadDone):
            return _tokens(pair, name, attempt)
        for session, kind in ((pair.d, D), (pair.p, P)):
            await session.send(cancel(kind, name, attempt))
    raise AssertionError(f"{name} found no end")


def _outcome(name: str, attempt: int, message: Any) -> Any:
    """A void read or the end of the attempt."""
    for read in message.kv_reads:
        if (read.request_id, read.attempt) == (name, attempt) and read.void_reason:
            return read
    return next((end for end in message.ended if (end.request_id, end.attempt) == (name, attempt)), None)


def _tokens(pair: Pair, name: str, attempt: int) -> list[int]:
    first = [f.token_id for m in pair.p.seen for f in m.first_tokens if (f.request_id, f.attempt) == (name, attempt)]
    later = [
        t for m in pair.d.seen for b in m.tokens if (b.request_id, b.attempt) == (name, attempt) for t in b.token_ids
    ]
    return [*first, *later]
