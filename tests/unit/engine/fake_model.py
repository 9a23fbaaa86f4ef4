"""A model whose tokens are a function of the whole prefix *as found in the pool*, and an engine around it.

The "KV" of a token is its id, kept per slot. The next token's logits are a hash of all ids gathered through the
block table, so that any foreign, missing or moved KV changes the output. Writing to a slot twice within one
generation of its block is an error: KV that was promised or shared must never be written to.
"""

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from tests.unit.engine.reference import Row
from weir.clock import ManualClock
from weir.engine.batch import Batch
from weir.engine.engine import Engine, EngineConfig
from weir.engine.output import Event, Finished, Preempted, Prefilled, Progress, Started, StepOutput, TokensOut
from weir.engine.request import EngineRequest, Mode
from weir.engine.sampler import Sampler
from weir.engine.sampling import SamplingParams
from weir.engine.scheduler import SchedulerConfig
from weir.ids import RequestKey
from weir.kvcache.blocks import BlockManager, BlockState
from weir.kvcache.prefix import PrefixIndex

VOCAB = 48
EOS = 2
EMPTY = -1


def logits_after(tokens: list[int]) -> Row:
    """The fake model: [VOCAB] from the whole prefix."""
    digest = hashlib.blake2b(struct.pack(f"<{len(tokens)}q", *tokens), digest_size=8).digest()
    rng = np.random.default_rng(int.from_bytes(digest, "little"))
    return (rng.standard_normal(VOCAB) * 2).astype(np.float32)


class FakeGuard:
    """Generations only."""

    def __init__(self, num_blocks: int) -> None:
        self.generations = [0] * num_blocks

    def generation(self, block: int) -> int:
        return self.generations[block]

    def invalidate(self, block: int) -> None:
        self.generations[block] += 1


