"""Traces across client, router and workers in one process over real gRPC, received by a real OTLP collector."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.integration.otlp_receiver import Received, collecting
from tests.integration.worker_rig import Bench, RunningWorker, eventually, running_worker
from tests.unit.models.text_models import byte_level_folder
from tests.unit.worker.pool_model import continuation
from weir.balance.decision import Action, Decision, Flip
from weir.client.aio import AsyncClient
from weir.client.types import Accepted, Delta, Event, Final
from weir.clock import SystemClock
from weir.config import LimitsConfig, NatsConfig, RouterConfig, TelemetryConfig
from weir.errors import FailedPrecondition, NotFound, RequestCancelled
from weir.events.memory import MemoryBus, MemoryRegistry
from weir.lifecycle import RequestState, Role
from weir.rpc.limits import RpcLimits
from weir.rpc.server import RpcServer
from weir.services.controller.actuators import Flips
from weir.services.controller.ledger import RoleLedger
from weir.services.controller.roles import RoleChanges
from weir.services.controller.traces import TracedActuator
from weir.services.controller.workers import GrpcWorkers
from weir.services.router.app import RouterApp, RouterSettings
from weir.services.router.entry import Entry
from weir.telemetry.metrics import ControllerMetrics
from weir.telemetry.spans import Tracer, make_tracer

MODEL = "pool-model"
PROMPT = list(range(5, 30))
UNSAMPLED = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"
SAMPLED = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TO_FIRST = ("admit", "queue", "prefill", "first_token")
STAGES = (*TO_FIRST, "second_token", "decode")


class Rig:
    """A router with real (pool model) workers, each with a tracer of its own, all exporting to one place."""

    def __init__(self, folder: Path, telemetry: TelemetryConfig) -> None:
        self.bench = Bench()
        self.clock = SystemClock()
        self.telemetry = telemetry
        self.tracers: list[Tracer] = []
        config = RouterConfig(model_path=str(folder), model_name=MODEL, bind="127.0.0.1:0", max_active_requests=2000)
        settings = RouterSettings(config, NatsConfig(), LimitsConfig(), telemetry)
        events = self.bench.events
        self.app = RouterApp(settings, MemoryBus(events), MemoryRegistry(events, self.clock), self.clock)
        self.tracers.append(self.app.tracer)
        self.server = RpcServer(name="router", bind="127.0.0.1:0", reflection=False)

    async def open(self) -> None:
        await self.server.start(self.app.register)
        await self.app.open()
        self.client = AsyncClient(self.server.address)

    async def close(self) -> None:
        await self.client.close()
        await self.server.stop(0)
        await self.app.close()

    @asynccontextmanager
    async def worker(self, role: Role, worker_id: str) -> AsyncIterator[RunningWorker]:
        """A worker that the router is connected with; forgotten by it when this ends."""
        bits = random.SystemRandom().getrandbits
        tracer = make_tracer(self.telemetry, "worker", worker_id, self.clock, bits)
        self.tracers.append(tracer)
        async with running_worker(self.bench, role, worker_id, tracer=tracer, max_batch_tokens=64) as worker:
            fleet = self.app.router.fleet
            await eventually(lambda: (view := fleet.get(worker.host.key)) is not None and view.connected)
            yield worker
        await eventually(lambda: (view := fleet.get(worker.host.key)) is None or not view.usable)
        await asyncio.to_thread(tracer.shutdown)

    async def flush(self) -> None:
        """Everything recorded so far is at the collector."""
        for tracer in self.tracers:
            await asyncio.to_thread(tracer.flush)


@asynccontextmanager
async def rigged(folder: Path, **telemetry: object) -> AsyncIterator[Rig]:
    made = Rig(folder, TelemetryConfig(**telemetry))  # type: ignore[arg-type]
    await made.open()
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = byte_level_folder(tmp_path / "toy-model")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 261, "hidden_size": 8,
        "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
        "max_position_embeddings": 400, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (made / "config.json").write_text(json.dumps(config))
    return made


def by_name(spans: list[Received]) -> dict[str, Received]:
    return {span.name: span for span in spans}


def root_of(spans: list[Received]) -> Received:
    """The router's span of the request."""
    (root,) = [s for s in spans if s.service == "weir-router" and s.kind == 2]
    return root


