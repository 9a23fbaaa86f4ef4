"""Any facts in any order: positions come once and in order, every request ends once, no leg is left behind."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.router.slo_fleet import PROFILE
from tests.unit.router.stage import D1, D2, LEASE, M1, MODEL, P1, P2, ROLES, info
from weir.engine.sampling import SamplingParams
from weir.errors import ResourceExhausted
from weir.ids import WorkerKey
from weir.lifecycle import FinishReason, RequestState, Role
from weir.services.router.book import RequestBook
from weir.services.router.commands import (
    Admission,
    Emit,
    End,
    SendBeginDecode,
    SendBeginPrefill,
    SendCancel,
    SendFirstToken,
    SendKvReady,
    SendRelease,
)
from weir.services.router.facts import BookLimits, EndedNews, FirstTokenNews
from weir.services.router.fleet import Fleet, Load
from weir.services.router.policy import LeastLoaded, Policy
from weir.services.router.prefixes import PrefixMap, PromptKeys
from weir.services.router.retry import RetryBudget
from weir.services.router.slo_policy import SloOptions, SloPolicy

WORKERS = (P1, P2, D1, D2, M1)
CODES = ("OK", "RESOURCE_EXHAUSTED", "INTERNAL", "CANCELLED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT")
VOIDS = ("", "", "", "checksum", "generation", "transport")
LIFETIME_S = 30.0

Leg = tuple[WorkerKey, bool, str, int]


class Chaos:
    """The book among workers that say anything, and what an honest observer knows of their legs."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.fleet = Fleet()
        self.prefixes = PrefixMap(50)
        options = SloOptions(queue_ms=50.0, local_tokens=2, max_joins=3)
        policy: Policy = SloPolicy(self.prefixes, options, self.random.random) if seed % 2 else LeastLoaded()
        limits = BookLimits(max_active=6, max_queued=3, queue_timeout_s=5.0, max_attempts=4)
        budget = RetryBudget(1.0, 100)
        self.book = RequestBook(self.fleet, policy, limits, budget, self.random.random)
        self.now_s = 1.0
        self.live: set[Leg] = set()
        self.owes_first: set[Leg] = set()
        self.released: set[Leg] = set()
        self.sent: dict[str, int] = {}
        self.ends: Counter[str] = Counter()
        self.reports = 0
        for worker in WORKERS:
            self.up(worker)

    def up(self, worker: WorkerKey) -> None:
        self.fleet.put(info(worker, num_blocks=8, profile=PROFILE)).connected = True
        self.book.fleet_changed(self.now_s)

    # looking at commands

    def look(self) -> None:
        for command in self.book.drain():
            if isinstance(command, Emit):
                assert command.first_index == self.sent[command.request_id], "a position twice or out of order"
                assert not self.ends[command.request_id], "tokens after the end"
                self.sent[command.request_id] += len(command.tokens)
            elif isinstance(command, SendBeginPrefill | SendBeginDecode):
                prefill = isinstance(command, SendBeginPrefill)
                leg = (command.worker, prefill, command.admission.request_id, command.attempt)
                assert leg not in self.live, "a leg begun twice"
                assert len(command.generated) == self.sent[leg[2]] or not prefill
                self.live.add(leg)
                if prefill:
                    self.owes_first.add(leg)
                    self.released.discard(leg)
            elif isinstance(command, SendCancel):
                key = (command.worker, command.prefill, command.request_id, command.attempt)
                self.over(key)
            elif isinstance(command, SendRelease):
                key = (command.worker, True, command.request_id, command.attempt)
                self.released.add(key)
                if key not in self.owes_first:
                    self.over(key)
            elif isinstance(command, End):
                self.ends[command.request_id] += 1
                times = command.timings
                assert times.ttft_ms == times.admit_ms + times.queue_ms + times.prefill_ms + times.first_token_ms
                assert times.e2e_ms == times.ttft_ms + times.second_token_ms + times.decode_ms
                usage = command.usage
                parts = (usage.local_compute_tokens, usage.local_cache_hit_tokens, usage.external_kv_tokens)
                assert sum(parts) == usage.prompt_tokens
                assert min(parts) >= 0
            elif isinstance(command, SendKvReady | SendFirstToken):
                assert command.worker in (D1, D2, M1)
        self.book.check_integrity()
        for leg in sorted(self.live, key=str):
            assert not self.ends[leg[2]], f"{leg} was left behind"

    def over(self, leg: Leg) -> None:
        self.live.discard(leg)
        self.owes_first.discard(leg)

    # doing things

    def leg(self, prefill: bool) -> Leg:
        """Mostly a live one; sometimes one that makes no sense."""
        live = sorted((leg for leg in self.live if leg[1] is prefill), key=str)
        if live and self.random.random() < 0.9:
            return self.random.choice(live)
        request_id = f"r{self.random.randrange(max(1, len(self.sent)))}"
        return self.random.choice(WORKERS), prefill, request_id, self.random.randrange(1, 5)

    def index(self, request_id: str) -> int:
        """Mostly the next position."""
        return max(0, self.sent.get(request_id, 0) + self.random.choice((0, 0, 0, 0, 0, 0, -1, 1)))

    def admit(self) -> None:
        request_id = f"r{len(self.sent)}"
        admission = Admission(
            request_id=request_id,
            model=MODEL,
            prompt=tuple(range(self.random.randrange(1, 20))),
            sampling=SamplingParams(max_tokens=self.random.randrange(1, 12), seed=1),
            received_s=self.now_s,
            deadline_s=self.now_s + self.random.uniform(0.01, LIFETIME_S),
            priority=self.random.randrange(3),
            tenant=self.random.choice(("", "a", "b")),
            slo_ttft_ms=self.random.choice((0.0, 0.0, 5.0, 500.0)),
            slo_tpot_ms=self.random.choice((0.0, 0.0, 5.0, 50.0)),
        )
        self.sent[request_id] = 0
        try:
            self.book.admit(admission, self.now_s)
        except ResourceExhausted:
            self.ends[request_id] += 1

    def prefill_fact(self) -> None:
        leg = self.leg(True)
        worker, _, request_id, attempt = leg
        kind = self.random.randrange(3)
        if kind == 0:
            self.book.prefill_started(worker, request_id, attempt, 1, 1.0, self.now_s)
        elif kind == 1:
            final = self.random.random() < 0.5
            self.book.kv_ready(worker, request_id, attempt, LEASE, final, "ticket")
        else:
            self.owes_first.discard(leg)
            if leg in self.released:
                self.over(leg)
            finish = FinishReason.STOP if self.random.random() < 0.1 else None
            news = FirstTokenNews(self.index(request_id), 1, (), finish, 1, 1.0, "first")
            self.book.first_token(worker, request_id, attempt, news, self.now_s)

    def decode_fact(self) -> None:
        leg = self.leg(False)
        worker, _, request_id, attempt = leg
        kind = self.random.randrange(4)
        if kind == 0:
            self.book.decode_started(worker, request_id, attempt, self.random.randrange(30), 1.0)
        elif kind == 1:
            void = self.random.choice(VOIDS)
            self.book.kv_read_done(worker, request_id, attempt, LEASE, void, "", None, self.now_s)
        else:
            finish = FinishReason.STOP if self.random.random() < 0.1 else None
            tokens = (1,) * self.random.randrange(0 if finish else 1, 4)
            if finish:
                self.over(leg)
            index = self.index(request_id)
            self.book.tokens(worker, request_id, attempt, index, tokens, (), finish, None, 1.0, self.now_s)

    def ended_fact(self) -> None:
        leg = self.leg(self.random.random() < 0.5)
        self.over(leg)
        worker, prefill, request_id, attempt = leg
        news = EndedNews(self.random.choice(CODES), "", self.random.choice((0.0, 100.0)))
        self.book.attempt_ended(worker, prefill, request_id, attempt, news, self.now_s)

    def lose(self) -> None:
        worker = self.random.choice(WORKERS)
        for leg in [leg for leg in self.live if leg[0] == worker]:
            self.over(leg)
        self.book.worker_lost(worker, self.now_s)

    def up_again(self) -> None:
        self.up(self.random.choice(WORKERS))

    def report(self) -> None:
        self.reports += 1
        view = self.fleet.get(self.random.choice(WORKERS))
        assert view is not None
        pending = 100 if view.info.role is not Role.DECODE else 0
        load = Load(self.reports, 1, 0, self.random.randrange(pending + 1), self.random.randrange(9), 8)
        view.take_report(load, self.now_s)
        hashes = PromptKeys(range(20), b"").hashes(view.info.fingerprint, view.info.block_size)
        self.prefixes.stored(view.key, hashes[: self.random.randrange(5)])
        self.book.fleet_changed(self.now_s)

    def leave(self) -> None:
        self.book.cancel(f"r{self.random.randrange(len(self.sent) + 1)}", "gone", self.now_s)

    def stop(self) -> None:
        entries = [entry for entry in self.book.entries() if entry.generated]
        if entries:
            entry = self.random.choice(entries)
            self.book.stop(entry.request_id, len(entry.generated), "END", self.now_s)

    def wait(self) -> None:
        self.now_s += self.random.choice((0.001, 0.05, 0.5, 3.0))
        self.book.tick(self.now_s)

    def step(self) -> None:
        names, weights = zip(*ACTIONS.items(), strict=True)
        getattr(self, self.random.choices(names, weights)[0])()
        self.look()


