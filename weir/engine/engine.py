"""The engine: one model, one pool, many sequences; ``step`` is the whole loop.

Single-threaded: all methods but ``interrupt`` are called from the thread that steps. What they change takes effect at
once, which is between steps; what there is to tell comes with the next ``StepOutput``.
"""

import heapq
import itertools
import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from weir.clock import Clock
from weir.engine.batch import Batch
from weir.engine.interrupt import StepInterrupt, StepInterrupted
from weir.engine.output import (
    EngineLoad,
    Event,
    Finished,
    Preempted,
    Prefilled,
    Progress,
    SealedBlock,
    Started,
    StepOutput,
    TokenLogprobs,
    TokensOut,
)
from weir.engine.request import EngineRequest, Mode
from weir.engine.sampler import INVALID_TOKEN, Sampler, Samples
from weir.engine.sampling import check_prompt, check_sampling
from weir.engine.scheduler import Plan, Scheduler, SchedulerConfig, build_batch
from weir.engine.sequence import Sequence, SequenceState
from weir.errors import DeadlineExceeded, InternalError, InvalidArgument, WeirError
from weir.ids import RequestKey
from weir.kvcache.blocks import BlockManager
from weir.lifecycle import FinishReason

MAX_STALE_DEADLINES = 1024

_log = logging.getLogger(__name__)


class Runner(Protocol):
    """The model on the pool."""

    def run(self, batch: Batch) -> torch.Tensor:
        """Write the batch's K and V into its slots; logits [len(logit_rows), vocab], float32."""
        ...


@runtime_checkable
class InterruptibleRunner(Protocol):
    """A runner that can give up between layers."""

    check: Callable[[], None]
    """Called between the layers of a step that prefills; what it raises leaves ``run``."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """``vocab_size`` and ``max_context_tokens`` are the model's; requests beyond them are refused."""

    vocab_size: int
    max_context_tokens: int
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)


