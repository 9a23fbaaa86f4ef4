"""What a worker can do, learnt from the load reports of all, or read from a profile. Pure.

The pools are of one kind (workers change role), so the fleet's reports are put together: the median of the prefill
rates, and a line through (sequences, step time) of the decode steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

from weir.balance.observe import Speed
from weir.balance.profile import Profile, fit
from weir.rpc.v1 import events_pb2

MAX_STEPS = 512
MIN_PROMPT_TOKENS = 16.0


class SpeedBook:
    """``note`` each load report; ``speed`` when both kinds of work have been seen, or a profile is given."""

    def __init__(self, profile: Profile | None = None) -> None:
        self._profile = profile
        self._rates: dict[str, float] = {}
        self._steps: deque[tuple[int, float]] = deque(maxlen=MAX_STEPS)
        self._last: dict[str, float] = {}

    def note(self, worker_id: str, running: int, step_ms: float, prefill_tokens_per_s: float) -> None:
        """A load report; figures of 0 are not known. A step time that has not changed was counted before."""
        if prefill_tokens_per_s > 0:
            self._rates[worker_id] = prefill_tokens_per_s
        if running > 0 and step_ms > 0 and self._last.get(worker_id) != step_ms:
            self._last[worker_id] = step_ms
            self._steps.append((running, step_ms / 1e3))

    def keep(self, worker_ids: Iterable[str]) -> None:
        """Forget the others."""
        kept = set(worker_ids)
        for table in (self._rates, self._last):
            for worker_id in table.keys() - kept:
                del table[worker_id]

    def speed(self, records: Iterable[events_pb2.WorkerRecord], prompt_tokens: float) -> Speed | None:
        """The speed of one worker at prompts of ``prompt_tokens`` to compute; None while it is not known."""
        members = list(records)
        batch = min((r.max_running for r in members if r.max_running > 0), default=64)
        kv_tokens = min((r.num_blocks * r.block_size for r in members if r.num_blocks > 0), default=0)
        size = max((bytes_per_token(r) for r in members), default=0.0)
        if self._profile is not None:
            base, per_sequence, per_token = self._profile.step.coefficients
            rate = self._profile.prefill_tokens_per_s(max(prompt_tokens, MIN_PROMPT_TOKENS))
            source = f"profile of {self._profile.device}"
            return Speed(rate, base, per_sequence, per_token, batch, kv_tokens, size, source)
        if not self._rates or not self._steps:
            return None
        base, per_sequence = self._step_line()
        source = f"reports of {len(self._rates)} workers and {len(self._steps)} decode steps"
        return Speed(median(self._rates.values()), base, per_sequence, 0.0, batch, kv_tokens, size, source)

    def _step_line(self) -> tuple[float, float]:
        if len(self._steps) < 2:
            return self._steps[0][1], 0.0
        fitted = fit([(1.0, float(batch)) for batch, _ in self._steps], [step_s for _, step_s in self._steps])
        return fitted.coefficients[0], fitted.coefficients[1]


def bytes_per_token(record: events_pb2.WorkerRecord) -> float:
    """KV bytes of a token of the worker's model; 0 when its record does not tell."""
    mark = record.fingerprint
    width = {"float32": 4, "float16": 2, "bfloat16": 2}.get(mark.kv_dtype, 2)
    return float(2 * mark.layers * mark.kv_heads * mark.head_dim * width)
