"""KV reads between two real processes over NIXL."""

import asyncio
import base64
import dataclasses
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from tests.integration.nixl_peer import LAYOUT, block_content, fingerprint
from weir.clock import SystemClock
from weir.errors import FingerprintMismatch, KvReadVoid, TransferUnavailable
from weir.ids import RequestKey, WorkerKey
from weir.kvcache.pool import KvPool
from weir.transfer.nixl import NixlTransfer
from weir.transfer.ticket import BlockRef, PeerDescriptor, Ticket

ROOT = Path(__file__).resolve().parents[2]
PEER_BLOCKS = 64
OWN_BLOCKS = 72
SEED = 7
KEY = RequestKey("r-00000001-000000000001", 1)


class Peer:
    """The other process, and its descriptor."""

    def __init__(self, process: asyncio.subprocess.Process, hello: dict[str, Any]) -> None:
        self.process = process
        self.descriptor = PeerDescriptor(
            worker=WorkerKey("prefill-peer", hello["incarnation"]),
            fingerprint=fingerprint(),
            agent_metadata=base64.b64decode(hello["metadata"]),
            memory="DRAM",
            device_id=0,
            pool_base=hello["pool_base"],
            block_bytes=LAYOUT.block_bytes,
            num_blocks=PEER_BLOCKS,
            guard_base=hello["guard_base"],
            host_id="here",
        )

    async def ask(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(command.encode() + b"\n")
        return await self.answer(self.process)

    async def ticket(self, blocks: list[int]) -> Ticket:
        generations = (await self.ask("ticket " + ",".join(map(str, blocks))))["generations"]
        return Ticket(
            key=KEY,
            lease_id=77,
            source=self.descriptor.worker,
            fingerprint_digest=fingerprint().digest(),
            first_block=0,
            blocks=tuple(BlockRef(*pair) for pair in zip(blocks, generations, strict=True)),
            num_tokens=len(blocks) * LAYOUT.block_size,
            final=True,
            deadline_unix_s=SystemClock().unix_s() + 60,
        )

    @staticmethod
    async def answer(process: asyncio.subprocess.Process) -> dict[str, Any]:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 20)
        assert line, "the peer has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


async def start_peer(seed: int = SEED, ucx_tls: str | None = None) -> Peer:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if ucx_tls is not None:
        env["UCX_TLS"] = ucx_tls
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.integration.nixl_peer", str(PEER_BLOCKS), str(seed)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=env,
        cwd=ROOT,
    )
    return Peer(process, await Peer.answer(process))


async def end_peer(peer: Peer) -> None:
    if peer.process.returncode is None:
        peer.process.kill()
    await peer.process.wait()


@pytest_asyncio.fixture
async def peer() -> AsyncIterator[Peer]:
    started = await start_peer()
    yield started
    await end_peer(started)


@pytest.fixture
def pool() -> KvPool:
    return KvPool(LAYOUT, OWN_BLOCKS, torch.float32)


@pytest_asyncio.fixture
async def transfer(pool: KvPool) -> AsyncIterator[NixlTransfer]:
    started = NixlTransfer(pool, WorkerKey("decode-own", 1), fingerprint(), host_id="here")
    yield started
    assert started.outstanding() == 0
    await started.close()


def pair(ticket: Ticket, own: list[int]) -> list[tuple[BlockRef, int]]:
    return list(zip(ticket.blocks, own, strict=True))


async def test_reads_exact_bytes_and_tells_the_owner(peer: Peer, pool: KvPool, transfer: NixlTransfer) -> None:
    await transfer.connect(peer.descriptor)
    await transfer.connect(peer.descriptor)
    ticket = await peer.ticket([9, 3, 4, 5, 20])
    report = await transfer.read(ticket, pair(ticket, [0, 10, 11, 12, 40]), timeout_s=10, notify=True)
    for source, own in [(9, 0), (3, 10), (4, 11), (5, 12), (20, 40)]:
        assert pool.block_view(own) == block_content(SEED, source), (source, own)
    assert pool.block_view(1) == bytes(LAYOUT.block_bytes), "a block that was not asked for was written"
    assert (report.blocks, report.descriptors) == (5, 3)
    assert report.bytes == 5 * LAYOUT.block_bytes
    assert report.transport.startswith("ucx")
    done = await peer.ask("completion")
    assert done == {"lease_id": 77, "key": str(KEY)}


async def test_adjacent_blocks_are_one_descriptor(peer: Peer, pool: KvPool, transfer: NixlTransfer) -> None:
    await transfer.connect(peer.descriptor)
    ticket = await peer.ticket(list(range(8, 18)))
    report = await transfer.read(ticket, pair(ticket, list(range(30, 40))), timeout_s=10, notify=False)
    assert report.descriptors == 1
    assert pool.block_view(39) == block_content(SEED, 17)


async def test_a_broken_promise_voids_the_read(peer: Peer, transfer: NixlTransfer) -> None:
    await transfer.connect(peer.descriptor)
    for block, command, reason in [(2, "reuse", "generation"), (12, "flip", "checksum"), (22, "unseal", "checksum")]:
        ticket = await peer.ticket([block - 1, block, block + 1])
        await peer.ask(f"{command} {block}")
        with pytest.raises(KvReadVoid) as void:
            await transfer.read(ticket, pair(ticket, [1, 2, 3]), timeout_s=10, notify=True)
        assert void.value.reason == reason, command
    again = await peer.ticket([5])
    await transfer.read(again, pair(again, [5]), timeout_s=10, notify=False)


