"""What a worker can do, learnt from the load reports of all, or read from a profile. Pure.

The pools are of one kind (workers change role), so the fleet's reports are put together: the median of the prefill
rates, and a line through (sequences, step time) of the decode steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

from weir.balance.observe import Speed
from weir.balance.profile import Profile, fit
from weir.rpc.v1 import events_pb2

MAX_STEPS = 512
MIN_PROMPT_TOKENS = 16.0
DEFAULT_BATCH = 64


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
        """The speed of one worker at prompts of ``prompt_tokens`` to compute; None while it is not known.

        By the profile that was given, else one that a worker has stored and published, else what was reported, else a
        rough profile from a worker's start.
        """
        members = list(records)
        tokens = max(prompt_tokens, MIN_PROMPT_TOKENS)
        if self._profile is not None:
            rate = self._profile.prefill_tokens_per_s(tokens)
            return _with_sizes(members, rate, self._profile.step.coefficients, f"profile of {self._profile.device}")
        published = [r.profile for r in members if _complete(r.profile)]
        for profile in published:
            if not profile.rough:
                return _published(members, profile, tokens)
        if self._rates and self._steps:
            source = f"reports of {len(self._rates)} workers and {len(self._steps)} decode steps"
            return _with_sizes(members, median(self._rates.values()), (*self._step_line(), 0.0), source)
        return _published(members, published[0], tokens) if published else None

    def _step_line(self) -> tuple[float, float]:
        if len(self._steps) < 2:
            return self._steps[0][1], 0.0
        fitted = fit([(1.0, float(batch)) for batch, _ in self._steps], [step_s for _, step_s in self._steps])
        return fitted.coefficients[0], fitted.coefficients[1]


def _complete(profile: events_pb2.WorkerProfile) -> bool:
    """Whether it can be used: from a peer, so not taken on trust."""
    numbers = (*profile.prefill_s, *profile.step_s)
    shaped = len(profile.prefill_s) == 3 and len(profile.step_s) == 3
    sound = all(math.isfinite(number) and number >= 0 for number in numbers)
    return shaped and sound and any(profile.prefill_s) and any(profile.step_s)


def _published(members: Sequence[events_pb2.WorkerRecord], profile: events_pb2.WorkerProfile, tokens: float) -> Speed:
    a, b, c = profile.prefill_s
    rate = tokens / (a + b * tokens + c * tokens * tokens / 2)
    kind = "a worker's rough profile" if profile.rough else f"published profile of {profile.device}"
    return _with_sizes(members, rate, tuple(profile.step_s), kind)


def _with_sizes(members: Sequence[events_pb2.WorkerRecord], rate: float, step: Sequence[float], source: str) -> Speed:
    return Speed(
        prefill_tokens_per_s=rate,
        step_base_s=step[0],
        step_per_sequence_s=step[1],
        step_per_token_s=step[2],
        max_batch=min((r.max_running for r in members if r.max_running > 0), default=DEFAULT_BATCH),
        kv_tokens=min((r.num_blocks * r.block_size for r in members if r.num_blocks > 0), default=0),
        bytes_per_token=max((bytes_per_token(r) for r in members), default=0.0),
        source=source,
    )


def bytes_per_token(record: events_pb2.WorkerRecord) -> float:
    """KV bytes of a token of the worker's model; 0 when its record does not tell."""
    mark = record.fingerprint
    width = {"float32": 4, "float16": 2, "bfloat16": 2}.get(mark.kv_dtype, 2)
    return float(2 * mark.layers * mark.kv_heads * mark.head_dim * width)
