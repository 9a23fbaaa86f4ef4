"""A whole cluster with the switch on: the same answer for who may ask, and a refusal for everybody else."""

import asyncio
import os
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
import pytest_asyncio

from tests.e2e.chromium import Page, find_chromium
from tests.e2e.faults.tiny import NAME, TinyLlama, prompt_of
from tests.integration.certificates import ALICE, Certificates, make_certificates
from weir.cli.cluster import Cluster, ClusterSpec
from weir.cli.doors import open_client
from weir.cli.workers import worker_state
from weir.client import AsyncClient, Client, Security
from weir.errors import PermissionDenied, Unauthenticated, Unavailable
from weir.rpc.channel import channel
from weir.rpc.v1 import worker_pb2, worker_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = prompt_of(40, seed=1)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    return TinyLlama(tmp_path_factory.mktemp("tiny"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def locked(
    certificates: Certificates, tiny: TinyLlama, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    """One pair, started and watched with what the environment says, as ``weir up`` does."""
    folder = tmp_path_factory.mktemp("locked")
    operator = folder / "operator"
    operator.write_text(certificates.operator_token)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("WEIR_SECURITY_ENABLED", "true")
        environment.setenv("WEIR_SECURITY_TOKEN_FILE", str(operator))
        for name in ("ca_file", "cert_file", "key_file", "tokens_file"):
            environment.setenv(f"WEIR_SECURITY_{name.upper()}", getattr(certificates.config(), name))
        async with Cluster(ClusterSpec(tiny.folder, NAME, folder, worker_flags=("--num-blocks", "256"))) as cluster:
            yield cluster


def trusting(certificates: Certificates) -> Security:
    """What a client needs: the authority. The name is that of the address."""
    return Security(ca_file=certificates.path("ca.pem"))


async def test_the_answer_is_the_same(locked: Cluster, certificates: Certificates, tiny: TinyLlama) -> None:
    assert locked.nats_url.startswith("tls://")
    async with AsyncClient(locked.router_address, token=ALICE, security=trusting(certificates)) as client:
        answer = await client.complete(PROMPT, max_tokens=12, temperature=0, ignore_eos=True)
    assert answer.token_ids == tiny.greedy(PROMPT, 12)
    assert answer.final.usage.external_kv_tokens == len(PROMPT)


async def test_the_blocking_client_too(locked: Cluster, certificates: Certificates, tiny: TinyLlama) -> None:
    with Client(locked.router_address, token=ALICE, security=trusting(certificates)) as client:
        answer = client.complete(PROMPT, max_tokens=3, temperature=0, ignore_eos=True)
    assert answer.token_ids == tiny.greedy(PROMPT, 3)


async def test_without_token_or_tls_or_in_anothers_name(locked: Cluster, certificates: Certificates) -> None:
    security = trusting(certificates)
    async with AsyncClient(locked.router_address, security=security) as client:
        with pytest.raises(Unauthenticated, match="a bearer token is needed"):
            await client.complete(PROMPT, max_tokens=1)
    async with AsyncClient(locked.router_address, token=ALICE, security=security) as client:
        with pytest.raises(PermissionDenied, match="tenant = 'bob': this token belongs to 'alice'"):
            await client.complete(PROMPT, max_tokens=1, tenant="bob")
        with pytest.raises(PermissionDenied, match="ListWorkers: only a token of 'operator'"):
            await client.workers()
    async with AsyncClient(locked.router_address, token=ALICE) as client:
        with pytest.raises(Unavailable):
            await client.complete(PROMPT, max_tokens=1)


async def test_workers_answer_certificates_only(locked: Cluster, certificates: Certificates) -> None:
    (address, *_) = locked.worker_addresses.values()
    assert (await worker_state(address)).load.blocks.total == 256
    async with channel(address, security=trusting(certificates)) as opened:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker_pb2_grpc.WorkerServiceStub(opened).GetState(worker_pb2.GetStateRequest(), timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_command_line_takes_the_environment(locked: Cluster) -> None:
    async with open_client(locked.router_address) as client:
        assert {worker.worker_id for worker in (await client.workers()).workers} == set(locked.worker_addresses)


async def test_http(locked: Cluster, certificates: Certificates, tiny: TinyLlama) -> None:
    context = ssl.create_default_context(cafile=certificates.path("ca.pem"))
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    alice = {"authorization": f"Bearer {ALICE}"}
    operator = {"authorization": f"Bearer {certificates.operator_token}"}
    url = f"https://{locked.http_address}"
    async with httpx.AsyncClient(base_url=url, verify=context, trust_env=False, timeout=30) as http:
        answer = await http.post("/v1/completions", json=body, headers=alice)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 4
        refused = await http.post("/v1/completions", json=body)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.json()["error"]["type"] == "authentication_error"
        other = await http.post("/v1/completions", json=body, headers={**alice, "x-weir-tenant": "bob"})
        assert other.status_code == 403
        statuses = {path: (await http.get(path)).status_code for path in ("/health", "/ui", "/metrics", "/ui/state")}
        assert statuses == {"/health": 200, "/ui": 200, "/metrics": 401, "/ui/state": 401}
        for path in ("/metrics", "/ui/state"):
            assert (await http.get(path, headers=alice)).status_code == 403
            assert (await http.get(path, headers=operator)).status_code == 200


@pytest.mark.skipif(find_chromium() is None, reason="chromium is not installed")
async def test_the_page_asks_for_a_token(locked: Cluster, certificates: Certificates, tmp_path: Path) -> None:
    def unlock() -> None:
        # The browser knows nothing of our authority; what TLS checks is tested above.
        with Page(tmp_path / "profile", 1280, 800, "--ignore-certificate-errors") as page:
            page.open(f"https://{locked.http_address}/ui")
            page.wait("!document.getElementById('locked').hidden", "the field for the token")
            page.value(
                f"document.getElementById('token').value = {certificates.operator_token!r};"
                "document.getElementById('locked').requestSubmit();"
            )
            page.wait("document.getElementById('status').textContent === 'serving'", "the state")
            page.wait("document.getElementById('locked').hidden", "no field any more")

    await asyncio.to_thread(unlock)


async def test_half_on_is_refused_before_anything_starts() -> None:
    halves = {name: "" for name in os.environ if name.startswith("WEIR_SECURITY_")} | {"WEIR_SECURITY_ENABLED": "true"}
    command = [sys.executable, "-m", "weir.services.router", "--nats", "nats://127.0.0.1:1"]
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, **halves}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    assert process.returncode == 2
    assert said.decode().splitlines()[-1] == (
        "router: security.ca_file = '': a router needs it when security.enabled is on"
    )