async def test_churn_never_yields_foreign_contents(peer: Peer, pool: KvPool, transfer: NixlTransfer) -> None:
    """The owner reuses blocks while they are read: each read is exact or void."""
    await transfer.connect(peer.descriptor)
    blocks = list(range(12))
    await peer.ask("churn " + ",".join(map(str, blocks)))
    outcomes = Counter[str]()
    while outcomes["exact"] < 20 or outcomes["generation"] < 20:
        ticket = await peer.ticket(blocks[:6])
        try:
            await transfer.read(ticket, pair(ticket, [40, 42, 44, 46, 48, 50]), timeout_s=10, notify=False)
        except KvReadVoid as void:
            outcomes[void.reason] += 1
            continue
        outcomes["exact"] += 1
        for ref, own in pair(ticket, [40, 42, 44, 46, 48, 50]):
            if ref.generation > 1:
                assert bool((pool.data[own] == float(ref.generation)).all()), outcomes
        assert sum(outcomes.values()) < 5000, outcomes
    assert set(outcomes) <= {"exact", "generation", "checksum"}, outcomes


async def test_incarnations_and_fingerprints(peer: Peer, pool: KvPool, transfer: NixlTransfer) -> None:
    await transfer.connect(peer.descriptor)
    old = await peer.ticket([1])
    newer = await start_peer(seed=SEED + 1)
    try:
        await transfer.connect(newer.descriptor)
        with pytest.raises(KvReadVoid) as void:
            await transfer.read(old, pair(old, [1]), timeout_s=10, notify=False)
        assert void.value.reason == "wrong_incarnation"
        with pytest.raises(TransferUnavailable, match="replaced"):
            await transfer.connect(peer.descriptor)
        ticket = await newer.ticket([1])
        await transfer.read(ticket, pair(ticket, [1]), timeout_s=10, notify=False)
        assert pool.block_view(1) == block_content(SEED + 1, 1)
    finally:
        await end_peer(newer)
    with pytest.raises(FingerprintMismatch, match="weights"):
        await transfer.connect(dataclasses.replace(newer.descriptor, fingerprint=fingerprint("other")))


async def test_a_killed_peer_voids_the_read(peer: Peer, pool: KvPool, transfer: NixlTransfer) -> None:
    await transfer.connect(peer.descriptor)
    ticket = await peer.ticket(list(range(PEER_BLOCKS)))
    destinations = pair(ticket, list(range(PEER_BLOCKS)))
    await transfer.read(ticket, destinations, timeout_s=10, notify=False)
    peer.process.send_signal(signal.SIGKILL)
    await peer.process.wait()
    with pytest.raises(KvReadVoid) as void:
        await transfer.read(ticket, destinations, timeout_s=2, notify=False)
    assert void.value.reason in {"transport", "timeout"}
    assert transfer.outstanding() == 0
    fresh = await start_peer(seed=SEED + 2)
    try:
        await transfer.connect(fresh.descriptor)
        ticket = await fresh.ticket([6])
        await transfer.read(ticket, pair(ticket, [6]), timeout_s=10, notify=False)
        assert pool.block_view(6) == block_content(SEED + 2, 6)
    finally:
        await end_peer(fresh)


async def test_many_reads_at_once_and_cancellation(peer: Peer, pool: KvPool, transfer: NixlTransfer) -> None:
    await transfer.connect(peer.descriptor)
    ticket = await peer.ticket(list(range(32)))
    reads = [
        asyncio.create_task(transfer.read(ticket, [(ticket.blocks[block], block)], timeout_s=10, notify=False))
        for block in range(32)
    ]
    await asyncio.sleep(0)
    for cancelled in reads[::2]:
        cancelled.cancel()
    outcomes = await asyncio.gather(*reads, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes[::2])
    for block in range(1, 32, 2):
        assert pool.block_view(block) == block_content(SEED, block)
    assert transfer.outstanding() == 0


async def test_a_stopped_peer_writes_nothing_after_the_read_has_ended(pool: KvPool, transfer: NixlTransfer) -> None:
    """Over TCP a posted read survives the release of its handle; the reader's reset must not let it land."""
    peer = await start_peer(ucx_tls="tcp")
    try:
        await transfer.connect(peer.descriptor)
        ticket = await peer.ticket(list(range(PEER_BLOCKS)))
        destinations = pair(ticket, list(range(PEER_BLOCKS)))
        peer.process.send_signal(signal.SIGSTOP)
        with pytest.raises(KvReadVoid) as void:
            await transfer.read(ticket, destinations, timeout_s=0.5, notify=False)
        assert void.value.reason == "timeout"
        assert transfer.outstanding() == 0
        pool.data.fill_(5.0)
        peer.process.send_signal(signal.SIGCONT)
        fresh = await start_peer(seed=SEED + 3)
        try:
            await transfer.connect(fresh.descriptor)
            ticket = await fresh.ticket([0])
            await transfer.read(ticket, pair(ticket, [70]), timeout_s=10, notify=False)
        finally:
            await end_peer(fresh)
        assert bool((pool.data[:70] == 5.0).all()), "bytes landed after the read had ended"
    finally:
        await end_peer(peer)
