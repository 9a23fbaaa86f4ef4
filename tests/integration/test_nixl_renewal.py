"""A reader agent that finds no way to a peer: started while there was no network, it would never find one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.nixl_peer import block_content
from tests.integration.test_nixl import SEED, Peer, pair, peer, pool, transfer  # noqa: F401 (fixtures)
from weir.errors import TransferUnavailable
from weir.kvcache.pool import KvPool
from weir.transfer.nixl import NixlTransfer


def unreachable(metadata: bytes) -> Any:
    raise RuntimeError("NIXL_ERR_BACKEND")


async def test_it_is_started_anew_and_reads(
    peer: Peer,  # noqa: F811
    pool: KvPool,  # noqa: F811
    transfer: NixlTransfer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer._thread._reader, "add_remote_agent", unreachable)
    await transfer.connect(peer.descriptor)
    ticket = await peer.ticket([9, 3])
    report = await transfer.read(ticket, pair(ticket, [0, 10]), timeout_s=10, notify=True)
    assert report.blocks == 2
    assert [pool.block_view(own) for own in (0, 10)] == [block_content(SEED, source) for source in (9, 3)]


async def test_not_again_at_once(peer: Peer, transfer: NixlTransfer, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """A peer that is really away costs one new agent, not one for each try."""
    started: list[str] = []
    begin = transfer._thread._begin_reader

    def begin_blind() -> None:
        begin()
        started.append("reader")
        monkeypatch.setattr(transfer._thread._reader, "add_remote_agent", unreachable)

    monkeypatch.setattr(transfer._thread, "_begin_reader", begin_blind)
    monkeypatch.setattr(transfer._thread._reader, "add_remote_agent", unreachable)
    for _ in range(2):
        with pytest.raises(TransferUnavailable, match="NIXL_ERR_BACKEND"):
            await transfer.connect(peer.descriptor)
    assert started == ["reader"]
