"""``weir bench engine``: the model on one core, beside what that core can do at best, in one run.

Every probe is run in turn, round after round, and its best time is kept, so that a limit and the figure beside
it have seen the same machine.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from rich.console import Console
from rich.table import Table

from weir.cli.paths import model_dir
from weir.clock import Clock, SystemClock
from weir.engine.batch import Batch

if TYPE_CHECKING:
    from torch import Tensor

    from weir.engine.runner import ModelRunner
    from weir.models.llama import Model

BLOCK_SIZE = 16
CONTEXT_TOKENS = 256
PREFILL_TOKENS = 1024
ROUNDS = 5
FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_tile")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement beside its limit, in ``unit``; ``ratio`` is the share of the limit that was reached."""

    name: str
    value: float
    unit: str
    limit: float
    limit_name: str
    ratio: float


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the figures come from. ``capability`` is the vector width torch chose."""

    cpu: str
    flags: list[str]
    capability: str
    torch: str
    core: int


def run_bench_engine(console: Console, model: str, json: Path | None) -> None:
    """Measure on one core with one thread, print a table and write ``json`` when given."""
    import torch

    folder = model_dir(model)
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    machine = _machine(core)
    with console.status("measuring"):
        figures = measure(folder, SystemClock())
    _print(console, machine, figures)
    if json is not None:
        report = {"machine": dataclasses.asdict(machine), "figures": [dataclasses.asdict(figure) for figure in figures]}
        json.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))


def measure(folder: Path, clock: Clock) -> list[Figure]:
    """All figures of a model folder, on the threads and cores the caller has set."""
    import torch

    from weir.engine.runner import ModelRunner
    from weir.models.build import load_model
    from weir.models.memory import keep_freed_memory

    started = clock.monotonic_s()
    model = load_model(folder)
    load_s = clock.monotonic_s() - started
    keep_freed_memory()
    config = model.config
    blocks = max(8 * CONTEXT_TOKENS, PREFILL_TOKENS) // BLOCK_SIZE
    shape = (blocks, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    runner = ModelRunner(model, torch.randn(shape) / 8)
    ballast = torch.ones(_weight_bytes(model) // 4)
    best = _best_times(clock, _probes(runner, ballast))
    return [*_figures(model, best), Figure("load", load_s, "s", 3.0, "target", 3.0 / load_s)]


def _probes(runner: ModelRunner, ballast: Tensor) -> dict[str, Callable[[], object]]:
    model = runner.model
    decode_1, decode_8, prefill = _decode(1), _decode(8), _prefill()
    return {
        "read": ballast.sum,
        "linears 1": _linears(model, 1),
        "linears 8": _linears(model, 8),
        "linears prefill": _linears(model, PREFILL_TOKENS),
        "decode 1": lambda: runner.run(decode_1),
        "decode 8": lambda: runner.run(decode_8),
        "prefill": lambda: runner.run(prefill),
    }


def _best_times(clock: Clock, probes: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of each probe's best run, after one that does not count."""
    import torch

    best = dict.fromkeys(probes, float("inf"))
    with torch.inference_mode():
        for round_number in range(ROUNDS + 1):
            for name, probe in probes.items():
                for _ in range(1 if "prefill" in name else 4):
                    started = clock.monotonic_s()
                    probe()
                    took = clock.monotonic_s() - started
                    if round_number:
                        best[name] = min(best[name], took)
    return best


def _linears(model: Model, tokens: int) -> Callable[[], object]:
    """The model's own packed products and nothing else; the head for one row a sequence."""
    import torch

    config = model.config
    hidden = torch.randn(tokens, config.hidden_size)
    attended = torch.randn(tokens, config.num_heads * config.head_dim)
    last = hidden[: 1 if tokens == PREFILL_TOKENS else tokens]

    def run() -> None:
        for layer in model.weights.layers:
            layer.qkv(hidden)
            layer.output.plus(attended, hidden)
            layer.feed_forward(hidden, hidden)
        model.weights.head(last)

    return run


