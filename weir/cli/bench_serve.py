"""``weir bench serve``: flags and result keys of ``vllm bench serve``, against Weir or any OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from weir.bench.arrivals import arrival_times_s, trace_times_s
from weir.bench.goodput import parse_goodput
from weir.bench.load import LoadResult, run_load
from weir.bench.metrics import detailed, parse_metrics, parse_percentiles, summarise
from weir.bench.plan import BACKENDS, REQUEST_TIMEOUT_S, LoadPlan, Prompt, Target
from weir.bench.records import RequestRecord
from weir.bench.synthetic import FIRST_PLAIN_ID, Vocabulary, random_prompts
from weir.bench.texts import custom_prompts, sharegpt_prompts
from weir.bench.traces import BadRow, check_rows, read_trace, trace_prompts
from weir.clock import SystemClock
from weir.errors import InvalidArgument

DATASETS = ("random", "sharegpt", "trace", "custom")
SHOWN_BAD_ROWS = 5
METRIC_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end to end",
}


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """Where prompts come from."""

    name: str = "random"
    path: Path | None = None
    count: int = 1000
    tokenizer: Path | None = None
    input_tokens: int = 1024
    output_tokens: int = 128
    range_ratio: float = 0.0
    prefix_tokens: int = 0
    vocabulary: int = 32_000
    fixed_output_tokens: int | None = None
    length_scale: float = 1.0
    max_model_len: int = 0
    on_bad: str = "skip"
    warmups: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Everything else of a run."""

    target: Target
    dataset: DatasetOptions
    request_rate: float = math.inf
    burstiness: float = 1.0
    trace_speed: float = 1.0
    max_concurrency: int = 0
    ignore_eos: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    goodput: tuple[str, ...] = ()
    percentile_metrics: str = "ttft,tpot,itl,e2el"
    metric_percentiles: str = "99"
    save: bool = False
    save_detailed: bool = False
    result_dir: Path | None = None
    result_filename: str | None = None
    label: str | None = None
    metadata: tuple[str, ...] = ()
    quiet: bool = False
    timeout_s: float = REQUEST_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Dataset:
    """Prompts to measure, prompts to warm up with, rows that could not be used."""

    prompts: list[Prompt]
    warmups: list[Prompt]
    bad: list[BadRow] = dataclasses.field(default_factory=list)


def load_dataset(options: DatasetOptions, *, as_text: bool) -> Dataset:
    """Read or make the prompts; ``as_text`` turns token ids into text, for which a tokenizer is needed."""
    random = np.random.default_rng(options.seed)
    made = {"random": _random, "sharegpt": _sharegpt, "trace": _trace, "custom": _custom}[options.name](options, random)
    if not made.prompts:
        raise InvalidArgument("--dataset-path", str(options.path), "holds no usable request")
    if not as_text:
        return made
    text = _tokenizer(options).decode
    return Dataset([_as_text(p, text) for p in made.prompts], [_as_text(p, text) for p in made.warmups], made.bad)


def _as_text(prompt: Prompt, decode: Callable[[list[int]], str]) -> Prompt:
    if not prompt.token_ids:
        return prompt
    return dataclasses.replace(prompt, token_ids=(), text=decode(list(prompt.token_ids)))


def _random(options: DatasetOptions, random: np.random.Generator) -> Dataset:
    prompts = random_prompts(
        options.count + options.warmups,
        input_tokens=options.input_tokens,
        output_tokens=options.output_tokens,
        range_ratio=options.range_ratio,
        prefix_tokens=options.prefix_tokens,
        vocabulary=_vocabulary(options),
        random=random,
    )
    return Dataset(prompts[options.warmups :], prompts[: options.warmups])


def _sharegpt(options: DatasetOptions, random: np.random.Generator) -> Dataset:
    tokenizer = _tokenizer(options)
    document = json.loads(_path(options).read_text(encoding="utf-8"))
    count = options.count + options.warmups
    prompts = sharegpt_prompts(
        document, count, lambda text: len(tokenizer.encode(text).ids), random, options.fixed_output_tokens
    )
    return Dataset(prompts[options.warmups :], prompts[: options.warmups])


def _trace(options: DatasetOptions, random: np.random.Generator) -> Dataset:
    with _path(options).open(encoding="utf-8") as lines:
        trace = read_trace(lines)
    check_rows(trace, options.on_bad)
    prompts = trace_prompts(
        trace.rows[: options.count],
        seed=options.seed,
        vocabulary=_vocabulary(options),
        length_scale=options.length_scale,
        max_tokens=options.max_model_len,
    )
    return Dataset(prompts, _warmups(options, random), list(trace.bad))


def _custom(options: DatasetOptions, random: np.random.Generator) -> Dataset:
    with _path(options).open(encoding="utf-8") as lines:
        prompts, bad = custom_prompts(lines, options.fixed_output_tokens or options.output_tokens)
    if bad and options.on_bad == "refuse":
        raise InvalidArgument("--dataset-path", f"line {bad[0].line}", f"{bad[0].reason} ({len(bad)} bad rows)")
    return Dataset(prompts[: options.count], _warmups(options, random), bad)


