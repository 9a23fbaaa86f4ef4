"""Reading UCX's own account of the transport it chose."""

import pytest

from weir.transfer.ucx import transport_in

PREFIX = "[1796050778.081011] [vm:9593 :0]   "
TABLES = [
    "+--------+-------------+-----------------------------------+",
    "| D intra-node cfg#1                                       |",
    "| remote memory write by ucp_put* from host memory to host |",
    "| Range  | Description |              Config               |",
    "| 0..inf | zero-copy   | tcp/lo                            |",
    "| D intra-node cfg#1                                       |",
    "| remote memory read by ucp_get*(multi) into host memory from host |",
    "| Range  | Description |              Config               |",
    "| 0      | short       | self/memory                       |",
    "| 1..4095 | copy-out   | tcp/eth0                          |",
    "| 4096..inf | zero-copy | 50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1 |",
    "| active message by ucp_am_send* from host memory |",
    "| 0..inf | short       | tcp/lo                            |",
]


@pytest.mark.parametrize(
    ("size", "transport"), [(0, "ucx:self"), (100, "ucx:tcp"), (4096, "ucx:rc_mlx5"), (737_280, "ucx:rc_mlx5")]
)
def test_the_row_for_the_size_counts(size: int, transport: str) -> None:
    assert transport_in("\n".join(PREFIX + line for line in TABLES), size) == transport


def test_the_last_table_counts() -> None:
    later = [TABLES[6], "| 0..inf | zero-copy | cma/memory |"]
    assert transport_in("\n".join(TABLES + later), 737_280) == "ucx:cma"


@pytest.mark.parametrize("text", ["", "nothing", "\n".join(TABLES[:5])])
def test_without_a_table_nothing_is_claimed(text: str) -> None:
    assert transport_in(text, 100) is None
