"""A worker's load and totals, from what the engine tells step by step. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, field

from weir.engine.output import (
    EngineLoad,
    Event,
    Finished,
    Preempted,
    Prefilled,
    Progress,
    Started,
    StepOutput,
    TokensOut,
    Usage,
)
from weir.ids import RequestKey
from weir.lifecycle import FinishReason

SMOOTHING = 0.1
"""Weight of the newest step in the moving averages."""


@dataclass(slots=True)
class LoadTracker:
    """``update`` after each step. Averages are 0 until the first step of their kind.

    ``context_to_compute(key)``: context tokens of an attempt whose prefill is done here, 0 for any other.
    """

    engine: EngineLoad
    context_to_compute: Callable[[RequestKey], int] = lambda key: 0
    decode_step_ms: float = 0.0
    prefill_tokens_per_s: float = 0.0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    kv_read_bytes: int = 0
    """Of proven reads; whoever proves them adds."""
    prompt_tokens_by_source: dict[str, int] = field(
        default_factory=lambda: {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 0}
    )

    _uncomputed: dict[RequestKey, int] = field(default_factory=dict)

    @property
    def pending_prefill_tokens(self) -> int:
        """Context tokens not yet computed, of waiting sequences and of those that prefill."""
        return self.engine.waiting_tokens + sum(self._uncomputed.values())

    def update(self, output: StepOutput) -> list[Usage]:
        """Take in one step; returns the token counts of the prompts whose KV it completed for good."""
        self.engine = load = output.load
        step_ms = load.schedule_ms + load.model_ms + load.sample_ms + load.publish_ms
        if load.decodes and not load.prefill_tokens:
            self.decode_step_ms = _averaged(self.decode_step_ms, step_ms)
        if load.prefill_tokens:
            self.prefilled_tokens += load.prefill_tokens
            if step_ms > 0.0 and not load.decodes:
                self.prefill_tokens_per_s = _averaged(self.prefill_tokens_per_s, load.prefill_tokens / step_ms * 1e3)
        counted = []
        for event in output.events:
            self._follow(event)
            if isinstance(event, TokensOut):
                self.generated_tokens += len(event.tokens)
            elif isinstance(event, Prefilled) or (isinstance(event, Finished) and _ended_well(event)):
                self._count(event.usage)
                counted.append(event.usage)
        return counted

    def _follow(self, event: Event) -> None:
        key = event.key
        if isinstance(event, Started):
            if context := self.context_to_compute(key):
                self._uncomputed[key] = context - event.cached_tokens
        elif isinstance(event, Progress):
            if key in self._uncomputed:
                self._uncomputed[key] = max(0, self.context_to_compute(key) - event.num_tokens)
        elif isinstance(event, TokensOut | Finished | Preempted):
            self._uncomputed.pop(key, None)

    def _count(self, usage: Usage) -> None:
        by_source = self.prompt_tokens_by_source
        by_source["local_compute"] += usage.local_compute
        by_source["local_cache_hit"] += usage.local_cache_hit
        by_source["external_kv_transfer"] += usage.external_kv


def _ended_well(event: Finished) -> bool:
    # A prefilled sequence, counted before, never ends this way.
    return event.reason in (FinishReason.STOP, FinishReason.LENGTH)


def _averaged(average: float, value: float) -> float:
    return value if average == 0.0 else average + SMOOTHING * (value - average)
