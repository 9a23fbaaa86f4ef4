"""``weir trace``: a request that has ended as a waterfall, from the router's ring of recent requests."""

from __future__ import annotations

import datetime

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from weir.cli.doors import open_client
from weir.cli.timeline import BAR_CHARS
from weir.rpc.v1 import common_pb2, router_pb2

Trace = router_pb2.GetTraceResponse

COLOURS = {
    "admit": "grey62",
    "queue": "yellow",
    "prefill": "blue",
    "first_token": "cyan",
    "second_token": "magenta",
    "decode": "green",
    "kv_read": "dark_orange",
    "retry": "red",
    "cancel": "red",
}
NOTED = {
    "route": ("weir.route.prefill_worker", "weir.route.decode_worker", "weir.route.reason"),
    "kv_read": ("weir.kv.bytes", "weir.kv.transport", "weir.kv.gb_per_s", "weir.kv.exposed_ms", "weir.kv.void_reason"),
    "attempt": ("weir.attempt",),
    "retry": ("weir.kind", "weir.error"),
    "cancel": ("weir.reason",),
}
"""What is worth a word beside the bar; the rest comes with all attributes."""


async def run_trace(console: Console, router: str, request_id: str, attributes: bool) -> None:
    """Fetch and print it; OpenAI's form of the identity is taken too."""
    async with open_client(router) as client:
        found = await client.trace(request_id.removeprefix("chatcmpl-").removeprefix("cmpl-"))
    console.print(waterfall(found, attributes=attributes))


def waterfall(found: Trace, *, attributes: bool = False) -> RenderableType:
    """One row a span: name, when it began, how long it took, its bar, and what belongs to it."""
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for heading, justify in (("span", "left"), ("start", "right"), ("took", "right"), ("", "left"), ("", "left")):
        table.add_column(heading, justify=justify, no_wrap=heading != "")  # type: ignore[arg-type]
    depths: list[int] = []
    total_ms = found.timings.e2e_ms
    for span in found.spans:
        depths.append(depths[span.parent] + 1 if span.parent >= 0 else 0)
        table.add_row(
            "  " * depths[-1] + escape(span.name),
            f"{span.start_ms:.1f} ms",
            f"{span.length_ms:.1f} ms" if span.length_ms else "",
            _bar(span, total_ms),
            _notes(span, attributes),
        )
        for event in span.events:
            words = " ".join(f"{_short(name)}={value}" for name, value in sorted(event.attributes.items()))
            table.add_row(
                "  " * (depths[-1] + 1) + escape(f"· {event.name}"), f"{event.at_ms:.1f} ms", "", Text(), Text(words)
            )
    return Group(*_head(found), table, *_foot(found))


def _head(found: Trace) -> list[RenderableType]:
    received = datetime.datetime.fromtimestamp(found.received_unix_s, datetime.UTC)
    state = common_pb2.RequestState.Name(found.state).removeprefix("REQUEST_STATE_").lower()
    exported = "exported" if found.sampled else "not sampled"
    lines = [
        Text(f"request {found.request_id}   model {found.model}   {state}   {received:%Y-%m-%d %H:%M:%S}Z"),
        Text(f"trace {found.trace_id} ({exported})", style="grey62"),
    ]
    if found.error:
        lines.append(Text(found.error, style="red"))
    return [*lines]


def _foot(found: Trace) -> list[RenderableType]:
    times, usage = found.timings, found.usage
    return [
        Text(
            f"TTFT {times.ttft_ms:.1f} ms   TPOT {times.tpot_ms:.1f} ms   end to end {times.e2e_ms:.1f} ms   "
            f"attempts {times.attempts}"
        ),
        Text(
            f"prompt {usage.prompt_tokens} tokens = {usage.local_compute_tokens} computed + "
            f"{usage.local_cache_hit_tokens} cached + {usage.external_kv_tokens} read; "
            f"{usage.completion_tokens} generated"
        ),
    ]


def _bar(span: Trace.Span, total_ms: float) -> Text:
    scale = BAR_CHARS / total_ms if total_ms > 0 else 0.0
    left = max(0, min(BAR_CHARS - 1, int(span.start_ms * scale)))
    if not span.length_ms:
        return Text(" " * left + "│")
    width = max(1, min(BAR_CHARS - left, round(span.length_ms * scale)))
    colour = "red" if span.error else COLOURS.get(span.name, "white")
    return Text(" " * left) + Text("█" * width, style=colour)


def _notes(span: Trace.Span, attributes: bool) -> Text:
    names = sorted(span.attributes) if attributes else NOTED.get(span.name, ())
    words = [f"{_short(name)}={span.attributes[name]}" for name in names if span.attributes.get(name)]
    text = Text(" ".join(words))
    if span.error and span.parent >= 0:
        text.append(f" {span.error}", style="red")
    return text


def _short(name: str) -> str:
    return name.removeprefix("weir.").removeprefix("route.").removeprefix("kv.")
