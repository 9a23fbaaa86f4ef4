"""``weir demo``: the main job once, on real parts, with what happened shown."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from weir.cli.cluster import Cluster, ClusterSpec
from weir.cli.paths import model_dir
from weir.cli.streaming import print_stream
from weir.cli.timeline import print_timeline
from weir.client import AsyncClient, Completion

DEMO_MODEL_NAME = "smollm2-135m-instruct"
DEMO_CHAT_TEMPLATE = "chatml"  # see docs/decisions/0003-demo-chat.md
DEMO_QUESTION = "Name the planets of the solar system."
DEMO_MAX_TOKENS = 128


async def run_demo(console: Console, *, model: str = "demo", question: str = DEMO_QUESTION) -> Completion:
    """Start a cluster with one prefill and one decode worker, ask one question, stop everything."""
    with console.status("finding the model (converted once, then cached)"):
        folder = model_dir(model)
    name = DEMO_MODEL_NAME if model == "demo" else folder.name
    with tempfile.TemporaryDirectory(prefix="weir-demo-") as scratch:
        template = DEMO_CHAT_TEMPLATE if model == "demo" else ""
        spec = ClusterSpec(folder, name, Path(scratch), chat_template=template)
        console.rule("starting: 5 processes", align="left", style="grey50")
        async with Cluster(spec, say=lambda line: console.print(line, highlight=False)) as cluster:
            console.rule("chat", align="left", style="grey50")
            console.print(f"[bold]user[/]       {question}", highlight=False)
            console.print("[bold]assistant[/]  ", end="")
            async with AsyncClient(cluster.router_address) as client:
                messages = [{"role": "user", "content": question}]
                stream = client.chat(messages, temperature=0.0, max_tokens=DEMO_MAX_TOKENS)  # type: ignore[arg-type]
                answer = await print_stream(console, stream)
            print_timeline(console, answer.final)
            console.rule("stopping", align="left", style="grey50")
    console.print("all processes ended")
    return answer
