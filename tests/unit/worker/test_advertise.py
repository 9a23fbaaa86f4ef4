"""The address that a worker announces."""

from __future__ import annotations

import socket

import pytest

from weir.services.worker.app import reachable_address


@pytest.mark.parametrize("bound", ["127.0.0.1:7610", "10.1.2.3:7610", "worker-3:7610", "[::1]:7610"])
def test_a_specific_address_is_announced_as_bound(bound: str) -> None:
    assert reachable_address(bound, "nats://127.0.0.1:4222") == bound


@pytest.mark.parametrize("bound", ["0.0.0.0:7610", "[::]:7610"])
@pytest.mark.parametrize("url", ["nats://127.0.0.1:4222", "127.0.0.1:4222, 10.0.0.1:4222", "nats://u:p@127.0.0.1"])
def test_an_unspecified_one_is_replaced_by_the_way_to_nats(bound: str, url: str) -> None:
    assert reachable_address(bound, url) == "127.0.0.1:7610"


@pytest.mark.parametrize("url", ["none", "", "nats://no-such-host.invalid:4222"])
def test_without_a_way_to_nats_the_host_name_is_announced(url: str) -> None:
    assert reachable_address("0.0.0.0:7610", url) == f"{socket.gethostname()}:7610"
