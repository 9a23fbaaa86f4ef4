"""When nobody is left: a status before the first token, an error event after it, and never a quiet end."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.e2e.faults.tiny import NAME, TinyLlama, prompt_of
from tests.e2e.faults.watched import Watched, exact, kill, renewed
from tests.e2e.quiet import assert_quiet
from weir.cli.cluster import Cluster, ClusterSpec
from weir.client import AsyncClient
from weir.errors import Unavailable

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.filterwarnings("ignore::FutureWarning")]

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
PATIENCE_S = 3.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def single(tiny: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One mixed worker, and a router that waits 3 s for another."""
    spec = ClusterSpec(
        tiny.folder, NAME, tmp_path_factory.mktemp("single"), prefill=0, decode=0, mixed=1,
        router_flags=("--queue-timeout-s", str(PATIENCE_S)),
    )  # fmt: skip
    async with Cluster(spec) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def client(single: Cluster) -> AsyncIterator[AsyncClient]:
    """A client; the worker is there again after it, and nothing is left in it."""
    async with AsyncClient(single.router_address) as client:
        yield client
    if single.workers[0].exit_code is not None:
        await single.restart_worker(single.workers[0])
        await renewed(single)
    await assert_quiet(single)


async def test_grpc(single: Cluster, client: AsyncClient, tiny: TinyLlama) -> None:
    """In the middle of a stream, and for one that comes when nobody is there: UNAVAILABLE, with what happened."""
    prompt = prompt_of(30, 200)
    request = Watched(client, prompt, max_tokens=4_000, **GREEDY)
    await request.seen(10)
    await kill(single.workers[0])
    with pytest.raises(Unavailable, match="no worker"):
        await request.outcome()
    assert tuple(request.tokens) == tiny.greedy(prompt, len(request.tokens))
    with pytest.raises(Unavailable, match="no worker"):
        await client.complete(prompt, max_tokens=5, **GREEDY)
    await single.restart_worker(single.workers[0])
    await renewed(single)
    exact(await client.complete(prompt, max_tokens=5, **GREEDY), tiny.greedy(prompt, 5))


async def test_http_before_the_first_token(single: Cluster, client: AsyncClient) -> None:
    await kill(single.workers[0])
    body = {"model": NAME, "prompt": prompt_of(30, 201), "max_tokens": 5, "stream": True, "temperature": 0}
    async with httpx.AsyncClient(base_url=f"http://{single.http_address}", timeout=30) as http:
        answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 503
    assert "no worker" in answer.json()["error"]["message"]


async def test_http_after_the_first_token(single: Cluster, client: AsyncClient) -> None:
    """The status has gone out as 200: the stream ends with an error event, and [DONE] does not come."""
    body = {"model": NAME, "prompt": prompt_of(30, 202), "max_tokens": 4_000, "stream": True, "temperature": 0}
    events: list[str] = []
    async with httpx.AsyncClient(base_url=f"http://{single.http_address}", timeout=30) as http:
        async with http.stream("POST", "/v1/completions", json={**body, "ignore_eos": True}) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    events.append(line.removeprefix("data: "))
                if len(events) == 10:
                    single.workers[0].kill()
    assert "[DONE]" not in events
    assert "no worker" in json.loads(events[-1])["error"]["message"]
    assert all(json.loads(event)["choices"] for event in events[:-1])
