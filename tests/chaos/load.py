"""Steady load whose every token is known beforehand."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.e2e.faults.tiny import TinyLlama, prompt_of
from tests.e2e.faults.watched import Watched
from weir.client import AsyncClient, Completion
from weir.errors import RequestCancelled, ResourceExhausted, Unavailable

LENGTHS = (1, 15, 16, 17, 40, 100, 333, 1_200)
CASES = 32
LONGEST_S = 45.0
"""No request may take longer, whatever happens to the cluster."""
RETRY_S = 0.2
_NUMBERS = re.compile(r"\b[0-9a-f]{6,}\b|\d+")


@dataclass(frozen=True, slots=True)
class Case:
    """A question and its answer."""

    prompt: list[int]
    options: dict[str, Any]
    expected: tuple[int, ...]


async def make_cases(tiny: TinyLlama, client: AsyncClient, source: random.Random) -> list[Case]:
    """Greedy ones from transformers, seeded ones from the cluster before anything is broken."""
    shared = prompt_of(64, source.randrange(1 << 30))
    cases = []
    for number in range(CASES):
        prompt = shared[: 16 * source.randrange(5)] + prompt_of(source.choice(LENGTHS), source.randrange(1 << 30))
        tokens = source.choice((1, 2, 20, 80, 200))
        options: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
        if number % 3:
            expected = await asyncio.to_thread(tiny.greedy, prompt, tokens)
        else:
            options |= {"temperature": 0.9, "top_p": 0.95, "seed": number}
            expected = (await client.complete(prompt, **options)).token_ids
        cases.append(Case(prompt, options, expected))
    return cases


class Load:
    """``clients`` loops, one request each. ``wrong`` holds a line for each thing that must not happen."""

    def __init__(
        self, cases: list[Case], doors: Callable[[], list[AsyncClient]], source: random.Random, clients: int
    ) -> None:
        self.ended: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.errors: Counter[str] = Counter()
        self.retried = 0
        self.tokens = 0
        self.slowest_s = 0.0
        self.under_way: list[Watched] = []
        self._left: set[int] = set()
        self._cases = cases
        self._doors = doors
        self._source = source
        self._clients = clients
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    def start(self) -> None:
        """Begin to ask."""
        self._stopping = False
        self._tasks = [asyncio.create_task(self._client()) for _ in range(self._clients)]

    async def stop(self) -> None:
        """Ask nothing more; return when all answers are there."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def abort_one(self) -> None:
        """One client leaves in the middle of its request, if there is one."""
        running = [request for request in self.under_way if not request.done]
        if running:
            request = self._source.choice(running)
            self._left.add(id(request))
            await request.leave()

    async def _client(self) -> None:
        while not self._stopping:
            case = self._source.choice(self._cases)
            tenant = self._source.choice(("", "", f"tenant {self._source.randrange(1 << 30)}"))
            request = Watched(self._source.choice(self._doors()), case.prompt, tenant=tenant, **case.options)
            self.under_way.append(request)
            started_s = asyncio.get_running_loop().time()
            ended = await self._judge(case, request)
            self.under_way.remove(request)
            self._left.discard(id(request))
            self.slowest_s = max(self.slowest_s, asyncio.get_running_loop().time() - started_s)
            self.ended[ended] += 1
            if ended not in ("finished", "left"):
                await asyncio.sleep(RETRY_S)

    async def _judge(self, case: Case, request: Watched) -> str:
        """How it ended; what it got must be the beginning of what is right."""
        ended = "finished"
        try:
            async with asyncio.timeout(LONGEST_S):
                self._check_whole(case, await request.outcome())
        except TimeoutError:
            ended = "hung"
            self.wrong.append(f"{request.request_id} hung after {len(request.tokens)} tokens")
        except asyncio.CancelledError:
            if id(request) not in self._left:
                raise
            ended = "left"
        except (Unavailable, ResourceExhausted, RequestCancelled) as error:
            ended = type(error).__name__
            self.errors[_NUMBERS.sub("N", f"{ended}: {error}")[:160]] += 1
        except Exception as error:
            ended = f"WRONG {type(error).__name__}"
            self.wrong.append(f"{request.request_id}: {type(error).__name__}: {error}")
        self.tokens += len(request.tokens)
        if tuple(request.tokens) != case.expected[: len(request.tokens)]:
            self.wrong.append(f"{request.request_id}: wrong tokens after {_agreeing(request.tokens, case.expected)}")
        return ended

    def _check_whole(self, case: Case, answer: Completion) -> None:
        usage = answer.final.usage
        sources = usage.local_compute_tokens + usage.local_cache_hit_tokens + usage.external_kv_tokens
        self.retried += answer.final.timings.attempts > 1
        if answer.token_ids != case.expected:
            self.wrong.append(f"{answer.request_id}: {len(answer.token_ids)} of {len(case.expected)} tokens, no error")
        if (usage.prompt_tokens, usage.completion_tokens) != (len(case.prompt), len(case.expected)):
            self.wrong.append(f"{answer.request_id}: usage {usage}")
        if sources != usage.prompt_tokens:
            self.wrong.append(f"{answer.request_id}: sources do not add up: {usage}")


def _agreeing(got: list[int], expected: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), len(expected))
