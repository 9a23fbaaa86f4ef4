"""TLS: what the security settings name, read and checked once, in the forms that gRPC, NATS and HTTP take.

Services trust each other by certificate: a worker or controller answers only who shows one that the authority
signed. Their addresses come and go, so between services the *name* in the certificate is checked against
``security.server_name`` instead of the address. The router's doors take clients without a certificate; those show
a bearer token (``weir.rpc.tokens``).
"""

from __future__ import annotations

import enum
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from weir.config.sections import SecurityConfig
from weir.errors import InvalidArgument


class Part(enum.Enum):
    """Who reads the settings: it decides which files must be there."""

    ROUTER = "router"
    SERVICE = "service"
    CLIENT = "client"


_NEEDED = {
    Part.ROUTER: ("ca_file", "cert_file", "key_file", "tokens_file"),
    Part.SERVICE: ("ca_file", "cert_file", "key_file"),
    Part.CLIENT: ("ca_file",),
}
_FILES = ("ca_file", "cert_file", "key_file", "tokens_file", "token_file", "nats_credentials_file")


@dataclass(frozen=True, slots=True, repr=False)
class Security:
    """Certificates by file. Empty: the system's authorities, no certificate of one's own, the address's own name."""

    server_name: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    nats_credentials_file: str = ""

    def server_credentials(self, *, clients_have_certificates: bool) -> grpc.ServerCredentials:
        """For a gRPC server; with ``clients_have_certificates`` it refuses who shows none."""
        pair = (_read("security.key_file", self.key_file), _read("security.cert_file", self.cert_file))
        authority = _read("security.ca_file", self.ca_file)
        return grpc.ssl_server_credentials([pair], authority, require_client_auth=clients_have_certificates)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a gRPC channel, with this process's own certificate if it has one."""
        authority = _read("security.ca_file", self.ca_file) if self.ca_file else None
        key = _read("security.key_file", self.key_file) if self.key_file else None
        certificate = _read("security.cert_file", self.cert_file) if self.cert_file else None
        return grpc.ssl_channel_credentials(authority, key, certificate)

    def channel_options(self) -> list[tuple[str, str]]:
        """Options of such a channel: which name the other side's certificate must carry."""
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []

    def client_context(self) -> ssl.SSLContext:
        """For a client of NATS or HTTP."""
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=self.ca_file or None)
        if self.cert_file:
            context.load_cert_chain(self.cert_file, self.key_file)
        return context


def load_security(config: SecurityConfig, part: Part) -> Security | None:
    """None when security is off. Reads every file named, so that nothing starts with a bad one.

    Raises InvalidArgument that names the setting: a file given while security is off, a file missing or not
    readable while it is on, a key that does not belong to its certificate.
    """
    if not config.enabled:
        for name in _FILES:
            if value := getattr(config, name):
                raise InvalidArgument(f"security.{name}", value, "is given although security.enabled is off")
        return None
    for name in _NEEDED[part]:
        if not getattr(config, name):
            raise InvalidArgument(f"security.{name}", "", f"a {part.value} needs it when security.enabled is on")
    if bool(config.cert_file) != bool(config.key_file):
        raise InvalidArgument("security.key_file", config.key_file, "certificate and key are given together")
    for name in _FILES:
        if path := getattr(config, name):
            _read(f"security.{name}", path)
    found = Security(
        config.server_name, config.ca_file, config.cert_file, config.key_file, config.nats_credentials_file
    )
    _check_pems(found)
    return found


def _check_pems(found: Security) -> None:
    try:
        ssl.create_default_context(cafile=found.ca_file)
    except ssl.SSLError as error:
        raise InvalidArgument("security.ca_file", found.ca_file, f"holds no certificate: {error.reason}") from None
    if not found.cert_file:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(found.cert_file, found.key_file)
    except ssl.SSLError as error:
        limit = f"is not the key of security.cert_file = {found.cert_file!r}: {error.reason or error}"
        raise InvalidArgument("security.key_file", found.key_file, limit) from None


def _read(field: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(field, path, f"cannot be read: {error.strerror}") from None
