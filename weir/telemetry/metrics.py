"""Prometheus metrics. Names of vLLM where it has one, so that its dashboards and scalers work; ours are ``weir_*``.

Each process makes one of these classes; each has its own registry. Durations are observed in seconds. Labels take few
values whatever is served (``metrics_labels``); docs/operations.md lists all metrics.

Router and workers share some names: the router counts requests, a worker what it did for them itself. Tell them apart
by the scrape's ``job``, and never add them up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from weir.errors import Unavailable
from weir.events.bus import BusStats
from weir.rpc.descriptors import DescriptorStats
from weir.telemetry.metrics_labels import CONCURRENCY, INPUT_TOKENS, PATHS, Bounded

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
E2E_BUCKETS_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
READ_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
BYTES_BUCKETS = tuple(float(1 << power) for power in range(16, 36, 2))
COUNT_BUCKETS = tuple(float(1 << power) for power in range(0, 17, 2))

MAX_MODELS = 8
MAX_REASONS = 32
MAX_TRANSPORTS = 8
MAX_PEERS = 64

ENDS = ("finished", "failed", "rejected", "cancelled")
RETRY_REASONS = ("prefill_lost", "decode_lost", "read_void", "rebind", "fault")
REFUSAL_REASONS = (
    "slo_ttft", "slo_tpot", "active_limit", "queue_limit", "total_limit", "tenant_active_limit", "tenant_queue_limit",
    "no_worker", "too_large", "back_pressure",
)  # fmt: skip
DOORS = ("http", "grpc", "kv")
"""Where somebody new may be refused for want of file descriptors; kv: a connection to another worker's memory."""
BLOCK_STATES = ("free", "used", "cached", "leased", "quarantined")
PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


class ProcessMetrics:
    """What every process has: a registry, the event bus's counts, whether the registry's view is stale."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        self.registry_stale = Gauge(
            "weir_registry_stale", "1 while the worker registry cannot be reached.", registry=self.registry
        )

    def render(self) -> bytes:
        """The body of ``/metrics``, of type CONTENT_TYPE."""
        return generate_latest(self.registry)

    def watch_bus(self, stats: Callable[[], BusStats]) -> None:
        """Export the bus's counts, read when scraped."""
        self.registry.register(_BusCollector(stats))  # type: ignore[arg-type, unused-ignore]

    def watch_descriptors(self, stats: Callable[[], DescriptorStats]) -> None:
        """Export the process's file descriptors, counted when scraped."""
        self.registry.register(_DescriptorCollector(stats))  # type: ignore[arg-type, unused-ignore]

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        made = Histogram(name, text, ("model_name",), buckets=tuple(buckets), registry=self.registry)
        return made.labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ("model_name",), registry=self.registry).labels(self._model)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ("model_name",), registry=self.registry).labels(self._model)


class PromptSources:
    """``vllm:prompt_tokens_by_source_total``: the sources add up to all prompt tokens."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counter = Counter(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where their KV came from.", ("source",), registry=registry
        )
        self._sources = {source: self._counter.labels(source) for source in PROMPT_SOURCES}

    def add(self, *, local_compute: int = 0, local_cache_hit: int = 0, external_kv_transfer: int = 0) -> None:
        """Count one prompt's tokens."""
        self._sources["local_compute"].inc(local_compute)
        self._sources["local_cache_hit"].inc(local_cache_hit)
        self._sources["external_kv_transfer"].inc(external_kv_transfer)


