"""The router over real gRPC, with scripted workers and the memory twins of bus and registry."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from tests.integration.scripted_worker import MODEL, ScriptedWorker, expected
from tests.unit.models.text_models import byte_level_folder
from weir.client.aio import AsyncClient
from weir.client.types import Accepted, Delta, Event, Final, PositionLogprobs
from weir.clock import SystemClock
from weir.config import LimitsConfig, NatsConfig, RouterConfig, TelemetryConfig
from weir.errors import DeadlineExceeded, InvalidArgument, RequestCancelled, ResourceExhausted, Unavailable
from weir.events.memory import MemoryBus, MemoryRegistry, MemoryServer
from weir.events.subjects import cancel_subject
from weir.lifecycle import FinishReason, Role
from weir.rpc.server import RpcServer
from weir.rpc.v1 import events_pb2, router_pb2, router_pb2_grpc
from weir.services.router.app import RouterApp, RouterSettings

PROMPT = (5, 6, 7, 8, 9, 10, 11, 12, 13)


class Cluster:
    """One router and as many scripted workers as a test wants."""

    def __init__(self, folder: Path, **config: object) -> None:
        self.nats = MemoryServer()
        self.clock = SystemClock()
        self.registry = MemoryRegistry(self.nats, self.clock)
        self.bus = MemoryBus(self.nats)
        router = RouterConfig(
            model_path=str(folder),
            model_name=MODEL,
            bind="127.0.0.1:0",
            **config,  # type: ignore[arg-type]
        )
        settings = RouterSettings(router, NatsConfig(), LimitsConfig(), TelemetryConfig())
        bus = MemoryBus(self.nats)
        self.app = RouterApp(settings, bus, MemoryRegistry(self.nats, self.clock), self.clock)
        self.server = RpcServer(name="router", bind="127.0.0.1:0")
        self.workers: list[ScriptedWorker] = []

    async def start(self) -> None:
        await self.server.start(self.app.register)
        await self.app.open()
        self.client = AsyncClient(self.server.address)

    async def add(self, *roles: Role) -> list[ScriptedWorker]:
        """Start workers and wait until the router is connected with them."""
        made = []
        for role in roles:
            worker = ScriptedWorker(f"{role.value}-{len(self.workers)}", role, self.registry)
            self.workers.append(worker)
            made.append(worker)
            await worker.start()
        await self.until(lambda: all(self.connected(worker) for worker in made))
        return made

    def connected(self, worker: ScriptedWorker) -> bool:
        view = self.app.router.fleet.get(worker.key)
        return view is not None and view.connected

    async def until(self, condition: object) -> None:
        """Wait for a condition that has no event of its own."""
        assert callable(condition)
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    def states(self) -> list[str]:
        """Lifecycle events on the bus, in order, as state.attempt."""
        events = [events_pb2.LifecycleEvent.FromString(event.payload) for event in self.nats.durable]
        subjects = [event.subject.rpartition(".")[2] for event in self.nats.durable]
        return [f"{subject}.{event.attempt}" for subject, event in zip(subjects, events, strict=True)]

    async def check_clean(self) -> None:
        """Nothing is left of any request, anywhere."""
        await self.until(lambda: self.app.router.state().active_requests == 0)
        for worker in self.workers:
            await self.until(lambda worker=worker: worker.left == 0)

    async def stop(self) -> None:
        await self.client.close()
        await self.server.stop(0)
        await self.app.close()
        for worker in self.workers:
            await worker.kill()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = byte_level_folder(tmp_path / "toy-model")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 261, "hidden_size": 8,
        "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
        "max_position_embeddings": 200, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (made / "config.json").write_text(json.dumps(config))
    (made / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}")
    return made


@pytest.fixture
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    made = Cluster(folder)
    await made.start()
    before = len(asyncio.all_tasks())
    yield made
    await made.check_clean()
    made.app.router._book.check_integrity()
    await made.stop()
    await made.until(lambda: len(asyncio.all_tasks()) <= before)


async def text_of(cluster: Cluster, tokens: list[int]) -> str:
    model = cluster.app.router._catalog.find(MODEL)
    return model.tokenizer.decode(tokens)


async def read(stream: AsyncIterator[Event]) -> tuple[list[int], Final | None]:
    tokens: list[int] = []
    final = None
    async for event in stream:
        if isinstance(event, Delta):
            assert event.first_index == len(tokens)
            tokens += event.token_ids
        elif isinstance(event, Final):
            final = event
    return tokens, final


async def test_prefill_and_decode_give_the_exact_tokens(cluster: Cluster) -> None:
    p, d = await cluster.add(Role.PREFILL, Role.DECODE)
    done = await cluster.client.complete(PROMPT, max_tokens=20)
    assert list(done.token_ids) == expected(PROMPT, 20)
    assert done.final.finish_reason is FinishReason.LENGTH
    times, usage = done.final.timings, done.final.usage
    assert times.admit_ms + times.queue_ms + times.prefill_ms + times.first_token_ms == times.ttft_ms
    assert times.ttft_ms + times.second_token_ms + times.decode_ms == times.e2e_ms
    assert times.kv_read is not None
    assert (times.kv_read.bytes, times.kv_read.transport) == (4096, "memory")
    assert (times.prefill_worker, times.decode_worker) == (p.key.worker_id, d.key.worker_id)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.external_kv_tokens) == (9, 20, 9)
    assert done.text == await text_of(cluster, expected(PROMPT, 20))
    await cluster.until(lambda: len(cluster.states()) == 6)
    assert cluster.states() == [
        "admitted.0", "prefilling.1", "prefilled.1", "transferring.1", "decoding.1", "finished.1",
    ]  # fmt: skip


async def test_mixed_workers_give_the_same_tokens(cluster: Cluster) -> None:
    await cluster.add(Role.MIXED)
    done = await cluster.client.complete(PROMPT, max_tokens=20)
    assert list(done.token_ids) == expected(PROMPT, 20)
    assert done.final.usage.local_compute_tokens == 9


async def test_text_and_chat_are_tokenised_by_the_model(cluster: Cluster) -> None:
    await cluster.add(Role.MIXED)
    tokenizer = cluster.app.router._catalog.find(MODEL).tokenizer
    done = await cluster.client.complete("the weir", max_tokens=3)
    assert list(done.token_ids) == expected(tokenizer.encode("the weir", add_special_tokens=True), 3)
    messages = [{"role": "user", "content": "hi"}]
    chat = await cluster.client.complete_chat(messages, max_tokens=3)  # type: ignore[arg-type]
    ids = tokenizer.encode("user:hi;", add_special_tokens=False)
    assert list(chat.token_ids) == expected(ids, 3)
    assert chat.final.usage.prompt_tokens == len(ids)


async def test_many_at_once(cluster: Cluster) -> None:
    await cluster.add(Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
    prompts = [tuple(range(i, i + 3 + i % 7)) for i in range(40)]
    answers = await asyncio.gather(*(cluster.client.complete(prompt, max_tokens=15) for prompt in prompts))
    assert [list(answer.token_ids) for answer in answers] == [expected(prompt, 15) for prompt in prompts]
    assert all(worker.script.begun for worker in cluster.workers)  # the load was spread


async def test_logprobs_pass_through(cluster: Cluster) -> None:
    await cluster.add(Role.PREFILL, Role.DECODE)
    entries: list[PositionLogprobs] = []
    async for event in cluster.client.generate(PROMPT, max_tokens=3, logprobs=0):
        if isinstance(event, Delta):
            entries += event.logprobs
    assert [entry.chosen.token_id for entry in entries] == expected(PROMPT, 3)
    assert [entry.chosen.logprob for entry in entries] == [-0.5, -0.25, -0.25]


async def test_a_stop_string_ends_the_request_and_the_decode_leg(cluster: Cluster) -> None:
    _, d = await cluster.add(Role.PREFILL, Role.DECODE)
    d.script.hold_decode_at = 12
    answer = expected(PROMPT, 40)
    stop = await text_of(cluster, answer[6:9])
    done = await cluster.client.complete(PROMPT, max_tokens=40, stop=[stop])
    assert done.final.finish_reason is FinishReason.STOP
    assert done.final.stop_string == stop
    assert done.final.usage.completion_tokens == 9
    assert list(done.token_ids) == answer[:9]
    assert done.text == await text_of(cluster, answer[:6])


async def test_a_client_that_leaves_while_decoding(cluster: Cluster) -> None:
    p, d = await cluster.add(Role.PREFILL, Role.DECODE)
    d.script.hold_decode_at = 5
    stream = cluster.client.generate(PROMPT, max_tokens=40)
    async for event in stream:
        if isinstance(event, Delta) and event.first_index + len(event.token_ids) == 5:
            break
    await stream.aclose()  # type: ignore[attr-defined]
    await cluster.check_clean()
    assert (len(d.script.cancelled), p.script.released) == (1, [1])
    assert cluster.app.router.state().ended == {"cancelled": 1}


async def test_a_client_that_leaves_while_prefilling(cluster: Cluster) -> None:
    p, d = await cluster.add(Role.PREFILL, Role.DECODE)
    p.script.hold_prefill = True
    stream = cluster.client.generate(PROMPT, max_tokens=40)
    assert isinstance(await anext(stream), Accepted)
    await d.until(lambda: bool(d.script.begun))
    await stream.aclose()  # type: ignore[attr-defined]
    await cluster.check_clean()
    assert (len(p.script.cancelled), len(d.script.cancelled)) == (1, 1)


@pytest.mark.parametrize("by", ["rpc", "bus"])
async def test_cancel(cluster: Cluster, by: str) -> None:
    _, d = await cluster.add(Role.PREFILL, Role.DECODE)
    d.script.hold_decode_at = 3
    stream = cluster.client.generate(PROMPT, max_tokens=40)
    accepted = await anext(stream)
    assert isinstance(accepted, Accepted)
    if by == "rpc":
        assert await cluster.client.cancel(accepted.request_id)
        assert not await cluster.client.cancel(accepted.request_id)
    else:
        event = events_pb2.CancelEvent(request_id=accepted.request_id, reason="by hand")
        await cluster.bus.publish(cancel_subject(accepted.request_id), event.SerializeToString())
    with pytest.raises(RequestCancelled):
        await read(stream)


async def test_a_deadline(cluster: Cluster) -> None:
    _, d = await cluster.add(Role.PREFILL, Role.DECODE)
    d.script.hold_decode_at = 3
    with pytest.raises(DeadlineExceeded):
        await cluster.client.complete(PROMPT, max_tokens=40, timeout_s=0.3)


async def test_decode_worker_killed_while_decoding(cluster: Cluster) -> None:
    p, d1, d2 = await cluster.add(Role.PREFILL, Role.DECODE, Role.DECODE)
    d1.script.hold_decode_at = d2.script.hold_decode_at = 6
    task = asyncio.create_task(read(cluster.client.generate(PROMPT, max_tokens=30)))
    await p.until(lambda: bool(p.script.released))
    await cluster.until(lambda: sum(r.tokens_sent for r in cluster.app.router.state().requests) == 6)
    victim, other = (d1, d2) if d1.left else (d2, d1)
    other.go_on()
    await victim.kill()
    tokens, final = await task
    assert tokens == expected(PROMPT, 30)
    assert final is not None
    assert (final.usage.completion_tokens, final.timings.attempts) == (30, 2)
    assert [list(begin.generated_token_ids) for begin in p.script.begun] == [[], expected(PROMPT, 6)]


async def test_decode_worker_killed_before_reading_takes_another_without_a_second_prefill(
    cluster: Cluster,
) -> None:
    p, d1, d2 = await cluster.add(Role.PREFILL, Role.DECODE, Role.DECODE)
    p.script.hold_prefill = True
    task = asyncio.create_task(read(cluster.client.generate(PROMPT, max_tokens=30)))
    await p.until(lambda: bool(p.script.begun))
    await cluster.until(lambda: bool(d1.script.begun or d2.script.begun))
    victim, other = (d1, d2) if d1.left else (d2, d1)
    await victim.kill()
    await other.until(lambda: bool(other.script.begun))
    p.go_on()
    tokens, final = await task
    assert tokens == expected(PROMPT, 30)
    assert final is not None
    assert (final.timings.attempts, len(p.script.begun)) == (1, 1)


async def test_prefill_worker_killed_while_prefilling(cluster: Cluster) -> None:
    p1, p2, _ = await cluster.add(Role.PREFILL, Role.PREFILL, Role.DECODE)
    p1.script.hold_prefill = p2.script.hold_prefill = True
    task = asyncio.create_task(read(cluster.client.generate(PROMPT, max_tokens=10)))
    await cluster.until(lambda: bool(p1.script.begun or p2.script.begun))
    victim, other = (p1, p2) if p1.left else (p2, p1)
    other.go_on()
    await victim.kill()
    tokens, final = await task
    assert tokens == expected(PROMPT, 10)
    assert final is not None
    assert final.timings.attempts == 2


async def test_a_worker_that_comes_back_is_used_again(cluster: Cluster) -> None:
    (worker,) = await cluster.add(Role.MIXED)
    await worker.kill()
    await cluster.until(lambda: not cluster.connected(worker))
    again = ScriptedWorker(worker.key.worker_id, Role.MIXED, cluster.registry, incarnation=2)
    cluster.workers.append(again)
    await again.start()
    done = await cluster.client.complete(PROMPT, max_tokens=5)
    assert list(done.token_ids) == expected(PROMPT, 5)
    await cluster.until(lambda: len(cluster.app.router.fleet) == 1)


async def test_refused_and_void_reads_are_mended(cluster: Cluster) -> None:
    p, d = await cluster.add(Role.PREFILL, Role.DECODE)
    d.script.refuse_decode = 1
    d.script.void_reads = 1
    done = await cluster.client.complete(PROMPT, max_tokens=10)
    assert list(done.token_ids) == expected(PROMPT, 10)
    assert (len(p.script.begun), done.final.timings.attempts) == (1, 1)


async def test_a_draining_worker_gets_nothing_new(cluster: Cluster) -> None:
    first, second = await cluster.add(Role.MIXED, Role.MIXED)
    await first.register(draining=True)
    await asyncio.gather(*(cluster.client.complete(PROMPT, max_tokens=2) for _ in range(4)))
    assert (len(first.script.begun), len(second.script.begun)) == (0, 4)


async def test_without_nats_requests_are_served_from_the_last_view(cluster: Cluster) -> None:
    await cluster.add(Role.PREFILL, Role.DECODE)
    cluster.nats.set_up(False)
    done = await cluster.client.complete(PROMPT, max_tokens=5)
    assert list(done.token_ids) == expected(PROMPT, 5)
    assert (await cluster.client.workers()).stale
    cluster.nats.set_up(True)
    assert not (await cluster.client.workers()).stale


async def test_no_worker_is_unavailable_after_a_bounded_wait(folder: Path) -> None:
    made = Cluster(folder, queue_timeout_s=0.1)
    await made.start()
    with pytest.raises(Unavailable, match="no worker for model 'toy'"):
        await made.client.complete(PROMPT, max_tokens=5)
    await made.stop()


async def test_too_many_requests(folder: Path) -> None:
    made = Cluster(folder, max_active_requests=2, max_queued_requests=1)
    await made.start()
    (worker,) = await made.add(Role.MIXED)
    worker.script.hold_decode_at = 1
    tasks = [asyncio.create_task(made.client.complete(PROMPT, max_tokens=5)) for _ in range(2)]
    await made.until(lambda: made.app.router.state().active_requests == 2)
    with pytest.raises(ResourceExhausted, match="2 requests are under way"):
        await made.client.complete(PROMPT, max_tokens=5)
    worker.go_on()
    await asyncio.gather(*tasks)
    await made.check_clean()
    await made.stop()


async def test_a_worker_that_closes_its_streams_is_heard_to_the_end(cluster: Cluster) -> None:
    """Its two streams end one after the other: the last token on the second one is no loss."""
    _, second = await cluster.add(Role.PREFILL, Role.DECODE)
    second.script.hold_decode_at = 4
    answer = asyncio.create_task(cluster.client.complete(PROMPT, max_tokens=5))
    await second.until(lambda: any(len(one.context) == len(PROMPT) + 4 for one in second._sequences.values()))
    second.close_stream(prefill=True)
    await asyncio.sleep(0.1)  # the end of that stream reaches the router long before the rest
    second.close_stream(prefill=False)
    second.go_on()
    done = await answer
    assert list(done.token_ids) == expected(PROMPT, 5)
    assert done.final.timings.attempts == 1
    await cluster.check_clean()


async def test_drain_lets_requests_end_and_takes_no_more(cluster: Cluster) -> None:
    (worker,) = await cluster.add(Role.MIXED)
    worker.script.hold_decode_at = 1
    task = asyncio.create_task(cluster.client.complete(PROMPT, max_tokens=5))
    await worker.until(lambda: bool(worker.script.begun))
    draining = asyncio.create_task(cluster.app.drain())
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="draining"):
        await cluster.client.complete(PROMPT, max_tokens=5)
    assert not draining.done()
    worker.go_on()
    assert list((await task).token_ids) == expected(PROMPT, 5)
    await draining


BAD: list[tuple[str, router_pb2.GenerateRequest]] = [
    ("prompt", router_pb2.GenerateRequest()),
    ("prompt", router_pb2.GenerateRequest(tokens=router_pb2.TokenPrompt())),
    ("prompt", router_pb2.GenerateRequest(text="")),
    ("prompt", router_pb2.GenerateRequest(tokens=router_pb2.TokenPrompt(token_ids=[261]))),
    ("prompt", router_pb2.GenerateRequest(tokens=router_pb2.TokenPrompt(token_ids=[-1]))),
    ("messages", router_pb2.GenerateRequest(chat=router_pb2.ChatPrompt())),
    ("model", router_pb2.GenerateRequest(model="other", text="the")),
    ("prompt + max_tokens", router_pb2.GenerateRequest(text="the", sampling={"max_tokens": 200})),
    ("max_tokens", router_pb2.GenerateRequest(text="the", sampling={"max_tokens": 0})),
    ("max_tokens", router_pb2.GenerateRequest(text="the", sampling={"max_tokens": -3})),
    ("temperature", router_pb2.GenerateRequest(text="the", sampling={"temperature": float("nan")})),
    ("temperature", router_pb2.GenerateRequest(text="the", sampling={"temperature": -1.0})),
    ("top_p", router_pb2.GenerateRequest(text="the", sampling={"top_p": 0.0})),
    ("top_p", router_pb2.GenerateRequest(text="the", sampling={"top_p": 1.5})),
    ("stop", router_pb2.GenerateRequest(text="the", sampling={"stop": ["x"] * 17})),
    ("tenant", router_pb2.GenerateRequest(text="the", tenant="x" * 300)),
]


@pytest.mark.parametrize(("field", "request_"), BAD)
async def test_bad_input_is_named(cluster: Cluster, field: str, request_: router_pb2.GenerateRequest) -> None:
    async with grpc.aio.insecure_channel(cluster.server.address) as channel:
        call = router_pb2_grpc.RouterServiceStub(channel).Generate(request_)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (raised.value.details() or "").startswith(f"{field} = ")


async def test_an_oversized_prompt_is_refused(folder: Path) -> None:
    made = Cluster(folder, max_prompt_bytes=100)
    await made.start()
    with pytest.raises(InvalidArgument, match="at most 100 bytes"):
        await made.client.complete("x" * 101, max_tokens=1)
    await made.stop()


async def test_models_workers_and_state(cluster: Cluster) -> None:
    p, d = await cluster.add(Role.PREFILL, Role.DECODE)
    models = await cluster.client.models()
    assert [(model.name, model.context_tokens) for model in models] == [(MODEL, 200)]
    workers = (await cluster.client.workers()).workers
    assert [worker.worker_id for worker in workers] == sorted([p.key.worker_id, d.key.worker_id])
    assert all(worker.connected for worker in workers)
    state = await cluster.client.state()
    assert (state.active_requests, state.open_sessions) == (0, 4)


def test_the_router_never_imports_torch() -> None:
    code = "import sys, weir.services.router.app, weir.services.router.__main__; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


async def test_metrics_count_what_ended(folder: Path) -> None:
    made = Cluster(folder, max_active_requests=1, max_queued_requests=0)
    await made.start()
    (worker,) = await made.add(Role.MIXED)
    worker.script.hold_decode_at = 1
    task = asyncio.create_task(made.client.complete(PROMPT, max_tokens=5))
    await worker.until(lambda: bool(worker.script.begun))
    with pytest.raises(ResourceExhausted):
        await made.client.complete(PROMPT, max_tokens=5)
    worker.go_on()
    await task
    text = made.app.router.render_metrics().decode()
    assert 'weir_requests_ended_total{state="finished"} 1.0' in text
    assert 'weir_requests_ended_total{state="rejected"} 1.0' in text
    assert 'vllm:prompt_tokens_by_source_total{source="local_compute"} 9.0' in text
    assert 'weir_admission_refusals_total{reason="total_limit"} 1.0' in text
    assert re.search(r'weir_ttft_seconds_count{input_tokens="0-128",model_name="[^"]+",path="mixed"} 1.0', text)
    assert made.app.router.render_metrics().decode().count("weir_requests_ended_total{") == 4
    await made.stop()


async def test_a_router_that_stops_tells_its_workers(folder: Path) -> None:
    made = Cluster(folder)
    await made.start()
    p, d = await made.add(Role.PREFILL, Role.DECODE)
    d.script.hold_decode_at = 3
    task = asyncio.create_task(made.client.complete(PROMPT, max_tokens=5))
    await p.until(lambda: bool(p.script.released))
    await made.app.close()
    with pytest.raises(Unavailable, match="stopping"):
        await task
    await d.until(lambda: d.left == 0)
    assert len(d.script.cancelled) == 1
    await made.stop()
