"""Two workers over real gRPC: exact tokens, cancellation and loss in every phase, role flips, faults.

After each test both workers are back at their baseline: no block used, no lease, no read.
"""

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio
import pytest

from tests.integration.worker_rig import (
    Bench,
    Pair,
    RunningWorker,
    begin_decode,
    begin_prefill,
    cancel,
    decode_session,
    eventually,
    prefill_session,
    running_worker,
)
from tests.unit.worker.pool_model import continuation
from weir.errors import KvReadVoid
from weir.events import subjects
from weir.events.memory import MemoryBus
from weir.ids import RequestKey
from weir.lifecycle import Role
from weir.rpc.channel import wait_ready
from weir.rpc.v1 import common_pb2, decode_pb2, events_pb2, kv_pb2, prefill_pb2, prefill_pb2_grpc, worker_pb2
from weir.services.worker import host
from weir.transfer.local import Faults
from weir.transfer.plan import Completion
from weir.transfer.ticket import Ticket

P = prefill_pb2.PrefillServiceSessionRequest
D = decode_pb2.DecodeServiceSessionRequest


class Rig:
    """A prefill and a decode worker, and a router's sessions with both."""

    def __init__(self, bench: Bench, p: RunningWorker, d: RunningWorker) -> None:
        self.bench = bench
        self.p = p
        self.d = d
        self.pair = Pair(p, d)


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(salt * 11 + i * 7) % 64 for i in range(length)]


def lasting(length: int, at_least: int = 6) -> list[int]:
    """A prompt whose continuation does not end at once."""
    return next(
        prompt_of(length, salt)
        for salt in range(1_000)
        if len(continuation(prompt_of(length, salt), at_least)) == at_least
    )


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    bench = Bench()
    async with AsyncExitStack() as stack:
        p = await stack.enter_async_context(running_worker(bench, Role.PREFILL, "p", max_batch_tokens=64))
        d = await stack.enter_async_context(running_worker(bench, Role.DECODE, "d", max_batch_tokens=64))
        made = Rig(bench, p, d)
        await made.pair.open()
        yield made
        p.runner.gate.set()
        d.runner.gate.set()
        await p.at_baseline()
        await d.at_baseline()
        await made.pair.close()
        assert p.host.step_loop.dead is None
        assert d.host.step_loop.dead is None


@pytest.mark.parametrize("length", [1, 3, 4, 5, 12, 13, 64, 65, 130])
async def test_disaggregated_equals_local(rig: Rig, length: int) -> None:
    prompt = lasting(length)
    await rig.pair.begin("r-pd", prompt)
    assert await rig.pair.tokens("r-pd") == continuation(prompt, 8)
    await rig.pair.d.send(begin_decode("r-local", prompt))
    await rig.pair.d.ended("r-local")
    local = [
        token
        for message in rig.pair.d.seen
        for batch in message.tokens
        if batch.request_id == "r-local"
        for token in batch.token_ids
    ]
    assert local == continuation(prompt, 8)
    over = await rig.pair.p.ended("r-pd")
    assert over.code == "OK"


async def test_usage_and_timings(rig: Rig) -> None:
    prompt = lasting(21)
    await rig.pair.begin("r-1", prompt)
    await rig.pair.tokens("r-1")
    last = await rig.pair.d.expect(lambda m: next((b for b in m.tokens if b.finish_reason), None))
    assert (last.usage.prompt_tokens, last.usage.external_kv_tokens) == (21, 21)
    assert last.usage.completion_tokens == len(continuation(prompt, 8))
    read = await rig.pair.d.expect(lambda m: next(iter(m.kv_reads), None))
    assert read.void_reason == ""
    assert read.timings.bytes == 6 * rig.p.host.parts.pool.layout.block_bytes
    assert read.timings.transport == "local"
    first = await rig.pair.p.expect(lambda m: next(iter(m.first_tokens), None))
    assert (first.computed_tokens, first.cached_tokens) == (21, 0)
    state = await rig.d.state()
    assert state.prompt_tokens_by_source["external_kv_transfer"] == 21
    assert state.transports == {"p": "local"}
    assert (await rig.p.state()).prefills_completed == 1


