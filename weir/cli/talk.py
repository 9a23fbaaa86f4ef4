"""``weir generate`` and ``weir chat``."""

from __future__ import annotations

import asyncio
from typing import Any

from rich.console import Console

from weir.cli.doors import open_client
from weir.cli.streaming import print_stream
from weir.cli.timeline import print_timeline
from weir.client import Message


async def run_generate(console: Console, router: str, prompt: str, options: dict[str, Any], timings: bool) -> None:
    """Print a completion as it comes."""
    async with open_client(router) as client:
        answer = await print_stream(console, client.generate(prompt, **options))
    if timings:
        print_timeline(console, answer.final)


async def run_chat(
    console: Console,
    router: str,
    message: str | None,
    system: str | None,
    options: dict[str, Any],
    timings: bool,
) -> None:
    """Answer one message, or hold a conversation until end of input."""
    history: list[Message] = [{"role": "system", "content": system}] if system else []
    async with open_client(router) as client:
        model = (await client.models())[0]
        if message is None:
            console.print(f"[grey50]{model.name} at {router}; end with Ctrl-D[/]")
        while True:
            text = message if message is not None else await _ask()
            if text is None:
                return
            history.append({"role": "user", "content": text})
            answer = await print_stream(console, client.chat(history, **options))
            history.append({"role": "assistant", "content": answer.text})
            if timings:
                print_timeline(console, answer.final)
            if message is not None:
                return


async def _ask() -> str | None:
    try:
        return await asyncio.to_thread(input, "> ")
    except EOFError:
        return None
