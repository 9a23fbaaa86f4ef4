"""The limited link of ``weir bench matrix``: it limits, and leaves nothing. Needs root."""

from __future__ import annotations

import subprocess
import sys

import pytest

from weir.cli.bench_link import LimitedLink, link_obstacle
from weir.clock import SystemClock
from weir.errors import FailedPrecondition

pytestmark = pytest.mark.skipif(bool(link_obstacle()), reason=link_obstacle() or "possible")


def links() -> str:
    """All namespaces and network devices here."""
    commands = (["ip", "netns", "list"], ["ip", "-brief", "link"])
    return "\n".join(subprocess.run(argv, capture_output=True, text=True, check=True).stdout for argv in commands)


async def test_a_stream_is_no_faster_than_the_limit() -> None:
    with LimitedLink(40.0) as link:
        speed = await link.measure_mb_s(SystemClock())
        name = link.namespace(0)
        assert name in links()
    assert 0.0 < speed < 1.1 * 5.0
    assert name not in links()
    assert f"wl{link.pid}" not in links()


def test_what_a_killed_process_left_is_removed() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = LimitedLink(40.0, pid=ended.pid)
    left.__enter__()
    assert left.namespace(1) in links()
    with LimitedLink(40.0):
        assert left.namespace(1) not in links()


def test_two_at_once_are_refused_and_the_first_stays() -> None:
    with LimitedLink(40.0) as link:
        with pytest.raises(FailedPrecondition, match="ip link add"), LimitedLink(40.0):
            pass
        assert link.namespace(0) in links()
