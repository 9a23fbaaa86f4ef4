"""Logs stay on one line, metrics carry the names dashboards know, trace context follows the standard."""

import io
import json
import logging
import random
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from weir.errors import Unavailable
from weir.events.bus import BusStats
from weir.telemetry.logs import MAX_FIELD_CHARS, OnceLog, configure_logging, log
from weir.telemetry.metrics import ControllerMetrics, MetricsServer, ProcessMetrics, RouterMetrics, WorkerMetrics
from weir.telemetry.tracing import TraceContext, format_traceparent, new_trace, parse_traceparent

LOGGER = logging.getLogger("weir.test")


@pytest.fixture(autouse=True)
def _logging_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level


def logged(form: str = "line", level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    configure_logging("router", level=level, form=form, stream=stream)
    return stream


def test_a_line_has_time_level_service_message_and_fields() -> None:
    stream = logged()
    log(LOGGER, logging.WARNING, "role changed", worker="p-1", took_ms=1.5, note='two "words"', none=None)
    time, rest = stream.getvalue().split(" ", 1)
    assert rest == 'WARNING router: role changed worker=p-1 took_ms=1.5 note="two \\"words\\"" none=None\n'
    assert (len(time), time[10], time[-1]) == (24, "T", "Z")


@pytest.mark.parametrize("evil", ["a\nERROR router: forged", "a\r\x1b[31m", "a\u2028b", "\x85", "x" * 10_000])
def test_nothing_breaks_out_of_its_line(evil: str) -> None:
    stream = logged()
    LOGGER.info("got %s", evil[:50])
    log(LOGGER, logging.INFO, "field", value=evil)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert "\x1b" not in stream.getvalue()
    assert len(lines[1]) < MAX_FIELD_CHARS + 100


def test_json_has_the_same_and_exceptions_stay_on_the_line() -> None:
    stream = logged("json")
    try:
        raise ValueError("no")
    except ValueError:
        LOGGER.exception("failed", extra={"fields": {"request": "r-1", "message": "cannot replace the message"}})
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["service"], entry["message"], entry["request"]) == (
        "ERROR",
        "router",
        "failed",
        "r-1",
    )
    assert entry["exception"].endswith("ValueError: no")
    stream = logged()
    LOGGER.error("failed", exc_info=ValueError("no"))
    (line,) = stream.getvalue().splitlines()
    assert line.endswith('exception="ValueError: no"')


def test_levels_filter_and_libraries_are_quiet() -> None:
    stream = logged(level="info")
    LOGGER.debug("no")
    logging.getLogger("nats.aio").info("no")
    LOGGER.info("yes")
    assert stream.getvalue().count("\n") == 1


def test_once_is_once_per_key() -> None:
    stream = logged()
    once = OnceLog(LOGGER)
    assert [once(logging.INFO, key, "transport", peer=key) for key in ("a", "a", "b")] == [True, False, True]
    assert stream.getvalue().count("transport") == 2


def samples(metrics: ProcessMetrics) -> dict[str, float]:
    text = metrics.render().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_router_metrics_have_the_known_names() -> None:
    metrics = RouterMetrics("m")
    metrics.saw_ttft("m", prompt_tokens=100, path="mixed", seconds=0.3)
    metrics.saw_gap("m", 1, 0.02)
    metrics.e2e_seconds.labels("m").observe(2)
    metrics.saw_tpot("m", active=1, seconds=0.02)
    metrics.requests_ended.labels("finished").inc()
    metrics.requests_active.labels("decoding").set(3)
    metrics.requests_running.labels("m").set(4)
    metrics.prompt_sources.add(local_compute=5, local_cache_hit=6, external_kv_transfer=7)
    metrics.registry_stale.set(True)
    metrics.watch_bus(lambda: BusStats(published=3, dropped=2, reconnects=1, pending=9))
    found = samples(metrics)
    assert found["vllm:time_to_first_token_seconds_sum{model_name=m}"] == 0.3
    assert found["vllm:time_to_first_token_seconds_bucket{le=0.25,model_name=m}"] == 0
    assert found["vllm:time_to_first_token_seconds_bucket{le=0.5,model_name=m}"] == 1
    assert found["vllm:inter_token_latency_seconds_count{model_name=m}"] == 1
    assert found["vllm:e2e_request_latency_seconds_sum{model_name=m}"] == 2
    assert found["vllm:num_requests_running{model_name=m}"] == 4
    assert found["weir_requests_ended_total{state=finished}"] == 1
    assert found["vllm:prompt_tokens_by_source_total{source=local_compute}"] == 5
    assert found["vllm:prompt_tokens_by_source_total{source=local_cache_hit}"] == 6
    assert found["vllm:prompt_tokens_by_source_total{source=external_kv_transfer}"] == 7
    assert (found["weir_registry_stale{}"], found["weir_events_dropped_total{}"]) == (1, 2)
    assert (found["weir_events_pending{}"], found["weir_nats_reconnects_total{}"]) == (9, 1)