def _decode(sequences: int) -> Batch:
    """One token each behind a full context; each sequence's blocks lie apart."""
    per = CONTEXT_TOKENS // BLOCK_SIZE
    tables = [[block * sequences + row for block in range(per)] for row in range(sequences)]
    last = CONTEXT_TOKENS - 1
    slots = [table[last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE for table in tables]
    ones, rows = [1] * sequences, list(range(sequences))
    return Batch(rows, [last] * sequences, slots, ones, [CONTEXT_TOKENS] * sequences, tables, rows, sequences)


def _prefill() -> Batch:
    tokens = list(range(PREFILL_TOKENS))
    table = list(range(PREFILL_TOKENS // BLOCK_SIZE))
    return Batch(tokens, tokens, tokens, [PREFILL_TOKENS], [PREFILL_TOKENS], [table], [0], 0)


def _figures(model: Model, best: dict[str, float]) -> list[Figure]:
    bytes_read = _weight_bytes(model)
    linear_flops, attention_flops = _prefill_flops(model)
    packed = linear_flops / best["linears prefill"] / 1e9
    reached = (linear_flops + attention_flops) / best["prefill"] / 1e9
    figures = [
        Figure(
            "read bandwidth", bytes_read / best["read"] / 1e9, "GB/s", bytes_read / best["read"] / 1e9, "itself", 1.0
        )
    ]
    for batch in (1, 8):
        step = best[f"decode {batch}"]
        for limit, limit_name in ((best[f"linears {batch}"], "packed linears"), (best["read"], "reading the weights")):
            figures.append(
                Figure(f"decode step, batch {batch}", step * 1e3, "ms", limit * 1e3, limit_name, limit / step)
            )
    figures.append(Figure(f"prefill of {PREFILL_TOKENS}", reached, "GF/s", packed, "packed sgemm", reached / packed))
    rate, limit_rate = PREFILL_TOKENS / best["prefill"], PREFILL_TOKENS / best["linears prefill"]
    figures.append(
        Figure(f"prefill of {PREFILL_TOKENS}", rate, "tok/s", limit_rate, "packed linears", rate / limit_rate)
    )
    return figures


def _weight_bytes(model: Model) -> int:
    """What a decode step must read: all weights once, a tied embedding as the head."""
    config = model.config
    return 4 * (_layer_parameters(model) * config.num_layers + config.vocab_size * config.hidden_size)


def _layer_parameters(model: Model) -> int:
    """Numbers in the products of one dense layer."""
    config = model.config
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return config.hidden_size * (heads + 3 * config.intermediate_size)


def _prefill_flops(model: Model) -> tuple[int, int]:
    """Operations of the products, and of causal attention (the half that is seen)."""
    config = model.config
    linears = 2 * _layer_parameters(model) * config.num_layers * PREFILL_TOKENS
    head = 2 * config.vocab_size * config.hidden_size
    seen = PREFILL_TOKENS * (PREFILL_TOKENS + 1) // 2
    return linears + head, 4 * seen * config.num_heads * config.head_dim * config.num_layers


def _machine(core: int) -> Machine:
    import torch

    info: dict[str, Any] = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        info.setdefault(key.strip(), value.strip())
    have = set(info.get("flags", "").split())
    return Machine(
        cpu=info.get("model name", platform.machine()),
        flags=[flag for flag in FLAGS if flag in have],
        capability=torch.backends.cpu.get_cpu_capability(),
        torch=torch.__version__,
        core=core,
    )


def _print(console: Console, machine: Machine, figures: list[Figure]) -> None:
    console.print(
        f"{machine.cpu} ({' '.join(machine.flags)}), core {machine.core}, one thread, torch {machine.torch} "
        f"({machine.capability}); best of {ROUNDS} rounds"
    )
    table = Table("figure", "measured", "limit", "what limits", "reached")
    for figure in figures:
        unit = figure.unit
        table.add_row(
            figure.name,
            f"{figure.value:.2f} {unit}",
            f"{figure.limit:.2f} {unit}",
            figure.limit_name,
            f"{figure.ratio:.2f}",
        )
    console.print(table)
