"""TLS and tokens on real sockets: who comes in, who does not, and what a half-on setting is told."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.integration.certificates import ALICE, Certificates, make_certificates
from weir.config import NatsConfig, SecurityConfig
from weir.errors import InvalidArgument, PermissionDenied, Unauthenticated, Unavailable
from weir.events.nats_bus import NatsBus
from weir.events.nats_link import NatsLink
from weir.events.nats_server import EmbeddedNats, ServerTls
from weir.events.nats_trust import nats_trust
from weir.rpc.channel import channel
from weir.rpc.health import PATH_PREFIX
from weir.rpc.security import Part, Security, load_security
from weir.rpc.server import RpcServer
from weir.rpc.status import from_rpc_error
from weir.rpc.tokens import TokenBook, TokenInterceptor, tenant_for

SERVICE = "test.Echo"
PING, SECRETS = f"/{SERVICE}/Ping", f"/{SERVICE}/Secrets"


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("foreign"))


def security_of(certificates: Certificates, part: Part = Part.SERVICE) -> Security:
    found = load_security(certificates.config(), part)
    assert found is not None
    return found


def register(server: grpc.aio.Server) -> Sequence[str]:
    async def ping(request: bytes, context: Any) -> bytes:
        return b"pong " + request

    handler = grpc.unary_unary_rpc_method_handler(ping)
    handlers = grpc.method_handlers_generic_handler(SERVICE, {"Ping": handler, "Secrets": handler})
    server.add_generic_rpc_handlers((handlers,))
    return (SERVICE,)


@pytest.fixture
async def worker(ours: Certificates) -> AsyncIterator[RpcServer]:
    """Answers only who shows a certificate."""
    credentials = security_of(ours).server_credentials(clients_have_certificates=True)
    server = RpcServer(name="worker", bind="127.0.0.1:0", credentials=credentials)
    await server.start(register)
    yield server
    await server.stop(0)


@pytest.fixture
async def router(ours: Certificates) -> AsyncIterator[RpcServer]:
    """Answers who shows a token."""
    book = TokenBook.read(ours.path("tokens"))
    server = RpcServer(
        name="router",
        bind="127.0.0.1:0",
        credentials=security_of(ours).server_credentials(clients_have_certificates=False),
        interceptors=(TokenInterceptor(book, open_prefixes=(PATH_PREFIX,), operator_methods=frozenset({SECRETS})),),
    )
    await server.start(register)
    yield server
    await server.stop(0)


async def call(address: str, security: Security | None, method: str = PING, token: str = "") -> bytes:
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    async with channel(address, security=security) as opened:
        try:
            answer: bytes = await opened.unary_unary(method, None, None)(b"x", timeout=5, metadata=metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
    return answer


async def test_a_service_with_a_certificate_is_answered(worker: RpcServer, ours: Certificates) -> None:
    assert await call(worker.address, security_of(ours)) == b"pong x"


async def test_nobody_else_is(worker: RpcServer, ours: Certificates, foreign: Certificates) -> None:
    no_certificate = Security("weir", ours.path("ca.pem"))
    other_authority = Security("weir", ours.path("ca.pem"), foreign.path("cert.pem"), foreign.path("key.pem"))
    for stranger in (None, no_certificate, other_authority):
        with pytest.raises(Unavailable):
            await call(worker.address, stranger)


async def test_a_service_of_another_authority_or_name_is_not_trusted(
    worker: RpcServer, ours: Certificates, foreign: Certificates
) -> None:
    with pytest.raises(Unavailable):
        await call(worker.address, security_of(foreign))
    with pytest.raises(Unavailable):
        await call(worker.address, Security("other", ours.path("ca.pem"), ours.path("cert.pem"), ours.path("key.pem")))


async def test_the_address_itself_is_checked_without_a_name(worker: RpcServer, ours: Certificates) -> None:
    files = ours.path("ca.pem"), ours.path("cert.pem"), ours.path("key.pem")
    assert await call(worker.address, Security("", *files)) == b"pong x"  # 127.0.0.1 is in the certificate


async def test_tokens(router: RpcServer, ours: Certificates) -> None:
    client = Security("weir", ours.path("ca.pem"))
    assert await call(router.address, client, token=ALICE) == b"pong x"
    assert await call(router.address, client, SECRETS, token=ours.operator_token) == b"pong x"
    with pytest.raises(Unauthenticated, match="a bearer token is needed"):
        await call(router.address, client)
    with pytest.raises(Unauthenticated, match="not known here"):
        await call(router.address, client, token=ALICE + "x")
    with pytest.raises(PermissionDenied, match=r"Secrets: only a token of 'operator' may, not one of 'alice'"):
        await call(router.address, client, SECRETS, token=ALICE)


async def test_health_needs_no_token(router: RpcServer, ours: Certificates) -> None:
    await router.set_ready(True)
    async with channel(router.address, security=Security("weir", ours.path("ca.pem"))) as opened:
        answer = await health_pb2_grpc.HealthStub(opened).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_token_speaks_for_its_own_tenant() -> None:
    assert tenant_for("alice", "") == "alice"
    assert tenant_for("alice", "alice") == "alice"
    assert tenant_for("operator", "bob") == "bob"
    assert tenant_for("operator", "") == ""
    with pytest.raises(PermissionDenied, match="tenant = 'bob': this token belongs to 'alice'"):
        tenant_for("alice", "bob")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must hold 1 to"),
        ("alice\n", "line 1 = '1 words': must be NAME TOKEN"),
        ("# x\n\nalice short\n", "line 3 = 'alice': its token has under 16"),
        (f"alice {ALICE}\nbob {ALICE}\n", "stands in it twice"),
    ],
)
def test_a_bad_token_file_is_refused_by_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=words) as caught:
        TokenBook.read(str(path))
    assert ALICE not in str(caught.value)


def test_half_on_is_refused(ours: Certificates, foreign: Certificates, tmp_path: Path) -> None:
    def refused(config: SecurityConfig, field: str, part: Part = Part.ROUTER) -> None:
        with pytest.raises(InvalidArgument) as caught:
            load_security(config, part)
        assert caught.value.field == field

    refused(SecurityConfig(ca_file=ours.path("ca.pem")), "security.ca_file")
    refused(SecurityConfig(enabled=True), "security.ca_file")
    refused(ours.config(key_file=""), "security.key_file")
    refused(ours.config(tokens_file=""), "security.tokens_file")
    refused(ours.config(key_file=foreign.path("key.pem")), "security.key_file")
    refused(ours.config(ca_file=str(tmp_path / "none")), "security.ca_file")
    refused(ours.config(ca_file=ours.path("tokens")), "security.ca_file")
    assert load_security(SecurityConfig(), Part.ROUTER) is None
    assert load_security(ours.config(tokens_file=""), Part.SERVICE) is not None
    refused(SecurityConfig(enabled=True, ca_file=ours.path("ca.pem"), cert_file=ours.path("cert.pem")),
            "security.key_file", Part.CLIENT)  # fmt: skip


async def test_nats_over_tls(ours: Certificates, foreign: Certificates, tmp_path: Path) -> None:
    tls = ServerTls(ours.path("ca.pem"), ours.path("cert.pem"), ours.path("key.pem"))
    nats = EmbeddedNats(tmp_path, tls=tls)
    url = await nats.start()
    assert url.startswith("tls://127.0.0.1:")
    config = NatsConfig(url=url, connect_timeout_s=3)
    try:
        link = await NatsLink.connect(config, name="ours", trust=nats_trust(security_of(ours), config))
        bus = await NatsBus.open(link)
        assert link.connected
        await bus.close()
        await link.close()
        with pytest.raises(Unavailable):
            await NatsLink.connect(config, name="foreign", trust=nats_trust(security_of(foreign), config))
    finally:
        await nats.stop()


def test_url_and_switch_agree(ours: Certificates) -> None:
    for security, url in ((security_of(ours), "nats://127.0.0.1:4222"), (None, "tls://127.0.0.1:4222")):
        with pytest.raises(InvalidArgument) as caught:
            nats_trust(security, NatsConfig(url=url))
        assert caught.value.field == "nats.url"
