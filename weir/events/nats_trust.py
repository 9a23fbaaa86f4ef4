"""What the security settings mean for the connection to NATS."""

from __future__ import annotations

from weir.config.sections import NatsConfig
from weir.errors import InvalidArgument
from weir.events.nats_link import NatsTrust
from weir.rpc.security import Security

_TLS_SCHEME = "tls://"


def nats_trust(security: Security | None, config: NatsConfig) -> NatsTrust | None:
    """None without security. Raises InvalidArgument when the servers' URLs and the switch do not agree."""
    for url in (part.strip() for part in config.url.split(",")):
        if security is not None and not url.startswith(_TLS_SCHEME):
            raise InvalidArgument("nats.url", url, f"must begin with {_TLS_SCHEME} when security.enabled is on")
        if security is None and url.startswith(_TLS_SCHEME):
            raise InvalidArgument("nats.url", url, "needs security.enabled = true with its files")
    if security is None:
        return None
    return NatsTrust(security.client_context(), security.server_name, security.nats_credentials_file)