async def test_second_time_only_the_tail_is_read(rig: Rig) -> None:
    prompt = lasting(20)
    await rig.pair.begin("r-1", prompt)
    await rig.pair.tokens("r-1")
    await rig.pair.begin("r-2", prompt)
    assert await rig.pair.tokens("r-2") == continuation(prompt, 8)
    batch = await rig.pair.d.expect(
        lambda m: next((b for b in m.tokens if b.request_id == "r-2" and b.finish_reason), None)
    )
    assert (batch.usage.local_cache_hit_tokens, batch.usage.external_kv_tokens) == (20, 0)
    assert (await rig.pair.p.ended("r-2")).code == "OK"


async def test_many_at_once(rig: Rig) -> None:
    prompts = {f"r-{i}": prompt_of(1 + 5 * i, salt=i) for i in range(24)}
    for name, prompt in prompts.items():
        await rig.pair.begin(name, prompt)
    for name, prompt in prompts.items():
        assert await rig.pair.tokens(name) == continuation(prompt, 8), name


@pytest.mark.parametrize(
    ("field", "code", "message"),
    [
        ({"prompt": []}, "INVALID_ARGUMENT", "prompt = []"),
        ({"prompt": [64]}, "INVALID_ARGUMENT", "prompt = 64"),
        ({"prompt": [1], "max_tokens": 0}, "INVALID_ARGUMENT", "max_tokens = 0"),
        ({"prompt": [1] * 395}, "OUT_OF_RANGE", "prompt + max_tokens"),  # a larger worker may take it
    ],
)
async def test_bad_input_is_refused(rig: Rig, field: dict[str, Any], code: str, message: str) -> None:
    await rig.pair.p.send(begin_prefill("r-bad", **field))
    over = await rig.pair.p.ended("r-bad")
    assert over.code == code
    assert over.message.startswith(message)
    await rig.pair.d.send(begin_decode("r-bad", **field))
    assert (await rig.pair.d.ended("r-bad")).code == code


# -- cancellation and loss, phase by phase ------------------------------------------------------------------


async def reach_queued(rig: Rig) -> None:
    rig.p.runner.gate.clear()
    await rig.pair.begin("r-other", prompt_of(30))
    await rig.pair.begin("r-1", lasting(30))


async def reach_prefilling(rig: Rig) -> None:
    prompt = lasting(200)
    await rig.pair.begin("r-1", prompt)
    await rig.pair.p.expect(lambda m: list(m.kv_ready))
    rig.p.runner.gate.clear()


async def reach_waiting_for_a_reader(rig: Rig) -> None:
    await rig.pair.p.send(begin_prefill("r-1", lasting(30)))
    await rig.pair.p.expect(lambda m: list(m.first_tokens))


async def reach_reading(rig: Rig) -> None:
    reading = asyncio.Event()

    def delay(ticket: Ticket) -> float:
        reading.set()
        return 0.2

    rig.bench.fabric.faults = Faults(before_data_s=delay)
    await rig.pair.begin("r-1", lasting(30))
    async with asyncio.timeout(10):
        await reading.wait()


async def reach_decoding(rig: Rig) -> None:
    await rig.pair.begin("r-1", lasting(30, 40), max_tokens=40)
    await rig.pair.d.expect(lambda m: list(m.tokens))
    rig.d.runner.gate.clear()


PHASES = [reach_queued, reach_prefilling, reach_waiting_for_a_reader, reach_reading, reach_decoding]


