"""What the images are and are not."""

from __future__ import annotations

import docker
import docker.errors
import pytest

from tests.e2e.containers.images import Images

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

LOCKED = {"read_only": True, "cap_drop": ["ALL"], "network_mode": "none", "tmpfs": {"/tmp": ""}, "remove": True}


def python(engine: docker.DockerClient, image: str, code: str) -> str:
    """What ``code`` prints in a container as locked down as in compose.yaml."""
    said: bytes = engine.containers.run(image, ["-c", code], entrypoint=["python3"], stderr=True, **LOCKED)
    return said.decode().strip()


def test_the_control_image_has_no_torch(engine: docker.DockerClient, images: Images) -> None:
    with pytest.raises(docker.errors.ContainerError) as caught:
        python(engine, images.control, "import torch")
    assert b"ModuleNotFoundError: No module named 'torch'" in caught.value.stderr
    code = "import weir.services.router.app, weir.services.controller.app, weir.cli.main; print('imported')"
    assert python(engine, images.control, code) == "imported"


def test_the_worker_image_has_an_engine_and_the_demo_model(engine: docker.DockerClient, images: Images) -> None:
    code = (
        "import torch, weir.services.worker.app; from weir.transfer.ucx import start_agent; start_agent('a');"
        "from weir.models.demo import _packaged_gguf; print(torch.cuda.is_available(), _packaged_gguf().suffix)"
    )
    assert python(engine, images.worker, code).splitlines()[-1] == "False .gguf"


SENDS_A_SPAN = """
import random
from concurrent.futures import ThreadPoolExecutor
import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from weir.clock import SystemClock
from weir.config import TelemetryConfig
from weir.telemetry.spans import SpanData, make_tracer

class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def Export(self, request, context):
        print([span.name for r in request.resource_spans for s in r.scope_spans for span in s.spans])
        return trace_service_pb2.ExportTraceServiceResponse()

server = grpc.server(ThreadPoolExecutor(1))
trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)
config = TelemetryConfig(otlp_endpoint=f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", trace_ratio=1.0)
server.start()
tracer = make_tracer(config, "router", "r", SystemClock(), random.Random(1).getrandbits)
assert tracer.close(tracer.open(), SpanData("a span", 1.0, 2.0))
tracer.flush()
print(tracer.stats().exported)
"""


@pytest.mark.parametrize("target", ["control", "worker"])
def test_the_images_can_send_spans_to_a_collector(engine: docker.DockerClient, images: Images, target: str) -> None:
    image = {"control": images.control, "worker": images.worker}[target]
    assert python(engine, image, SENDS_A_SPAN).splitlines() == ["['a span']", "1"]


@pytest.mark.parametrize("target", ["control", "worker"])
def test_nobody_is_root_and_nothing_can_be_written(engine: docker.DockerClient, images: Images, target: str) -> None:
    image = {"control": images.control, "worker": images.worker}[target]
    code = (
        "import os, pathlib, tempfile\n"
        "print(os.getuid(), os.getgid())\n"
        "tempfile.TemporaryFile().write(b'x')\n"
        "for path in ('/opt/weir/x', '/home/weir/x', '/models/x', '/x'):\n"
        "    try: pathlib.Path(path).write_text('x')\n"
        "    except OSError as error: print(error.strerror)\n"
    )
    assert python(engine, image, code).splitlines() == ["10001 10001", *["Read-only file system"] * 4]
    assert engine.images.get(image).attrs["Config"]["User"] == "10001:10001"


def test_health_of_nothing_is_a_failure(engine: docker.DockerClient, images: Images) -> None:
    command = ["weir.cli.main", "health", "127.0.0.1:1", "--timeout-s", "0.5"]
    with pytest.raises(docker.errors.ContainerError) as caught:
        engine.containers.run(images.control, command, **LOCKED)
    assert caught.value.exit_status == 1
    assert b"127.0.0.1:1 not ready" in caught.value.stderr
