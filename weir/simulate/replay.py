"""One mixed worker, step by step, under the production engine scheduler and block manager.

For comparison with servers that were measured request by request. It costs time per token; ``worker`` does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass

from weir.engine.request import EngineRequest, Mode
from weir.engine.sampling import SamplingParams
from weir.engine.scheduler import Plan, Scheduler, SchedulerConfig
from weir.engine.sequence import Sequence
from weir.ids import RequestKey
from weir.kvcache.blocks import BlockManager
from weir.kvcache.prefix import PrefixIndex
from weir.simulate.models import Chunk
from weir.simulate.operators import OperatorTimes
from weir.simulate.traffic import Arrival

FILLER = 7
"""Token that stands for all generated ones: nothing is matched by it, since blocks are chained."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Moments of one request."""

    arrival_s: float
    first_s: float
    end_s: float
    prompt: int
    output: int

    @property
    def ttft_s(self) -> float:
        """Arrival to first token."""
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean gap between its tokens."""
        return (self.end_s - self.first_s) / (self.output - 1) if self.output > 1 else 0.0

    @property
    def e2e_s(self) -> float:
        """Arrival to last token."""
        return self.end_s - self.arrival_s


class EagerScheduler(Scheduler):
    """With vLLM's two rules: admit what fits beside this step's growth, and preempt who was admitted last."""

    def _reserve(self, sequence: Sequence) -> int:
        size = self.block_size
        return sum(len(one.tokens) > len(one.block_table) * size for one in self._decoding)

    def _victim(self) -> Sequence:
        return max((*self._decoding, *self._prefilling), key=lambda one: (one.since_s, one.order))


class _NoGuard:
    """Nobody reads from here."""

    def generation(self, block: int) -> int:
        return 0

    def invalidate(self, block: int) -> None:
        pass


class Replay:
    """``run`` once. ``overhead_s`` is added to every step."""

    def __init__(
        self,
        times: OperatorTimes,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        block_size: int = 16,
        eager: bool = True,
        overhead_s: float = 0.0,
    ) -> None:
        blocks = BlockManager(num_blocks, block_size, _NoGuard(), PrefixIndex())
        self.scheduler = (EagerScheduler if eager else Scheduler)(blocks, config)
        self.steps = 0
        self.preemptions = 0
        self._times = times
        self._overhead_s = overhead_s
        self._now_s = 0.0
        self._first_s: dict[RequestKey, float] = {}
        self._done: dict[RequestKey, Replayed] = {}
        self._arrival_s: dict[RequestKey, float] = {}

    def run(self, arrivals: Many[Arrival]) -> list[Replayed]:
        """All of ``arrivals``, in order of time; the results in their order."""
        coming = deque(enumerate(arrivals))
        while coming or self.scheduler.num_live:
            while coming and coming[0][1].at_s <= self._now_s:
                self._add(*coming.popleft())
            self.scheduler.admit(self._now_s)
            plan, preempted = self.scheduler.schedule()
            self.preemptions += len(preempted)
            if plan.sequences:
                self._step(plan)
            else:
                assert coming, "sequences wait and none runs"
                self._now_s = max(self._now_s, coming[0][1].at_s)
        return [self._done[_key(index)] for index in range(len(arrivals))]

    def _add(self, index: int, arrival: Arrival) -> None:
        first = (index + 1) << 14
        prompt = tuple(range(first, first + arrival.prompt))
        sampling = SamplingParams(max_tokens=arrival.output, temperature=0.0, ignore_eos=True)
        key = _key(index)
        self._arrival_s[key] = arrival.at_s
        self.scheduler.add(EngineRequest(key, prompt, (), sampling, Mode.LOCAL), self._now_s)

    def _step(self, plan: Plan) -> None:
        decodes = plan.num_decodes
        context = sum(sequence.num_computed + 1 for sequence in plan.sequences[:decodes])
        chunks: list[Chunk] = [
            (chunk, sequence.num_computed)
            for sequence, chunk in zip(plan.sequences[decodes:], plan.chunks[decodes:], strict=True)
        ]
        self._now_s += self._times.step_s(chunks, decodes, context) + self._overhead_s
        self.steps += 1
        for place, (sequence, chunk) in enumerate(zip(plan.sequences, plan.chunks, strict=True)):
            self.scheduler.computed(sequence, chunk)
            if sequence.remaining == 0:
                self._token(sequence, prefilled=place >= decodes)

    def _token(self, sequence: Sequence, *, prefilled: bool) -> None:
        sequence.tokens.append(FILLER)
        key = sequence.key
        first_s = self._first_s.setdefault(key, self._now_s)
        if sequence.finish_reason() is not None:
            self.scheduler.finish(sequence)
            prompt, output = sequence.num_prompt, sequence.num_generated
            self._done[key] = Replayed(self._arrival_s[key], first_s, self._now_s, prompt, output)
        elif prefilled:
            self.scheduler.prefilled(sequence, hold=False)


def _key(index: int) -> RequestKey:
    return RequestKey(f"r-{index}", 1)
