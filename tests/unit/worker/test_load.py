"""Totals and averages from what the engine tells."""

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
from weir.kvcache.blocks import BlockState
from weir.lifecycle import FinishReason
from weir.services.worker.load import LoadTracker

KEY = RequestKey("r-1", 1)
BLOCKS = dict.fromkeys(BlockState, 0)
USAGE = Usage(10, 3, 4, 6, 0, 0, 0)


def load(decodes: int = 0, prefill: int = 0, model_ms: float = 0.0, waiting: int = 0) -> EngineLoad:
    return EngineLoad(1, 0, 0, waiting, BLOCKS, decodes, prefill, 0.0, model_ms, 0.0, 0.0)


def step(*events: Event, of: EngineLoad | None = None) -> StepOutput:
    return StepOutput(events, of or load())


def test_averages_follow_pure_steps_only() -> None:
    tracker = LoadTracker(load())
    tracker.update(step(of=load(decodes=2, model_ms=10.0)))
    tracker.update(step(of=load(decodes=2, model_ms=20.0)))
    assert tracker.decode_step_ms == 11.0
    tracker.update(step(of=load(prefill=100, model_ms=50.0)))
    assert tracker.prefill_tokens_per_s == 2_000.0
    tracker.update(step(of=load(decodes=1, prefill=7, model_ms=500.0)))
    assert (tracker.decode_step_ms, tracker.prefill_tokens_per_s) == (11.0, 2_000.0)
    assert tracker.prefilled_tokens == 107


def test_each_prompt_is_counted_once() -> None:
    tracker = LoadTracker(load())
    assert tracker.update(step(TokensOut(KEY, 0, (1,)), Prefilled(KEY, USAGE))) == [USAGE]
    assert tracker.update(step(Finished(KEY, FinishReason.CANCELLED, None, USAGE))) == []
    assert tracker.update(step(Finished(KEY, FinishReason.LENGTH, None, USAGE))) == [USAGE]
    assert tracker.prompt_tokens_by_source == {
        "local_compute": 8,
        "local_cache_hit": 12,
        "external_kv_transfer": 0,
    }
    assert tracker.generated_tokens == 1


def test_pending_prefill_tokens() -> None:
    tracker = LoadTracker(load(waiting=5), lambda key: 40 if key == KEY else 0)
    assert tracker.pending_prefill_tokens == 5
    remote = RequestKey("r-2", 1)
    tracker.update(step(Started(KEY, 8, (1, 2), 0.0), Started(remote, 0, (3,), 0.0), of=load(waiting=7)))
    assert tracker.pending_prefill_tokens == 7 + 32
    tracker.update(step(Progress(KEY, 24, ())))
    assert tracker.pending_prefill_tokens == 16
    tracker.update(step(Preempted(KEY)))
    assert tracker.pending_prefill_tokens == 0
    tracker.update(step(Started(KEY, 0, (1, 2), 0.0), Progress(KEY, 40, ()), TokensOut(KEY, 0, (1,))))
    assert tracker.pending_prefill_tokens == 0
