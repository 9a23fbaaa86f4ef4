"""One request inside the engine: its tokens, its blocks and where it stands.

                 ┌────────────── preempt ──────────────┐
                 ▼                                     │
WAITING ──► PREFILLING ──► DECODING ──► DONE     (from any state: DONE)
   │             │             ▲
   │             └─► HOLDING   │    PREFILL mode: prefilled, KV kept for a reader
   └──► AWAITING_KV ───────────┘    REMOTE mode: its blocks are being read into; never preempted
             └─► WAITING            recompute: as if it were LOCAL
"""

import enum

from weir.engine.output import Usage
from weir.engine.request import EngineRequest, Mode
from weir.ids import RequestKey
from weir.kvcache.prefix import block_hashes
from weir.lifecycle import FinishReason


class SequenceState(enum.Enum):
    """Where a sequence is; see the drawing."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    AWAITING_KV = "awaiting_kv"
    DECODING = "decoding"
    HOLDING = "holding"
    DONE = "done"


_FORWARD: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.PREFILLING, SequenceState.AWAITING_KV}),
    SequenceState.PREFILLING: frozenset({SequenceState.DECODING, SequenceState.HOLDING, SequenceState.WAITING}),
    SequenceState.AWAITING_KV: frozenset({SequenceState.DECODING, SequenceState.WAITING}),
    SequenceState.DECODING: frozenset({SequenceState.WAITING}),
    SequenceState.HOLDING: frozenset(),
    SequenceState.DONE: frozenset(),
}


class Sequence:
    """Mutable; owned by the scheduler.

    ``tokens``        prompt, then everything generated; its last token has no KV yet while decoding
    ``block_table``   blocks of positions [0, len * block_size); each holds one reference of this sequence
    ``num_computed``  tokens whose KV is in the pool
    ``cached_blocks`` the first blocks of the table, found in the prefix cache: shared, never written
    ``num_announced`` blocks told to readers so far
    ``reading``       reads may be under way into the blocks from ``num_computed`` on
    ``order``         what goes first: priority, then arrival; unique, and kept for life
    ``sampling_state`` the sampler's own, opaque here
    """

    __slots__ = (
        "_high_water",
        "block_table",
        "cached_blocks",
        "first_sampled",
        "hashes",
        "mode",
        "num_announced",
        "num_computed",
        "num_prompt",
        "num_registered",
        "order",
        "preemptions",
        "reading",
        "recomputed",
        "request",
        "sampling_state",
        "since_s",
        "sources",
        "state",
        "stops",
        "tokens",
    )

    def __init__(self, request: EngineRequest, arrival: int, now_s: float) -> None:
        self.request = request
        self.mode = request.mode
        self.state = SequenceState.WAITING
        self.tokens: list[int] = [*request.prompt, *request.generated]
        self.num_prompt = len(request.prompt)
        self.order = (-request.priority, arrival)
        self.since_s = now_s
        self.block_table: list[int] = []
        self.hashes: list[bytes] = []
        self.num_computed = 0
        self.num_registered = 0
        self.num_announced = 0
        self.cached_blocks = 0
        self.reading = False
        self.first_sampled = False
        self.preemptions = 0
        self.recomputed = 0
        self.sources = {"compute": 0, "hit": 0, "external": 0}
        self.sampling_state: object | None = None
        self.stops = frozenset(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            self.stops |= request.eos_token_ids
        self._high_water = 0

    @property
    def key(self) -> RequestKey:
        """Its identity."""
        return self.request.key

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, by all attempts."""
        return len(self.tokens) - self.num_prompt

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed; 1 while decoding."""
        return len(self.tokens) - self.num_computed

    def enter(self, state: SequenceState) -> None:
        """Move on; asserts that the drawing has the step."""
        assert state is SequenceState.DONE or state in _FORWARD[self.state], (self.state, state)
        assert self.state is not SequenceState.DONE, self.key
        self.state = state

    def extend_hashes(self, block_size: int, seed: bytes, num_tokens: int) -> None:
        """Make ``hashes`` cover the full blocks of the first ``num_tokens`` tokens."""
        done = len(self.hashes) * block_size
        if num_tokens - done >= block_size:
            parent = self.hashes[-1] if self.hashes else None
            self.hashes += block_hashes(self.tokens[done:num_tokens], block_size, seed, parent)

    def advance(self, num_computed: int, source: str) -> None:
        """KV of the tokens up to ``num_computed`` is there now; books where it came from."""
        assert self.num_computed <= num_computed <= len(self.tokens), (self.num_computed, num_computed)
        again = min(num_computed, self._high_water) - self.num_computed
        if source == "compute" and again > 0:
            self.recomputed += again
        new_prompt = min(num_computed, self.num_prompt) - min(self._high_water, self.num_prompt)
        if new_prompt > 0:
            self.sources[source] += new_prompt
        self._high_water = max(self._high_water, num_computed)
        self.num_computed = num_computed

    def forget_kv(self) -> None:
        """Its blocks are gone: everything about KV starts over, tokens stay."""
        self.block_table = []
        self.num_computed = self.num_registered = self.num_announced = self.cached_blocks = 0
        self.reading = False

    def finish_reason(self) -> FinishReason | None:
        """Whether the last token ends the sequence."""
        assert self.num_generated > 0, self.key
        if self.num_generated >= self.request.sampling.min_tokens and self.tokens[-1] in self.stops:
            return FinishReason.STOP
        if self.num_generated >= self.request.sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def usage(self) -> Usage:
        """Counts so far."""
        return Usage(
            prompt=self.num_prompt,
            completion=self.num_generated,
            local_compute=self.sources["compute"],
            local_cache_hit=self.sources["hit"],
            external_kv=self.sources["external"],
            recomputed=self.recomputed,
            preemptions=self.preemptions,
        )


def max_kv_tokens(request: EngineRequest) -> int:
    """The most tokens whose KV the request can need here: the last token generated never needs any."""
    if request.mode is Mode.PREFILL:
        return request.context_len
    return max(request.context_len, len(request.prompt) + request.sampling.max_tokens - 1)