@pytest.mark.parametrize("reach", PHASES)
async def test_cancel(rig: Rig, reach: Any) -> None:
    await reach(rig)
    for name in ("r-1", "r-other"):
        await rig.pair.p.send(cancel(P, name))
        await rig.pair.d.send(cancel(D, name))
    rig.p.runner.gate.set()
    rig.d.runner.gate.set()
    await rig.p.at_baseline()
    await rig.d.at_baseline()
    prompt = lasting(9)
    rig.bench.fabric.faults = Faults()
    await rig.pair.begin("r-2", prompt)
    assert await rig.pair.tokens("r-2") == continuation(prompt, 8)


@pytest.mark.parametrize("reach", PHASES)
async def test_cancel_by_event(rig: Rig, reach: Any) -> None:
    await reach(rig)
    bus = MemoryBus(rig.bench.events)
    for name in ("r-1", "r-other"):
        event = events_pb2.CancelEvent(request_id=name, attempt=1, reason="test")
        await bus.publish(subjects.cancel_subject(name), event.SerializeToString())
    rig.p.runner.gate.set()
    rig.d.runner.gate.set()
    await rig.p.at_baseline()
    await rig.d.at_baseline()


@pytest.mark.parametrize("reach", PHASES)
async def test_router_dies(rig: Rig, reach: Any) -> None:
    await reach(rig)
    await rig.pair.close()
    rig.p.runner.gate.set()
    rig.d.runner.gate.set()
    await rig.p.at_baseline()
    await rig.d.at_baseline()
    assert (await rig.p.state()).open_sessions == 0
    rig.bench.fabric.faults = Faults()
    await rig.pair.open()
    prompt = lasting(9)
    await rig.pair.begin("r-2", prompt)
    assert await rig.pair.tokens("r-2") == continuation(prompt, 8)


async def test_a_deadline_ends_what_nobody_reads(rig: Rig) -> None:
    await rig.pair.p.send(begin_prefill("r-1", lasting(30), timeout_ms=100.0))
    over = await rig.pair.p.ended("r-1")
    assert over.code == "DEADLINE_EXCEEDED"
    await rig.pair.p.send(begin_prefill("r-2", lasting(30), lease_ms=50.0))
    over = await rig.pair.p.ended("r-2")
    assert over.code == "DEADLINE_EXCEEDED"
    await rig.pair.d.send(begin_decode("r-3", lasting(30), 8, rig.pair.source, timeout_ms=100.0))
    assert (await rig.pair.d.ended("r-3")).code == "DEADLINE_EXCEEDED"


async def test_an_older_attempt_is_ignored_and_a_newer_one_replaces(rig: Rig) -> None:
    prompt = lasting(30)
    rig.p.runner.gate.clear()
    await rig.pair.p.send(begin_prefill("r-1", prompt, attempt=2))
    await rig.pair.p.send(begin_prefill("r-1", prompt, attempt=1))
    await rig.pair.p.send(begin_prefill("r-1", prompt, attempt=3))
    await eventually(lambda: RequestKey("r-1", 3) in rig.p.host.prefill.desk)
    rig.p.runner.gate.set()
    assert (await rig.pair.p.ended("r-1", 2)).code == "CANCELLED"
    first = await rig.pair.p.expect(lambda m: next(iter(m.first_tokens), None))
    assert first.attempt == 3
    await rig.pair.p.send(cancel(P, "r-1", 3))


async def test_a_cancel_may_overtake_what_it_stops(rig: Rig) -> None:
    await rig.pair.p.send(cancel(P, "r-1"))
    await rig.pair.p.send(begin_prefill("r-1", lasting(30)))
    over = await rig.pair.p.ended("r-1")
    assert (over.code, over.message) == ("CANCELLED", "cancelled before it began")
    await rig.pair.p.send(begin_prefill("r-1", lasting(30), attempt=2))
    await rig.pair.p.expect(lambda m: [f for f in m.first_tokens if f.attempt == 2])
    await rig.pair.p.send(cancel(P, "r-1", 2))