class Engine:
    """Runs requests. ``seal(blocks)`` publishes the checksums of blocks that a reader will be told about."""

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        blocks: BlockManager,
        seal: Callable[[Iterable[int]], None],
        config: EngineConfig,
        clock: Clock,
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._blocks = blocks
        self._seal = seal
        self._config = config
        self._clock = clock
        self._scheduler = Scheduler(blocks, config.scheduler)
        self._events: list[Event] = []
        self._deadlines: list[tuple[float, RequestKey]] = []
        self._interrupt = StepInterrupt()
        if isinstance(runner, InterruptibleRunner):
            runner.check = self._interrupt.check
        self.failed_steps = 0
        self.interrupted_steps = 0

    # -- the loop ---------------------------------------------------------------------------------------

    def step(self) -> StepOutput:
        """Admit, schedule, run, publish. A failing model ends the sequences of its batch, not the engine."""
        laps = [self._clock.monotonic_s()]
        self._expire(laps[0])
        self._admit(laps[0])
        plan = self._schedule()
        laps.append(self._clock.monotonic_s())
        if plan.sequences:
            try:
                batch = build_batch(plan, self._blocks.block_size)
                logits = self._run(plan, batch)
                laps.append(self._clock.monotonic_s())
                samples = self._sample(plan, batch, logits)
                laps.append(self._clock.monotonic_s())
                self._publish(plan, samples, laps[-1])
            except StepInterrupted:
                self.interrupted_steps += 1
            except Exception as error:
                self._fail(plan, error)
        laps.append(self._clock.monotonic_s())
        return self._output(plan, laps)

    def interrupt(self, key: RequestKey) -> None:
        """``key`` is about to be cancelled: give up the step under way if it works mostly for it. The only call that
        may come from another thread; the ``cancel`` must follow.
        """
        self._interrupt.request(key)

    def has_work(self) -> bool:
        """Whether ``step`` would do or tell anything now. If not, wait for a call or ``next_deadline_s``."""
        scheduler = self._scheduler
        if self._events or scheduler.num_computing:
            return True
        if scheduler.num_waiting and scheduler.admission_may_help:
            return True
        return bool(self._deadlines) and self._deadlines[0][0] <= self._clock.monotonic_s()

    def next_deadline_s(self) -> float | None:
        """The first moment, on the monotonic clock, at which a request may expire; may be a finished one's."""
        return self._deadlines[0][0] if self._deadlines else None

    def load(self) -> EngineLoad:
        """Load now, without the times of a step."""
        return self._load()

    # -- commands ---------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Nothing is kept when it raises:

        InvalidArgument      a field is out of its limits, or it can never fit the context or the pool
        ResourceExhausted    the queue is full
        FailedPrecondition   the key is live, or its blocks are still being read into
        """
        self._check(request)
        self._scheduler.add(request, self._clock.monotonic_s())
        if request.deadline_monotonic_s is not None:
            self._watch_deadline(request.deadline_monotonic_s, request.key)

    def cancel(self, key: RequestKey, quarantined: bool = False) -> bool:
        """End a request wherever it is; blocks are back when this returns, except those of unfinished reads
        (``quarantined``, or ``reads_started`` was called), which wait for ``reads_done``. False: not here.
        """
        self._interrupt.forget(key)
        sequence = self._scheduler.get(key)
        if sequence is None:
            return False
        sequence.reading = sequence.reading or (quarantined and bool(sequence.block_table))
        self._finish(sequence, FinishReason.CANCELLED)
        return True

    def release_kv(self, key: RequestKey) -> bool:
        """The lease of a prefilled sequence has ended: drop it silently. False: nothing is held."""
        sequence = self._scheduler.get(key)
        if sequence is None or sequence.state is not SequenceState.HOLDING:
            return False
        self._scheduler.finish(sequence)
        return True

    def reads_started(self, key: RequestKey) -> bool:
        """Call before the first read is posted into the blocks of a REMOTE sequence: from now on they are not
        handed out before ``reads_done``, whatever happens. False: it does not wait for KV; post nothing.
        """
        sequence = self._awaiting(key)
        if sequence is None:
            return False
        sequence.reading = True
        return True

    def reads_done(self, key: RequestKey) -> None:
        """No read into its blocks can land any more (done, or the peer is known dead). Idempotent; to be
        called after each ``reads_started`` in the end, also when the sequence is gone.
        """
        self._scheduler.reads_done(key)

    def kv_arrived(self, key: RequestKey, num_tokens: int) -> bool:
        """KV of the first ``num_tokens`` of the context is there and proven, and no read lands in it any more.
        Grows with each chunk; with the whole context it implies ``reads_done``. False: nobody waits for it.
        """
        sequence = self._awaiting(key)
        if sequence is None:
            return False
        self._scheduler.kv_arrived(sequence, num_tokens)
        return True

    def first_token(self, key: RequestKey, token: int) -> bool:
        """The context's next token, sampled and sent elsewhere: it is not told again. Before or after the KV,
        also while it waits or is recomputed. False: not here, or already known (harmless).
        """
        sequence = self._scheduler.get(key)
        if sequence is None or sequence.request.mode is not Mode.REMOTE:
            return False
        if sequence.num_generated != len(sequence.request.generated):
            return False
        if self._scheduler.first_token(sequence, token):
            self._note_preempted(sequence, self._clock.monotonic_s())
        reason = sequence.finish_reason()
        if reason is not None:
            self._finish(sequence, reason)
        return True

    def recompute(self, key: RequestKey, quarantined: bool = False) -> bool:
        """Give up reading KV of a REMOTE sequence: prefill here what is not proven. Its blocks go as in
        ``cancel``, it waits in its old place and Started comes again. False: it does not wait for KV.
        """
        sequence = self._scheduler.get(key)
        if sequence is None or sequence.mode is not Mode.REMOTE:
            return False
        if sequence.state is SequenceState.AWAITING_KV:
            sequence.reading = sequence.reading or quarantined
            self._scheduler.requeue(sequence)
            sequence.since_s = self._clock.monotonic_s()
        elif sequence.state is SequenceState.WAITING:
            sequence.mode = Mode.LOCAL
        else:
            return False
        return True

    # -- inside a step ----------------------------------------------------------------------------------

    def _expire(self, now_s: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now_s:
            deadline_s, key = heapq.heappop(self._deadlines)
            sequence = self._scheduler.get(key)
            if sequence is not None and sequence.request.deadline_monotonic_s == deadline_s:
                late = DeadlineExceeded(f"request {key}: deadline passed while {sequence.state.value}")
                self._finish(sequence, FinishReason.ERROR, late)

    def _admit(self, now_s: float) -> None:
        size = self._blocks.block_size
        for sequence, waited_s in self._scheduler.admit(now_s):
            cached = sequence.cached_blocks * size
            self._events.append(Started(sequence.key, cached, tuple(sequence.block_table), waited_s))

    def _schedule(self) -> Plan:
        plan, preempted = self._scheduler.schedule()
        now_s = self._clock.monotonic_s() if preempted else 0.0
        for sequence in preempted:
            self._note_preempted(sequence, now_s)
        return plan

    def _note_preempted(self, sequence: Sequence, now_s: float) -> None:
        sequence.since_s = now_s
        self._events.append(Preempted(sequence.key))

    def _run(self, plan: Plan, batch: Batch) -> torch.Tensor:
        self._interrupt.begin({s.key: chunk for s, chunk in zip(plan.sequences, plan.chunks, strict=True)})
        try:
            return self._runner.run(batch)
        finally:
            self._interrupt.end()

    def _sample(self, plan: Plan, batch: Batch, logits: torch.Tensor) -> Samples:
        assert logits.shape[0] == len(batch.logit_rows), (logits.shape, len(batch.logit_rows))
        return self._sampler.sample(logits, [plan.sequences[row] for row in batch.logit_rows])

    def _publish(self, plan: Plan, samples: Samples, now_s: float) -> None:
        sampled = zip(samples.tokens, samples.logprobs, strict=True)
        for sequence, chunk in zip(plan.sequences, plan.chunks, strict=True):
            self._scheduler.computed(sequence, chunk)
            if sequence.state is SequenceState.PREFILLING:
                self._publish_progress(sequence)
            if sequence.remaining == 0:
                token, logprobs = next(sampled)
                self._publish_token(sequence, token, logprobs, now_s)

    def _publish_progress(self, sequence: Sequence) -> None:
        sealed: tuple[SealedBlock, ...] = ()
        if sequence.mode is Mode.PREFILL:
            size, first = self._blocks.block_size, sequence.num_announced
            end = sequence.num_computed // size if sequence.remaining else len(sequence.block_table)
            new = sequence.block_table[first:end]
            self._seal(new)
            sealed = tuple(SealedBlock(first + i, block, self._blocks.generation(block)) for i, block in enumerate(new))
            sequence.num_announced = end
        self._events.append(Progress(sequence.key, sequence.num_computed, sealed))

    def _publish_token(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, now_s: float) -> None:
        if token == INVALID_TOKEN:
            self._finish(sequence, FinishReason.ERROR, InternalError("the model's logits are not finite"))
            return
        key = sequence.key
        prefill_s = 0.0 if sequence.first_sampled else now_s - sequence.since_s
        sequence.first_sampled = True
        index = sequence.num_generated
        sequence.tokens.append(token)
        self._events.append(TokensOut(key, index, (token,), None if logprobs is None else (logprobs,), prefill_s))
        reason = sequence.finish_reason()
        if reason is not None:
            self._finish(sequence, reason)
        elif sequence.state is SequenceState.PREFILLING:
            hold = sequence.mode is Mode.PREFILL
            self._scheduler.prefilled(sequence, hold=hold)
            if hold:
                self._events.append(Prefilled(key, sequence.usage()))

    def _finish(self, sequence: Sequence, reason: FinishReason, error: WeirError | None = None) -> None:
        stop_token = sequence.tokens[-1] if reason is FinishReason.STOP else None
        self._scheduler.finish(sequence)
        self._events.append(Finished(sequence.key, reason, stop_token, sequence.usage(), error))

    def _fail(self, plan: Plan, error: Exception) -> None:
        self.failed_steps += 1
        _log.error("engine step failed; its %d sequences end", len(plan.sequences), exc_info=error)
        for sequence in plan.sequences:
            if sequence.state in (SequenceState.PREFILLING, SequenceState.DECODING):
                fault = InternalError(f"engine step failed: {type(error).__name__}: {error}")
                self._finish(sequence, FinishReason.ERROR, fault)

    def _output(self, plan: Plan, laps: list[float]) -> StepOutput:
        spans_ms = [(after - before) * 1e3 for before, after in itertools.pairwise(laps)]
        if len(spans_ms) != 4:  # no batch, or a failed one
            spans_ms = [spans_ms[0], sum(spans_ms[1:]), 0.0, 0.0]
        load = self._load(plan.num_decodes, sum(plan.chunks) - plan.num_decodes, spans_ms)
        events = tuple(self._events)
        self._events.clear()
        return StepOutput(events, load)

    def _load(
        self, decodes: int = 0, prefill_tokens: int = 0, spans_ms: SequenceOf[float] = (0.0, 0.0, 0.0, 0.0)
    ) -> EngineLoad:
        scheduler = self._scheduler
        return EngineLoad(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            holding=scheduler.num_holding,
            waiting_tokens=scheduler.waiting_tokens,
            blocks=self._blocks.counts(),
            decodes=decodes,
            prefill_tokens=prefill_tokens,
            schedule_ms=spans_ms[0],
            model_ms=spans_ms[1],
            sample_ms=spans_ms[2],
            publish_ms=spans_ms[3],
        )

    def _watch_deadline(self, deadline_s: float, key: RequestKey) -> None:
        # Entries of finished requests stay until they come up; drop them all when they outnumber the live ones.
        if len(self._deadlines) > 2 * self._scheduler.num_live + MAX_STALE_DEADLINES:
            live = [entry for entry in self._deadlines if self._scheduler.get(entry[1]) is not None]
            heapq.heapify(live)
            self._deadlines = live
        heapq.heappush(self._deadlines, (deadline_s, key))

    # -- checks -----------------------------------------------------------------------------------------

    def _awaiting(self, key: RequestKey) -> Sequence | None:
        sequence = self._scheduler.get(key)
        if sequence is None or sequence.state is not SequenceState.AWAITING_KV:
            return None
        return sequence

    def _check(self, request: EngineRequest) -> None:
        sampling, config = request.sampling, self._config
        check_sampling(sampling, vocab_size=config.vocab_size)
        check_prompt(
            request.prompt,
            max_tokens=sampling.max_tokens,
            vocab_size=config.vocab_size,
            context=config.max_context_tokens,
        )
        if sampling.seed is None and not sampling.greedy:
            raise InvalidArgument("seed", None, "must be set unless temperature is 0")
        if len(request.generated) >= sampling.max_tokens:
            limit = f"fewer than max_tokens={sampling.max_tokens} may have been generated before"
            raise InvalidArgument("generated", len(request.generated), limit)
        if request.generated and not 0 <= min(request.generated) <= max(request.generated) < config.vocab_size:
            raise InvalidArgument("generated", "token ids", f"token ids lie in [0, {config.vocab_size})")
