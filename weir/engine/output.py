"""What an engine step has to tell: one ``StepOutput`` a step, with every sequence's news in order.

For one key the events come in this order (``[ ]`` may be absent, ``*`` may repeat):

    PREFILL  Started  Progress*  TokensOut  Prefilled | Finished
    REMOTE   Started  [Progress* TokensOut after a recompute]  TokensOut*  Finished
    LOCAL    Started  Progress*  TokensOut*  Finished

``Preempted`` may come between any two of them after Started; Started then comes again, with other blocks.
Finished may come at any time and is the last one, exactly once, except for a prefilled sequence, whose
``release_kv`` is silent.
"""

from dataclasses import dataclass

from weir.errors import WeirError
from weir.ids import RequestKey
from weir.kvcache.blocks import BlockState
from weir.lifecycle import FinishReason


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one attempt.

    Each prompt token is counted once, under the source its KV first came from here:
    ``local_compute + local_cache_hit + external_kv == prompt`` once the prompt's KV is complete.
    ``completion`` counts all generated tokens, the ending one and those of earlier attempts included.
    ``recomputed`` counts tokens whose KV was lost by preemption and computed again.
    """

    prompt: int
    completion: int
    local_compute: int
    local_cache_hit: int
    external_kv: int
    recomputed: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logs of probabilities under the raw logits: before bias, penalties, temperature and filters."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The sequence has its blocks.

    ``cached_tokens``  tokens found in this worker's own prefix cache; a whole number of blocks
    ``block_table``    blocks of the whole context, in order. REMOTE: reads may land in those after the first
                       ``cached_tokens // block_size``, and in no others
    ``queued_s``       seconds it waited since it was added (or preempted)
    """

    key: RequestKey
    cached_tokens: int
    block_table: tuple[int, ...]
    queued_s: float


@dataclass(frozen=True, slots=True)
class SealedBlock:
    """A block whose contents are final: its index in the sequence, its id, the generation to promise."""

    index: int
    block: int
    generation: int


@dataclass(frozen=True, slots=True)
class Progress:
    """A prefill chunk is done; KV of the first ``num_tokens`` tokens is in the pool.

    ``sealed`` (PREFILL only) are the blocks that became final since the last Progress, prefix hits among the
    first ones, the partial last block with the last ones. After a preemption it starts from index 0 again.
    """

    key: RequestKey
    num_tokens: int
    sealed: tuple[SealedBlock, ...]


@dataclass(frozen=True, slots=True)
class TokensOut:
    """New tokens. ``first_index`` counts from 0 over the generated tokens of all attempts.

    ``prefill_s`` is set with the first token sampled here: seconds from Started to it; else 0.
    """

    key: RequestKey
    first_index: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prefill_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Prefilled:
    """PREFILL only: the KV is complete and kept until ``release_kv`` or ``cancel``."""

    key: RequestKey
    usage: Usage


@dataclass(frozen=True, slots=True)
class Finished:
    """The sequence is gone and its blocks are back (those under a read: when ``reads_done`` is called).

    ``stop_token`` is the EOS or stop token that ended it, which is also its last token. ``error`` is set when
    ``reason`` is ERROR: DeadlineExceeded, or InternalError for a failed step.
    """

    key: RequestKey
    reason: FinishReason
    stop_token: int | None
    usage: Usage
    error: WeirError | None = None


@dataclass(frozen=True, slots=True)
class Preempted:
    """Its blocks were taken for others; it waits again. Blocks announced before are no longer promised."""

    key: RequestKey


Event = Started | Progress | TokensOut | Prefilled | Finished | Preempted


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load after a step, and where the step's time went (milliseconds).

    ``running``        sequences that compute or wait for KV; ``holding``: prefilled ones kept for a reader
    ``waiting_tokens`` context tokens of waiting sequences
    ``decodes``, ``prefill_tokens`` what the step's batch held
    """

    running: int
    waiting: int
    holding: int
    waiting_tokens: int
    blocks: dict[BlockState, int]
    decodes: int = 0
    prefill_tokens: int = 0
    schedule_ms: float = 0.0
    model_ms: float = 0.0
    sample_ms: float = 0.0
    publish_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class StepOutput:
    """News since the last step, oldest first."""

    events: tuple[Event, ...]
    load: EngineLoad
