"""The generator with a back end of its own: open-loop arrivals, limits, kinds of failure."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from weir.bench.backends import Answer, RequestFailed
from weir.bench.generator import LoadGenerator
from weir.bench.load import run_load
from weir.bench.plan import LoadPlan, Prompt, Target
from weir.clock import SystemClock
from weir.errors import ResourceExhausted

NOWHERE = Target("weir", "127.0.0.1:1")


class ScriptedBackend:
    """Answers ``output_tokens`` tokens once ``released``; counts requests that are open."""

    def __init__(self, before: Callable[[Prompt], None] = lambda _: None) -> None:
        self.released = asyncio.Event()
        self.open = 0
        self.most_open = 0
        self.all_open = asyncio.Event()
        self.expected = math.inf
        self._before = before

    async def send(self, prompt: Prompt, answer: Answer) -> None:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        if self.open == self.expected:
            self.all_open.set()
        try:
            await self.released.wait()
            self._before(prompt)
            answer.add(prompt.output_tokens, "x")
            answer.output_tokens = prompt.output_tokens
            answer.prompt_tokens = len(prompt.token_ids)
        finally:
            self.open -= 1

    async def close(self) -> None:
        pass


def plan(count: int, **fields: Any) -> LoadPlan:
    arrivals = fields.pop("arrivals_s", (0.0,) * count)
    return LoadPlan(NOWHERE, tuple(Prompt(i + 1, (1, 2)) for i in range(count)), arrivals, **fields)


def generator(load: LoadPlan, backend: ScriptedBackend) -> tuple[LoadGenerator, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    return LoadGenerator(load, backend, SystemClock(), events.append), events


async def test_later_requests_never_wait_for_answers() -> None:
    backend = ScriptedBackend()
    backend.expected = 20
    load, events = generator(plan(20, arrivals_s=tuple(i / 1000 for i in range(20))), backend)
    running = asyncio.create_task(load.run())
    await asyncio.wait_for(backend.all_open.wait(), 10)
    assert [e["event"] for e in events] == ["started"], "all are sent, none is answered"
    backend.released.set()
    await running
    records = [e["record"] for e in events if e["event"] == "record"]
    assert sorted(r["index"] for r in records) == list(range(20))
    assert all(r["error"] == "" and r["output_tokens"] == r["index"] + 1 for r in records)
    assert all(r["fired_s"] >= r["scheduled_s"] for r in records)
    assert events[-1]["event"] == "done"


async def test_max_concurrency_holds_requests_back_and_their_ttft_starts_when_sent() -> None:
    backend = ScriptedBackend()
    backend.expected = 3
    load, events = generator(plan(10, max_concurrency=3), backend)
    running = asyncio.create_task(load.run())
    await asyncio.wait_for(backend.all_open.wait(), 10)
    backend.released.set()
    await running
    assert backend.most_open == 3
    records = [e["record"] for e in events if e["event"] == "record"]
    assert sum(r["sent_s"] > r["fired_s"] for r in records) == 10


async def test_failures_are_counted_by_kind_and_stop_nothing() -> None:
    def fail(prompt: Prompt) -> None:
        if prompt.output_tokens == 1:
            raise ResourceExhausted("full")
        if prompt.output_tokens == 2:
            raise RequestFailed("HTTP 500", "oops")
        if prompt.output_tokens == 3:
            raise KeyError("usage")

    backend = ScriptedBackend(fail)
    backend.released.set()
    load, events = generator(plan(4), backend)
    await load.run()
    errors = {e["record"]["index"]: e["record"]["error"] for e in events if e["event"] == "record"}
    assert errors == {0: "RESOURCE_EXHAUSTED", 1: "HTTP 500", 2: "malformed answer", 3: ""}


async def test_a_request_without_end_is_given_up() -> None:
    load, events = generator(plan(1, timeout_s=0.01), ScriptedBackend())
    await load.run()
    assert events[1]["record"]["error"] == "timeout"


async def test_a_short_answer_is_an_error_only_when_eos_is_ignored() -> None:
    class Short(ScriptedBackend):
        async def send(self, prompt: Prompt, answer: Answer) -> None:
            answer.add(1, "x")
            answer.output_tokens = 1

    for ignore, error in ((True, "wrong length"), (False, "")):
        load, events = generator(LoadPlan(NOWHERE, (Prompt(5, (1,)),), (0.0,), ignore_eos=ignore), Short())
        await load.run()
        assert events[1]["record"]["error"] == error


async def test_the_process_reports_every_request_even_when_nobody_listens() -> None:
    seen: list[int] = []
    result = await run_load(plan(3, timeout_s=5.0), on_record=lambda r: seen.append(r.index))
    assert sorted(seen) == [r.index for r in result.records] == [0, 1, 2]
    assert {r.error for r in result.records} == {"UNAVAILABLE"}
    assert result.duration_s > 0


async def test_cancelling_a_run_ends_its_process() -> None:
    started = asyncio.Event()
    load = plan(1, arrivals_s=(3600.0,))
    running = asyncio.create_task(run_load(load, on_started=lambda _: started.set()))
    await asyncio.wait_for(started.wait(), 30)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
