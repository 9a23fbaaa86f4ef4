"""Tickets that are not as they were issued, on real workers: nothing that one of them promises is ever believed."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.integration.worker_rig import (
    Bench,
    Pair,
    RunningWorker,
    begin_decode,
    begin_prefill,
    cancel,
    eventually,
    running_worker,
)
from tests.unit.worker.pool_model import continuation
from weir.lifecycle import Role
from weir.rpc.v1 import decode_pb2, kv_pb2, prefill_pb2
from weir.transfer.ticket import VoidReason

PER_REQUEST = 25
REQUESTS = 400
D = decode_pb2.DecodeServiceSessionRequest
MALFORMED_FIELDS = ("lease_id", "attempt", "first_block", "num_tokens", "source_incarnation")


class TicketBench:
    """Two workers in this process, a loop that runs them, and a router's sessions that keep every ticket."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.number = 0
        self.seen: list[kv_pb2.KvTicket] = []
        self._stack = AsyncExitStack()

    async def open(self) -> None:
        """Start the workers."""
        bench = Bench()
        self.p: RunningWorker = await self._stack.enter_async_context(running_worker(bench, Role.PREFILL, "p"))
        self.d: RunningWorker = await self._stack.enter_async_context(running_worker(bench, Role.DECODE, "d"))
        self.pair = await Pair(self.p, self.d).open()
        self.pair.hold_tickets = True

    async def close(self) -> None:
        """Nothing is left, and no step thread died."""
        await self.p.at_baseline()
        await self.d.at_baseline()
        await self.pair.close()
        assert self.p.host.step_loop.dead is None
        assert self.d.host.step_loop.dead is None
        await self._stack.aclose()

    async def present(self, prompt: list[int], mutations: list[tuple[int, int, int]]) -> None:
        """One request: altered tickets first, the true ones then, and its tokens must be right."""
        self.number += 1
        name = f"m-{self.number}"
        expected = continuation(prompt, 4)
        await self.pair.d.send(begin_decode(name, prompt, 4, self.pair.source))
        await self.pair.p.send(begin_prefill(name, prompt, 4))
        first = await self.pair.p.expect(lambda m: next((f for f in m.first_tokens if f.request_id == name), None))
        if first.finish_reason:
            await self._end(name)
            return
        await eventually(lambda: any(r.ticket.request_id == name and r.ticket.final for r in self.pair.tickets))
        true = [ready for ready in self.pair.tickets if ready.ticket.request_id == name]
        altered = [alter(true[-1].ticket, self.seen, *mutation) for mutation in mutations]
        self.seen = [*self.seen, true[-1].ticket][-50:]
        await self.pair.d.send(D(kv_ready=[prefill_pb2.KvReady(ticket=ticket) for ticket in altered]))
        await self.pair.d.send(D(kv_ready=true))
        resending = asyncio.create_task(self._resend_after_void(name, true))
        assert await self.pair.tokens(name) == expected
        async with self.pair.d._writing:  # a write that is cancelled takes the whole stream along
            resending.cancel()
        await self._end(name)
        self.pair.tickets.clear()
        self.pair.d.seen.clear()

    async def _end(self, name: str) -> None:
        """As a router does for a request that has finished: nothing is kept for it, read or not."""
        await self.pair.d.send(cancel(D, name))
        await self.pair.p.send(cancel(prefill_pb2.PrefillServiceSessionRequest, name))

    async def _resend_after_void(self, name: str, true: list[prefill_pb2.KvReady]) -> None:
        """As a router does when a read under a lease that lives is void."""
        answered = 0
        while True:

            def voids(message: Any) -> int:
                return sum(read.request_id == name and bool(read.void_reason) for read in message.kv_reads)

            async with self.pair.d._arrived:
                while (found := sum(map(voids, self.pair.d.seen))) == answered:
                    await self.pair.d._arrived.wait()
            answered = found
            await self.pair.d.send(D(kv_ready=true))


def alter(true: kv_pb2.KvTicket, others: list[kv_pb2.KvTicket], kind: int, a: int, b: int) -> kv_pb2.KvTicket:
    """``true`` with one thing changed; a change that changes nothing is made another."""
    ticket = kv_pb2.KvTicket()
    ticket.CopyFrom(true)
    ALTERATIONS[kind % len(ALTERATIONS)](ticket, others, a, b)
    if ticket == true:
        ticket.lease_id += 1
    return ticket


def _other_block(ticket: kv_pb2.KvTicket, others: list[kv_pb2.KvTicket], a: int, b: int) -> None:
    ticket.blocks[a % len(ticket.blocks)] = b % 140  # the pool has 128


def _swapped(ticket: kv_pb2.KvTicket, others: list[kv_pb2.KvTicket], a: int, b: int) -> None:
    i, j = a % len(ticket.blocks), b % len(ticket.blocks)
    for values in (ticket.blocks, ticket.generations):
        values[i], values[j] = values[j], values[i]


def _foreign_pair(ticket: kv_pb2.KvTicket, others: list[kv_pb2.KvTicket], a: int, b: int) -> None:
    """A block of another request under its true generation."""
    if others:
        other = others[a % len(others)]
        i, j = b % len(ticket.blocks), b % len(other.blocks)
        ticket.blocks[i], ticket.generations[i] = other.blocks[j], other.generations[j]


