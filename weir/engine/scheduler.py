"""Who runs in the next step: continuous batching under a token budget, on one pool of blocks.

Rules
* Decodes are in every step, so a long prefill cannot starve them; what is left of ``max_batch_tokens`` goes to
  prefill chunks, first come first served.
* Admission takes the head of the queue only (priority, then arrival), with *all* blocks of its context at
  once. If they are not there the queue waits: nobody overtakes, so nobody starves.
* A decoding sequence that needs a block takes it from the youngest sequence that computes (preemption), if
  need be from itself. Its tokens become context and it goes back to its old place in the queue.

Why nothing deadlocks
* A prefilling sequence has all its blocks, so it never waits for one: half-prefilled sequences cannot starve
  each other.
* Only sequences that compute are preempted, youngest first: the oldest of them keeps its blocks as long as
  any other computes. When it is alone it can be stopped only by blocks that others hold without computing
  (KV under a lease, KV being read, quarantine); each of these ends by itself (completion, cancel, deadline).
* ``add`` refuses what could never fit the whole pool, so the head of the queue is admitted at the latest when
  all others have left. Each admission yields at least one token (the context's last logits), so sequences
  that preempt each other still finish.

Ownership: a sequence holds one reference on each block of its table from admission until ``release``, which
is the only place that gives blocks back. Blocks on which a read may still land go through quarantine.
"""

import bisect
from dataclasses import dataclass

from weir.engine.batch import Batch
from weir.engine.request import EngineRequest, Mode
from weir.engine.sampling import LENGTH
from weir.engine.sequence import Sequence, SequenceState, max_kv_tokens
from weir.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from weir.ids import RequestKey
from weir.kvcache.blocks import BlockManager
from weir.kvcache.prefix import chain_seed


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds. ``max_batch_tokens`` per step; ``max_running`` sequences that compute or wait for KV;
    ``max_waiting`` in the queue. ``watermark`` is the share of the pool that admission leaves free for the
    growth of running sequences. ``fingerprint_digest`` seeds the prefix hashes.
    """

    max_batch_tokens: int = 512
    max_running: int = 64
    max_waiting: int = 1024
    watermark: float = 0.01
    fingerprint_digest: bytes = b""

    def __post_init__(self) -> None:
        if not 1 <= self.max_running <= self.max_batch_tokens:
            limit = f"must lie in [1, max_batch_tokens={self.max_batch_tokens}]: all may decode in one step"
            raise InvalidArgument("max_running", self.max_running, limit)
        if self.max_waiting < 1:
            raise InvalidArgument("max_waiting", self.max_waiting, "must be at least 1")
        if not 0.0 <= self.watermark < 1.0:
            raise InvalidArgument("watermark", self.watermark, "must lie in [0, 1)")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run: ``chunks[i]`` new tokens of ``sequences[i]``; the first ``num_decodes`` decode."""

    sequences: list[Sequence]
    chunks: list[int]
    num_decodes: int