class FakeRunner:
    """Keeps the pool and computes; ``fail_next`` makes the next run raise."""

    def __init__(self, num_blocks: int, block_size: int, guard: FakeGuard) -> None:
        self.pool = [EMPTY] * (num_blocks * block_size)
        self.written_in: dict[int, int] = {}
        self.block_size = block_size
        self.guard = guard
        self.fail_next = False
        self.batches: list[Batch] = []

    def run(self, batch: Batch) -> torch.Tensor:
        self.batches.append(batch)
        assert min(batch.query_lens) >= 1, "a sequence without new tokens"
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("planted")
        for token, slot in zip(batch.token_ids, batch.slots, strict=True):
            self.write(slot, token)
        self._check_positions(batch)
        rows = [self._logits(batch, row) for row in batch.logit_rows]
        return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, VOCAB)

    def write(self, slot: int, token: int) -> None:
        generation = self.guard.generation(slot // self.block_size)
        assert self.written_in.get(slot) != generation, f"slot {slot} written twice in generation {generation}"
        self.written_in[slot] = generation
        self.pool[slot] = token

    def read(self, block_table: list[int] | tuple[int, ...], num_tokens: int) -> list[int]:
        size = self.block_size
        assert num_tokens <= len(block_table) * size
        return [self.pool[block_table[i // size] * size + i % size] for i in range(num_tokens)]

    def _logits(self, batch: Batch, row: int) -> Row:
        return logits_after(self.read(batch.block_tables[row], batch.context_lens[row]))

    def _check_positions(self, batch: Batch) -> None:
        start = 0
        size = self.block_size
        for table, query, context in zip(batch.block_tables, batch.query_lens, batch.context_lens, strict=True):
            positions = batch.positions[start : start + query]
            assert positions == list(range(context - query, context))
            slots = [table[p // size] * size + p % size for p in positions]
            assert batch.slots[start : start + query] == slots
            start += query


@dataclass
class Seen:
    """What the events said about one key."""

    started: list[Started] = field(default_factory=list)
    sealed: dict[int, tuple[int, int]] = field(default_factory=dict)
    computed: int = 0
    tokens: list[int] = field(default_factory=list)
    first_index: int | None = None
    logprobs: list[object] = field(default_factory=list)
    prefilled: Prefilled | None = None
    finished: Finished | None = None
    preemptions: int = 0


class Harness:
    """An engine on the fake model; ``step`` checks the pool and the order of events each time."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        prefix_cache: bool = True,
        max_context_tokens: int = 1000,
        **scheduler: float | int | bytes,
    ) -> None:
        scheduler.setdefault("max_running", min(64, int(scheduler.get("max_batch_tokens", 512))))
        self.guard = FakeGuard(num_blocks)
        self.blocks = BlockManager(num_blocks, block_size, self.guard, PrefixIndex() if prefix_cache else None)
        self.runner = FakeRunner(num_blocks, block_size, self.guard)
        self.clock = ManualClock()
        self.sealed_calls: list[list[int]] = []
        config = EngineConfig(VOCAB, max_context_tokens, SchedulerConfig(**scheduler))  # type: ignore[arg-type]
        self.engine = Engine(self.runner, Sampler(), self.blocks, self._seal, config, self.clock)
        self.seen: dict[RequestKey, Seen] = {}
        self.steps = 0
        self.last: StepOutput | None = None

    def _seal(self, blocks: Iterable[int]) -> None:
        listed = list(blocks)
        for block in listed:
            assert self.blocks.state(block) is BlockState.USED
        self.sealed_calls.append(listed)

    def add(self, request: EngineRequest) -> RequestKey:
        self.engine.add(request)
        self.seen[request.key] = Seen()
        return request.key

    def step(self) -> tuple[Event, ...]:
        self.last = self.engine.step()
        self.steps += 1
        self.clock.advance(0.001)
        self.blocks.check_integrity()
        assert self.last.load.blocks == self.blocks.counts()
        for event in self.last.events:
            self._note(event)
        return self.last.events

    def run(self, limit: int = 5000) -> None:
        """Step until there is nothing to do."""
        for _ in range(limit):
            if not self.engine.has_work():
                return
            self.step()
        raise AssertionError(f"still busy after {limit} steps")

    def _note(self, event: Event) -> None:
        seen = self.seen[event.key]
        assert seen.finished is None, f"{event} after the end"
        match event:
            case Started():
                seen.started.append(event)
            case Progress():
                assert seen.started
                assert event.num_tokens > seen.computed or seen.preemptions
                seen.computed = event.num_tokens
                for sealed in event.sealed:
                    seen.sealed[sealed.index] = (sealed.block, sealed.generation)
            case TokensOut():
                if seen.first_index is None:
                    seen.first_index = event.first_index
                assert event.first_index == seen.first_index + len(seen.tokens), "a position twice or missing"
                seen.tokens += event.tokens
                seen.logprobs += event.logprobs or ()
            case Prefilled():
                seen.prefilled = event
            case Preempted():
                seen.preemptions += 1
                seen.sealed.clear()
            case Finished():
                seen.finished = event

    def assert_idle(self) -> None:
        """Nothing is left: all blocks free or cached."""
        load = self.engine.load()
        assert (load.running, load.waiting, load.holding, load.waiting_tokens) == (0, 0, 0, 0)
        counts = self.blocks.counts()
        assert counts[BlockState.FREE] + counts[BlockState.CACHED] == self.blocks.num_blocks, counts
        self.blocks.check_integrity()


def make_request(
    name: str,
    prompt: list[int],
    mode: Mode = Mode.LOCAL,
    generated: tuple[int, ...] = (),
    salt: bytes = b"",
    priority: int = 0,
    deadline_s: float | None = None,
    sampling: SamplingParams | None = None,
) -> EngineRequest:
    """A request of the fake model; greedy, 6 tokens unless told otherwise."""
    return EngineRequest(
        key=RequestKey(name, 1),
        prompt=tuple(prompt),
        generated=generated,
        sampling=sampling or SamplingParams(max_tokens=6, temperature=0.0),
        mode=mode,
        eos_token_ids=frozenset({EOS}),
        tenant_salt=salt,
        deadline_monotonic_s=deadline_s,
        priority=priority,
    )


def make_prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids that are not EOS; the same seed gives a common prefix."""
    rng = np.random.default_rng(seed)
    return [int(token) for token in rng.integers(3, VOCAB, size=length)]