def check_sums(spans: list[Received]) -> None:
    """Stages follow each other without gaps; their sums are TTFT and the whole, within 1 ms or 1 %."""
    root = root_of(spans)
    stages = sorted((s for s in spans if s.service == "weir-router" and s.name in STAGES), key=lambda s: s.start_ns)
    assert [s.name for s in stages] == [name for name in STAGES if name in {s.name for s in stages}]
    assert all(s.parent_id == root.span_id for s in stages)
    for before, after in itertools.pairwise(stages):
        assert abs(after.start_ns - before.end_ns) <= 1_000
    ttft_ms = float(str(root.attributes["weir.ttft_ms"]))
    assert sum(s.length_ms for s in stages if s.name in TO_FIRST) == pytest.approx(ttft_ms, abs=1.0, rel=0.01)
    assert sum(s.length_ms for s in stages) == pytest.approx(root.length_ms, abs=1.0, rel=0.01)


async def test_one_trace_across_client_router_and_workers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(ours))
    monkeypatch.setattr(otel, "get_tracer", provider.get_tracer)
    with collecting() as collector:
        async with rigged(folder, otlp_endpoint=collector.address, trace_ratio=0.0) as rig, AsyncExitStack() as stack:
            await stack.enter_async_context(rig.worker(Role.PREFILL, "p1"))
            await stack.enter_async_context(rig.worker(Role.DECODE, "d1"))
            prompt = [7 + i % 50 for i in range(150)]
            done = await rig.client.complete(prompt, max_tokens=12, temperature=0.0, ignore_eos=True)
            assert len(done.token_ids) == 12
            await rig.flush()
        (client_span,) = ours.get_finished_spans()
        assert client_span.context is not None
        spans = collector.trace(f"{client_span.context.trace_id:032x}")
    check_trace(spans, f"{client_span.context.span_id:016x}", done.request_id)
    assert len(collector.traces()) == 1
    attributes = dict(client_span.attributes or {})
    assert attributes["weir.request_id"] == done.request_id
    assert attributes["gen_ai.usage.output_tokens"] == 12
    events = rig.bench.events.durable
    states = ["admitted", "prefilling", "prefilled", "transferring", "decoding", "finished"]
    assert [event.subject.rpartition(".")[2] for event in events] == states
    assert {event.headers["traceparent"].split("-")[1] for event in events} == {spans[0].trace_id}


def check_trace(spans: list[Received], client_span_id: str, request_id: str) -> None:
    root = root_of(spans)
    assert root.parent_id == client_span_id
    names = sorted((s.instance if s.service == "weir-worker" else "router", s.name) for s in spans)
    routers = ["admit", "decode", "first_token", "kv_read", "prefill", "queue", "route", "second_token"]
    reads = [name for name in names if name[1] in ("worker.kv_read", "worker.guard_check")]
    assert len(reads) >= 2
    assert len(reads) % 2 == 0, "each read is proven"
    rest = [name for name in names if name not in reads]
    assert rest == [
        ("d1", "worker.decode"),
        ("p1", "worker.prefill"),
        *sorted([("router", name) for name in [*routers, root.name]]),
    ]
    named = by_name(spans)
    for name in (*routers, "worker.prefill", "worker.decode"):
        assert named[name].parent_id == root.span_id, name
    decode = named["worker.decode"]
    read_ids = {s.span_id for s in spans if s.name == "worker.kv_read"}
    assert all(s.parent_id == decode.span_id for s in spans if s.name == "worker.kv_read")
    assert {s.parent_id for s in spans if s.name == "worker.guard_check"} == read_ids
    check_sums(spans)
    assert root.name == f"text_completion {MODEL}"
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": MODEL,
        "gen_ai.usage.input_tokens": 150,
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.response.finish_reasons": ["length"],
        "weir.request_id": request_id,
        "weir.attempts": 1,
        "weir.state": "finished",
    }
    assert {name: root.attributes[name] for name in expected} == expected
    assert "error.type" not in root.attributes
    assert named["route"].attributes["weir.route.prefill_worker"] == "p1"
    assert named["worker.prefill"].events == ["started", "chunk", "chunk", "chunk"]
    assert named["worker.prefill"].attributes["weir.chunks"] == 3
    read = named["kv_read"].attributes
    assert read["weir.kv.transport"] == "local"
    assert read["weir.kv.bytes"] == sum(
        int(str(s.attributes["weir.kv.bytes"])) for s in spans if s.name == "worker.kv_read"
    )
    assert decode.attributes["weir.tokens.generated"] == 11
    assert decode.attributes["weir.kv_source"] == "remote"


