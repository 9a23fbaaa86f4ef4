"""``weir top``: pools, queues, stock, flows, requests and decisions, live on the whole screen."""

from __future__ import annotations

import asyncio
import datetime
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import grpc
import grpc.aio
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weir.cli.decisions import action_word, what_of
from weir.cli.doors import open_channel, open_client
from weir.cli.up import ROLE_WORDS
from weir.client import AsyncClient
from weir.clock import Clock, SystemClock
from weir.errors import WeirError
from weir.lifecycle import RequestState
from weir.rpc.convert import state_from_pb
from weir.rpc.v1 import common_pb2, controller_pb2, controller_pb2_grpc, router_pb2, worker_pb2, worker_pb2_grpc
from weir.services.router.view import kv_bytes_per_token

ANSWER_TIMEOUT_S = 1.0
"""A worker or controller that takes longer is shown without what only it knows."""
DECISIONS_SHOWN = 5
REQUESTS_SHOWN = 12
BAR_CHARS = 20
PIPED_WIDTH = 160
FLOW_WINDOW_S = 3.0
"""Flows are means over this long at least: prefill works, and KV comes, in chunks of about a second's work."""

Worker = router_pb2.ListWorkersResponse.Worker
ActiveRequest = router_pb2.GetRouterStateResponse.ActiveRequest


@dataclass(frozen=True, slots=True)
class Sample:
    """What all said at one moment. ``own``: states by worker id, of those that answered."""

    at_s: float
    fleet: router_pb2.ListWorkersResponse
    router: router_pb2.GetRouterStateResponse
    own: dict[str, worker_pb2.GetStateResponse]
    decisions: controller_pb2.ListDecisionsResponse | None

    def load(self, worker: Worker) -> common_pb2.WorkerLoad:
        """As the worker itself says, else as it last told the router."""
        own = self.own.get(worker.worker_id)
        return own.load if own is not None and own.incarnation == worker.incarnation else worker.load


@dataclass(frozen=True, slots=True)
class Flow:
    """Tokens a second, and bytes of KV that were read a second."""

    prefill: float = 0.0
    decode: float = 0.0
    kv: float = 0.0


@dataclass(slots=True)
class Sources:
    """Connections to the router, its workers and, perhaps, a controller; an async context manager closes them."""

    router: AsyncClient
    controller: str
    clock: Clock
    _channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.router.close()
        for link in self._channels.values():
            await link.close(None)
        self._channels.clear()

    async def sample(self) -> Sample:
        """Ask all of them. Raises an error of ``weir.errors`` when the router does not answer; others may be away."""
        fleet, router, decisions = await asyncio.gather(self.router.workers(), self.router.state(), self._decisions())
        await self._forget_all_but({worker.address for worker in fleet.workers} | {self.controller})
        at_s = self.clock.monotonic_s()
        states = await asyncio.gather(*(self._own(worker.address) for worker in fleet.workers))
        own = {worker.worker_id: state for worker, state in zip(fleet.workers, states, strict=True) if state}
        return Sample(at_s, fleet, router, own, decisions)

    async def _own(self, address: str) -> worker_pb2.GetStateResponse | None:
        stub = worker_pb2_grpc.WorkerServiceStub(self._channel(address))
        try:
            state: worker_pb2.GetStateResponse = await stub.GetState(
                worker_pb2.GetStateRequest(), timeout=ANSWER_TIMEOUT_S
            )
        except grpc.RpcError:
            return None
        return state

    async def _decisions(self) -> controller_pb2.ListDecisionsResponse | None:
        if not self.controller:
            return None
        stub = controller_pb2_grpc.ControllerServiceStub(self._channel(self.controller))
        request = controller_pb2.ListDecisionsRequest(limit=DECISIONS_SHOWN)
        try:
            answer: controller_pb2.ListDecisionsResponse = await stub.ListDecisions(request, timeout=ANSWER_TIMEOUT_S)
        except grpc.RpcError:
            return None
        return answer

    def _channel(self, address: str) -> grpc.aio.Channel:
        link = self._channels.get(address)
        if link is None:
            link = self._channels[address] = open_channel(address)
        return link

    async def _forget_all_but(self, addresses: set[str]) -> None:
        for address in self._channels.keys() - addresses:
            await self._channels.pop(address).close(None)


def flows(before: Sample | None, now: Sample) -> dict[str, Flow]:
    """By worker id, from the counters of two samples; zero for a worker that was not in both."""
    if before is None or now.at_s <= before.at_s:
        return {worker.worker_id: Flow() for worker in now.fleet.workers}
    span_s = now.at_s - before.at_s
    old = {(worker.worker_id, worker.incarnation): before.load(worker) for worker in before.fleet.workers}
    found = {}
    for worker in now.fleet.workers:
        load, last = now.load(worker), old.get((worker.worker_id, worker.incarnation))
        if last is None:
            found[worker.worker_id] = Flow()
            continue
        added = (
            load.prefilled_tokens - last.prefilled_tokens,
            load.generated_tokens - last.generated_tokens,
            load.kv_read_bytes - last.kv_read_bytes,
        )
        # An older count may come from the worker and the newer from its last report: never below nothing.
        found[worker.worker_id] = Flow(*(max(0, count) / span_s for count in added))
    return found


