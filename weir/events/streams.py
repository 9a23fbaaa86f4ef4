"""The streams and buckets that Weir keeps in NATS, with their bounds."""

from __future__ import annotations

from typing import Any

from nats.js import api
from nats.js.errors import BadRequestError

from weir.config.sections import NatsConfig
from weir.events.bus import MAX_EVENT_BYTES
from weir.events.subjects import REGISTRY_BUCKET, REQUEST_STREAM, REQUEST_STREAM_SUBJECTS

_NAME_IN_USE = 10058
_HEADER_ROOM_BYTES = 4 << 10
MAX_RECORD_BYTES = 64 << 10
MAX_REGISTRY_BYTES = 64 << 20


def request_stream(config: NatsConfig) -> Any:
    """The stream of lifecycle events: bounded in age, bytes and messages; the oldest are discarded."""
    return api.StreamConfig(
        name=REQUEST_STREAM,
        subjects=list(REQUEST_STREAM_SUBJECTS),
        retention=api.RetentionPolicy.LIMITS,
        discard=api.DiscardPolicy.OLD,
        storage=api.StorageType.FILE,
        max_age=config.stream_max_age_s,
        max_bytes=config.stream_max_mb << 20,
        max_msgs=config.stream_max_messages,
        max_msg_size=MAX_EVENT_BYTES + _HEADER_ROOM_BYTES,
        max_consumers=64,
        # The server refuses a window longer than the age.
        duplicate_window=min(config.duplicate_window_s, config.stream_max_age_s),
        num_replicas=1,
    )


def registry_stream(config: NatsConfig) -> Any:
    """The stream under the registry's bucket: one value per worker, gone after the time to live."""
    return api.StreamConfig(
        name=f"KV_{REGISTRY_BUCKET}",
        subjects=[f"$KV.{REGISTRY_BUCKET}.>"],
        retention=api.RetentionPolicy.LIMITS,
        discard=api.DiscardPolicy.NEW,
        storage=api.StorageType.FILE,
        max_age=config.registry_ttl_s,
        max_bytes=MAX_REGISTRY_BYTES,
        max_msgs=-1,
        max_msgs_per_subject=1,
        max_msg_size=MAX_RECORD_BYTES,
        max_consumers=-1,
        duplicate_window=min(config.duplicate_window_s, config.registry_ttl_s),
        allow_direct=True,
        allow_rollup_hdrs=True,
        deny_delete=True,
        num_replicas=1,
    )


async def ensure_stream(jetstream: Any, stream: Any) -> None:
    """Create the stream, or bring an existing one to these bounds. Raises what nats raises."""
    try:
        await jetstream.add_stream(stream)
    except BadRequestError as error:
        if error.err_code != _NAME_IN_USE:
            raise
        await jetstream.update_stream(stream)
