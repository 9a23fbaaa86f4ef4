"""Workers as DistServe's authors measured them (coefficients in ms), and what they measured end to end.

Prefill of a batch takes ``a + b * sum(l) + c * sum(l^2)``, a decode step ``a + b * sum(context) + c * batch`` with one
fit below a batch of 95 and one from there on. A pipeline of p stages runs p batches at once, each a p-th of all: the
interval between a sequence's tokens keeps its constant and divides the rest by p. Prefill pipelines are not modelled.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weir.errors import InvalidArgument, NotFound
from weir.simulate.models import StepLine, WorkerModel
from weir.simulate.traffic import Arrival

MAX_STEP_TOKENS = 50_000
BATCH_TOKENS = 8192
MS = 1e-3


def distserve_model(
    folder: Path, model: str = "facebook/opt-66b", *, tp: int = 4, pp: int = 1, engine: str = "distserve"
) -> WorkerModel:
    """The worker ``model`` at ``tp`` x ``pp`` GPUs, under ``engine`` (distserve or vllm)."""
    source = folder / f"distserve_profiler-a100-80g.{engine}.json"
    if not source.is_file():
        raise NotFound("DistServe profile", str(source))
    try:
        fits: Mapping[str, Any] = json.loads(source.read_text())[model][str(tp)]
        prefill, small, large = (fits[name] for name in ("prefill", "decoding_smallbs", "decoding_largebs"))
        threshold = int(fits["decoding_large_small_bs_threshold"])
    except (KeyError, ValueError) as error:
        raise InvalidArgument(source.name, f"{model}, tp {tp}", f"no such profile: {error}") from error
    a, b, c = prefill
    return WorkerModel(
        name=f"DistServe {model} tp{tp} pp{pp} ({engine})",
        # The quadratic term is on l^2, ours on l^2 / 2.
        prefill=(a * MS, b * MS, 2 * c * MS),
        small=_line(small, pp),
        large=_line(large, pp),
        large_from=threshold,
        max_batch=1024,
        max_step_tokens=MAX_STEP_TOKENS,
        batch_tokens=BATCH_TOKENS,
        kv_tokens=kv_tokens(folder, model, tp, pp),
        pads=engine == "vllm",
    )


def _line(fit: list[float], pp: int) -> StepLine:
    a, b, c = fit
    return StepLine(a * MS, c * MS / pp, b * MS / pp)


def kv_tokens(folder: Path, model: str, tp: int, pp: int) -> int:
    """The KV capacity that they give for it, 0 when they give none."""
    source = folder / "distserve_max_num_tokens.csv"
    if not source.is_file():
        return 0
    with source.open() as rows:
        for row in csv.DictReader(rows):
            if (row["model"], row["tp"], row["pp"]) == (model, str(tp), str(pp)):
                return int(row["max_num_tokens"])
    return 0


def harness_arrivals(rows: Sequence[tuple[int, int]], rate: float, count: int, seed: int = 0) -> Iterator[Arrival]:
    """The arrivals of their load generator: ten copies of ``rows``, sampled without replacement, gamma gaps of CV 1.

    It sleeps between requests, and a sleep ends at the next whole millisecond (epoll rounds up), so that the rate
    falls short by half a millisecond a request.
    """
    chosen = random.Random(seed).sample(list(rows) * 10, count)
    gaps = np.random.RandomState(seed).gamma(1.0, 1.0 / rate, size=count).tolist()
    at_s = 0.0
    for (prompt, output), gap_s in zip(chosen, gaps, strict=True):
        yield Arrival(at_s, prompt, output)
        at_s += math.ceil(gap_s / MS) * MS


def read_lengths(source: Path) -> list[tuple[int, int]]:
    """(prompt tokens, output tokens) of each row."""
    with source.open() as rows:
        return [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(rows)]