def test_worker_metrics_follow_blocks_roles_and_peers() -> None:
    metrics = WorkerMetrics("m")
    metrics.set_blocks({"free": 4, "used": 3, "cached": 1, "leased": 1, "quarantined": 1})
    metrics.set_role("prefill")
    metrics.set_role("decode")
    metrics.set_transport("p-1", "ucx:cma")
    metrics.set_transport("p-2", "ucx:tcp")
    metrics.forget_peer("p-2")
    metrics.leases_ended.labels("read").inc()
    metrics.void_reads.labels("generation").inc()
    metrics.read_bytes.observe(1 << 20)
    metrics.read_descriptors.observe(3)
    metrics.read_seconds.observe(0.002)
    metrics.read_failures.inc()
    metrics.cache_config_info.labels("16", "10").set(1)
    found = samples(metrics)
    assert found["vllm:kv_cache_usage_perc{model_name=m}"] == 0.5
    assert found["weir_kv_blocks{state=leased}"] == 1
    assert {key for key in found if key.startswith("weir_role_info")} == {"weir_role_info{role=decode}"}
    assert {key for key in found if "transport" in key} == {"weir_kv_transport_info{peer=p-1,transport=ucx:cma}"}
    assert found["weir_leases_ended_total{reason=read}"] == 1
    assert found["weir_kv_reads_void_total{reason=generation}"] == 1
    assert found["vllm:nixl_bytes_transferred_sum{model_name=m}"] == 1 << 20
    assert found["vllm:nixl_num_descriptors_sum{model_name=m}"] == 3
    assert found["vllm:nixl_xfer_time_seconds_sum{model_name=m}"] == 0.002
    assert found["vllm:nixl_num_failed_transfers_total{model_name=m}"] == 1
    assert found["vllm:cache_config_info{block_size=16,num_gpu_blocks=10}"] == 1
    metrics.set_blocks({})
    assert samples(metrics)["vllm:kv_cache_usage_perc{model_name=m}"] == 0


def test_each_process_has_a_registry_of_its_own_and_can_serve_it() -> None:
    one, two = ControllerMetrics(), ControllerMetrics()
    one.members.labels("decode").set(2)
    assert "weir_members{role=decode}" not in samples(two)
    server = MetricsServer("127.0.0.1:0", one)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
            assert b'weir_members{role="decode"} 2.0' in answer.read()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/else", timeout=10)
        with pytest.raises(Unavailable, match=f"cannot bind 127.0.0.1:{server.port}"):
            MetricsServer(f"127.0.0.1:{server.port}", two)
    finally:
        server.close()


VALID = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_traceparent_round_trip() -> None:
    context = parse_traceparent(VALID)
    assert context == TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", True)
    assert format_traceparent(context) == VALID
    unsampled = parse_traceparent(VALID[:-2] + "02")
    assert unsampled is not None
    assert not unsampled.sampled
    assert parse_traceparent("01" + VALID[2:] + "-later") == context


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        VALID.upper(),
        VALID + "-x",
        "ff" + VALID[2:],
        VALID[:-1],
        VALID.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32),
        VALID.replace("00f067aa0ba902b7", "0" * 16),
    ],
)
def test_invalid_traceparents_are_none(header: str) -> None:
    assert parse_traceparent(header) is None


def test_children_stay_in_the_trace() -> None:
    source = random.Random(1)
    parent = new_trace(source.getrandbits)
    child = parent.child(source.getrandbits)
    assert (child.trace_id, child.sampled) == (parent.trace_id, True)
    assert child.span_id != parent.span_id
    assert parse_traceparent(format_traceparent(child)) == child
    assert new_trace(lambda bits: 0).trace_id == "0" * 31 + "1"
