"""Workers from Splitwise's performance table, fitted with the fits of ``weir profile``.

Left out, as its authors' notes ask: batches of 64 on two GPUs, which ran out of memory. Rows of ``h100-80gb-pcap`` have
made-up prompt times (x 1.3) and are refused.
"""

from __future__ import annotations

import csv
from pathlib import Path

from weir.balance.profile import Fit, fit, prefill_features, step_features
from weir.errors import InvalidArgument, NotFound
from weir.simulate.models import StepLine, WorkerModel

FILE = "splitwise_perf_model.csv"
BROKEN = ("2", 64)
BYTES_PER_TOKEN = {"llama2-70b": 2 * 80 * 8 * 128 * 2, "bloom-176b": 2 * 70 * 112 * 128 * 2}
GPU_BYTES = 80e9
WEIGHTS = {"llama2-70b": 2 * 69e9, "bloom-176b": 2 * 176e9}
USABLE = 0.9
LINK_BYTES_PER_S = 25e9


def splitwise_model(
    folder: Path, model: str = "llama2-70b", hardware: str = "h100-80gb", *, tp: int = 8
) -> WorkerModel:
    """The worker, its KV pool being what the weights leave of 90 % of the GPUs. Raises NotFound, InvalidArgument."""
    prefill, step = splitwise_fits(folder, model, hardware, tp)
    room = tp * GPU_BYTES * USABLE - WEIGHTS[model]
    assert room > 0, "every row of the table was measured"
    a, b, c = prefill.coefficients
    line = StepLine(*step.coefficients)
    return WorkerModel(
        name=f"Splitwise {model} {hardware} tp{tp}",
        prefill=(a, b, c),
        small=line,
        large=line,
        max_batch=256,
        batch_tokens=2048,
        kv_tokens=int(room / BYTES_PER_TOKEN[model]),
        bytes_per_token=BYTES_PER_TOKEN[model],
        read_latency_s=1e-3,
        read_bytes_per_s=LINK_BYTES_PER_S,
    )


def splitwise_fits(folder: Path, model: str, hardware: str, tp: int) -> tuple[Fit, Fit]:
    """Prefill over tokens and decode step over (batch, context), with R^2 and the largest residual."""
    source = folder / FILE
    if not source.is_file():
        raise NotFound("Splitwise table", str(source))
    if hardware.endswith("pcap"):
        raise InvalidArgument("hardware", hardware, "its prompt times are not measured")
    with source.open() as lines:
        wanted = (model, hardware, str(tp))
        rows = [
            row
            for row in csv.DictReader(lines)
            if (row["model"], row["hardware"], row["tensor_parallel"]) == wanted
            and (row["tensor_parallel"], int(row["batch_size"])) != BROKEN
        ]
    if model not in WEIGHTS or not rows:
        raise InvalidArgument("model, hardware, tp", wanted, "is not in the table")
    prefills, steps = [], []
    for row in rows:
        batch, prompt, output = int(row["batch_size"]), int(row["prompt_size"]), int(row["token_size"])
        one, tokens, area = prefill_features(prompt, 0)
        prefills.append((one, tokens * batch, area * batch))
        steps.append(step_features(batch, batch * (prompt + output / 2)))
    return (
        fit(prefills, [float(row["prompt_time"]) / 1e3 for row in rows]),
        fit(steps, [float(row["token_time"]) / 1e3 for row in rows]),
    )