# -- void reads ---------------------------------------------------------------------------------------------


async def test_flipped_byte_is_void_and_sent_again(rig: Rig) -> None:
    flips = [1]

    def flip(ticket: Ticket) -> None:
        if flips:
            flips.pop()
            table = [block for block in range(128) if rig.d.host.parts.blocks.state(block).value == "used"]
            rig.d.host.parts.pool.block_view(table[0])[0] ^= 1

    rig.bench.fabric.faults = Faults(on_data=flip)
    prompt = lasting(10)
    await rig.pair.begin("r-1", prompt)
    void = await rig.pair.d.expect(lambda m: next((k for k in m.kv_reads if k.void_reason), None))
    assert void.void_reason == "checksum"
    await rig.pair.d.send(D(kv_ready=rig.pair.tickets))
    assert await rig.pair.tokens("r-1") == continuation(prompt, 8)
    assert (await rig.d.state()).void_reads == {"checksum": 1}
    read = await rig.pair.d.expect(lambda m: next((k for k in m.kv_reads if not k.void_reason), None))
    assert read.timings.void_reads == 1


async def test_a_failing_transport_is_void(rig: Rig) -> None:
    def fail(ticket: Ticket) -> None:
        raise KvReadVoid("transport", "planted")

    rig.bench.fabric.faults = Faults(on_data=fail)
    await rig.pair.begin("r-1", lasting(10))
    void = await rig.pair.d.expect(lambda m: next((k for k in m.kv_reads if k.void_reason), None))
    assert void.void_reason == "transport"
    await rig.pair.p.send(cancel(P, "r-1"))
    await rig.pair.d.send(cancel(D, "r-1"))
    assert (await rig.pair.d.ended("r-1")).code == "CANCELLED"


async def test_a_malformed_ticket_is_void(rig: Rig) -> None:
    await rig.pair.d.send(begin_decode("r-1", lasting(10), 8, rig.pair.source))
    broken = prefill_pb2.KvReady()
    broken.ticket.request_id, broken.ticket.attempt = "r-1", 1
    await rig.pair.d.send(D(kv_ready=[broken]))
    void = await rig.pair.d.expect(lambda m: next(iter(m.kv_reads), None))
    assert void.void_reason == "malformed"
    await rig.pair.d.send(cancel(D, "r-1"))


async def test_foreign_kv_is_refused_at_the_door(rig: Rig) -> None:
    foreign = kv_pb2.PeerDescriptor()
    foreign.CopyFrom(rig.pair.source)
    foreign.fingerprint.kv_dtype = "float16"
    await rig.pair.d.send(begin_decode("r-1", lasting(10), 8, foreign))
    over = await rig.pair.d.ended("r-1")
    assert over.code == "FAILED_PRECONDITION"
    assert over.message == "fingerprint differs in kv_dtype: ours 'float32', theirs 'float16'"


async def test_another_reader_takes_over_under_the_same_lease(rig: Rig) -> None:
    prompt = lasting(30)
    await rig.pair.begin("r-1", prompt)
    await rig.pair.p.expect(lambda m: list(m.first_tokens))
    async with running_worker(rig.bench, Role.DECODE, "d2") as second:
        rig.pair.hold_tickets = True
        await rig.pair.p.send(begin_prefill("r-2", prompt))
        first = await rig.pair.p.expect(lambda m: next((f for f in m.first_tokens if f.request_id == "r-2"), None))
        session = await decode_session(second)
        await session.send(begin_decode("r-2", prompt, 8, rig.pair.source))
        tickets = [t for t in rig.pair.tickets if t.ticket.request_id == "r-2"]
        await session.send(D(kv_ready=tickets, first_tokens=[first]))
        await session.ended("r-2")
        tokens = [t for m in session.seen for b in m.tokens for t in b.token_ids]
        assert [first.token_id, *tokens] == continuation(prompt, 8)
        await second.at_baseline()
        await session.close()


