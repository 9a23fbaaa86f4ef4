"""A worker's load and totals, from what the engine tells step by step. Pure."""

from dataclasses import dataclass, field

from weir.engine.output import EngineLoad, Finished, Prefilled, StepOutput, TokensOut, Usage
from weir.lifecycle import FinishReason

SMOOTHING = 0.1
"""Weight of the newest step in the moving averages."""


@dataclass(slots=True)
class LoadTracker:
    """``update`` after each step. Averages are 0 until the first step of their kind."""

    engine: EngineLoad
    decode_step_ms: float = 0.0
    prefill_tokens_per_s: float = 0.0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    prompt_tokens_by_source: dict[str, int] = field(
        default_factory=lambda: {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 0}
    )

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
            if isinstance(event, TokensOut):
                self.generated_tokens += len(event.tokens)
            elif isinstance(event, Prefilled) or (isinstance(event, Finished) and _ended_well(event)):
                self._count(event.usage)
                counted.append(event.usage)
        return counted

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