class RouterMetrics(ProcessMetrics):
    """Metrics of a router. Whoever sets a label that others choose passes it through ``models`` or ``reasons``."""

    def __init__(self, model_name: str = "") -> None:
        super().__init__(model_name)
        self.models = Bounded(MAX_MODELS)
        self.reasons = Bounded(MAX_REASONS, (*RETRY_REASONS, *REFUSAL_REASONS))
        self._requests()
        self._latencies()
        self._tokens()
        self._choices()
        _begin(self.requests_ended, ENDS)
        _begin(self.slo_missed, ("ttft", "tpot"))
        _begin(self.retries, RETRY_REASONS)
        _begin(self.refusals, REFUSAL_REASONS)

    def _requests(self) -> None:
        registry = self.registry
        self.requests_ended = Counter(
            "weir_requests_ended", "Requests by the state they ended in.", ("state",), registry=registry
        )
        self.requests_active = Gauge(
            "weir_requests_active", "Requests not ended, by state.", ("state",), registry=registry
        )
        self.requests_good = Counter(
            "weir_requests_good", "Finished requests that met every SLO they had.", registry=registry
        )
        self.slo_missed = Counter(
            "weir_requests_slo_missed", "Finished requests that missed an SLO, by SLO.", ("slo",), registry=registry
        )
        self.requests_running = Gauge(
            "vllm:num_requests_running", "Requests on a worker.", ("model_name",), registry=registry
        )
        self.requests_waiting = Gauge(
            "vllm:num_requests_waiting", "Requests waiting for a worker.", ("model_name",), registry=registry
        )
        self.retries = Counter("weir_request_retries", "Further attempts, by reason.", ("reason",), registry=registry)
        self.sessions_open = Gauge("weir_sessions_open", "Sessions with workers, by leg.", ("leg",), registry=registry)

    def _latencies(self) -> None:
        registry = self.registry
        self.ttft_seconds = Histogram(
            "weir_ttft_seconds",
            "Received until the first token was passed on, by prompt tokens and path.",
            ("model_name", "input_tokens", "path"),
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self.itl_seconds = Histogram(
            "weir_itl_seconds",
            "Between tokens of a request, by requests under way at this router.",
            ("model_name", "concurrency"),
            buckets=ITL_BUCKETS_S,
            registry=registry,
        )
        self.tpot_seconds = Histogram(
            "weir_tpot_seconds",
            "Mean time per token after the first, by requests under way at this router.",
            ("model_name", "concurrency"),
            buckets=ITL_BUCKETS_S,
            registry=registry,
        )
        for name, text, source in (
            ("vllm:time_to_first_token_seconds", "Received until the first token was passed on.", self.ttft_seconds),
            ("vllm:inter_token_latency_seconds", "Between tokens of a request.", self.itl_seconds),
            ("vllm:request_time_per_output_token_seconds", "Mean time per token after the first.", self.tpot_seconds),
        ):
            registry.register(_Summed(name, text, source))  # type: ignore[arg-type, unused-ignore]
        self.e2e_seconds = Histogram(
            "vllm:e2e_request_latency_seconds",
            "Received until the end.",
            ("model_name",),
            buckets=E2E_BUCKETS_S,
            registry=registry,
        )
        self.stage_seconds = Histogram(
            "weir_request_stage_seconds", "Stages of a request.", ("stage",), buckets=TTFT_BUCKETS_S, registry=registry
        )
        self._gaps: dict[str, list[Histogram]] = {}

    def _tokens(self) -> None:
        registry = self.registry
        self.prompt_tokens = Counter(
            "vllm:prompt_tokens", "Prompt tokens of finished requests.", ("model_name",), registry=registry
        )
        self.generation_tokens = Counter(
            "vllm:generation_tokens", "Tokens passed on.", ("model_name",), registry=registry
        )
        self.prompt_sources = PromptSources(registry)
        self.prefix_hit_tokens = Counter(
            "weir_prefix_hit_tokens",
            "Prompt tokens of finished requests that the worker that prefilled them had in its cache.",
            registry=registry,
        )

    def _choices(self) -> None:
        registry = self.registry
        self.placements = Counter("weir_placements", "Placements, by reason.", ("reason",), registry=registry)
        self.refusals = Counter(
            "weir_admission_refusals", "Requests refused before any work, by reason.", ("reason",), registry=registry
        )
        self.breakers = Gauge("weir_breakers", "Workers by state of their breaker.", ("state",), registry=registry)
        self.breaker_openings = Counter("weir_breaker_openings", "Times a worker's breaker opened.", registry=registry)

    def saw_ttft(self, model: str, *, prompt_tokens: int, path: str, seconds: float) -> None:
        """The first token of a request was passed on; ``path`` is one of PATHS."""
        assert path in PATHS, path
        self.ttft_seconds.labels(self.models(model), INPUT_TOKENS.label(prompt_tokens), path).observe(seconds)

    def saw_tpot(self, model: str, *, active: int, seconds: float) -> None:
        """A request ended that had more than one token; ``active`` requests were under way."""
        self.tpot_seconds.labels(self.models(model), CONCURRENCY.label(active)).observe(seconds)

    def saw_gap(self, model: str, active: int, seconds: float) -> None:
        """Tokens of a request came ``seconds`` after the ones before. Once a token and request: kept cheap."""
        children = self._gaps.get(model) or self._gaps_of(self.models(model))
        children[CONCURRENCY.index(active)].observe(seconds)

    def _gaps_of(self, name: str) -> list[Histogram]:
        if name not in self._gaps:
            self._gaps[name] = [self.itl_seconds.labels(name, label) for label in CONCURRENCY.labels]
        return self._gaps[name]


class WorkerMetrics(ProcessMetrics):
    """Metrics of a worker; labels are those given to ``labels``."""

    def __init__(self, model_name: str = "") -> None:
        super().__init__(model_name)
        self.requests_running = self._gauge("vllm:num_requests_running", "Sequences in the batch.")
        self.requests_waiting = self._gauge("vllm:num_requests_waiting", "Sequences waiting for room.")
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens prefilled.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self.prompt_sources = PromptSources(self.registry)
        self.prefix_queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked for in the cache.")
        self.prefix_hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache.")
        self.transports = Bounded(MAX_TRANSPORTS)
        self.reasons = Bounded(MAX_REASONS)
        self._transports: dict[str, str] = {}
        self._work()
        self._memory()
        self._reads()

    def _work(self) -> None:
        registry = self.registry
        self.step_seconds = Histogram(
            "weir_step_seconds", "Engine steps by kind.", ("kind",), buckets=ITL_BUCKETS_S, registry=registry
        )
        self.decode_step_seconds = Histogram(
            "weir_decode_step_seconds",
            "Engine steps that decode, by sequences decoded: the ITL that this worker gives.",
            ("concurrency",),
            buckets=ITL_BUCKETS_S,
            registry=registry,
        )
        self.role_info = Gauge("weir_role_info", "1 for the role now.", ("role",), registry=registry)
        self.busy_seconds = Counter(
            "weir_busy_seconds",
            "Time in engine steps, by role: its rate is the utilisation.",
            ("pool",),
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "weir_queue_seconds",
            "Wait of a sequence for its KV blocks, by role of the worker.",
            ("pool",),
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self.cancel_seconds = Histogram(
            "weir_cancel_seconds",
            "From a cancel's arrival until the engine has let go of the sequence.",
            buckets=READ_BUCKETS_S,
            registry=registry,
        )
        self.price_per_hour = Gauge("weir_worker_price_per_hour", "Configured price of the worker.", registry=registry)
        self.cost = Counter(
            "weir_worker_cost", "Price of the time it has served, by role.", ("pool",), registry=registry
        )

    def _memory(self) -> None:
        registry = self.registry
        self.kv_usage = self._gauge(
            "vllm:kv_cache_usage_perc", "Share of KV blocks that are not free or cached (1 is all)."
        )
        self.cache_config_info = Gauge(
            "vllm:cache_config_info", "Always 1.", ("block_size", "num_gpu_blocks"), registry=registry
        )
        self.blocks = Gauge("weir_kv_blocks", "KV blocks by state.", ("state",), registry=registry)
        self.stock_bytes = Gauge(
            "weir_stock_bytes", "Finished KV that waits under leases for a decode worker.", registry=registry
        )
        self.headroom_bytes = Gauge(
            "weir_headroom_bytes", "KV that the pool can still take: free and cached blocks.", registry=registry
        )
        self.open_leases = Gauge("weir_leases_open", "Leases open.", registry=registry)
        self.leases_ended = Counter("weir_leases_ended", "Leases ended, by reason.", ("reason",), registry=registry)

    def _reads(self) -> None:
        registry = self.registry
        self.void_reads = Counter(
            "weir_kv_reads_void", "KV reads that were void, by reason.", ("reason",), registry=registry
        )
        self.outstanding_reads = Gauge("weir_kv_reads_outstanding", "KV reads under way.", registry=registry)
        by = ("input_tokens", "transport")
        self.kv_read_seconds = Histogram(
            "weir_kv_read_seconds",
            "A proven KV read, from its call to its proof, by tokens it covers and transport.",
            by,
            buckets=READ_BUCKETS_S,
            registry=registry,
        )
        self.kv_read_bytes = Counter("weir_kv_read_bytes", "Bytes of proven KV reads.", by, registry=registry)
        self.kv_read_errors = Counter(
            "weir_kv_read_errors", "KV reads begun that were void or failed.", by, registry=registry
        )
        self.read_seconds = self._histogram("vllm:nixl_xfer_time_seconds", "Time of a KV read.", READ_BUCKETS_S)
        self.read_bytes = self._histogram("vllm:nixl_bytes_transferred", "Bytes of a KV read.", BYTES_BUCKETS)
        self.read_descriptors = self._histogram("vllm:nixl_num_descriptors", "Descriptors of a KV read.", COUNT_BUCKETS)
        self.read_failures = self._counter("vllm:nixl_num_failed_transfers", "KV reads that failed in the transport.")
        self.transport_info = Gauge(
            "weir_kv_transport_info", "1 for the transport in use.", ("peer", "transport"), registry=registry
        )

    def set_blocks(self, counts: Mapping[str, int]) -> None:
        """Export counts by state; the usage is what is neither free nor cached, as a share of all."""
        total = sum(counts.get(state, 0) for state in BLOCK_STATES)
        for state in BLOCK_STATES:
            self.blocks.labels(state).set(counts.get(state, 0))
        idle = counts.get("free", 0) + counts.get("cached", 0)
        self.kv_usage.set((total - idle) / total if total else 0.0)

    def set_role(self, role: str) -> None:
        """Export the role now; the others become 0."""
        self.role_info.clear()
        self.role_info.labels(role).set(1)

    def saw_read(self, *, tokens: int, transport: str, num_bytes: int, descriptors: int, seconds: float) -> None:
        """A KV read of ``tokens`` tokens was proven."""
        self.read_seconds.observe(seconds)
        self.read_bytes.observe(num_bytes)
        self.read_descriptors.observe(descriptors)
        by = (INPUT_TOKENS.label(tokens), self.transports(transport))
        self.kv_read_seconds.labels(*by).observe(seconds)
        self.kv_read_bytes.labels(*by).inc(num_bytes)
        self.kv_read_errors.labels(*by)

    def saw_read_error(self, *, tokens: int, transport: str) -> None:
        """A KV read of ``tokens`` tokens that was begun may not be used."""
        self.kv_read_errors.labels(INPUT_TOKENS.label(tokens), self.transports(transport)).inc()

    def set_transport(self, peer: str, transport: str) -> None:
        """Export the transport in use to ``peer``, in place of the one before. The oldest of too many is dropped."""
        self.forget_peer(peer)
        if len(self._transports) >= MAX_PEERS:
            self.forget_peer(next(iter(self._transports)))
        transport = self.transports(transport)
        self._transports[peer] = transport
        self.transport_info.labels(peer, transport).set(1)

    def forget_peer(self, peer: str) -> None:
        """Drop what is exported of ``peer``, so that gone workers do not gather."""
        transport = self._transports.pop(peer, None)
        if transport is not None:
            self.transport_info.remove(peer, transport)


class ControllerMetrics(ProcessMetrics):
    """Metrics of the controller."""

    def __init__(self) -> None:
        super().__init__("")
        self.members = Gauge("weir_members", "Workers in the registry, by role.", ("role",), registry=self.registry)
        self.role_changes = Counter(
            "weir_role_changes", "Role changes, by outcome.", ("outcome",), registry=self.registry
        )
        _begin(self.role_changes, ("made", "failed"))
        self.decisions = Counter("weir_decisions", "Balance decisions.", ("action",), registry=self.registry)
        self.forecast_error = Gauge(
            "weir_forecast_error_ratio", "Error (MAPE) of the arrival forecast in use.", registry=self.registry
        )
        self.used = Gauge("weir_capacity_used_ratio", "Demand over capacity.", registry=self.registry)


class MetricsServer:
    """``/metrics`` on an address of its own, always in the text format.

    OpenMetrics, which Prometheus asks for first, is not offered: there the client library writes ``vllm_``, not
    ``vllm:``.
    """

    def __init__(self, bind: str, metrics: ProcessMetrics) -> None:
        """Listen on ``bind`` (host:port); Unavailable when it is taken."""
        host, _, port = bind.rpartition(":")
        try:
            self._server = ThreadingHTTPServer((host.strip("[]"), int(port)), partial(_Page, metrics.render))
        except OSError as error:
            raise Unavailable(f"metrics cannot bind {bind}: {error}") from None
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _begin(counter: Counter, values: Iterable[str]) -> None:
    """Export the counter's series from 0 on: of one that begins later, the first event is no increase."""
    for value in values:
        counter.labels(value)


class _Summed:
    """A histogram by model alone, added up from one with further labels when scraped: observed once, not twice."""

    _labelnames = ("model_name",)

    def __init__(self, name: str, text: str, source: Histogram) -> None:
        self._name = name
        self._text = text
        self._source = source

    def collect(self) -> Iterable[Metric]:
        """The family now."""
        buckets: dict[str, dict[str, float]] = {}
        sums: dict[str, float] = {}
        for sample in next(iter(self._source.collect())).samples:
            model = sample.labels["model_name"]
            if sample.name.endswith("_bucket"):
                counts = buckets.setdefault(model, {})
                edge = sample.labels["le"]
                counts[edge] = counts.get(edge, 0.0) + sample.value
            elif sample.name.endswith("_sum"):
                sums[model] = sums.get(model, 0.0) + sample.value
        family = HistogramMetricFamily(self._name, self._text, labels=("model_name",))
        for model, counts in buckets.items():
            family.add_metric((model,), list(counts.items()), sums[model])
        yield family


class _Page(BaseHTTPRequestHandler):
    timeout = 10

    def __init__(self, render: Callable[[], bytes], *given: Any) -> None:
        self._render = render
        super().__init__(*given)

    def do_GET(self) -> None:
        """The page, whatever the path's query is."""
        if self.path.partition("?")[0] not in ("/", "/metrics"):
            self.send_error(404)
            return
        body = self._render()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a scrape is no news."""


class _DescriptorCollector:
    def __init__(self, stats: Callable[[], DescriptorStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        """Families with the counts now."""
        stats = self._stats()
        yield GaugeMetricFamily("weir_descriptors_open", "File descriptors open.", value=stats.open)
        yield GaugeMetricFamily("weir_descriptors_limit", "File descriptors allowed.", value=stats.limit)
        refused = CounterMetricFamily(
            "weir_connections_refused", "Refused for want of file descriptors, by door.", labels=("door",)
        )
        for door in DOORS:
            refused.add_metric((door,), stats.refused.get(door, 0))
        yield refused


class _BusCollector:
    def __init__(self, stats: Callable[[], BusStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        """Families with the counts now."""
        stats = self._stats()
        counters = {
            "published": stats.published,
            "dropped": stats.dropped,
            "received": stats.received,
            "handler_errors": stats.handler_errors,
        }
        for name, value in counters.items():
            yield CounterMetricFamily(f"weir_events_{name}", f"Events: {name.replace('_', ' ')}.", value=value)
        yield CounterMetricFamily("weir_nats_reconnects", "Returns of the NATS connection.", value=stats.reconnects)
        yield GaugeMetricFamily("weir_events_pending", "Events waiting to be sent.", value=stats.pending)
