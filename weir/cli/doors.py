"""How the command line connects: by the ``WEIR_SECURITY_*`` settings of its environment."""

from __future__ import annotations

from pathlib import Path

import grpc.aio

from weir.client import AsyncClient
from weir.config import NatsConfig, SecurityConfig, load_config
from weir.errors import InvalidArgument
from weir.events.nats_link import NatsLink
from weir.events.nats_trust import nats_trust
from weir.rpc.channel import channel
from weir.rpc.security import Part, Security, load_security


def security(part: Part = Part.CLIENT) -> Security | None:
    """None when security is off. Raises InvalidArgument that names the setting."""
    return load_security(load_config(SecurityConfig, section="security"), part)


def token() -> str | None:
    """What ``security.token_file`` holds; None without one. Raises InvalidArgument when it cannot be read."""
    path = load_config(SecurityConfig, section="security").token_file
    if not path:
        return None
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise InvalidArgument("security.token_file", path, f"cannot be read: {error.strerror}") from None


def open_client(router: str) -> AsyncClient:
    """A client of the router at ``router``."""
    return AsyncClient(router, token=token(), security=security())


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to a worker or controller; the caller closes it."""
    return channel(address, security=security())


async def open_nats(url: str, name: str) -> NatsLink:
    """A connection to NATS. Raises Unavailable."""
    config = NatsConfig(url=url)
    return await NatsLink.connect(config, name=name, trust=nats_trust(security(), config))
