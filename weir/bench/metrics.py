"""From records to the figures of ``vllm bench serve``, under the same names. Pure.

TTFT: sent until first token. TPOT: (e2e - ttft) / (output tokens - 1), requests of more than one token. ITL: gaps
between tokens, pooled over all requests. E2EL: sent until the end. Only completed requests count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from weir.bench.goodput import Slo
from weir.bench.records import RequestRecord
from weir.errors import InvalidArgument

METRICS = ("ttft", "tpot", "itl", "e2el")
MAX_ERROR_DETAILS = 5


def latencies_ms(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """The samples behind each metric, in milliseconds."""
    done = [r for r in records if r.ok]
    return {
        "ttft": [r.ttft_s * 1e3 for r in done if r.token_times_s],
        "tpot": [r.tpot_s * 1e3 for r in done if r.output_tokens > 1],
        "itl": [gap * 1e3 for r in done for gap in r.itls_s],
        "e2el": [r.e2e_s * 1e3 for r in done],
    }


def statistics_ms(name: str, samples: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """mean, median, std and percentiles (linear interpolation) as ``p99_ttft_ms``; zeros without samples."""
    values = np.asarray(samples or [0.0], dtype=np.float64)
    figures = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
    }
    for percentile in percentiles:
        figures[f"p{percentile:g}_{name}_ms"] = float(np.percentile(values, percentile))
    return figures


def summarise(
    records: Sequence[RequestRecord],
    duration_s: float,
    *,
    slo: Slo | None = None,
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = (99.0,),
) -> dict[str, Any]:
    """All figures of a run that took ``duration_s`` (> 0), JSON-ready."""
    assert duration_s > 0, duration_s
    done = [r for r in records if r.ok]
    tokens_in, tokens_out = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)
    figures: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(done) / duration_s,
        "request_goodput": sum(map(slo.met_by, done)) / duration_s if slo is not None else None,
        "output_throughput": tokens_out / duration_s,
        "total_token_throughput": (tokens_in + tokens_out) / duration_s,
        "max_output_tokens_per_s": _busiest_second(done),
        "max_concurrent_requests": _most_at_once(records),
        "errors_by_kind": dict(Counter(r.error for r in records if not r.ok)),
        "error_details": list(dict.fromkeys(r.detail for r in records if r.detail))[:MAX_ERROR_DETAILS],
    }
    samples = latencies_ms(records)
    for name in metrics:
        figures |= statistics_ms(name, samples[name], percentiles)
    return figures


def detailed(records: Sequence[RequestRecord]) -> dict[str, list[Any]]:
    """The lists of ``--save-detailed``, one entry per request, in seconds."""
    return {
        "input_lens": [r.prompt_tokens for r in records],
        "output_lens": [r.output_tokens for r in records],
        "ttfts": [r.ttft_s for r in records],
        "itls": [r.itls_s for r in records],
        "latencies": [r.e2e_s for r in records],
        "start_times": [r.sent_s for r in records],
        "queue_times": [r.sent_s - r.fired_s for r in records],
        "generated_texts": [r.text for r in records],
        "errors": [f"{r.error}: {r.detail}" if r.error else "" for r in records],
    }


def parse_metrics(text: str) -> tuple[str, ...]:
    """``--percentile-metrics``: names separated by commas."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in METRICS:
            raise InvalidArgument("--percentile-metrics", name, f"must be among {', '.join(METRICS)}")
    return names


def parse_percentiles(text: str) -> tuple[float, ...]:
    """``--metric-percentiles``: numbers between 0 and 100, separated by commas."""
    try:
        values = tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise InvalidArgument("--metric-percentiles", text, "must be numbers separated by commas") from None
    if not values or not all(0 <= value <= 100 for value in values):
        raise InvalidArgument("--metric-percentiles", text, "must lie between 0 and 100")
    return values


def _busiest_second(done: Sequence[RequestRecord]) -> float:
    seconds = Counter(int(t) for r in done for t in r.token_times_s)
    return float(max(seconds.values(), default=0))


def _most_at_once(records: Sequence[RequestRecord]) -> int:
    # At equal times an end comes before a start.
    edges = sorted([(r.sent_s, 1) for r in records] + [(r.ended_s, -1) for r in records], key=lambda e: (e[0], e[1]))
    now = most = 0
    for _, step in edges:
        now += step
        most = max(most, now)
    return most