def _relabelled(ticket: kv_pb2.KvTicket, others: list[kv_pb2.KvTicket], a: int, b: int) -> None:
    """Another request's ticket under this one's name."""
    if others:
        request_id, attempt = ticket.request_id, ticket.attempt
        lease_id, tokens = ticket.lease_id, ticket.num_tokens
        ticket.CopyFrom(others[a % len(others)])
        ticket.request_id, ticket.attempt = request_id, attempt
        if b % 2:
            ticket.lease_id = lease_id
        if b % 3 == 0:
            ticket.num_tokens = tokens


def _generation(ticket: kv_pb2.KvTicket, others: list[kv_pb2.KvTicket], a: int, b: int) -> None:
    i = a % len(ticket.generations)
    ticket.generations[i] = (ticket.generations[i] + b % 5 - 2) % 2**64


def _number(ticket: kv_pb2.KvTicket, others: list[kv_pb2.KvTicket], a: int, b: int) -> None:
    field = MALFORMED_FIELDS[a % len(MALFORMED_FIELDS)]
    setattr(ticket, field, (getattr(ticket, field) + b % 7 - 3) % 2**32)


def _name(ticket: kv_pb2.KvTicket, others: list[kv_pb2.KvTicket], a: int, b: int) -> None:
    if a % 2:
        ticket.source_worker_id = ("d", "", "q" * (b % 300))[b % 3]
    else:
        ticket.fingerprint_digest = bytes([b % 256]) + ticket.fingerprint_digest[1:]


def _deadline(ticket: kv_pb2.KvTicket, others: list[kv_pb2.KvTicket], a: int, b: int) -> None:
    ticket.deadline_unix_s = (0.0, -1.0, float("nan"), float("inf"), 1.0, ticket.deadline_unix_s + b)[a % 6]


def _length(ticket: kv_pb2.KvTicket, others: list[kv_pb2.KvTicket], a: int, b: int) -> None:
    if a % 3 == 0:
        del ticket.blocks[b % len(ticket.blocks)]
    if a % 3 == 1:
        del ticket.generations[b % len(ticket.generations)]
    if a % 3 == 2:
        ticket.blocks.append(b % 128)
        ticket.generations.append(b % 3)


def _not_final(ticket: kv_pb2.KvTicket, others: list[kv_pb2.KvTicket], a: int, b: int) -> None:
    ticket.final = not ticket.final


def _bit(ticket: kv_pb2.KvTicket, others: list[kv_pb2.KvTicket], a: int, b: int) -> None:
    """One bit of the message flipped on its way; the wire may make no message of it at all."""
    raw = bytearray(ticket.SerializeToString())
    raw[a % len(raw)] ^= 1 << b % 8
    flipped = kv_pb2.KvTicket()
    with contextlib.suppress(DecodeError):
        flipped.ParseFromString(bytes(raw))
        ticket.CopyFrom(flipped)


ALTERATIONS = (
    _other_block, _swapped, _foreign_pair, _relabelled, _generation, _number, _name, _deadline, _length, _not_final,
    _bit,
)  # fmt: skip


@pytest.fixture(scope="module")
def bench() -> Iterator[TicketBench]:
    made = TicketBench()
    made.runner.run(made.open())
    yield made
    made.runner.run(made.close())
    made.runner.close()


@pytest.mark.parametrize("kind", range(4), ids=["other block", "exchanged", "foreign block", "other request's"])
def test_what_generations_alone_would_let_pass(bench: TicketBench, kind: int) -> None:
    """One altered ticket whose every block has the generation that it is promised under."""
    source = random.Random(kind)
    before = dict(bench.runner.run(bench.d.state()).void_reads)
    for _ in range(2):  # the second has the first one's ticket to take from
        bench.runner.run(bench.present([source.randrange(64) for _ in range(24)], [(kind, 0, 7)]))
    after = dict(bench.runner.run(bench.d.state()).void_reads)
    assert after.get("altered", 0) > before.get("altered", 0)


@settings(
    max_examples=REQUESTS,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
    derandomize=True,
    database=None,
)
@given(
    seed=st.integers(0, 2**32),
    length=st.integers(5, 60),
    mutations=st.lists(
        st.tuples(st.integers(0, 1_000), st.integers(0, 2**20), st.integers(0, 2**20)),
        min_size=PER_REQUEST,
        max_size=PER_REQUEST,
    ),
)
def test_ten_thousand_altered_tickets(
    bench: TicketBench, seed: int, length: int, mutations: list[tuple[int, int, int]]
) -> None:
    """25 altered tickets for each of 400 requests: every request's tokens are right, and nobody crashes."""
    source = random.Random(seed)
    bench.runner.run(bench.present([source.randrange(64) for _ in range(length)], mutations))


def test_every_void_read_has_a_reason(bench: TicketBench) -> None:
    """After the test before: what was refused was counted, under known names only."""
    voids = dict(bench.runner.run(bench.d.state()).void_reads)
    assert set(voids) <= {reason.value for reason in VoidReason}
    assert sum(voids.values()) > bench.number
