"""Fleets with profiles, and a router that places by predicted latency without sending anything."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from tests.unit.router.stage import MODEL, info
from weir.balance.profile import Fit, Profile
from weir.ids import WorkerKey
from weir.lifecycle import Role
from weir.services.router.fleet import Fleet, Load, WorkerView
from weir.services.router.policy import Choice, Demand
from weir.services.router.prefixes import PrefixMap, PromptKeys
from weir.services.router.slo_policy import SloOptions, SloPolicy

BLOCK = 16
PROFILE = Profile(
    "", "", 1, Fit((0.005, 0.0005, 0.0), 1, 0, 9), Fit((0.01, 0.0002, 0.0), 1, 0, 9), Fit((0.001, 1e-9), 1, 0, 9)
)
"""10 ms + 0.2 ms a sequence; 5 ms + 0.5 ms a prompt token; 1 GB/s."""


def key(name: str) -> WorkerKey:
    return WorkerKey(name, 1)


class Desk:
    """One router's placing: ``send`` chooses, notes and counts."""

    def __init__(
        self, prefills: int = 0, decodes: int = 0, mixed: int = 0, *, seed: int = 1, options: SloOptions | None = None
    ) -> None:
        rng = random.Random(seed)
        self.fleet = Fleet(lambda worker: rng.random())
        self.prefixes = PrefixMap(100_000)
        self.policy = SloPolicy(self.prefixes, options or SloOptions(), rng.random)
        self.now_s = 100.0
        self.sent = 0
        self.prefilled: Counter[str] = Counter()
        self.decoded: Counter[str] = Counter()
        self.alone: Counter[str] = Counter()
        """Requests prefilled where they are decoded, by worker."""
        self.reports = 0
        for letter, role, count in (
            ("p", Role.PREFILL, prefills),
            ("d", Role.DECODE, decodes),
            ("m", Role.MIXED, mixed),
        ):
            for number in range(count):
                self.add(f"{letter}{number}", role)

    def add(self, name: str, role: Role, **changes: Any) -> WorkerView:
        given = {
            "block_size": BLOCK,
            "num_blocks": 10_000,
            "context_tokens": 160_000,
            "profile": PROFILE,
            "kv_bytes_per_token": 20_000.0,
        }
        view = self.fleet.put(info(key(name), role, **{**given, **changes}))
        view.connected = True
        view.heard_s = self.now_s
        return view

    def view(self, name: str) -> WorkerView:
        view = self.fleet.get(key(name))
        assert view is not None
        return view

    def report(self, name: str, **load: Any) -> None:
        self.reports += 1
        base = {"running": 0, "waiting": 0, "pending_prefill_tokens": 0, "free_blocks": 10_000, "total_blocks": 10_000}
        self.view(name).take_report(Load(self.reports, **{**base, **load}), self.now_s)

    def demand(self, tokens: int = 100, *, prompt: list[int] | None = None, **fields: Any) -> Demand:
        keys = None if prompt is None else PromptKeys(prompt, b"")
        length = tokens if prompt is None else len(prompt)
        return Demand(length, 1_000, **{"expected_tokens": 100, "keys": keys, **fields})

    def choose(self, demand: Demand) -> Choice | None:
        return self.policy.choose(self.fleet.serving(MODEL), demand, self.now_s)

    def send(self, demand: Demand) -> Choice:
        """Place a request as the book does: prefill, then the decode worker."""
        choice = self.choose(demand)
        assert choice is not None
        self.sent += 1
        name = f"r{self.sent}"
        tokens = max(demand.prompt_tokens - choice.cached_tokens, 1)
        if choice.prefill is None:
            assert choice.decode is not None
            self._take(choice.decode, name, demand, tokens)
            self.alone[choice.decode.key.worker_id] += 1
            return choice
        choice.prefill.note(name, self.now_s, tokens, 0, 0)
        self.fleet.used(choice.prefill)
        self.prefilled[choice.prefill.key.worker_id] += 1
        decode = self.policy.choose_decode(self.fleet.serving(MODEL), choice.prefill, demand, self.now_s)
        if decode is not None:
            self._take(decode, name, demand, 0)
        return choice

    def _take(self, view: WorkerView, name: str, demand: Demand, tokens: int) -> None:
        view.note(name, self.now_s, tokens, 1, view.blocks_for(demand.prompt_tokens + 1))
        view.bind(name, demand.slo_tpot_ms, demand.expected_tokens)
        view.joined(name)
        self.fleet.used(view)
        self.decoded[view.key.worker_id] += 1

    def settle(self, name: str) -> None:
        """All that was sent under this name is over."""
        for view in self.fleet:
            view.settle(name)
            view.unbind(name)


def spread(counts: Counter[str], workers: int) -> float:
    """Most over least; inf when one has nothing."""
    if len(counts) < workers:
        return float("inf")
    return max(counts.values()) / min(counts.values())