def _kv_read_of(name: str, message: Any) -> Any:
    return next((read for read in message.kv_reads if read.request_id == name), None)


async def test_pressure_is_waited_out() -> None:
    """The decode pool holds one and a half requests, the prefill pool three, and twenty come."""
    bench = Bench()
    async with AsyncExitStack() as stack:
        p = await stack.enter_async_context(running_worker(bench, Role.PREFILL, "p", num_blocks=30))
        d = await stack.enter_async_context(running_worker(bench, Role.DECODE, "d", num_blocks=15))
        pair = await Pair(p, d).open()
        prompts = {f"r-{i}": prompt_of(30 + i % 4, salt=i) for i in range(20)}
        for name, prompt in prompts.items():
            await pair.begin(name, prompt)
        await pair.p.send(begin_prefill("r-huge", prompt_of(200)))
        over = await pair.p.ended("r-huge")
        assert over.code == "OUT_OF_RANGE"
        assert "the pool has 30" in over.message
        for name, prompt in prompts.items():
            assert await pair.tokens(name) == continuation(prompt, 8), name
        await p.at_baseline()
        await d.at_baseline()
        await pair.close()


async def test_a_short_lease_and_a_slow_reader_never_give_a_wrong_answer() -> None:
    """Leases of 20 ms, every other read longer than that, and a small pool that is used again meanwhile."""
    bench = Bench()

    def delay(ticket: Ticket) -> float:
        return 0.03 if ticket.lease_id % 2 else 0.0

    bench.fabric.faults = Faults(before_data_s=delay, before_guard_s=delay)
    async with AsyncExitStack() as stack:
        settings: dict[str, Any] = {"num_blocks": 24, "lease_s": 0.1}
        p = await stack.enter_async_context(running_worker(bench, Role.PREFILL, "p", **settings))
        d = await stack.enter_async_context(running_worker(bench, Role.DECODE, "d"))
        pair = await Pair(p, d).open()
        prompts = {f"r-{i}": prompt_of(20 + i % 7, salt=i) for i in range(30)}
        # A first token that ends the request leaves nothing to read.
        prompts = {name: prompt for name, prompt in prompts.items() if len(continuation(prompt, 2)) == 2}
        for name, prompt in prompts.items():
            await pair.d.send(begin_decode(name, prompt, 8, pair.source))
            await pair.p.send(begin_prefill(name, prompt, lease_ms=20.0))
        voids = 0
        for name, prompt in prompts.items():
            read = await pair.d.expect(functools.partial(_kv_read_of, name))
            if read.void_reason:
                assert read.void_reason in ("generation", "lease_expired", "checksum", "timeout")
                voids += 1
                await pair.d.send(cancel(D, name))
            await pair.d.ended(name)
            if not read.void_reason:
                assert await pair.tokens(name) == continuation(prompt, 8)
        assert voids > 0
        await p.at_baseline()
        await d.at_baseline()
        await pair.close()


# -- roles --------------------------------------------------------------------------------------------------


async def test_role_flip(rig: Rig) -> None:
    stale = worker_pb2.SetRoleRequest(role=common_pb2.ROLE_DECODE, expected_epoch=9)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.p.admin.SetRole(stale)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    answer = await rig.p.admin.SetRole(worker_pb2.SetRoleRequest(role=common_pb2.ROLE_DECODE, expected_epoch=1))
    assert (answer.role, answer.role_epoch) == (common_pb2.ROLE_DECODE, 2)
    assert rig.bench.events.records["p"].role == common_pb2.ROLE_DECODE
    await rig.pair.p.send(begin_prefill("r-1", lasting(5)))
    assert (await rig.pair.p.ended("r-1")).code == "UNAVAILABLE"
    session = await decode_session(rig.p)
    prompt = lasting(5)
    await session.send(begin_decode("r-2", prompt))
    await session.ended("r-2")
    assert [t for m in session.seen for b in m.tokens for t in b.token_ids] == continuation(prompt, 8)
    await session.close()


