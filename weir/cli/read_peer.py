"""The far side of a READ probe: a process with a pool of known bytes.

    python -m weir.cli.read_peer LAYERS KV_HEADS HEAD_DIM BLOCKS

Prints its descriptor and a ticket (base64 of their wire forms) and lives until its standard input ends.
"""

from __future__ import annotations

import base64
import sys

import torch

from weir.clock import SystemClock
from weir.ids import RequestKey, WorkerKey
from weir.kvcache.layout import LAYOUT_VERSION, KvLayout
from weir.kvcache.pool import KvPool
from weir.rpc.convert import descriptor_to_pb, ticket_to_pb
from weir.transfer.fingerprint import Fingerprint
from weir.transfer.nixl import NixlTransfer
from weir.transfer.ticket import BlockRef, Ticket

BLOCK_SIZE = 16
LEASE_S = 600.0


def make_layout(layers: int, kv_heads: int, head_dim: int) -> KvLayout:
    """A float32 layout with the probe's block size."""
    return KvLayout(layers=layers, kv_heads=kv_heads, head_dim=head_dim, block_size=BLOCK_SIZE, dtype_bytes=4)


def make_fingerprint(layout: KvLayout) -> Fingerprint:
    """One that only probes share."""
    return Fingerprint(
        weights="probe",
        architecture="none",
        dtype="float32",
        kv_dtype="float32",
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        layout_version=LAYOUT_VERSION,
        tokenizer="none",
        adapter="",
        rope="none",
    )


def make_pool(layout: KvLayout, blocks: int) -> KvPool:
    """A pool on the CPU."""
    return KvPool(layout, blocks, torch.float32, torch.device("cpu"))


def fill(pool: KvPool) -> None:
    """Bytes that differ in every block."""
    values = torch.arange(pool.data.numel(), dtype=torch.float32)
    pool.data.copy_(values.view_as(pool.data))


def main() -> None:
    """Serve reads until standard input ends."""
    layers, kv_heads, head_dim, blocks = map(int, sys.argv[1:5])
    layout = make_layout(layers, kv_heads, head_dim)
    fingerprint = make_fingerprint(layout)
    pool = make_pool(layout, blocks)
    fill(pool)
    pool.seal(range(blocks))
    worker = WorkerKey("probe-far", 1)
    transfer = NixlTransfer(pool, worker, fingerprint)
    ticket = Ticket(
        key=RequestKey("r-probe", 1),
        lease_id=1,
        source=worker,
        fingerprint_digest=fingerprint.digest(),
        first_block=0,
        blocks=tuple(BlockRef(block, pool.guard.generation(block)) for block in range(blocks)),
        num_tokens=blocks * BLOCK_SIZE,
        final=True,
        deadline_unix_s=SystemClock().unix_s() + LEASE_S,
    )
    for message in (descriptor_to_pb(transfer.descriptor()), ticket_to_pb(ticket)):
        print(base64.b64encode(message.SerializeToString()).decode(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