async def test_the_stages_of_500_requests_add_up(folder: Path) -> None:
    """Disaggregated with a worker that dies under its requests, mixed, and prefilled on decode workers."""
    with collecting() as collector:
        async with rigged(folder, otlp_endpoint=collector.address, trace_ratio=1.0, trace_ring=100) as rig:
            finals = await disaggregated(rig, 200)
            for role in (Role.MIXED, Role.DECODE):
                async with rig.worker(role, f"{role.value}-only"):
                    finals |= await many(rig, 150)
            assert len(rig.app.router._traces) == 100
            await rig.flush()
            assert [t.stats().dropped for t in rig.tracers] == [0] * len(rig.tracers)
    traces = {str(root_of(t).attributes["weir.request_id"]): t for t in collector.traces().values()}
    assert len(traces) == len(finals) == 500
    for request_id, final in finals.items():
        spans = traces[request_id]
        root, times = root_of(spans), final.timings
        check_sums(spans)
        assert root.length_ms == pytest.approx(times.e2e_ms, abs=0.01)
        assert times.admit_ms + times.queue_ms + times.prefill_ms + times.first_token_ms == pytest.approx(times.ttft_ms)
        ids = {s.span_id for s in spans}
        assert root.parent_id == ""
        assert all(s.parent_id in ids for s in spans if s is not root)
    check_retries([t for i, t in traces.items() if finals[i].timings.attempts > 1])


def check_retries(retried: list[list[Received]]) -> None:
    """A second attempt shows both, the wait between them, and why."""
    assert retried, "no request was tried again"
    for spans in retried:
        attempts = [s for s in spans if s.name == "attempt"]
        assert [s.attributes["weir.attempt"] for s in attempts] == list(range(1, len(attempts) + 1))
        assert len([s for s in spans if s.name == "route"]) == len(attempts) >= 2
        retries = [s for s in spans if s.name == "retry"]
        assert len(retries) == len(attempts) - 1
        assert all(s.error for s in attempts[:-1])
        assert not attempts[-1].error


