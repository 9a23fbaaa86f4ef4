"""All settings of all services. Field names carry their units; empty strings mean "not set"."""

from __future__ import annotations

from dataclasses import dataclass

from weir.config.setting import setting
from weir.lifecycle import Role

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class NatsConfig:
    """How to reach NATS, and the bounds of what Weir keeps there."""

    url: str = setting("nats://127.0.0.1:4222", "server, or several separated by commas")
    connect_timeout_s: float = setting(5.0, "longest wait for the first connection", low=0.1, high=300)
    reconnect_min_ms: float = setting(100.0, "first wait before reconnecting", low=1, high=60_000)
    reconnect_max_ms: float = setting(2_000.0, "longest wait between reconnects", low=1, high=60_000)
    ping_interval_s: float = setting(2.0, "time between pings that find a dead link", low=0.1, high=120)
    max_pending_events: int = setting(4_096, "events waiting to be sent; more are dropped", low=1, high=1 << 20)
    registry_ttl_s: float = setting(3.0, "a worker not renewed for this long is gone", low=0.2, high=3_600)
    stream_max_age_s: float = setting(3_600.0, "older events are discarded", low=1, high=30 * 86_400)
    stream_max_mb: int = setting(64, "size of the event stream, MiB", low=1, high=1 << 20)
    stream_max_messages: int = setting(200_000, "events kept; the oldest are discarded", low=1, high=1 << 30)
    duplicate_window_s: float = setting(60.0, "repeated message ids within this are dropped", low=0.1, high=3_600)


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """Bounds of the gRPC edge of every service."""

    message_bytes: int = setting(4 * _MIB, "largest gRPC message", low=1_024, high=256 * _MIB)
    max_concurrent_streams: int = setting(4_096, "calls at once on one connection", low=1, high=1 << 20)
    keepalive_s: float = setting(10.0, "time between keepalive pings", low=1, high=7_200)
    keepalive_timeout_s: float = setting(5.0, "a peer silent for this long is gone", low=0.1, high=600)
    drain_timeout_s: float = setting(30.0, "longest wait for running work at shutdown", low=0, high=3_600)
    stop_grace_s: float = setting(5.0, "longest wait for open calls after the drain", low=0, high=600)


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """TLS on every connection and bearer tokens at the router's doors: one switch, refused half-on."""

    enabled: bool = setting(False, "TLS everywhere, certificates between services, tokens at the router")
    ca_file: str = setting("", "PEM of the authority that signed the certificates")
    cert_file: str = setting("", "PEM of this process's certificate")
    key_file: str = setting("", "PEM of its key")
    server_name: str = setting("weir", "DNS name that every service's certificate carries")
    tokens_file: str = setting("", "router: a line NAME TOKEN for each client")
    token_file: str = setting("", "command line: file with the token to send")
    nats_credentials_file: str = setting("", ".creds file, for a NATS server that asks for one")


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """Logs, metrics and traces of every service."""

    log_level: str = setting("info", "least level written", choices=("debug", "info", "warning", "error"))
    log_format: str = setting("line", "one line of key=value, or JSON", choices=("line", "json"))
    metrics_bind: str = setting("", "address of /metrics; empty is off", address=True)
    otlp_endpoint: str = setting("", "OTLP/gRPC collector for spans, host:port or URL; empty is off")
    trace_ratio: float = setting(0.1, "share of requests traced when the caller does not say", low=0, high=1)
    trace_ring: int = setting(512, "ended requests the router remembers for weir trace", low=0, high=1 << 16)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The router."""

    bind: str = setting("127.0.0.1:7400", "gRPC address", address=True)
    http_bind: str = setting("", "OpenAI HTTP address; empty is off", address=True)
    ui: bool = setting(True, "serve the page /ui at the HTTP address")
    router_id: str = setting("", "identity; minted when empty")
    model_path: str = setting("", "folder with tokenizer and config; empty takes the workers' path")
    model_name: str = setting("", "name that clients ask for; empty takes the workers' name")
    chat_template: str = setting("", "file with a Jinja chat template, or chatml; empty takes the model's own")
    reflection: bool = setting(True, "serve gRPC reflection")
    max_active_requests: int = setting(1_024, "requests under way", low=1, high=1 << 20)
    max_queued_requests: int = setting(1_024, "requests waiting for a worker", low=0, high=1 << 20)
    request_timeout_s: float = setting(600.0, "deadline when the client sets none", low=0.1, high=86_400)
    queue_timeout_s: float = setting(60.0, "longest wait for a worker", low=0, high=86_400)
    max_attempts: int = setting(3, "attempts per request, the first one included", low=1, high=100)
    retry_budget: float = setting(0.2, "retries as a share of recent requests", low=0, high=10)
    retry_budget_min: int = setting(10, "retries always allowed in a window", low=0, high=1 << 20)
    retry_backoff_ms: float = setting(20.0, "first wait before a retry, then doubled", low=0, high=60_000)
    lease_s: float = setting(30.0, "longest time finished KV is kept for a reader", low=0.1, high=3_600)
    worker_connect_timeout_s: float = setting(5.0, "longest wait for a worker's session", low=0.1, high=300)
    max_prompt_bytes: int = setting(2 * _MIB, "largest prompt or HTTP body", low=1, high=256 * _MIB)
    policy: str = setting("slo", "how workers are chosen", choices=("slo", "least-loaded"))
    slo_ttft_ms: float = setting(
        0.0, "TTFT that a request is to meet when it names none; 0 is none", low=0, high=3_600_000
    )
    slo_tpot_ms: float = setting(
        0.0, "TPOT that a request is to meet when it names none; 0 is none", low=0, high=3_600_000
    )
    slo_limit_ms: float = setting(600_000.0, "largest SLO that a request may name", low=1, high=86_400_000)
    worker_queue_ms: float = setting(
        1_000.0, "predicted wait at a worker beyond which requests wait here", low=0, high=600_000
    )
    local_prefill_tokens: int = setting(
        16, "prompts with at most this much to compute may be prefilled on D", low=0, high=1 << 24
    )
    decode_joins: int = setting(32, "sequences on their way to one D at a time", low=1, high=1 << 16)
    heartbeat_late_s: float = setting(2.5, "a worker silent for this long gets nothing new", low=0.1, high=3_600)
    max_output_tokens: int = setting(
        0, "most tokens that a request may generate; 0 is the context", low=0, high=1 << 24
    )
    tenant_max_queued: int = setting(0, "requests of one tenant waiting; 0 is no limit of its own", low=0, high=1 << 20)
    tenant_max_active: int = setting(
        0, "requests of one tenant under way; 0 is no limit of its own", low=0, high=1 << 20
    )
    prefix_index_blocks: int = setting(1 << 19, "blocks of workers' caches remembered; 0 is none", low=0, high=1 << 26)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """A worker: its engine, its memory and its edges."""

    bind: str = setting("127.0.0.1:0", "gRPC address; port 0 takes a free one", address=True)
    advertise: str = setting(
        "", "address that routers use; empty takes the bound one, or the way to NATS for 0.0.0.0", address=True
    )
    worker_id: str = setting("", "identity; minted when empty")
    role: Role = setting(Role.MIXED, "role at start")  # noqa: RUF009
    reflection: bool = setting(True, "serve gRPC reflection")
    model_path: str = setting("", "Hugging Face folder or GGUF file")
    model_name: str = setting("", "name that clients ask for; empty takes the folder's")
    device: str = setting("cpu", "cpu, cuda or cuda:N")
    dtype: str = setting("auto", "weights' type", choices=("auto", "float32", "bfloat16", "float16"))
    threads: int = setting(0, "compute threads; 0 takes one per given core", low=0, high=1_024)
    cpus: tuple[int, ...] = setting((), 'cores to keep to, e.g. "0-3,6"; empty takes all')
    block_size: int = setting(0, "tokens per KV block; 0 takes the device's default", low=0, high=1_024)
    num_blocks: int = setting(0, "KV blocks; 0 takes kv_memory_mb", low=0, high=1 << 24)
    kv_memory_mb: int = setting(1_024, "KV memory when num_blocks is 0, MiB", low=1, high=1 << 24)
    max_batch_tokens: int = setting(512, "tokens computed in one step", low=1, high=1 << 20)
    max_running: int = setting(64, "sequences in the batch", low=1, high=1 << 16)
    max_waiting: int = setting(1_024, "sequences waiting for room", low=0, high=1 << 20)
    context_tokens: int = setting(0, "longest prompt plus output; 0 takes the model's", low=0, high=1 << 24)
    prefix_cache: bool = setting(True, "keep blocks of ended sequences for later prompts")
    transfer: str = setting("nixl", "how KV is read", choices=("nixl", "local"))
    checksums: bool = setting(True, "prove KV reads by checksums as well as generations")
    read_timeout_s: float = setting(10.0, "a KV read longer than this is void", low=0.01, high=600)
    max_outstanding_reads: int = setting(64, "KV reads under way", low=1, high=1 << 16)
    lease_s: float = setting(30.0, "longest lease that is granted", low=0.1, high=3_600)
    session_grace_s: float = setting(2.0, "leases outlive a lost session this long", low=0, high=600)
    heartbeat_s: float = setting(1.0, "time between registry renewals", low=0.05, high=600)
    load_report_s: float = setting(0.25, "time between load reports", low=0.01, high=60)
    role_drain_timeout_s: float = setting(10.0, "longest wait for running work at a flip", low=0, high=3_600)
    profile: str = setting(
        "auto", "stored profile: use one if there is, require, ignore", choices=("auto", "require", "ignore")
    )
    profile_path: str = setting("", "JSON of weir profile; empty looks in the user's cache")
    price_per_hour: float = setting(0.0, "cost of this worker an hour, in any currency", low=0, high=1e6)


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """The controller."""

    bind: str = setting("127.0.0.1:7401", "gRPC address", address=True)
    controller_id: str = setting("", "identity; minted when empty")
    reflection: bool = setting(True, "serve gRPC reflection")
    role_change_timeout_s: float = setting(30.0, "longest wait for a worker's answer", low=0.1, high=3_600)
    max_role_changes_kept: int = setting(1_000, "role changes remembered", low=1, high=1 << 20)
    mode: str = setting("off", "balance: off, advise (dry run) or auto", choices=("off", "advise", "auto"))
    dry_run: bool = setting(False, "advise only, whatever the mode")
    interval_s: float = setting(1.0, "time between decisions", low=0.05, high=3_600)
    window_s: float = setting(60.0, "traffic looked at", low=1, high=3_600)
    slo_ttft_ms: float = setting(2_000.0, "TTFT to meet; 0 is none", low=0, high=3_600_000)
    slo_tpot_ms: float = setting(0.0, "TPOT to meet; 0 is none", low=0, high=3_600_000)
    profile_path: str = setting("", "JSON of weir profile; empty learns from the workers' reports")
    actuator: str = setting("flip", "what may be changed", choices=("flip", "local", "kubernetes"))
    min_workers: int = setting(1, "workers that are always kept", low=1, high=1 << 20)
    max_workers: int = setting(8, "budget: workers that are never exceeded", low=1, high=1 << 20)
    mixed_fallback: bool = setting(True, "make all workers mixed when a split does not pay")
    local_prefill: bool = setting(False, "advise local prefill: for routers that heed decisions")
    busy: float = setting(0.7, "share of the capacity below which nothing is changed", low=0.01, high=1)
    spare: float = setting(0.55, "a worker goes when the rest would be used less than this", low=0.01, high=1)
    band: float = setting(0.15, "least gain in capacity for which roles change", low=0, high=10)
    confirm_s: float = setting(15.0, "how long a need must last", low=0, high=3_600)
    confirm_down_s: float = setting(120.0, "how long a worker must be spare", low=0, high=86_400)
    cooldown_s: float = setting(30.0, "pause after a change", low=0, high=86_400)
    pending_s: float = setting(60.0, "an action not seen by then is given up", low=0.1, high=86_400)
    season_s: float = setting(0.0, "length of a season of the traffic for the forecast; 0 is none", low=0, high=86_400)
    link_prefill_mb_s: float = setting(0.0, "egress of a prefill worker, MB/s; 0 is not known", low=0, high=1e9)
    link_decode_mb_s: float = setting(0.0, "ingress of a decode worker, MB/s; 0 is not known", low=0, high=1e9)
    drain_ms: float = setting(0.0, "drain time of a flip; 0 takes the worker's default", low=0, high=3_600_000)
    max_decisions_kept: int = setting(500, "decisions remembered", low=1, high=1 << 16)
    kubernetes_namespace: str = setting("default", "namespace of the workers' Deployments")
    kubernetes_prefix: str = setting("weir", "Deployments are PREFIX-prefill, PREFIX-decode, PREFIX-mixed")


SECTIONS: dict[str, type] = {
    "nats": NatsConfig,
    "limits": LimitsConfig,
    "security": SecurityConfig,
    "telemetry": TelemetryConfig,
    "router": RouterConfig,
    "worker": WorkerConfig,
    "controller": ControllerConfig,
}
