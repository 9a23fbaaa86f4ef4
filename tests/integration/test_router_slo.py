"""SLOs, profiles and cache events through a real router, over gRPC and HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from tests.integration.scripted_worker import FINGERPRINT, MODEL, ScriptedWorker
from tests.integration.test_router import Cluster, folder
from weir.errors import InvalidArgument
from weir.events.subjects import kv_subject
from weir.kvcache.prefix import block_hashes, chain_seed
from weir.lifecycle import Role
from weir.rpc.v1 import events_pb2, router_pb2, router_pb2_grpc

__all__ = ["folder"]

PROMPT = tuple(range(5, 45))
SLOW = events_pb2.WorkerProfile(prefill_s=(0.1, 0.01, 0.0), step_s=(0.02, 0.001, 0.0), read_s=(0.001, 1e-9))
"""40 tokens take 500 ms, a step 21 ms."""


@pytest.fixture
async def slow(folder: Path) -> AsyncIterator[Cluster]:
    made = Cluster(folder)
    await made.start()
    for worker in await made.add(Role.PREFILL, Role.DECODE):
        await publish(made, worker, SLOW)
    yield made
    await made.check_clean()
    await made.stop()


async def publish(cluster: Cluster, worker: ScriptedWorker, profile: events_pb2.WorkerProfile) -> None:
    """Put the worker's entry with ``profile`` into the registry and wait until the router has it."""
    worker.profile = profile
    await worker.register()
    view = cluster.app.router.fleet.get(worker.key)
    assert view is not None
    await cluster.until(lambda: view.info.profile is not None)
    assert view.speed.known


async def refusal(cluster: Cluster, **slo: Any) -> grpc.aio.AioRpcError:
    async with grpc.aio.insecure_channel(cluster.server.address) as channel:
        request = router_pb2.GenerateRequest(model=MODEL, **slo)
        request.tokens.token_ids.extend(PROMPT)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in router_pb2_grpc.RouterServiceStub(channel).Generate(request):
                pass
    return caught.value


async def test_what_cannot_meet_its_slo_is_refused_before_prefill(slow: Cluster) -> None:
    error = await refusal(slow, slo_ttft_ms=400.0)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() is not None
    assert "TTFT would be about 500 ms, the SLO is 400 ms" in str(error.details())
    trailing: Any = error.trailing_metadata()
    assert [float(value) for name, value in trailing if name == "retry-after-ms"] == [60_000.0]
    error = await refusal(slow, slo_tpot_ms=10.0)
    assert "TPOT would be about 21.0 ms, the SLO is 10 ms" in str(error.details())
    assert slow.states() == ["rejected.0", "rejected.0"]
    assert all(worker.left == 0 for worker in slow.workers)


@pytest.mark.parametrize(
    ("slo", "limit"), [(-1.0, "at least 0"), (float("nan"), "at least 0"), (1e9, "at most 600000")]
)
async def test_impossible_slos_are_refused_by_name(slow: Cluster, slo: float, limit: str) -> None:
    error = await refusal(slow, slo_tpot_ms=slo)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "slo_tpot_ms" in str(error.details())
    assert limit in str(error.details())


async def test_http_says_429_and_when_to_try_again(slow: Cluster) -> None:
    address = await slow.app.open_http("127.0.0.1:0")
    body = {"model": MODEL, "prompt": list(PROMPT), "max_tokens": 4}
    async with httpx.AsyncClient(base_url=f"http://{address}") as client:
        answer = await client.post("/v1/completions", json=body, headers={"x-slo-ttft-ms": "400"})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "60")
        answer = await client.post("/v1/completions", json=body, headers={"x-slo-ttft-ms": "-4"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-slo-ttft-ms")


async def test_caches_are_listed_when_links_come_up_followed_by_events_and_asked_for_after_a_gap(slow: Cluster) -> None:
    worker = ScriptedWorker("decode-9", Role.DECODE, slow.registry)
    hashes = block_hashes(PROMPT[:-1], 4, chain_seed(FINGERPRINT.digest(), b""))
    worker.cached = hashes[:2]
    slow.workers.append(worker)
    await worker.start()
    prefixes = slow.app.router._prefixes
    await slow.until(lambda: prefixes.depth(worker.key, hashes) == 2)

    async def announce(sequence: int, stored: list[bytes]) -> None:
        origin = events_pb2.EventOrigin(
            publisher_id=worker.key.worker_id, incarnation=worker.key.incarnation, sequence=sequence
        )
        event = events_pb2.KvBlocksEvent(origin=origin, stored=stored)
        await slow.bus.publish(kv_subject(worker.key.worker_id), event.SerializeToString())

    await announce(1, hashes[2:5])
    await slow.until(lambda: prefixes.depth(worker.key, hashes) == 5)
    worker.cached = hashes[:7]
    await announce(3, hashes[7:8])  # the second was lost, which stored two more
    await slow.until(lambda: prefixes.depth(worker.key, hashes) == 8)
    await worker.kill()
    await slow.registry.delete(worker.key.worker_id, worker.key.incarnation)
    await slow.until(lambda: len(prefixes) == 0)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"slo_ttft_ms": 900.0, "slo_limit_ms": 500.0}, "router.slo_ttft_ms"),
        ({"slo_tpot_ms": 900.0, "slo_limit_ms": 500.0}, "router.slo_tpot_ms"),
        ({"tenant_max_queued": 9, "max_queued_requests": 8}, "router.tenant_max_queued"),
    ],
)
async def test_contradictory_limits_are_refused_before_anything_starts(
    folder: Path, config: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidArgument, match=named):
        Cluster(folder, **config)
