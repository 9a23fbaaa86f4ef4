"""The ``weir bench`` sub-commands that measure serving: their flags, nothing else."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weir.errors import InvalidArgument

PIPED_WIDTH = 140
console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
Flag = typer.Option
Count = Annotated[int, typer.Option(min=1)]
Json = Annotated[Path | None, typer.Option("--json", help="Write the figures here")]
Externals = Annotated[
    list[str] | None,
    typer.Option(help="A running system instead, NAME=BACKEND:URL[,URL]; vllm-pd:PREFILL,DECODE for vLLM's pair"),
]
ExternalModel = Annotated[str, typer.Option(help="Model name that it serves")]
Model = Annotated[str, typer.Option("--model", help="'demo' or a Hugging Face folder")]


def register(bench: typer.Typer) -> None:
    """Add the commands to ``weir bench``."""
    example = "weir bench serve --router 127.0.0.1:7600 --num-prompts 100 --request-rate 4 --goodput ttft:500 tpot:50"
    bench.command(name="serve", epilog=f"Example: {example}")(serve)
    bench.command(name="cancel", epilog="Example: weir bench cancel --count 50")(cancel)
    bench.command(name="soak", epilog="Example: weir bench soak --requests 2000")(soak)
    bench.command(name="interference", epilog="Example: weir bench interference --rounds 3")(interference)
    bench.command(name="matrix", epilog="Example: weir bench matrix --seconds 60 --rate-scale 1 --rate-scale 2")(matrix)
    bench.command(name="router", epilog="Example: weir bench router --requests 2000")(router)
    bench.command(name="transfer", epilog="Example: weir bench transfer --repeats 20")(transfer)


def serve(
    more: Annotated[list[str] | None, typer.Argument(hidden=True, help="Further --goodput words")] = None,
    backend: Annotated[str, Flag(help="weir (gRPC), openai or openai-chat")] = "weir",
    router: Annotated[str, Flag(envvar="WEIR_ROUTER", help="weir: host:port of the router")] = "127.0.0.1:7600",
    base_url: Annotated[str | None, Flag(help="openai: instead of --host and --port")] = None,
    host: Annotated[str, Flag(help="openai: host")] = "127.0.0.1",
    port: Annotated[int, Flag(min=1, max=65535, help="openai: port")] = 8000,
    endpoint: Annotated[str, Flag(help="openai: path; default /v1/completions or /v1/chat/completions")] = "",
    model: Annotated[str, Flag(help="Model name to ask for; weir: the only one served if empty")] = "",
    api_key: Annotated[str, Flag(envvar="OPENAI_API_KEY", help="Bearer token")] = "",
    tokenizer: Annotated[Path | None, Flag(help="Folder with tokenizer.json, for datasets of text")] = None,
    dataset_name: Annotated[str, Flag(help="random, sharegpt, trace or custom")] = "random",
    dataset_path: Annotated[Path | None, Flag(help="sharegpt .json, trace .csv/.jsonl, custom .jsonl")] = None,
    num_prompts: Annotated[int, Flag(min=1, help="Requests")] = 1000,
    random_input_len: Annotated[int, Flag(min=1)] = 1024,
    random_output_len: Annotated[int, Flag(min=1)] = 128,
    random_range_ratio: Annotated[float, Flag(help="Lengths in [n(1-r), n(1+r)]")] = 0.0,
    random_prefix_len: Annotated[int, Flag(min=0, help="Tokens shared by all prompts")] = 0,
    random_vocab_size: Annotated[int, Flag(min=2, help="Token ids drawn lie below this")] = 32_000,
    output_len: Annotated[int | None, Flag(min=1, help="sharegpt, custom: instead of the file's")] = None,
    trace_speed: Annotated[float, Flag(help="trace: times as fast as recorded")] = 1.0,
    trace_length_scale: Annotated[float, Flag(help="trace: shorten all lengths by this factor")] = 1.0,
    max_model_len: Annotated[int, Flag(min=0, help="trace: leave longer requests out; 0 keeps all")] = 0,
    bad_rows: Annotated[str, Flag(help="skip or refuse")] = "skip",
    request_rate: Annotated[
        float, Flag(help="Requests a second; inf sends all at once (a trace: as recorded)")
    ] = float("inf"),
    burstiness: Annotated[float, Flag(help="1 is Poisson; CV of the gaps is 1/sqrt of it")] = 1.0,
    max_concurrency: Annotated[int, Flag(min=0, help="Most requests at once; 0 is no limit")] = 0,
    num_warmups: Annotated[int, Flag(min=0, help="Requests before the run")] = 0,
    ignore_eos: Annotated[bool, Flag("--ignore-eos", help="Always generate the full length")] = False,
    temperature: Annotated[float, Flag(min=0)] = 0.0,
    top_p: Annotated[float, Flag()] = 1.0,
    seed: Annotated[int, Flag(min=0, help="Of prompts, arrivals and sampling")] = 0,
    timeout_s: Annotated[float, Flag(min=0.1, help="Longest time for one request")] = 600.0,
    goodput: Annotated[list[str] | None, Flag(help="ttft:MS tpot:MS e2el:MS, all to be met")] = None,
    percentile_metrics: Annotated[str, Flag(help="Which metrics")] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, Flag(help="Which percentiles")] = "99",
    save_result: Annotated[bool, Flag("--save-result")] = False,
    save_detailed: Annotated[bool, Flag("--save-detailed", help="Also lists with an entry per request")] = False,
    result_dir: Annotated[Path | None, Flag()] = None,
    result_filename: Annotated[str | None, Flag()] = None,
    label: Annotated[str | None, Flag(help="Beginning of the file's name")] = None,
    metadata: Annotated[list[str] | None, Flag(help="KEY=VALUE into the result")] = None,
    disable_tqdm: Annotated[bool, Flag("--disable-tqdm", help="No progress bar")] = False,
) -> None:
    """Send requests at planned times and measure what comes back; flags as in `vllm bench serve`."""
    given = dict(locals())
    from weir.cli.bench_serve import run_bench_serve, serve_options

    if more and not goodput:
        raise InvalidArgument("arguments", " ".join(more), "not known")
    asyncio.run(run_bench_serve(console, serve_options(given)))


def cancel(
    model: Model = "demo",
    count: Annotated[int, Flag(min=1, help="Requests to cancel")] = 50,
    prompt_tokens: Annotated[int, Flag(min=1)] = 512,
    output_tokens: Annotated[int, Flag(min=2)] = 32,
    seed: Annotated[int, Flag(min=0)] = 0,
    out: Json = None,
) -> None:
    """Cancel at any moment: how soon are the blocks back?"""
    from weir.cli.bench_cancel import run_bench_cancel
    from weir.cli.paths import model_dir

    asyncio.run(run_bench_cancel(console, model_dir(model), count, prompt_tokens, output_tokens, seed, out))


def soak(
    model: Model = "demo",
    requests: Annotated[int, Flag(min=20, help="In all")] = 2000,
    concurrency: Annotated[int, Flag(min=1, help="At once")] = 16,
    input_tokens: Annotated[int, Flag(min=1, help="Every tenth prompt is eight times as long")] = 32,
    output_tokens: Annotated[int, Flag(min=1)] = 8,
    mixed: Annotated[bool, Flag("--mixed", help="Two mixed workers instead of a pair")] = False,
    seed: Annotated[int, Flag(min=0)] = 0,
    num_blocks: Annotated[int, Flag(min=64, help="KV blocks of each worker")] = 512,
    out: Json = None,
) -> None:
    """Send many requests: does any process grow?"""
    from weir.cli.bench_soak import SoakShape, run_bench_soak
    from weir.cli.paths import model_dir

    shape = SoakShape(requests, concurrency, input_tokens, output_tokens, seed, num_blocks)
    asyncio.run(run_bench_soak(console, model_dir(model), shape, mixed, out))


def transfer(
    blocks: Annotated[list[int] | None, Flag(min=1, help="Sizes; default 1 4 16 64")] = None,
    repeats: Annotated[int, Flag(min=1)] = 15,
    out: Json = None,
) -> None:
    """A proven KV read beside a raw NIXL READ and a memcpy of the same bytes."""
    from weir.cli.bench_transfer import run_bench_transfer

    asyncio.run(run_bench_transfer(console, blocks or [1, 4, 16, 64], repeats, out))


def interference(
    model: Model = "demo",
    chats: Annotated[int, Flag(min=1, help="Chats of 64 tokens in, 64 out")] = 8,
    longs: Annotated[int, Flag(min=1, help="Long prompts that arrive together")] = 4,
    long_input: Annotated[int, Flag(min=1, help="Tokens of each")] = 1024,
    after_s: Annotated[float, Flag(min=0, help="When they arrive")] = 1.0,
    rounds: Annotated[int, Flag(min=1, help="Each idle and disturbed")] = 2,
    seed: Annotated[int, Flag(min=0)] = 0,
    external: Externals = None,
    external_model: ExternalModel = "",
    out: Json = None,
) -> None:
    """What long prompts do to the tokens of running chats: split against aggregated."""
    from weir.cli.bench_interference import InterferenceShape, run_bench_interference
    from weir.cli.bench_layouts import parse_external
    from weir.cli.paths import model_dir

    shape = InterferenceShape(
        chats=chats, longs=longs, long_input=long_input, after_s=after_s, rounds=rounds, seed=seed
    )
    externals = [parse_external(text, external_model) for text in external or ()]
    asyncio.run(run_bench_interference(console, model_dir(model), shape, externals, out))


def matrix(
    model: Model = "demo",
    scenario: Annotated[list[str] | None, Flag(help="Only these; default all")] = None,
    seconds: Annotated[float, Flag(min=1, help="Length of each run's arrivals")] = 30.0,
    rate_scale: Annotated[
        list[float] | None, Flag(help="Times the rates of the scenarios; several give a curve")
    ] = None,
    goodput: Annotated[
        list[str] | None, Flag(help="ttft:MS tpot:MS e2el:MS, all to be met; default: those of each scenario")
    ] = None,
    link_mbit: Annotated[
        float, Flag(min=0, help="network-degradation: the KV's link, 10^6 bits/s; 0: the scenario's")
    ] = 0.0,
    seed: Annotated[int, Flag(min=0)] = 0,
    external: Externals = None,
    external_model: ExternalModel = "",
    out: Annotated[Path, Flag("--out", help="Folder for report.json and report.html")] = Path("bench-report"),
) -> None:
    """Every scenario, split against aggregated on the same cores: report.html and report.json."""
    from weir.cli.bench_layouts import parse_external
    from weir.cli.bench_matrix import MatrixOptions, run_bench_matrix
    from weir.cli.paths import model_dir

    options = MatrixOptions(
        model_dir=model_dir(model),
        scenarios=tuple(scenario or ()),
        seconds=seconds,
        rate_scales=tuple(rate_scale or (1.0,)),
        goodput=tuple(goodput or ()),
        link_mbit=link_mbit,
        seed=seed,
        out=out,
        externals=tuple(parse_external(text, external_model) for text in external or ()),
    )
    asyncio.run(run_bench_matrix(console, options))


def router(
    model: Model = "demo",
    requests: Annotated[int, Flag(min=10, help="Answers of one token")] = 2000,
    streams: Annotated[int, Flag(min=1, help="Long answers")] = 200,
    stream_tokens: Annotated[int, Flag(min=2, help="Tokens of each")] = 128,
    concurrency: Annotated[int, Flag(min=1, help="At once")] = 32,
    step_ms: Annotated[float, Flag(min=0.1, help="Pace of the mock workers")] = 5.0,
    peer_python: Annotated[Path | None, Flag(help="Interpreter that has sglang-router; default this one")] = None,
    trace_ratio: Annotated[float, Flag(min=0, max=1, help="Instead: what tracing this share of requests costs")] = 0.0,
    rounds: Annotated[int, Flag(min=1, help="--trace-ratio: measurements, with and without it")] = 10,
    out: Json = None,
) -> None:
    """What the router costs: latency added, CPU a request and a token, with mock workers."""
    from weir.cli.bench_router import RouterShape, run_bench_router
    from weir.cli.bench_router_tracing import run_bench_router_tracing
    from weir.cli.paths import model_dir

    shape = RouterShape(
        requests=requests, streams=streams, stream_tokens=stream_tokens, concurrency=concurrency, step_ms=step_ms
    )
    if trace_ratio:
        asyncio.run(run_bench_router_tracing(console, model_dir(model), shape, trace_ratio, rounds, out))
    else:
        asyncio.run(run_bench_router(console, model_dir(model), shape, peer_python, out))