ACTIONS = {
    "admit": 8,
    "prefill_fact": 30,
    "decode_fact": 30,
    "ended_fact": 6,
    "lose": 2,
    "up_again": 4,
    "report": 6,
    "leave": 1,
    "stop": 1,
    "wait": 6,
}


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(20, 300))
def test_any_facts_in_any_order(seed: int, steps: int) -> None:
    chaos = Chaos(seed)
    for _ in range(steps):
        chaos.step()
    chaos.now_s += LIFETIME_S
    chaos.book.tick(chaos.now_s)
    chaos.look()
    assert len(chaos.book) == 0
    assert chaos.book.waiting == 0
    assert dict.fromkeys(chaos.sent, 1) == dict(chaos.ends)
    assert chaos.live == set()
    assert sum(chaos.book.ended.values()) == len(chaos.sent)
    assert set(chaos.book.ended) <= {state.value for state in RequestState}


def test_the_chaos_reaches_every_end() -> None:
    ended: Counter[str] = Counter()
    retries: Counter[str] = Counter()
    for seed in range(40):
        chaos = Chaos(seed)
        for _ in range(400):
            chaos.step()
        ended += chaos.book.ended
        retries += chaos.book.retries
    assert set(ended) == {"finished", "cancelled", "failed", "rejected"}
    assert set(retries) == {"prefill_lost", "decode_lost", "rebind", "read_void", "fault"}
    assert set(ROLES) >= set(WORKERS)
