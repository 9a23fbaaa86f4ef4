"""Random schedules of a whole hand-over: two real engines, both desks, a scripted router, reads that land late.

Checked: exact tokens, no position twice, every attempt over exactly once, every lease and read ended, every
block back, whatever is cancelled, preempted, voided or lost on the way.
"""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from tests.unit.worker.kv_cases import OURS
from tests.unit.worker.pool_model import EOS, VOCAB, continuation, make_parts
from weir.attempts.desk import AddRequest, AttemptOver, CancelRequest
from weir.clock import ManualClock
from weir.config import WorkerConfig
from weir.engine.engine import Engine
from weir.engine.output import Started
from weir.engine.request import EngineRequest, Mode
from weir.engine.sampling import SamplingParams
from weir.errors import KvReadVoid, WeirError
from weir.ids import RequestKey, WorkerKey
from weir.kvcache.blocks import BlockState
from weir.services.decode import desk as decode_desk
from weir.services.decode.desk import DecodeDesk
from weir.services.decode.reads import ReadResult
from weir.services.prefill import desk as prefill_desk
from weir.services.prefill.desk import PrefillDesk
from weir.transfer.lease import LeaseTable
from weir.transfer.plan import check_read
from weir.transfer.ticket import PeerDescriptor, prove

SESSION = "router"
P_KEY = WorkerKey("p", 1)


