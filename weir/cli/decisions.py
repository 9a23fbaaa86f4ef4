"""``weir decisions``: what the balance controller decided, and why."""

from __future__ import annotations

import datetime

import grpc
from rich.console import Console
from rich.table import Table

from weir.cli.doors import open_channel
from weir.cli.up import ROLE_WORDS
from weir.rpc.status import from_rpc_error
from weir.rpc.v1 import controller_pb2, controller_pb2_grpc, events_pb2

TIMEOUT_S = 10.0
INPUTS = ("rate", "isl_mean", "osl_mean", "hit_ratio", "phi", "capacity", "used", "tau_s", "forecast", "forecast_error")


def action_word(action: int) -> str:
    """As in logs: flip, scale_up, ..."""
    return events_pb2.BalanceAction.Name(action).removeprefix("BALANCE_ACTION_").lower()


def what_of(event: events_pb2.DecisionEvent) -> str:
    """Whom a decision concerns."""
    if event.flips:
        return ", ".join(f"{flip.worker_id} -> {ROLE_WORDS.get(flip.role, '?')}" for flip in event.flips)
    if event.worker_id:
        return event.worker_id
    if event.role:
        return f"one more {ROLE_WORDS.get(event.role, '?')}"
    if event.local_share:
        return f"routers: {event.local_share:.1%} of prompts on decode workers"
    if event.admit_per_s:
        return f"routers: at most {event.admit_per_s:.3g} requests/s"
    return f"gives up {event.cancels}" if event.cancels else ""


def decisions_table(answer: controller_pb2.ListDecisionsResponse) -> Table:
    """Time, action, whom, reason; oldest first."""
    table = Table(title=f"decisions, mode {answer.mode}", title_justify="left", header_style="bold")
    for heading in ("no", "time", "action", "who", "reason"):
        table.add_column(heading, justify="right" if heading == "no" else "left")
    for event in answer.decisions:
        at = datetime.datetime.fromtimestamp(event.origin.unix_s).strftime("%H:%M:%S")
        mark = " (advice)" if event.dry_run else " (pending)" if event.number == answer.pending else ""
        table.add_row(str(event.number), at, action_word(event.action) + mark, what_of(event), event.reason)
    return table


def latest_lines(event: events_pb2.DecisionEvent) -> list[str]:
    """The last decision and what it rests on."""
    inputs = "  ".join(f"{name} {event.inputs[name]:.4g}" for name in INPUTS if name in event.inputs)
    lines = [f"now: {action_word(event.action)}; {event.reason}"]
    return [*lines, f"     {inputs}"] if inputs else lines


async def run_decisions(console: Console, address: str, limit: int, cancel: int | None) -> None:
    """Print the latest decisions; with ``cancel`` give that pending one up first."""
    async with open_channel(address) as link:
        stub = controller_pb2_grpc.ControllerServiceStub(link)
        try:
            if cancel is not None:
                await stub.CancelDecision(controller_pb2.CancelDecisionRequest(number=cancel), timeout=TIMEOUT_S)
            answer = await stub.ListDecisions(controller_pb2.ListDecisionsRequest(limit=limit), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
    console.print(decisions_table(answer))
    if answer.HasField("latest"):
        for line in latest_lines(answer.latest):
            console.print(line, highlight=False, soft_wrap=True)
