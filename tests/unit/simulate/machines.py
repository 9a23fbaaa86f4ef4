"""The worker that the scenarios run on: round numbers, Llama-3-8B's KV on one fast GPU."""

from __future__ import annotations

from weir.balance.sizing import Slo
from weir.simulate.models import StepLine, WorkerModel

_LINE = StepLine(base=0.012, per_sequence=1e-4, per_token=4e-8)
WORKER = WorkerModel(
    name="test",
    prefill=(0.005, 1e-4, 1e-9),
    small=_LINE,
    large=_LINE,
    max_batch=128,
    kv_tokens=400_000,
    bytes_per_token=131_072,
    read_latency_s=1e-3,
    read_bytes_per_s=25e9,
)
SLO = Slo(ttft_s=2.0, tpot_s=0.04)
