"""``weir up``: a local cluster that stays, with its live state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.table import Table

from weir.cli.cluster import Cluster, ClusterSpec
from weir.cli.doors import open_client, open_nats, security
from weir.cli.supervisor import Supervisor
from weir.clock import SystemClock
from weir.config import RouterConfig, load_config
from weir.errors import InvalidArgument, Unavailable, WeirError
from weir.events.nats_bus import NatsBus
from weir.rpc.v1 import common_pb2, router_pb2

REFRESH_S = 1.0
PLAIN_REFRESH_S = 10.0
MODES = ("off", "advise", "auto")
ROLE_WORDS = {
    common_pb2.ROLE_PREFILL: "prefill",
    common_pb2.ROLE_DECODE: "decode",
    common_pb2.ROLE_MIXED: "mixed",
}


@dataclass(slots=True)
class Rates:
    """Tokens per second from two load reports of the same worker."""

    last: dict[str, tuple[float, int, int]] = field(default_factory=dict)

    def update(self, worker_id: str, now_s: float, prefilled: int, generated: int) -> tuple[float, float]:
        """Prefilled and generated tokens a second since the last call for this worker."""
        before = self.last.get(worker_id)
        self.last[worker_id] = (now_s, prefilled, generated)
        if before is None or now_s <= before[0]:
            return 0.0, 0.0
        span_s = now_s - before[0]
        return max(0, prefilled - before[1]) / span_s, max(0, generated - before[2]) / span_s


def workers_table(answer: router_pb2.ListWorkersResponse, rates: Rates, now_s: float) -> Table:
    """Workers, roles, queues, KV usage and speeds."""
    title = "workers" + (" (registry out of reach: last known view)" if answer.stale else "")
    table = Table(title=title, title_justify="left", header_style="bold", expand=False)
    for heading in ("worker", "role", "state"):
        table.add_column(heading)
    for heading in ("running", "waiting", "KV used", "leases", "reads", "prefill tok/s", "decode tok/s"):
        table.add_column(heading, justify="right")
    for worker in sorted(answer.workers, key=lambda w: (w.role, w.worker_id)):
        load = worker.load
        blocks = load.blocks
        held = blocks.used + blocks.leased + blocks.quarantined
        share = f"{held}/{blocks.total} ({100 * held / blocks.total:.0f} %)" if blocks.total else "-"
        prefill, decode = rates.update(worker.worker_id, now_s, load.prefilled_tokens, load.generated_tokens)
        state = "draining" if worker.draining else "ready" if worker.connected else "connecting"
        table.add_row(
            worker.worker_id, ROLE_WORDS.get(worker.role, "?"), state, str(load.running), str(load.waiting), share,
            str(load.open_leases), str(load.outstanding_reads), f"{prefill:.0f}", f"{decode:.0f}",
        )  # fmt: skip
    return table


def plain_line(answer: router_pb2.ListWorkersResponse) -> str:
    """The same state as one line, for logs."""
    parts = []
    for worker in sorted(answer.workers, key=lambda w: (w.role, w.worker_id)):
        blocks = worker.load.blocks
        held = blocks.used + blocks.leased + blocks.quarantined
        parts.append(
            f"{worker.worker_id} {ROLE_WORDS.get(worker.role, '?')} run={worker.load.running} "
            f"wait={worker.load.waiting} kv={held}/{blocks.total}"
        )
    return " | ".join(parts)


def controller_flags(mode: str, workers: int, max_workers: int, further: Sequence[str]) -> tuple[str, ...]:
    """Flags of the controller's process. Raises InvalidArgument for an unknown mode or a budget below ``workers``."""
    if mode not in MODES:
        raise InvalidArgument("--controller", mode, f"must be one of {', '.join(MODES)}")
    if max_workers and max_workers < workers:
        raise InvalidArgument("--max-workers", max_workers, f"at least the {workers} workers that are started")
    if mode == "off":
        return tuple(further)
    scaling = ("--actuator", "local", "--max-workers", str(max_workers)) if max_workers else ()
    return ("--mode", mode, *scaling, *further)


@asynccontextmanager
async def supervised(cluster: Cluster, max_workers: int, say: Callable[[str], None]) -> AsyncIterator[None]:
    """While inside, the controller may start and stop workers, up to ``max_workers``; 0: it may not."""
    if not max_workers:
        yield
        return
    link = await open_nats(cluster.nats_url, "supervisor")
    bus = await NatsBus.open(link)
    supervisor = Supervisor(cluster, bus, SystemClock(), max_workers=max_workers, say=say)
    await supervisor.open()
    try:
        yield
    finally:
        await supervisor.close()
        await bus.close()
        await link.close()


def where_to_look(cluster: Cluster) -> list[str]:
    """Commands and addresses for people, of a cluster that runs."""
    lines = [f"weir chat --router {cluster.router_address}"]
    if cluster.http_address:
        url = f"{'http' if security() is None else 'https'}://{cluster.http_address}"
        lines.append(f"OpenAI API at {url}/v1")
        # The router reads the same environment.
        if cluster.spec.ui and load_config(RouterConfig, section="router").ui:
            lines.append(f"pools, requests and a chat at {url}/ui")
    if cluster.spec.controller_flags:
        lines.append(f"weir decisions --controller {cluster.controller_address}")
    return [*lines, ""]


async def run_up(console: Console, spec: ClusterSpec, max_workers: int = 0) -> None:
    """Start the cluster and show it until cancelled or until one of its processes ends by itself.

    ``max_workers``: up to so many may the controller start; 0: it starts and stops none.
    """
    console.rule("starting", align="left", style="grey50")
    async with Cluster(spec, say=lambda line: console.print(line, highlight=False)) as cluster:
        console.print(f"\nready: model [bold]{spec.model_name}[/]; stop with Ctrl-C")
        for line in where_to_look(cluster):
            console.print(f"  {line}", highlight=False)
        show = asyncio.create_task(_show(console, cluster), name="live-state")
        ended = asyncio.create_task(cluster.wait_any_exit(), name="watch-processes")
        try:
            async with supervised(cluster, max_workers, lambda line: console.print(line, highlight=False)):
                await asyncio.wait({show, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (show, ended):
                task.cancel()
            await asyncio.gather(show, ended, return_exceptions=True)
        if ended.done() and not ended.cancelled():
            child = ended.result()
            raise Unavailable(f"{child.name} ended with exit code {child.exit_code}\n{child.log_tail()}")
        show.result()


async def _show(console: Console, cluster: Cluster) -> None:
    clock, rates = SystemClock(), Rates()
    async with open_client(cluster.router_address) as client:
        if not console.is_terminal:
            while True:
                console.print(plain_line(await client.workers()), highlight=False, soft_wrap=True)
                await asyncio.sleep(PLAIN_REFRESH_S)
        with Live(console=console, auto_refresh=False) as live:
            while True:
                try:
                    live.update(workers_table(await client.workers(), rates, clock.monotonic_s()), refresh=True)
                except WeirError as error:
                    live.update(f"router does not answer: {error}", refresh=True)
                await asyncio.sleep(REFRESH_S)
