"""The near side of a READ probe: reads another process's blocks over NIXL and proves them."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from weir.cli import read_peer
from weir.errors import InternalError, Unavailable
from weir.ids import WorkerKey
from weir.kvcache.layout import KvLayout
from weir.rpc.convert import descriptor_from_pb, ticket_from_pb
from weir.rpc.v1 import kv_pb2
from weir.transfer.nixl import NixlTransfer
from weir.transfer.plan import ReadReport
from weir.transfer.ticket import Ticket

PEER_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 30.0


async def probe_reads(layout: KvLayout, sizes: Sequence[int], repeats: int) -> list[list[ReadReport]]:
    """For each number of blocks in ``sizes`` the reports of ``repeats`` reads, after one that does not count.

    Raises InternalError when proven bytes differ from those written, and what the transfer raises.
    """
    blocks = max(sizes)
    async with _far_process(layout, blocks) as lines:
        peer = descriptor_from_pb(kv_pb2.PeerDescriptor.FromString(lines[0]))
        ticket = ticket_from_pb(kv_pb2.KvTicket.FromString(lines[1]))
        pool = read_peer.make_pool(layout, blocks)
        expected = read_peer.make_pool(layout, blocks)
        read_peer.fill(expected)
        transfer = NixlTransfer(pool, WorkerKey("probe-near", 1), read_peer.make_fingerprint(layout))
        try:
            await transfer.connect(peer)
            reports = [await _read(transfer, _first(ticket, size), repeats + 1) for size in sizes]
        finally:
            await transfer.close()
        if not bool((pool.data == expected.data).all()):
            raise InternalError("the read was proven but its bytes differ")
    return [each[1:] for each in reports]


def _first(ticket: Ticket, blocks: int) -> Ticket:
    return dataclasses.replace(
        ticket, blocks=ticket.blocks[:blocks], num_tokens=blocks * read_peer.BLOCK_SIZE, final=False
    )


async def _read(transfer: NixlTransfer, ticket: Ticket, repeats: int) -> list[ReadReport]:
    pairs = [(ref, ref.block) for ref in ticket.blocks]
    return [await transfer.read(ticket, pairs, timeout_s=READ_TIMEOUT_S, notify=False) for _ in range(repeats)]


@asynccontextmanager
async def _far_process(layout: KvLayout, blocks: int) -> AsyncIterator[list[bytes]]:
    dimensions = (layout.layers, layout.kv_heads, layout.head_dim, blocks)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "weir.cli.read_peer", *map(str, dimensions),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield await asyncio.wait_for(_two_lines(process), PEER_TIMEOUT_S)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _two_lines(process: asyncio.subprocess.Process) -> list[bytes]:
    assert process.stdout is not None
    assert process.stderr is not None
    lines: list[bytes] = []
    while len(lines) < 2:
        line = await process.stdout.readline()
        if not line:
            told = (await process.stderr.read()).decode(errors="replace").strip().splitlines()
            raise Unavailable(f"the far process ended: {told[-1] if told else 'no output'}")
        try:
            lines.append(base64.b64decode(line.strip(), validate=True))
        except ValueError:
            continue  # a library's own chatter
    return lines
