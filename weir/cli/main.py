"""The ``weir`` command."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from weir import __version__
from weir.cli import balance_commands, bench_commands, simulate
from weir.cli.paths import DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT
from weir.errors import InvalidArgument, WeirError

app = typer.Typer(
    name="weir",
    help="Disaggregated LLM serving: prefill and decode on separate workers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    add_completion=False,
)
console = Console()
DEFAULT_ROUTER = "127.0.0.1:7600"
DEFAULT_CONTROLLER = "127.0.0.1:7401"

RouterOption = Annotated[str, typer.Option("--router", envvar="WEIR_ROUTER", help="host:port of the router")]
ModelOption = Annotated[str, typer.Option("--model", help="'demo' or a Hugging Face folder")]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end; Ctrl-C cancels the work, which cleans up, and then exits with 130."""
    return asyncio.run(work)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weir {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it")] = False,
) -> None:
    """Disaggregated LLM serving: prefill and decode on separate workers."""


@app.command(epilog="Example: weir demo --question 'What is a weir?'")
def demo(
    model: ModelOption = "demo",
    question: Annotated[str, typer.Option(help="What to ask")] = "Name the planets of the solar system.",
) -> None:
    """Start a small cluster, ask one question, show the timeline, stop."""
    from weir.cli.demo import run_demo

    run(run_demo(console, model=model, question=question))


@app.command(epilog="Example: weir up --model demo --prefill 1 --decode 1 --http 8000")
def up(
    model: ModelOption = "demo",
    prefill: Annotated[int, typer.Option(min=0, max=64, help="Prefill workers")] = 1,
    decode: Annotated[int, typer.Option(min=0, max=64, help="Decode workers")] = 1,
    mixed: Annotated[int, typer.Option(min=0, max=64, help="Mixed (aggregated) workers")] = 0,
    http: Annotated[int, typer.Option(min=0, max=65535, help="OpenAI port; 0 = any free")] = DEFAULT_HTTP_PORT,
    grpc: Annotated[int, typer.Option(min=0, max=65535, help="gRPC port; 0 = any free")] = DEFAULT_GRPC_PORT,
    ui: Annotated[bool, typer.Option(help="The page /ui at the OpenAI port")] = True,
    host: Annotated[str, typer.Option(help="Address to listen on")] = "127.0.0.1",
    nats: Annotated[str | None, typer.Option(help="URL of a nats-server; default: an embedded one")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    name: Annotated[str | None, typer.Option(help="Model name for clients; default: the folder's")] = None,
    logs: Annotated[Path | None, typer.Option(help="Folder for the processes' logs")] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="File or 'chatml'; default: the model's own, chatml for the demo model")
    ] = None,
    controller: Annotated[str, typer.Option(help="Balance of the pools: off, advise or auto")] = "off",
    max_workers: Annotated[int, typer.Option(min=0, max=64, help="auto may start up to so many; 0: roles only")] = 0,
    controller_flag: Annotated[
        list[str] | None,
        typer.Option(help="Further flag of the controller, such as --slo-tpot-ms=150; may be repeated"),
    ] = None,
) -> None:
    """Start a local cluster and show its state until Ctrl-C."""
    from weir.cli.cluster import ClusterSpec
    from weir.cli.demo import DEMO_CHAT_TEMPLATE, DEMO_MODEL_NAME
    from weir.cli.paths import cache_root, model_dir
    from weir.cli.up import controller_flags, run_up

    if mixed == 0 and (prefill == 0 or decode == 0):
        if prefill:
            raise InvalidArgument("--decode", decode, "prefill workers need at least one decode or mixed worker")
        if not decode:
            raise InvalidArgument("--mixed", mixed, "at least one worker that decodes")
    if device not in {"cpu", "cuda"}:
        raise InvalidArgument("--device", device, "must be cpu or cuda")
    folder = model_dir(model)
    template = chat_template if chat_template is not None else DEMO_CHAT_TEMPLATE if model == "demo" else ""
    spec = ClusterSpec(
        model_dir=folder,
        model_name=name or (DEMO_MODEL_NAME if model == "demo" else folder.name),
        log_dir=logs or cache_root() / "logs",
        prefill=prefill,
        decode=decode,
        mixed=mixed,
        nats_url=nats,
        host=host,
        grpc_port=grpc,
        http_port=http,
        ui=ui,
        device=device,
        chat_template=template,
        controller_flags=controller_flags(controller, prefill + decode + mixed, max_workers, controller_flag or ()),
    )
    run(run_up(console, spec, max_workers if controller == "auto" else 0))


@app.command(epilog="Example: weir generate 'Once upon a time' --max-tokens 40 --temperature 0")
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input")],
    router: RouterOption = DEFAULT_ROUTER,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Start of the random stream")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated")] = None,
    timings: Annotated[bool, typer.Option(help="Show the timeline afterwards")] = False,
) -> None:
    """Continue a text."""
    from weir.cli.talk import run_generate

    text = sys.stdin.read() if prompt == "-" else prompt
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
    options |= {"seed": seed} if seed is not None else {}
    options |= {"stop": stop} if stop else {}
    run(run_generate(console, router, text, options, timings))