@dataclass(slots=True)
class Recent:
    """The samples that flows are counted from."""

    samples: deque[Sample] = field(default_factory=deque)

    def add(self, now: Sample) -> Sample | None:
        """Keep ``now``; the one to count from: ``FLOW_WINDOW_S`` before it or a little more, else the oldest."""
        while len(self.samples) > 1 and now.at_s - self.samples[1].at_s >= FLOW_WINDOW_S:
            self.samples.popleft()
        before = self.samples[0] if self.samples else None
        self.samples.append(now)
        return before


def frame(before: Sample | None, now: Sample, *, rows: int = REQUESTS_SHOWN) -> RenderableType:
    """One frame; flows are between the samples. At most ``rows`` requests, the oldest ones."""
    moving = flows(before, now)
    parts: list[RenderableType] = [_head(now), Text(), _pools(now, moving), Text(), _workers(now, moving)]
    parts += [Text(), _requests(now.router, rows)]
    if now.decisions is not None:
        parts += [Text(), _decisions(now.decisions)]
    return Group(*parts)


def _head(now: Sample) -> Text:
    router = now.router
    ended = "  ".join(f"{count} {name}" for name, count in sorted(router.ended.items()) if count)
    line = Text.assemble(
        ("weir ", "bold"),
        f"{router.active_requests} in flight  {router.queued_requests} queued  {router.open_sessions} sessions",
    )
    if ended:
        line.append(f"   ended: {ended}", style="grey62")
    if now.fleet.stale:
        line.append("   registry out of reach: last known view", style="yellow")
    return line


def _pools(now: Sample, moving: dict[str, Flow]) -> Table:
    """By role: queues, the stock (KV that waits under leases), the room left, and what flows."""
    headings = (
        "workers",
        "running",
        "waiting",
        "to prefill",
        "stock",
        "headroom",
        "prefill tok/s",
        "decode tok/s",
        "KV read/s",
    )
    table = _table("pools", ("role",), headings)
    for role, word in ROLE_WORDS.items():
        pool = [worker for worker in now.fleet.workers if worker.role == role]
        if not pool:
            continue
        loads = [now.load(worker) for worker in pool]
        flow = [moving[worker.worker_id] for worker in pool]
        held = [load.blocks.leased for load in loads]
        room = [load.blocks.free + load.blocks.cached for load in loads]
        table.add_row(
            word,
            str(len(pool)),
            str(sum(load.running for load in loads)),
            str(sum(load.waiting for load in loads)),
            f"{sum(load.pending_prefill_tokens for load in loads)} tok",
            _in_bytes(now, pool, held),
            _in_bytes(now, pool, room),
            f"{sum(each.prefill for each in flow):.0f}",
            f"{sum(each.decode for each in flow):.0f}",
            size_of(sum(each.kv for each in flow)),
        )
    return table


def _in_bytes(now: Sample, pool: Sequence[Worker], blocks: Sequence[int]) -> str:
    """The sum as bytes when all of the pool say what a block takes, else as blocks."""
    total = 0.0
    for worker, count in zip(pool, blocks, strict=True):
        own = now.own.get(worker.worker_id)
        if own is None:
            return f"{sum(blocks)} blocks"
        total += count * own.fingerprint.block_size * kv_bytes_per_token(own.fingerprint)
    return size_of(total)


def _workers(now: Sample, moving: dict[str, Flow]) -> Table:
    table = _table("workers", ("worker", "role", "state"), ("running", "waiting"))
    table.add_column("KV blocks")
    for heading in ("used", "leases", "reads", "step ms", "prefill tok/s", "decode tok/s"):
        table.add_column(heading, justify="right")
    for worker in sorted(now.fleet.workers, key=lambda worker: (worker.role, worker.worker_id)):
        load, flow = now.load(worker), moving[worker.worker_id]
        state = "draining" if worker.draining else "ready" if worker.connected else "connecting"
        blocks = load.blocks
        table.add_row(
            worker.worker_id,
            ROLE_WORDS.get(worker.role, "?"),
            Text(state, style="green" if state == "ready" else "yellow"),
            str(load.running),
            str(load.waiting),
            _blocks_bar(blocks.used, blocks.leased + blocks.quarantined, blocks.cached, blocks.total),
            f"{100 * (blocks.total - blocks.free - blocks.cached) / blocks.total:.0f} %" if blocks.total else "-",
            str(load.open_leases),
            str(load.outstanding_reads),
            f"{load.decode_step_ms:.1f}" if load.decode_step_ms else "-",
            f"{flow.prefill:.0f}",
            f"{flow.decode:.0f}",
        )
    return table


