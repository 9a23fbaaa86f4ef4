"""File descriptors: counted, and refused by name while there are still some left."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from dataclasses import dataclass

import pytest

from weir.clock import ManualClock
from weir.errors import ResourceExhausted
from weir.rpc.descriptors import (
    RETRY_AFTER_S,
    SAMPLE_S,
    Descriptors,
    DescriptorStats,
    PeerGate,
    descriptor_limit,
    open_descriptors,
    reserve_of,
)


@dataclass
class Process:
    """A process as Descriptors sees it."""

    open: int | None = 0
    limit: int = 128
    counted: int = 0

    def count(self) -> int | None:
        self.counted += 1
        return self.open


def descriptors(process: Process, clock: ManualClock | None = None) -> Descriptors:
    return Descriptors(clock or ManualClock(), count=process.count, limit=lambda: process.limit)


@pytest.mark.parametrize(("limit", "reserve"), [(20, 10), (64, 32), (128, 32), (1_024, 64), (1 << 20, 1 << 16)])
def test_the_reserve(limit: int, reserve: int) -> None:
    assert reserve_of(limit) == reserve


@pytest.mark.parametrize(("held", "limit", "connections"), [(0, 16, 8), (0, 128, 48), (30, 128, 33), (60, 1_024, 450)])
def test_each_door_gets_half_of_the_room(held: int, limit: int, connections: int) -> None:
    made = descriptors(Process(open=held, limit=limit))
    assert made.connections == connections
    made.check("http", "a new client", connections - 1)
    with pytest.raises(ResourceExhausted, match=f"{connections} connections are open, the limit: no room for a new"):
        made.check("http", "a new client", connections)


def test_what_is_new_is_refused_once_only_the_reserve_is_left() -> None:
    clock, process = ManualClock(), Process(open=95)
    made = descriptors(process, clock)
    made.check("http", "a connection")
    process.open = 96
    made.check("http", "a connection")  # the count is not older than SAMPLE_S
    clock.advance(SAMPLE_S)
    with pytest.raises(ResourceExhausted) as refused:
        made.check("http", "a connection")
    assert str(refused.value) == "96 of 128 file descriptors are open: no room for a connection"
    assert refused.value.retry_after_s == RETRY_AFTER_S
    assert made.stats() == DescriptorStats(96, 128, {"http": 1})
    process.limit = 256  # raised from outside
    clock.advance(SAMPLE_S)
    made.check("http", "a connection")


def test_when_they_cannot_even_be_counted_there_are_none() -> None:
    made = descriptors(Process(open=None))
    with pytest.raises(ResourceExhausted, match="128 of 128 file descriptors are open"):
        made.check("kv", "a connection to p")


def test_a_known_client_is_let_in_and_costs_no_count() -> None:
    clock, process = ManualClock(), Process(open=1)
    gate = PeerGate(descriptors(process, clock))
    gate("ipv4:10.0.0.1:4000")
    counted = process.counted
    process.open = 120
    clock.advance(1.0)
    gate("ipv4:10.0.0.1:4000")
    assert process.counted == counted
    with pytest.raises(ResourceExhausted, match="no room for a new client"):
        gate("ipv4:10.0.0.1:4001")
    process.open = 1
    clock.advance(1.0)
    gate("ipv4:10.0.0.1:4001")


def test_the_processes_own_are_counted() -> None:
    before = open_descriptors()
    assert before is not None
    ends = os.pipe()
    assert open_descriptors() == before + 2
    for end in ends:
        os.close(end)
    assert open_descriptors() == before
    assert descriptor_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_without_any_left_nothing_is_counted_and_the_limit_can_be_raised_again() -> None:
    program = """
import os, resource
from weir.rpc.descriptors import open_descriptors, raise_descriptor_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 60))
held = []
try:
    while True:
        held.append(os.dup(0))
except OSError:
    print(open_descriptors())
print(raise_descriptor_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0], open_descriptors() == 40)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["None", "60 60 True", ""]