async def test_role_flip_ends_what_waits_and_what_does_not_end(rig: Rig) -> None:
    await rig.pair.p.send(begin_prefill("r-held", lasting(30)))
    await rig.pair.p.expect(lambda m: list(m.first_tokens))
    rig.p.runner.gate.clear()
    await rig.pair.p.send(begin_prefill("r-running", lasting(200)))
    flip = asyncio.ensure_future(
        rig.p.admin.SetRole(
            worker_pb2.SetRoleRequest(role=common_pb2.ROLE_DECODE, expected_epoch=1, drain_timeout_ms=50)
        )
    )
    held = await rig.pair.p.ended("r-held")
    assert held.code == "UNAVAILABLE"
    rig.p.runner.gate.set()
    assert (await flip).role_epoch == 2
    assert (await rig.pair.p.ended("r-running")).code == "UNAVAILABLE"
    assert (await rig.p.state()).leases_ended["role_change"] >= 1


# -- sessions and faults ------------------------------------------------------------------------------------


async def test_hello_is_checked(rig: Rig) -> None:
    stub = prefill_pb2_grpc.PrefillServiceStub(rig.p.channel)
    for hello, code in (
        (P(), grpc.StatusCode.INVALID_ARGUMENT),
        (
            P(hello=prefill_pb2.SessionHello(router_id="r", worker_id="other")),
            grpc.StatusCode.FAILED_PRECONDITION,
        ),
        (
            P(hello=prefill_pb2.SessionHello(router_id="r", worker_id="p", worker_incarnation=1)),
            grpc.StatusCode.FAILED_PRECONDITION,
        ),
    ):
        call = stub.Session()
        await call.write(hello)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is code


async def test_a_new_stream_of_the_same_router_replaces_the_old(rig: Rig) -> None:
    await rig.pair.p.send(begin_prefill("r-1", lasting(30)))
    await rig.pair.p.expect(lambda m: list(m.first_tokens))
    again = await prefill_session(rig.p)
    await rig.p.at_baseline()
    assert (await rig.p.state()).leases_ended["session_lost"] == 1
    await again.close()


async def test_two_routers_do_not_disturb_each_other(rig: Rig) -> None:
    other = await prefill_session(rig.p, "router-2")
    prompt = lasting(12)
    await rig.pair.begin("r-1", prompt)
    await other.send(begin_prefill("r-2", prompt))
    await other.expect(lambda m: list(m.first_tokens))
    assert await rig.pair.tokens("r-1") == continuation(prompt, 8)
    assert all(e.request_id == "r-2" for m in other.seen for e in m.started)
    await other.close()


async def test_a_peer_that_left_is_dropped_unless_it_comes_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "PEER_GRACE_S", 0.02)
    prompt = lasting(12)
    await rig.pair.begin("r-1", prompt)
    await rig.pair.tokens("r-1")
    peer = rig.p.host.key
    registry = rig.p.host.edges.registry
    # The registry lost its records, and the worker renews its own: nothing happens.
    await registry.delete("p", peer.incarnation)
    await registry.put(rig.p.host.record())
    await eventually(lambda: peer not in rig.d.host._gone)
    assert peer in rig.d.host.decode._peers
    await rig.p.host.announcer.stop()
    await eventually(lambda: peer not in rig.d.host.decode._peers)
    assert dict((await rig.d.state()).transports) == {}
    # Out of the registry, but its memory is still there: a request that names it is served.
    await rig.pair.begin("r-2", lasting(30))
    assert await rig.pair.tokens("r-2") == continuation(lasting(30), 8)