@dataclass
class Wanted:
    """A request as the scripted router sees it."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    attempt: int = 0
    tokens: list[int] = field(default_factory=list)
    cancelled: bool = False
    ended: bool = False
    tickets: list[object] = field(default_factory=list)

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.request_id, self.attempt)


class World:
    """Everything between two engines happens one event at a time, in a random order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = ManualClock()
        small = self.random.random() < 0.5
        config = WorkerConfig(
            num_blocks=12 if small else 64, max_batch_tokens=self.random.choice([5, 9, 40]), max_running=4
        )
        self.p, _ = make_parts(config, self.clock)
        self.d, _ = make_parts(config, self.clock)
        self.peer = PeerDescriptor(
            P_KEY, OURS, b"", "DRAM", 0, 0, self.p.pool.layout.block_bytes, self.p.pool.num_blocks, 0
        )
        self.leases = LeaseTable()
        self.prefill = PrefillDesk(P_KEY, OURS.digest(), self.leases, block_size=4, max_lease_s=30.0)
        self.decode = DecodeDesk(OURS, vocab_size=VOCAB)
        self.prefill.open_session(SESSION)
        self.decode.open_session(SESSION)
        self.reads: list[decode_desk.BeginRead] = []
        self.to_p: deque[tuple[str, object]] = deque()
        self.to_d: deque[tuple[str, object]] = deque()
        self.over: dict[tuple[str, RequestKey], int] = {}
        self.wanted: dict[str, Wanted] = {}
        self.refused: deque[tuple[object, RequestKey, WeirError]] = deque()

    # -- router -----------------------------------------------------------------------------------------

    def admit(self, number: int) -> None:
        length = self.random.randint(1, 20)
        base = self.random.choice([0, 1, 2])
        prompt = [(base + i * 7) % VOCAB for i in range(length)]
        one = Wanted(f"r-{number}", prompt, self.random.randint(1, 8))
        self.wanted[one.request_id] = one
        self.next_attempt(one)

    def next_attempt(self, one: Wanted) -> None:
        if one.ended:
            return
        for queue in (self.to_p, self.to_d):
            queue.append(("cancel", one.key))
        one.attempt += 1
        one.tickets = []
        assert one.attempt < 60, "no progress"
        sampling = SamplingParams(max_tokens=one.max_tokens, temperature=0.0)
        for queue, mode in ((self.to_p, Mode.PREFILL), (self.to_d, Mode.REMOTE)):
            request = EngineRequest(one.key, tuple(one.prompt), tuple(one.tokens), sampling, mode, frozenset({EOS}))
            queue.append(("begin", request))

    def cancel(self) -> None:
        active = [one for one in self.wanted.values() if not one.ended]
        if active:
            one = self.random.choice(active)
            one.cancelled = one.ended = True
            self.to_p.append(("cancel", one.key))
            self.to_d.append(("cancel", one.key))

    def token(self, one: Wanted, index: int, tokens: tuple[int, ...], finish: object) -> None:
        assert index == len(one.tokens), f"position {index} after {len(one.tokens)}"
        one.tokens += tokens
        if finish is not None:
            one.ended = True
            self.to_p.append(("cancel", one.key))
            self.to_d.append(("cancel", one.key))

    def current(self, key: RequestKey) -> Wanted | None:
        one = self.wanted[key.request_id]
        return one if one.attempt == key.attempt and not one.ended else None

    def hear_p(self) -> None:
        for news in self.prefill.take_news(SESSION):
            key = news.ticket.key if isinstance(news, prefill_desk.TicketIssued) else news.key
            if isinstance(news, AttemptOver):
                self.over["p", key] = self.over.get(("p", key), 0) + 1
            one = self.current(key)
            if one is None:
                continue
            if isinstance(news, prefill_desk.TicketIssued):
                one.tickets.append(news.ticket)
                self.to_d.append(("ticket", news.ticket))
            elif isinstance(news, prefill_desk.FirstTokenMade):
                self.to_d.append(("token", (key, news.index, news.token)))
                self.token(one, news.index, (news.token,), news.finish)
            elif isinstance(news, AttemptOver) and news.code != "OK":
                self.next_attempt(one)

    def hear_d(self) -> None:
        for news in self.decode.take_news(SESSION):
            if isinstance(news, AttemptOver):
                self.over["d", news.key] = self.over.get(("d", news.key), 0) + 1
            one = self.current(news.key)
            if one is None:
                continue
            if isinstance(news, decode_desk.NewTokens):
                self.token(one, news.first_index, news.tokens, news.finish)
            elif isinstance(news, decode_desk.KvRead):
                if not news.reason:
                    self.to_p.append(("release", (news.key, news.lease_id)))
                elif self.random.random() < 0.5:
                    self.to_d.extend(("ticket", ticket) for ticket in one.tickets)
                else:
                    self.next_attempt(one)
            elif isinstance(news, AttemptOver) and news.code != "OK":
                self.next_attempt(one)

    # -- workers ----------------------------------------------------------------------------------------

    def deliver_p(self) -> None:
        kind, value = self.to_p.popleft()
        if kind == "begin":
            self.prefill.begin(SESSION, value, 30.0, None)  # type: ignore[arg-type]
        elif kind == "cancel":
            self.prefill.cancel(value.request_id, value.attempt)  # type: ignore[attr-defined]
        else:
            self.prefill.release(*value)  # type: ignore[misc]
        self.pump_p()

    def deliver_d(self) -> None:
        kind, value = self.to_d.popleft()
        if kind == "begin":
            self.decode.begin(SESSION, value, self.peer)  # type: ignore[arg-type]
        elif kind == "cancel":
            self.decode.cancel(value.request_id, value.attempt)  # type: ignore[attr-defined]
        elif kind == "ticket":
            self.decode.offer(value, self.clock.unix_s(), 0.0)  # type: ignore[arg-type]
        else:
            self.decode.first_token(*value, 0.0)  # type: ignore[misc, call-arg]
        self.pump_d()

    def pump_p(self) -> None:
        for order in self.prefill.take_orders():
            if isinstance(order, AddRequest):
                self.add(self.p.engine, self.prefill, order.request)
            elif isinstance(order, CancelRequest):
                self.p.engine.cancel(order.key)
            else:
                assert self.p.engine.release_kv(order.key)

    def pump_d(self) -> None:
        engine = self.d.engine
        for order in self.decode.take_orders():
            if isinstance(order, AddRequest):
                self.add(engine, self.decode, order.request)
            elif isinstance(order, CancelRequest):
                engine.cancel(order.key)
            elif isinstance(order, decode_desk.GiveFirstToken):
                engine.first_token(order.key, order.token)
            elif isinstance(order, decode_desk.KvArrived):
                engine.kv_arrived(order.key, order.num_tokens)
            elif isinstance(order, decode_desk.ReadsDone):
                engine.reads_done(order.key)
            elif isinstance(order, decode_desk.BeginRead):
                self.reads.append(order)

    def add(self, engine: Engine, desk: PrefillDesk | DecodeDesk, request: EngineRequest) -> None:
        try:
            engine.add(request)
        except WeirError as error:
            self.refused.append((desk, request.key, error))

    def refuse(self) -> None:
        desk, key, error = self.refused.popleft()
        desk.refused(key, error)  # type: ignore[attr-defined]
        self.pump_p()
        self.pump_d()

    def step_p(self) -> None:
        self.prefill.on_events(self.p.engine.step().events, self.clock.unix_s())
        self.pump_p()

    def step_d(self) -> None:
        output = self.d.engine.step()
        for event in output.events:
            if isinstance(event, Started):
                self.d.engine.reads_started(event.key)
        self.decode.on_events(output.events, 0.0)
        self.pump_d()

    def land(self) -> None:
        order = self.reads.pop(self.random.randrange(len(self.reads)))
        read, now = order.read, self.clock.unix_s()
        for ref, block in read.destinations:
            self.d.pool.block_view(block)[:] = self.p.pool.block_view(ref.block)
        refs = [ref for ref, _ in read.destinations]
        sums = self.d.pool.checksums([block for _, block in read.destinations])
        try:
            check_read(read.ticket, read.destinations, self.peer, OURS, now, self.d.pool.num_blocks)
            if self.random.random() < 0.05:
                raise KvReadVoid("transport", "planted")
            prove(refs, self.p.pool.guard.entries(ref.block for ref in refs), sums)
        except KvReadVoid as void:
            self.decode.read_void(order.key, read.read_id, void, 0.0)
        else:
            self.decode.read_proven(order.key, read.read_id, ReadResult(0, 1, "test", 0, 0), 0.0)
            if read.notify and self.random.random() < 0.5:
                self.prefill.lease_read(read.ticket.lease_id)
                self.pump_p()
        self.pump_d()

    # -- the run ----------------------------------------------------------------------------------------

    def possible(self) -> list[str]:
        found = {
            "deliver_p": bool(self.to_p),
            "deliver_d": bool(self.to_d),
            "hear_p": self.prefill.has_news(SESSION),
            "hear_d": self.decode.has_news(SESSION),
            "step_p": self.p.engine.has_work(),
            "step_d": self.d.engine.has_work(),
            "land": bool(self.reads),
            "refuse": bool(self.refused),
        }
        return [name for name, can in found.items() if can]

    def run(self, requests: int) -> None:
        admitted, steps = 0, 0
        while True:
            steps += 1
            assert steps < 60_000, "no end"
            possible = self.possible()
            if admitted < requests and (not possible or self.random.random() < 0.02):
                self.admit(admitted)
                admitted += 1
            elif possible:
                getattr(self, self.random.choice(possible))()
                if self.random.random() < 0.002:
                    self.cancel()
                if self.random.random() < 0.001:
                    self.clock.advance(31.0)
                    self.prefill.expire(self.clock.unix_s())
                    self.pump_p()
            else:
                return

    def check(self) -> None:
        for one in self.wanted.values():
            assert one.ended, one
            expected = continuation(one.prompt, one.max_tokens)
            assert one.tokens == (expected[: len(one.tokens)] if one.cancelled else expected)
        assert all(count == 1 for count in self.over.values()), self.over
        assert len(self.prefill) == len(self.decode) == self.decode.landing == 0
        assert self.leases.open_count == 0
        self.leases.check_integrity()
        for parts in (self.p, self.d):
            parts.blocks.check_integrity()
            counts = parts.blocks.counts()
            assert counts[BlockState.FREE] + counts[BlockState.CACHED] == parts.blocks.num_blocks, counts


@pytest.mark.parametrize("seed", range(60))
def test_schedule(seed: int) -> None:
    world = World(seed)
    world.run(requests=8)
    world.check()


@pytest.mark.parametrize("seed", range(20))
def test_lost_session(seed: int) -> None:
    world = World(1_000 + seed)
    for number in range(6):
        world.admit(number)
    for _ in range(world.random.randint(1, 150)):
        if possible := world.possible():
            getattr(world, world.random.choice(possible))()
    world.prefill.end_session(SESSION)
    world.decode.end_session(SESSION)
    world.to_p.clear()
    world.to_d.clear()
    world.pump_p()
    world.pump_d()
    while possible := world.possible():
        getattr(world, world.random.choice(possible))()
    for one in world.wanted.values():
        one.ended = one.cancelled = True
    world.over.clear()
    world.check()