def _warmups(options: DatasetOptions, random: np.random.Generator) -> list[Prompt]:
    """Prompts that share nothing with the measured ones."""
    vocabulary = _vocabulary(options)
    return [Prompt(8, vocabulary.draw(64, random)) for _ in range(options.warmups)]


def _vocabulary(options: DatasetOptions) -> Vocabulary:
    size = options.vocabulary
    if options.tokenizer is not None:
        size = min(size, _tokenizer(options).get_vocab_size())
    if size <= FIRST_PLAIN_ID:
        return Vocabulary(0, size)
    return Vocabulary(end=size)


def _path(options: DatasetOptions) -> Path:
    if options.path is None or not options.path.is_file():
        raise InvalidArgument("--dataset-path", str(options.path), f"the {options.name} dataset needs a file")
    return options.path


def _tokenizer(options: DatasetOptions) -> Any:
    """A ``tokenizers.Tokenizer``."""
    from tokenizers import Tokenizer

    folder = options.tokenizer
    file = folder / "tokenizer.json" if folder is not None and folder.is_dir() else folder
    if file is None or not file.is_file():
        raise InvalidArgument("--tokenizer", str(folder), "a folder with a tokenizer.json is needed to count tokens")
    return Tokenizer.from_file(str(file))


def make_plan(options: ServeOptions, dataset: Dataset) -> LoadPlan:
    """Decide every arrival before the run."""
    prompts, source = dataset.prompts, options.dataset
    if source.name == "trace" and math.isinf(options.request_rate):
        arrivals = trace_times_s(prompts, options.trace_speed)
    else:
        # A stream of its own, so that another rate does not change the prompts.
        random = np.random.default_rng([source.seed, 1])
        arrivals = arrival_times_s(len(prompts), options.request_rate, options.burstiness, random)
    return LoadPlan(
        target=options.target,
        prompts=tuple(prompts),
        arrivals_s=arrivals,
        warmups=tuple(dataset.warmups),
        max_concurrency=options.max_concurrency,
        ignore_eos=options.ignore_eos,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=source.seed,
        timeout_s=options.timeout_s,
        keep_text=options.save_detailed,
    )


def result_of(options: ServeOptions, plan: LoadPlan, result: LoadResult) -> dict[str, Any]:
    """The JSON document, under vLLM's keys; Weir's own are ``generator`` and ``errors_by_kind``."""
    rate = options.request_rate
    tokenizer = options.dataset.tokenizer
    document: dict[str, Any] = {
        "date": _date(),
        "endpoint_type": plan.target.backend,
        "backend": plan.target.backend,
        "label": options.label,
        "model_id": plan.target.model,
        "tokenizer_id": str(tokenizer) if tokenizer is not None else None,
        "num_prompts": len(plan.prompts),
        "request_rate": rate if math.isfinite(rate) else "inf",
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency or None,
        "seed": plan.seed,
    }
    document |= dict(word.split("=", 1) for word in options.metadata)
    document |= summarise(
        result.records,
        result.duration_s,
        slo=parse_goodput(options.goodput),
        metrics=parse_metrics(options.percentile_metrics),
        percentiles=parse_percentiles(options.metric_percentiles),
    )
    document["generator"] = {**dataclasses.asdict(result.health), "verdict": result.health.verdict}
    return document | (detailed(result.records) if options.save_detailed else {})


def _date() -> str:
    import datetime

    moment = datetime.datetime.fromtimestamp(SystemClock().unix_s(), datetime.UTC)
    return moment.strftime("%Y%m%d-%H%M%S")


def check_options(options: ServeOptions) -> None:
    """Refuse what cannot work before anything is loaded or sent."""
    if options.dataset.name not in DATASETS:
        raise InvalidArgument("--dataset-name", options.dataset.name, f"must be one of {', '.join(DATASETS)}")
    if options.dataset.on_bad not in {"skip", "refuse"}:
        raise InvalidArgument("--bad-rows", options.dataset.on_bad, "must be skip or refuse")
    for word in options.metadata:
        if "=" not in word:
            raise InvalidArgument("--metadata", word, "must be KEY=VALUE")
    parse_goodput(options.goodput)
    parse_metrics(options.percentile_metrics)
    parse_percentiles(options.metric_percentiles)


async def run_bench_serve(console: Console, options: ServeOptions) -> dict[str, Any]:
    """Measure, print, save when asked to; returns the document."""
    check_options(options)
    dataset = load_dataset(options.dataset, as_text=options.target.backend == "openai-chat")
    _print_bad_rows(console, dataset.bad)
    plan = make_plan(options, dataset)
    with _progress(console, len(plan.prompts), options.quiet) as advance:
        result = await run_load(plan, on_record=advance)
    document = result_of(options, plan, result)
    print_result(console, document, parse_metrics(options.percentile_metrics))
    if options.save:
        console.print(f"saved {_save(options, document)}", highlight=False)
    return document