async def test_a_dead_step_thread_ends_everything() -> None:
    bench = Bench()
    async with running_worker(bench, Role.PREFILL, "p") as p:
        session = await prefill_session(p)
        p.runner.fail = True
        await session.send(begin_prefill("r-1", lasting(30)))
        over = await session.ended("r-1")
        assert over.code == "INTERNAL"
        await session.send(begin_prefill("r-2", lasting(30)))
        refused = await session.ended("r-2")  # it had begun nothing: no failure of the request
        assert (refused.code, "no engine any more" in refused.message) == ("UNAVAILABLE", True)
        assert (await p.state()).draining is True
        await eventually(lambda: bench.events.records["p"].draining)
        await session.close()


async def test_drained_after_its_engine_died_a_worker_ends_its_sessions_with_the_cause() -> None:
    bench = Bench()
    async with running_worker(bench, Role.MIXED, "m") as m:
        sessions = [await prefill_session(m), await decode_session(m)]
        m.runner.fail = True
        await sessions[1].send(begin_decode("r-1", lasting(30), 8))
        assert (await sessions[1].ended("r-1")).code == "INTERNAL"
        await m.host.drain()
        assert "m" not in bench.events.records
        await eventually(lambda: all(session.error is not None for session in sessions))
        for session in sessions:
            assert isinstance(session.error, grpc.aio.AioRpcError)
            assert session.error.code() is grpc.StatusCode.INTERNAL
            assert (session.error.details() or "").startswith("the step thread died: ")
            await session.close()


async def test_lost_news_of_a_step_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is inconsistent is not served on: everything here ends, and the worker is to go."""

    def break_down(*args: object) -> None:
        raise ValueError("planted")

    bench, faults = Bench(), list[Exception]()
    async with running_worker(bench, Role.MIXED, "m") as m:
        monkeypatch.setattr(m.host, "_on_fault", faults.append)
        session = await decode_session(m)
        monkeypatch.setattr(m.host.decode.desk, "on_events", break_down)
        await session.send(begin_decode("r-1", lasting(30), 8))
        over = await session.ended("r-1")
        assert (over.code, over.message) == ("INTERNAL", "the news of a step were lost: ValueError: planted")
        assert str(faults[0]) == over.message
        assert (await m.state()).draining is True
        await session.close()


@pytest.mark.parametrize("name", ["load-reports", "registry-heartbeat", "lease-completions"])
async def test_a_task_of_its_own_that_dies_is_a_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that nobody hears of any more must not live on; unlike without an engine, what runs may end."""

    def break_down(*args: object) -> None:
        raise ValueError("planted")

    bench, faults = Bench(), list[Exception]()
    async with running_worker(bench, Role.MIXED, "m", heartbeat_s=0.01) as m:
        monkeypatch.setattr(m.host, "_on_fault", faults.append)
        session = await decode_session(m)
        if name == "load-reports":
            monkeypatch.setattr(m.host.announcer, "_load", break_down)
        elif name == "registry-heartbeat":
            monkeypatch.setattr(m.host.announcer, "publish_record", break_down)
        else:
            monkeypatch.setattr(m.host.prefill, "completed", break_down)
            m.host.edges.transfer._completions.put_nowait(Completion(1, RequestKey("r", 1)))  # type: ignore[attr-defined]
        await eventually(lambda: bool(faults))
        assert [str(fault) for fault in faults] == [f"task {name} died: ValueError: planted"]
        await session.send(begin_decode("r-1", lasting(30), 8))
        assert (await session.ended("r-1")).code == "OK"
        await session.close()


async def test_drain_lets_running_work_end() -> None:
    bench = Bench()
    async with running_worker(bench, Role.MIXED, "m") as m:
        await wait_ready(m.server.address, timeout_s=5)
        session = await decode_session(m)
        prompt = lasting(30, 20)
        await session.send(begin_decode("r-1", prompt, 20))
        await session.expect(lambda message: list(message.tokens))
        await m.host.drain()
        over = await session.ended("r-1")
        assert over.code == "OK"
        assert "m" not in bench.events.records
        await session.close()
