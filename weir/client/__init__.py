"""The Python SDK.

from weir.client import Client

with Client("127.0.0.1:7600") as client:
    for event in client.chat([{"role": "user", "content": "Hello"}], temperature=0, max_tokens=32):
        ...
"""

from weir.client.aio import AsyncClient
from weir.client.blocking import Client
from weir.client.types import (
    Accepted,
    Completion,
    Delta,
    Event,
    Final,
    KvReadTimings,
    Message,
    ModelInfo,
    Options,
    PositionLogprobs,
    Timings,
    TokenLogprob,
    Usage,
)
from weir.rpc.security import Security

__all__ = [
    "Accepted",
    "AsyncClient",
    "Client",
    "Completion",
    "Delta",
    "Event",
    "Final",
    "KvReadTimings",
    "Message",
    "ModelInfo",
    "Options",
    "PositionLogprobs",
    "Security",
    "Timings",
    "TokenLogprob",
    "Usage",
]