class Scheduler:
    """Owns all sequences of an engine and their block references. Single-threaded.

    ``admission_may_help``: something changed since ``admit`` last ran that may let the queue's head in.
    """

    def __init__(self, blocks: BlockManager, config: SchedulerConfig) -> None:
        self.blocks = blocks
        self.config = config
        self.block_size = blocks.block_size
        self._waiting: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []
        self._live: dict[RequestKey, Sequence] = {}
        self._quarantined: dict[RequestKey, list[int]] = {}
        self._arrivals = 0
        self._watermark_blocks = int(config.watermark * blocks.num_blocks)
        self.num_awaiting = 0
        self.num_holding = 0
        self.waiting_tokens = 0
        self.admission_may_help = False

    # -- looking ----------------------------------------------------------------------------------------

    def get(self, key: RequestKey) -> Sequence | None:
        """The live sequence of ``key``."""
        return self._live.get(key)

    @property
    def num_live(self) -> int:
        """Sequences that are not done."""
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._waiting)

    @property
    def num_computing(self) -> int:
        """Sequences that prefill or decode."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_running(self) -> int:
        """Sequences that compute or wait for KV; what ``max_running`` bounds."""
        return self.num_computing + self.num_awaiting

    # -- coming -----------------------------------------------------------------------------------------

    def add(self, request: EngineRequest, now_s: float) -> Sequence:
        """Queue a request. Raises InvalidArgument if it can never fit the pool, ResourceExhausted if the
        queue is full, FailedPrecondition if its key is live; nothing is changed then.
        """
        if request.key in self._live or request.key in self._quarantined:
            raise FailedPrecondition(f"request {request.key} is already here")
        self._check_fits(request)
        if len(self._waiting) >= self.config.max_waiting:
            raise ResourceExhausted(f"{len(self._waiting)} requests wait; max_waiting = {self.config.max_waiting}")
        sequence = Sequence(request, self._arrivals, now_s)
        self._arrivals += 1
        self._live[request.key] = sequence
        self._enqueue(sequence)
        self.admission_may_help = True
        return sequence

    def _check_fits(self, request: EngineRequest) -> None:
        tokens = max_kv_tokens(request)
        needed = -(-tokens // self.block_size)
        if needed > self.blocks.num_blocks:
            raise InvalidArgument(
                LENGTH,
                tokens,
                f"needs {needed} KV blocks of {self.block_size} tokens; the pool has {self.blocks.num_blocks}",
            )

    def admit(self, now_s: float) -> list[tuple[Sequence, float]]:
        """Give blocks to the head of the queue while there is room. Returns (sequence, seconds waited)."""
        admitted: list[tuple[Sequence, float]] = []
        self.admission_may_help = False
        while self._waiting and self.num_running < self.config.max_running:
            sequence = self._waiting[0]
            if not self._try_allocate(sequence):
                break
            self._dequeue(sequence)
            self._start(sequence)
            admitted.append((sequence, now_s - sequence.since_s))
            sequence.since_s = now_s
        return admitted

    def _try_allocate(self, sequence: Sequence) -> bool:
        size, remote = self.block_size, sequence.mode is Mode.REMOTE
        context = sequence.request.context_len if remote else len(sequence.tokens)
        # One token must be left to compute for its logits, unless they are made elsewhere.
        usable = context if remote else context - 1
        seed = chain_seed(self.config.fingerprint_digest, sequence.request.tenant_salt)
        sequence.extend_hashes(size, seed, context)
        hits = self.blocks.match(sequence.hashes[: usable // size])
        needed = -(-context // size) - len(hits)
        if needed + self._reserve(sequence) > self.blocks.num_available():
            self.blocks.release(hits)
            return False
        sequence.block_table = hits + self.blocks.allocate(needed)
        sequence.cached_blocks = sequence.num_registered = len(hits)
        sequence.advance(len(hits) * size, "hit")
        return True

    def _reserve(self, sequence: Sequence) -> int:
        """Blocks to leave for the growth of running sequences; none when nothing else could make room."""
        if self.num_running == 0:
            return 0
        grows = sequence.mode is not Mode.PREFILL
        return len(self._decoding) + (self._watermark_blocks if grows else 0)

    def _start(self, sequence: Sequence) -> None:
        if sequence.mode is Mode.REMOTE:
            sequence.enter(SequenceState.AWAITING_KV)
            self.num_awaiting += 1
            self.try_decode(sequence)
        else:
            sequence.enter(SequenceState.PREFILLING)
            bisect.insort(self._prefilling, sequence, key=_order)

    # -- running ----------------------------------------------------------------------------------------

    def schedule(self) -> tuple[Plan, list[Sequence]]:
        """The next step's plan and the sequences that were preempted for it. Allocates the decodes' blocks."""
        preempted = self._grow_decodes()
        sequences = list(self._decoding)
        chunks = [1] * len(sequences)
        num_decodes = len(sequences)
        budget = self.config.max_batch_tokens - num_decodes
        for sequence in self._prefilling:
            if budget <= 0:
                break
            chunk = min(budget, sequence.remaining)
            sequences.append(sequence)
            chunks.append(chunk)
            budget -= chunk
        return Plan(sequences, chunks, num_decodes), preempted

    def _grow_decodes(self) -> list[Sequence]:
        preempted: list[Sequence] = []
        size = self.block_size
        for sequence in list(self._decoding):
            if len(sequence.tokens) <= len(sequence.block_table) * size:
                continue
            while sequence.state is SequenceState.DECODING and self.blocks.num_available() == 0:
                victim = self._victim()
                self.requeue(victim)
                victim.preemptions += 1
                preempted.append(victim)
            if sequence.state is SequenceState.DECODING:
                sequence.block_table += self.blocks.allocate(1)
        return preempted

    def _victim(self) -> Sequence:
        """The youngest sequence that computes. Decoding and prefilling lists are kept in order."""
        assert self._decoding, "only a decoding sequence asks for a victim"
        youngest = self._decoding[-1]
        if self._prefilling and self._prefilling[-1].order > youngest.order:
            youngest = self._prefilling[-1]
        return youngest

    def computed(self, sequence: Sequence, chunk: int) -> None:
        """``chunk`` more tokens of it are in the pool: register the blocks that became full."""
        self._advance(sequence, sequence.num_computed + chunk, "compute")

    def prefilled(self, sequence: Sequence, *, hold: bool) -> None:
        """Its context is computed and the next token appended: decode, or hold the KV under a lease."""
        self._prefilling.remove(sequence)
        if hold:
            sequence.enter(SequenceState.HOLDING)
            self.num_holding += 1
            self.blocks.lease(sequence.block_table)
            self.blocks.release(sequence.block_table)
        else:
            sequence.enter(SequenceState.DECODING)
            bisect.insort(self._decoding, sequence, key=_order)

    def _advance(self, sequence: Sequence, num_computed: int, source: str) -> None:
        sequence.advance(num_computed, source)
        full = num_computed // self.block_size
        if full > sequence.num_registered:
            seed = chain_seed(self.config.fingerprint_digest, sequence.request.tenant_salt)
            sequence.extend_hashes(self.block_size, seed, num_computed)
            for index in range(sequence.num_registered, full):
                self.blocks.register(sequence.block_table[index], sequence.hashes[index])
            sequence.num_registered = full

    # -- KV from elsewhere ------------------------------------------------------------------------------

    def kv_arrived(self, sequence: Sequence, num_tokens: int) -> None:
        """KV of the first ``num_tokens`` context tokens is proven; no read lands before their end any more."""
        assert sequence.state is SequenceState.AWAITING_KV, (sequence.key, sequence.state)
        assert num_tokens <= sequence.request.context_len, (sequence.key, num_tokens)
        if num_tokens > sequence.num_computed:
            self._advance(sequence, num_tokens, "external")
        if num_tokens == sequence.request.context_len:
            sequence.reading = False
        self.try_decode(sequence)

    def first_token(self, sequence: Sequence, token: int) -> bool:
        """Append the token sampled elsewhere. Returns whether its blocks were taken for that: a sequence that
        was already being recomputed goes back to the queue, because it may need one block more.
        """
        assert sequence.num_generated == len(sequence.request.generated), sequence.key
        requeued = sequence.state is SequenceState.PREFILLING
        if requeued:
            self.requeue(sequence)
        sequence.tokens.append(token)
        if sequence.state is SequenceState.WAITING:
            self.waiting_tokens += 1
        self.try_decode(sequence)
        return requeued

    def try_decode(self, sequence: Sequence) -> bool:
        """Start to decode if the KV is complete and the first token known."""
        if sequence.state is not SequenceState.AWAITING_KV or sequence.remaining != 1:
            return False
        if len(sequence.tokens) == sequence.request.context_len:
            return False  # what is missing is the last context token's KV, not a sampled token
        sequence.enter(SequenceState.DECODING)
        self.num_awaiting -= 1
        bisect.insort(self._decoding, sequence, key=_order)
        return True

    def reads_done(self, key: RequestKey) -> None:
        """No read into the blocks of ``key`` is under way: its quarantine, if any, ends. Idempotent."""
        sequence = self._live.get(key)
        if sequence is not None:
            sequence.reading = False
        blocks = self._quarantined.pop(key, None)
        if blocks is not None:
            self.blocks.unquarantine(blocks)
            self.admission_may_help = True

    # -- going ------------------------------------------------------------------------------------------

    def requeue(self, sequence: Sequence) -> None:
        """Take its blocks; it waits in its old place and computes its tokens here when it is admitted again."""
        self.release(sequence)
        sequence.enter(SequenceState.WAITING)
        if sequence.mode is Mode.REMOTE:
            sequence.mode = Mode.LOCAL
        self._enqueue(sequence)

    def finish(self, sequence: Sequence) -> None:
        """It is over: take it out of every list and give its blocks back."""
        if sequence.state is SequenceState.WAITING:
            self._dequeue(sequence)
        self.release(sequence)
        sequence.enter(SequenceState.DONE)
        del self._live[sequence.key]

    def release(self, sequence: Sequence) -> None:
        """Take it off the list of its state and give its blocks back, through quarantine if it is read into."""
        state, table = sequence.state, sequence.block_table
        if state is SequenceState.PREFILLING:
            self._prefilling.remove(sequence)
        elif state is SequenceState.DECODING:
            self._decoding.remove(sequence)
        elif state is SequenceState.AWAITING_KV:
            self.num_awaiting -= 1
        elif state is SequenceState.HOLDING:
            self.num_holding -= 1
            self.blocks.unlease(table)
        if sequence.reading:
            self._quarantine(sequence)
        if state is not SequenceState.HOLDING:
            self.blocks.release(table)
        sequence.forget_kv()
        self.admission_may_help = True

    def _quarantine(self, sequence: Sequence) -> None:
        at_risk = sequence.block_table[sequence.num_computed // self.block_size :]
        self.blocks.quarantine(at_risk)
        assert sequence.key not in self._quarantined, sequence.key
        self._quarantined[sequence.key] = at_risk

    def _enqueue(self, sequence: Sequence) -> None:
        bisect.insort(self._waiting, sequence, key=_order)
        self.waiting_tokens += len(sequence.tokens)

    def _dequeue(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        self.waiting_tokens -= len(sequence.tokens)


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


def build_batch(plan: Plan, block_size: int) -> Batch:
    """The step as the model sees it. Block tables are shared with the sequences, not copied."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    context_lens: list[int] = []
    logit_rows: list[int] = []
    for row, (sequence, chunk) in enumerate(zip(plan.sequences, plan.chunks, strict=True)):
        start = sequence.num_computed
        end = start + chunk
        table = sequence.block_table
        token_ids += sequence.tokens[start:end]
        positions += range(start, end)
        slots += [table[i // block_size] * block_size + i % block_size for i in range(start, end)]
        context_lens.append(end)
        if end == len(sequence.tokens):
            logit_rows.append(row)
    tables = [sequence.block_table for sequence in plan.sequences]
    return Batch(token_ids, positions, slots, plan.chunks, context_lens, tables, logit_rows, plan.num_decodes)
