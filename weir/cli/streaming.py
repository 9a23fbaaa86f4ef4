"""Printing a generation as it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator

from rich.console import Console

from weir.client import Accepted, Completion, Delta, Event
from weir.client.messages import Collector


async def print_stream(console: Console, events: AsyncIterator[Event], *, show_head: bool = False) -> Completion:
    """Print text as it arrives; the whole generation afterwards."""
    collector = Collector()
    async for event in events:
        collector.add(event)
        if isinstance(event, Delta):
            console.out(event.text, end="", highlight=False)
            console.file.flush()
        elif isinstance(event, Accepted) and show_head:
            console.print(f"[grey50]{event.request_id}: {event.prompt_tokens} prompt tokens, {event.model}[/]")
    console.out("")
    return collector.completion()