@app.command(epilog="Example: weir chat --router 127.0.0.1:7600   (or: weir chat 'Hello')")
def chat(
    message: Annotated[str | None, typer.Argument(help="One question; without it, a conversation")] = None,
    router: RouterOption = DEFAULT_ROUTER,
    system: Annotated[str | None, typer.Option(help="System message")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens per answer")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.7,
    timings: Annotated[bool, typer.Option(help="Show the timeline after each answer")] = False,
) -> None:
    """Talk to the model."""
    from weir.cli.talk import run_chat

    options: dict[str, Any] = {"temperature": temperature}
    options |= {"max_tokens": max_tokens} if max_tokens is not None else {}
    run(run_chat(console, router, message, system, options, timings))


@app.command(epilog="Example: weir workers --router 127.0.0.1:7600 --check")
def workers(
    router: RouterOption = DEFAULT_ROUTER,
    check: Annotated[bool, typer.Option(help="Ask each worker itself: blocks, leases, fingerprint")] = False,
) -> None:
    """List the workers and their load."""
    from weir.cli.workers import run_workers

    run(run_workers(console, router, check))


@app.command(epilog="Example: weir trace last --router 127.0.0.1:7600")
def trace(
    request_id: Annotated[str, typer.Argument(help="Request id, or last")] = "last",
    router: RouterOption = DEFAULT_ROUTER,
    attributes: Annotated[bool, typer.Option(help="Show all attributes of each span")] = False,
) -> None:
    """Show how a request that has ended spent its time."""
    from weir.cli.trace import run_trace

    run(run_trace(console, router, request_id, attributes))


@app.command(epilog="Example: weir top --router 127.0.0.1:7600")
def top(
    router: RouterOption = DEFAULT_ROUTER,
    controller: Annotated[
        str, typer.Option(envvar="WEIR_CONTROLLER", help="host:port of the controller; empty: none")
    ] = DEFAULT_CONTROLLER,
    interval_s: Annotated[float, typer.Option(min=0.1, max=60, help="Between two looks")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, after one interval")] = False,
) -> None:
    """Watch pools, queues, stock, flows, requests and decisions."""
    from weir.cli.top import run_top

    run(run_top(console, router, controller, interval_s, once))


@app.command(name="role", epilog="Example: weir role decode-3fa9c1 mixed --router 127.0.0.1:7600")
def set_role(
    worker: Annotated[str, typer.Argument(help="Worker id")],
    role: Annotated[str, typer.Argument(help="prefill, decode or mixed")],
    router: RouterOption = DEFAULT_ROUTER,
    epoch: Annotated[int | None, typer.Option(help="Refuse unless the worker's epoch is this")] = None,
) -> None:
    """Change a worker's role in place."""
    from weir.cli.workers import run_set_role

    run(run_set_role(console, router, worker, role, epoch))


@app.command(epilog="Example: weir doctor --router 127.0.0.1:7600")
def doctor(
    router: Annotated[str | None, typer.Option(help="Also check a running cluster")] = None,
) -> None:
    """Check this machine: NATS, NIXL with a READ, ports; and a cluster's fingerprints."""
    from weir.cli.doctor import run_doctor

    raise typer.Exit(0 if run(run_doctor(console, router)) else 1)


@app.command(epilog="Example: weir health 127.0.0.1:7600")
def health(
    address: Annotated[str, typer.Argument(help="host:port of any Weir service")],
    timeout_s: Annotated[float, typer.Option(min=0.1, max=300, help="Longest wait")] = 4.0,
) -> None:
    """Exit 0 when the service says SERVING, 1 when it does not."""
    from weir.cli.doors import security
    from weir.rpc.channel import wait_ready

    run(wait_ready(address, timeout_s=timeout_s, security=security()))


@app.command(epilog="Example: weir profile --model demo --json profile.json")
def profile(
    model: ModelOption = "demo",
    threads: Annotated[int, typer.Option(min=1, max=256, help="Threads of the worker")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write the figures here")] = None,
) -> None:
    """Measure prefill time over tokens and decode step over batch and context."""
    from weir.cli.profile import run_profile

    run_profile(console, model, threads, json)


@app.command(name="model", epilog="Example: weir model demo")
def show_model(
    model: Annotated[str, typer.Argument(help="'demo' or a Hugging Face folder")] = "demo",
    to: Annotated[Path | None, typer.Option(help="Make this path a link to the folder")] = None,
) -> None:
    """Print a model's folder; the demo model is converted first if it has not been."""
    from weir.cli.paths import model_dir

    folder = model_dir(model)
    if to is not None:
        to.unlink(missing_ok=True)
        to.symlink_to(folder)
    typer.echo(folder)


bench = typer.Typer(help="Measure.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command(name="engine", epilog="Example: weir bench engine --model demo --json engine.json")
def bench_engine(
    model: ModelOption = "demo",
    json: Annotated[Path | None, typer.Option(help="Write the figures here")] = None,
) -> None:
    """The engine on one core against this core's own limits."""
    from weir.cli.bench_engine import run_bench_engine

    run_bench_engine(console, model, json)


@bench.command(name="handover", epilog="Example: weir bench handover --tokens 1024 --runs 7")
def bench_handover(
    model: ModelOption = "demo",
    tokens: Annotated[int, typer.Option(min=1, max=8000, help="Prompt tokens")] = 1024,
    runs: Annotated[int, typer.Option(min=1, max=1000, help="Requests per cluster")] = 5,
    json: Annotated[Path | None, typer.Option(help="Write the figures here")] = None,
) -> None:
    """What splitting costs one request, against a mixed worker in the same run."""
    from weir.cli.bench_handover import run_bench_handover
    from weir.cli.paths import model_dir

    run(run_bench_handover(console, model_dir(model), tokens, runs, json))


bench_commands.register(bench)
balance_commands.register(app, bench)
simulate.register(app)


def main() -> None:
    """Entry point: errors become one line and an exit status, never a traceback."""
    try:
        app(standalone_mode=True)
    except WeirError as error:
        Console(stderr=True).print(f"[red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(2 if isinstance(error, InvalidArgument) else 1)
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped")
        sys.exit(130)


if __name__ == "__main__":
    main()