def _print_bad_rows(console: Console, bad: Sequence[BadRow]) -> None:
    for row in bad[:SHOWN_BAD_ROWS]:
        console.print(f"[yellow]line {row.line} skipped:[/] {row.reason}", highlight=False)
    if len(bad) > SHOWN_BAD_ROWS:
        console.print(f"[yellow]{len(bad) - SHOWN_BAD_ROWS} more rows skipped[/]")


@contextlib.contextmanager
def _progress(console: Console, total: int, quiet: bool) -> Iterator[Callable[[RequestRecord], None]]:
    columns = (
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True) as bars:
        task, failed = bars.add_task("", total=total), 0

        def advance(record: RequestRecord) -> None:
            nonlocal failed
            failed += not record.ok
            bars.update(task, advance=1, description=f"[red]{failed} failed[/]" if failed else "")

        yield advance


def print_result(console: Console, document: dict[str, Any], metrics: Sequence[str]) -> None:
    """Throughput, then a line per metric, then errors and what the watchdog says."""
    table = Table(title="serving benchmark", title_justify="left", show_header=False)
    for title, key in (
        ("completed / failed", ("completed", "failed")),
        ("duration, s", ("duration",)),
        ("tokens in / out", ("total_input_tokens", "total_output_tokens")),
        ("requests/s", ("request_throughput",)),
        ("goodput, requests/s", ("request_goodput",)),
        ("output tokens/s", ("output_throughput",)),
        ("all tokens/s", ("total_token_throughput",)),
        ("most requests at once", ("max_concurrent_requests",)),
    ):
        values = [document[k] for k in key]
        if values != [None]:
            table.add_row(title, " / ".join(f"{v:,.2f}" if isinstance(v, float) else f"{v:,}" for v in values))
    console.print(table)
    _print_latencies(console, document, metrics)
    for kind, count in document["errors_by_kind"].items():
        console.print(f"[red]{count} × {kind}[/]", highlight=False)
    for detail in document["error_details"]:
        console.print(f"  {detail}", highlight=False, markup=False)
    if document["generator"]["verdict"]:
        console.print(f"[yellow]{document['generator']['verdict']}[/]", highlight=False)


def _print_latencies(console: Console, document: dict[str, Any], metrics: Sequence[str]) -> None:
    if not metrics:
        return
    kinds = [key.removesuffix(f"_{metrics[0]}_ms") for key in document if key.endswith(f"_{metrics[0]}_ms")]
    table = Table("milliseconds", *kinds)
    for metric in metrics:
        table.add_row(METRIC_TITLES[metric], *(f"{document[f'{kind}_{metric}_ms']:,.2f}" for kind in kinds))
    console.print(table)


def _save(options: ServeOptions, document: dict[str, Any]) -> Path:
    rate = "inf" if math.isinf(options.request_rate) else f"{options.request_rate:g}"
    label = options.label or options.target.backend
    model = options.target.model.rpartition("/")[2] or "model"
    name = options.result_filename or f"{label}-{rate}qps-{model}-{document['date']}.json"
    folder = options.result_dir or Path()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def check_backend(name: str) -> str:
    """``name`` if it is a back end."""
    if name not in BACKENDS:
        raise InvalidArgument("--backend", name, f"must be one of {', '.join(BACKENDS)}")
    return name


def serve_options(given: dict[str, Any]) -> ServeOptions:
    """From the command's flags by name."""
    backend = check_backend(given["backend"])
    url = given["base_url"] or f"http://{given['host']}:{given['port']}"
    address = given["router"] if backend == "weir" else url
    dataset = DatasetOptions(
        name=given["dataset_name"],
        path=given["dataset_path"],
        count=given["num_prompts"],
        tokenizer=given["tokenizer"],
        input_tokens=given["random_input_len"],
        output_tokens=given["random_output_len"],
        range_ratio=given["random_range_ratio"],
        prefix_tokens=given["random_prefix_len"],
        vocabulary=given["random_vocab_size"],
        fixed_output_tokens=given["output_len"],
        length_scale=given["trace_length_scale"],
        max_model_len=given["max_model_len"],
        on_bad=given["bad_rows"],
        warmups=given["num_warmups"],
        seed=given["seed"],
    )
    same: tuple[str, ...] = (
        "request_rate",
        "burstiness",
        "trace_speed",
        "max_concurrency",
        "ignore_eos",
        "temperature",
        "top_p",
    )
    same += ("percentile_metrics", "metric_percentiles", "result_dir", "result_filename", "label", "timeout_s")
    return ServeOptions(
        target=Target(backend, address, given["model"], given["endpoint"], given["api_key"]),
        dataset=dataset,
        goodput=(*(given["goodput"] or ()), *(given["more"] or ())),
        save=given["save_result"] or given["save_detailed"],
        save_detailed=given["save_detailed"],
        metadata=tuple(given["metadata"] or ()),
        quiet=given["disable_tqdm"],
        **{name: given[name] for name in same},
    )