def _blocks_bar(used: int, held: int, cached: int, total: int) -> Text:
    """Used, held for others, cached, free; what is there at all gets a character."""
    bar = Text()
    left = BAR_CHARS
    for count, sign, style in ((used, "█", "blue"), (held, "█", "dark_orange"), (cached, "▒", "cyan")):
        width = min(left, max(1, round(BAR_CHARS * count / total))) if count and total else 0
        bar.append(sign * width, style=style)
        left -= width
    bar.append("·" * left, style="grey42")
    return bar


def _requests(router: router_pb2.GetRouterStateResponse, rows: int) -> RenderableType:
    states = [state_from_pb(request.state) for request in router.requests]
    line = Text.assemble(("requests  ", "bold"), _counts(states))
    if not router.requests or rows <= 0:
        return line
    table = _table("", ("request", "stage"), ("attempt", "age", "tokens"))
    for heading in ("prefill", "decode"):
        table.add_column(heading)
    for request in sorted(router.requests, key=lambda request: -request.age_ms)[:rows]:
        table.add_row(*_request_cells(request))
    more = len(router.requests) - rows
    return Group(line, table, *([Text(f"and {more} more", style="grey62")] if more > 0 else []))


def _counts(states: Iterable[RequestState]) -> str:
    counts = Counter(states)
    return "  ".join(f"{counts[state]} {state.value}" for state in RequestState if counts[state]) or "none in flight"


def _request_cells(request: ActiveRequest) -> tuple[str, ...]:
    return (
        request.request_id,
        state_from_pb(request.state).value,
        str(request.attempt),
        f"{request.age_ms / 1e3:.1f} s",
        str(request.tokens_sent),
        request.prefill_worker or "-",
        request.decode_worker or "-",
    )


def _decisions(answer: controller_pb2.ListDecisionsResponse) -> RenderableType:
    table = _table(f"decisions, mode {answer.mode}", ("time", "action", "who", "reason"), ())
    for event in answer.decisions[-DECISIONS_SHOWN:]:
        at = datetime.datetime.fromtimestamp(event.origin.unix_s).strftime("%H:%M:%S")
        mark = " (advice)" if event.dry_run else " (pending)" if event.number == answer.pending else ""
        table.add_row(at, action_word(event.action) + mark, what_of(event), Text(event.reason, overflow="ellipsis"))
    if not answer.HasField("latest"):
        return table
    latest = answer.latest
    return Group(table, Text(f"now: {action_word(latest.action)}; {latest.reason}", style="grey62"))


def _table(title: str, words: Sequence[str], figures: Sequence[str]) -> Table:
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        header_style="grey62",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for heading in words:
        table.add_column(heading, no_wrap=True)
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def size_of(count: float) -> str:
    """Bytes with a decimal prefix: ``8.8 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


async def run_top(console: Console, router: str, controller: str, interval_s: float, once: bool) -> None:
    """Show frames until cancelled; with ``once`` print one, made of two samples, and return.

    The first sample must succeed (raises Unavailable and the like); later the screen says what is wrong.
    Where there is no terminal, frames are printed one after the other.
    """
    async with Sources(open_client(router), controller, SystemClock()) as sources:
        first, recent = await sources.sample(), Recent()
        recent.add(first)
        if console.is_terminal and not once:
            with Live(frame(None, first), console=console, screen=True, auto_refresh=False) as live:
                await _watch(sources, recent, interval_s, console, lambda shown: live.update(shown, refresh=True))
            return
        plain = console if console.is_terminal else Console(file=console.file, width=PIPED_WIDTH)
        if not once:
            await _watch(sources, recent, interval_s, None, plain.print)
        await asyncio.sleep(interval_s)
        plain.print(frame(first, await sources.sample()))


async def _watch(
    sources: Sources,
    recent: Recent,
    interval_s: float,
    screen: Console | None,
    show: Callable[[RenderableType], object],
) -> None:
    """Sample and show for ever; ``screen`` limits the rows."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            now = await sources.sample()
        except WeirError as error:
            show(Text(f"the router does not answer: {error}", style="red"))
            continue
        show(frame(recent.add(now), now, rows=_rows(screen, now) if screen is not None else REQUESTS_SHOWN))


def _rows(console: Console, now: Sample) -> int:
    """Rows left for requests on this screen."""
    others = 12 + len(now.fleet.workers) + len({worker.role for worker in now.fleet.workers})
    return max(0, console.height - others - (3 + DECISIONS_SHOWN if now.decisions is not None else 0))