async def disaggregated(rig: Rig, count: int) -> dict[str, Final]:
    """Requests over two pairs; one prefill worker dies while it holds some of them."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(rig.worker(Role.PREFILL, "p1"))
        await stack.enter_async_context(rig.worker(Role.DECODE, "d1"))
        await stack.enter_async_context(rig.worker(Role.DECODE, "d2"))
        async with rig.worker(Role.PREFILL, "dying") as dying:
            finals = await many(rig, count // 4)
            dying.runner.gate.clear()
            held = asyncio.create_task(many(rig, count // 4))
            await eventually(lambda: any(is_held(entry, "dying") for entry in rig.app.router._book.entries()))
            await dying.server.stop(0)
            finals |= await held
        return finals | await many(rig, count - len(finals))


def is_held(entry: Entry, worker_id: str) -> bool:
    return entry.state is RequestState.PREFILLING and entry.prefill_name == worker_id


async def many(rig: Rig, count: int) -> dict[str, Final]:
    """Requests at once, sixteen at a time, each answered as the model must."""
    slots = asyncio.Semaphore(16)

    async def one(number: int) -> tuple[str, Final]:
        prompt = [5 + (number * 7 + i * i) % 50 for i in range(4 + number % 90)]
        length = 1 + number % 9
        async with slots:
            done = await rig.client.complete(prompt, max_tokens=length, temperature=0.0)
        assert list(done.token_ids) == continuation(prompt, length)
        return done.request_id, done.final

    return dict(await asyncio.gather(*(one(number) for number in range(count))))


async def test_the_callers_decision_is_kept_and_the_ring_knows_all(folder: Path) -> None:
    with collecting() as collector:
        async with rigged(folder, otlp_endpoint=collector.address, trace_ratio=1.0, trace_ring=2) as rig:
            async with rig.worker(Role.MIXED, "m1"):
                metadata = (("traceparent", UNSAMPLED),)
                rig.client._metadata = metadata
                quiet = await rig.client.complete(PROMPT, max_tokens=3, temperature=0.0)
                rig.client._metadata = (("traceparent", SAMPLED),)
                loud = await rig.client.complete(PROMPT, max_tokens=3, temperature=0.0)
                kept = await rig.client.trace(quiet.request_id)
                assert (kept.sampled, kept.trace_id) == (False, UNSAMPLED.split("-")[1])
                last = await rig.client.trace()
                assert (last.request_id, last.sampled) == (loud.request_id, True)
                assert [s.name for s in last.spans if s.parent < 0] == [f"text_completion {MODEL}"]
                assert sum(s.length_ms for s in last.spans if s.name in STAGES) == pytest.approx(last.timings.e2e_ms)
                await rig.client.complete(PROMPT, max_tokens=3, temperature=0.0)
                with pytest.raises(NotFound, match=quiet.request_id):
                    await rig.client.trace(quiet.request_id)
            await rig.flush()
        roots = [s for s in collector.spans if s.service == "weir-router" and s.kind == 2]
        found = {str(s.attributes["weir.request_id"]) for s in roots}
        assert quiet.request_id not in found
        assert {s.parent_id for s in collector.spans if s.kind == 2} == {SAMPLED.split("-")[2]}


async def read_out(stream: AsyncIterator[Event]) -> None:
    """Read to the end."""
    async for _ in stream:
        pass


async def test_a_cancelled_request_ends_its_trace_with_the_reason(folder: Path) -> None:
    with collecting() as collector:
        async with rigged(folder, otlp_endpoint=collector.address, trace_ratio=1.0) as rig:
            async with rig.worker(Role.MIXED, "m1") as worker:
                stream = rig.client.generate(PROMPT, max_tokens=300, temperature=0.0, ignore_eos=True)
                accepted = await anext(stream)
                assert isinstance(accepted, Accepted)
                assert isinstance(await anext(stream), Delta)
                worker.runner.gate.clear()
                assert await rig.client.cancel(accepted.request_id)
                with pytest.raises(RequestCancelled):
                    await read_out(stream)
                worker.runner.gate.set()
                await worker.at_baseline()
                assert worker.host.decode._traces is not None
                assert len(worker.host.decode._traces) == 0
            await rig.flush()
    (spans,) = collector.traces().values()
    root, named = root_of(spans), by_name(spans)
    assert (root.attributes["weir.state"], root.attributes["error.type"]) == ("cancelled", "CANCELLED")
    assert named["cancel"].attributes["weir.reason"] == "cancelled by the client"
    assert named["worker.decode"].attributes["weir.finish_reason"] == "cancelled"
    check_sums(spans)


async def test_a_dead_collector_costs_spans_and_nothing_else(folder: Path) -> None:
    async with rigged(folder, otlp_endpoint="127.0.0.1:1", trace_ratio=1.0) as rig:
        async with rig.worker(Role.MIXED, "m1"):
            assert len(await many(rig, 60)) == 60
        tracer = rig.app.tracer
    assert not tracer.enabled
    stats = tracer.stats()
    assert stats.exported == 0
    assert b"weir_trace_spans_total" in rig.app.metrics.render()


async def test_a_decision_and_its_role_flips_are_one_trace(folder: Path) -> None:
    with collecting() as collector:
        async with rigged(folder, otlp_endpoint=collector.address, trace_ratio=0.0) as rig:
            async with rig.worker(Role.MIXED, "m1") as worker:
                bits = random.SystemRandom().getrandbits
                tracer = make_tracer(rig.telemetry, "controller", "c1", rig.clock, bits)
                rig.tracers.append(tracer)
                registry = MemoryRegistry(rig.bench.events, rig.clock)
                await registry.watch(lambda change: None)
                await eventually(lambda: "m1" in registry.snapshot())
                workers = GrpcWorkers(RpcLimits())
                changes = RoleChanges(registry, RoleLedger(5), workers, rig.clock, ControllerMetrics(), 5.0)
                actuator = TracedActuator(Flips(changes, drain_ms=0.0), tracer, rig.clock)
                epoch = worker.host.gate.epoch
                flip = Flip("m1", Role.DECODE, epoch)
                await actuator.carry_out(Decision(3, Action.FLIP, 0.0, "more decode", flips=(flip,)))
                with pytest.raises(FailedPrecondition):
                    await actuator.carry_out(Decision(4, Action.FLIP, 0.0, "stale", flips=(flip,)))
                await registry.close()
            await rig.flush()
            await asyncio.to_thread(tracer.shutdown)
    spans = sorted(collector.spans, key=lambda span: (span.name, span.start_ns))
    assert [s.name for s in spans] == ["decision", "decision", "role_flip"]
    decided, refused, flipped = spans
    assert (decided.service, decided.parent_id, decided.error) == ("weir-controller", "", "")
    assert decided.attributes["weir.decision.reason"] == "more decode"
    assert (flipped.trace_id, flipped.parent_id, flipped.error) == (decided.trace_id, decided.span_id, "")
    assert (flipped.attributes["weir.role.from"], flipped.attributes["weir.role.to"]) == ("mixed", "decode")
    assert flipped.attributes["weir.role.epoch"] == epoch + 1
    assert refused.trace_id != decided.trace_id
    assert "epoch" in refused.error
