"""The load generator: a process of its own, ``python -m weir.bench.generator``.

Reads a pickled ``LoadPlan`` from standard input (its own parent wrote it) and writes a JSON object a line:
``started``, a ``record`` for each request as it ends, ``done`` with the process's own cost. Arrivals are timers at
absolute times, all set before the run: a slow answer never delays a later request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import pickle
import resource
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import orjson

from weir.bench.backends import Answer, Backend, OpenAiBackend, RequestFailed, WeirBackend
from weir.bench.plan import LoadPlan, Prompt
from weir.bench.records import RequestRecord
from weir.bench.vllm_pd import VllmPdBackend
from weir.bench.watchdog import judge
from weir.clock import Clock, SystemClock
from weir.errors import WeirError

LEAD_S = 0.05
TICK_S = 0.01

Emit = Callable[[dict[str, Any]], None]


class LoadGenerator:
    """Runs one plan. ``emit`` is called with each event; it must not block for long."""

    def __init__(self, plan: LoadPlan, backend: Backend, clock: Clock, emit: Emit) -> None:
        self._plan = plan
        self._backend = backend
        self._clock = clock
        self._emit = emit
        self._slots = asyncio.Semaphore(plan.max_concurrency) if plan.max_concurrency else None
        self._start_s = 0.0
        self._schedule_lags_s: list[float] = []
        self._loop_lags_s: list[float] = []

    async def run(self) -> None:
        """Warm up, send everything, wait for all of it. Always ends with a ``done`` event."""
        for prompt in self._plan.warmups:
            await self._one(-1, prompt, 0.0, 0.0)
        # What exists now lives to the end; collections would stop the clock of every request.
        gc.collect()
        gc.freeze()
        cpu_before_s = _cpu_s()
        self._start_s = self._clock.monotonic_s() + LEAD_S
        self._emit({"event": "started", "monotonic_s": self._start_s})
        ticking = asyncio.create_task(self._tick())
        await self._send_all()
        ended_s = self._clock.monotonic_s()
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
        wall_s = max(1e-9, ended_s - self._start_s)
        due_together = len(set(self._plan.arrivals_s)) <= 1
        lags = [] if due_together else self._schedule_lags_s
        health = judge(lags, self._loop_lags_s, _cpu_s() - cpu_before_s, wall_s)
        self._emit({"event": "done", "duration_s": wall_s, "health": dataclasses.asdict(health)})

    async def _send_all(self) -> None:
        loop = asyncio.get_running_loop()
        offset_s = loop.time() - self._clock.monotonic_s()
        tasks: list[asyncio.Task[None]] = []
        left = len(self._plan.prompts)
        all_fired = asyncio.Event()

        def fire(index: int) -> None:
            nonlocal left
            tasks.append(loop.create_task(self._measured(index, self._now_s())))
            left -= 1
            if not left:
                all_fired.set()

        for index, at_s in enumerate(self._plan.arrivals_s):
            loop.call_at(self._start_s + at_s + offset_s, fire, index)
        if left:
            await all_fired.wait()
        await asyncio.gather(*tasks)

    async def _measured(self, index: int, fired_s: float) -> None:
        scheduled_s = self._plan.arrivals_s[index]
        self._schedule_lags_s.append(max(0.0, fired_s - scheduled_s))
        async with AsyncExitStack() as stack:
            if self._slots is not None:
                await stack.enter_async_context(self._slots)
            record = await self._one(index, self._plan.prompts[index], scheduled_s, fired_s)
        self._emit({"event": "record", "record": dataclasses.asdict(record)})

    async def _one(self, index: int, prompt: Prompt, scheduled_s: float, fired_s: float) -> RequestRecord:
        answer = Answer(self._clock, self._plan.keep_text)
        sent_s = self._now_s()
        error, detail = "", ""
        try:
            async with asyncio.timeout(self._plan.timeout_s):
                await self._backend.send(prompt, answer)
            error, detail = self._shortfall(prompt, answer)
        except RequestFailed as failure:
            error, detail = failure.kind, str(failure)
        except TimeoutError:
            error, detail = "timeout", f"no end within {self._plan.timeout_s:g} s"
        except WeirError as failure:
            error, detail = failure.code, str(failure)
        except (OSError, ValueError, KeyError, TypeError) as failure:
            error, detail = "malformed answer", f"{type(failure).__name__}: {failure}"
        return RequestRecord(
            index=index,
            kind=prompt.kind,
            scheduled_s=scheduled_s,
            fired_s=fired_s,
            sent_s=sent_s,
            ended_s=self._now_s(),
            token_times_s=tuple(t - self._start_s for t in answer.times_s),
            prompt_tokens=answer.prompt_tokens or len(prompt.token_ids),
            output_tokens=answer.output_tokens or len(answer.times_s),
            error=error,
            detail=detail,
            text=answer.text,
        )

    def _shortfall(self, prompt: Prompt, answer: Answer) -> tuple[str, str]:
        """An answer that stops early is an error when only its length may end it."""
        if self._plan.ignore_eos and answer.output_tokens != prompt.output_tokens:
            return "wrong length", f"{answer.output_tokens} tokens instead of {prompt.output_tokens}"
        return "", ""

    def _now_s(self) -> float:
        return self._clock.monotonic_s() - self._start_s

    async def _tick(self) -> None:
        """How late this loop comes to a timer is how late it stamps tokens."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            due_s = max(due_s + TICK_S, loop.time())
            await asyncio.sleep(due_s - loop.time())
            self._loop_lags_s.append(max(0.0, loop.time() - due_s))


def make_backend(plan: LoadPlan) -> Backend:
    """The back end that the plan names."""
    kinds: dict[str, type[WeirBackend] | type[OpenAiBackend] | type[VllmPdBackend]] = {
        "weir": WeirBackend,
        "openai": OpenAiBackend,
        "openai-chat": OpenAiBackend,
        "vllm-pd": VllmPdBackend,
    }
    return kinds[plan.target.backend](plan)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _emit_line(event: dict[str, Any]) -> None:
    sys.stdout.buffer.write(orjson.dumps(event) + b"\n")
    sys.stdout.buffer.flush()


async def _main(plan: LoadPlan) -> None:
    backend = make_backend(plan)
    try:
        await LoadGenerator(plan, backend, SystemClock(), _emit_line).run()
    finally:
        await backend.close()


if __name__ == "__main__":
    asyncio.run(_main(pickle.load(sys.stdin.buffer)))
