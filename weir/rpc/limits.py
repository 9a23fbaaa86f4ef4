"""Bounds of a gRPC edge and the options that set them, for servers and channels alike."""

from __future__ import annotations

from dataclasses import dataclass

from weir.config.sections import LimitsConfig

Options = list[tuple[str, int | str]]

DEFAULT_MESSAGE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class RpcLimits:
    """Sizes in bytes, times in seconds; defaults are those of ``weir.config.LimitsConfig``."""

    message_bytes: int = DEFAULT_MESSAGE_BYTES
    max_concurrent_streams: int = 4_096
    keepalive_s: float = 10.0
    keepalive_timeout_s: float = 5.0

    @classmethod
    def of(cls, config: LimitsConfig) -> RpcLimits:
        """The gRPC bounds of a configuration."""
        return cls(
            message_bytes=config.message_bytes,
            max_concurrent_streams=config.max_concurrent_streams,
            keepalive_s=config.keepalive_s,
            keepalive_timeout_s=config.keepalive_timeout_s,
        )


def shared_options(limits: RpcLimits) -> Options:
    """Options that both ends take."""
    return [
        ("grpc.max_send_message_length", limits.message_bytes),
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.keepalive_time_ms", int(limits.keepalive_s * 1_000)),
        ("grpc.keepalive_timeout_ms", int(limits.keepalive_timeout_s * 1_000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(limits: RpcLimits, connections: int | None = None) -> Options:
    """Options of a server. ``connections``: further ones are closed as soon as they are accepted."""
    bound: Options = [] if connections is None else [("grpc.max_allowed_incoming_connections", connections)]
    return [
        *bound,
        *shared_options(limits),
        # Two servers on one port would share its connections silently; a taken port must be an error.
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", limits.max_concurrent_streams),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def channel_options(limits: RpcLimits) -> Options:
    """Options of a channel; reconnects quickly, never through a proxy."""
    return [
        *shared_options(limits),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 50),
        # Whatever its name says: what one attempt to connect may take, the handshake included. Shorter, and a server
        # that is far away or busy is never reached.
        ("grpc.min_reconnect_backoff_ms", 2_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
    ]
