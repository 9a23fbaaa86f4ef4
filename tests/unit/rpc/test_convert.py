"""Domain objects survive the wire; nonsense from it is refused."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.engine.sampling import SamplingParams
from weir.errors import InvalidArgument, KvReadVoid
from weir.ids import RequestKey, WorkerKey
from weir.lifecycle import FinishReason, RequestState, Role
from weir.rpc import convert
from weir.rpc.v1 import common_pb2, kv_pb2
from weir.transfer.fingerprint import Fingerprint
from weir.transfer.ticket import BlockRef, PeerDescriptor, Ticket

FINGERPRINT = Fingerprint("w", "LlamaForCausalLM", "float32", "bfloat16", 30, 3, 64, 16, 1, "t", "a", "r", 2)
PEER = PeerDescriptor(WorkerKey("p-1", 2**62), FINGERPRINT, b"\x00\xff", "DRAM", 0, 2**47, 4096, 9, 2**46, "host")

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize("role", list(Role))
def test_roles(role: Role) -> None:
    assert convert.role_from_pb(convert.role_to_pb(role)) is role


@pytest.mark.parametrize("state", list(RequestState))
def test_states(state: RequestState) -> None:
    assert convert.state_from_pb(convert.state_to_pb(state)) is state


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_finish_reasons(reason: FinishReason | None) -> None:
    assert convert.finish_from_pb(convert.finish_to_pb(reason)) is reason


def test_enums_on_the_wire_are_covered() -> None:
    assert len(common_pb2.Role.values()) == len(Role) + 1
    assert len(common_pb2.RequestState.values()) == len(RequestState) + 1
    assert len(common_pb2.FinishReason.values()) == len(FinishReason) + 1


@pytest.mark.parametrize("value", [0, 99, -1])
def test_unset_and_unknown_values_are_refused(value: int) -> None:
    with pytest.raises(InvalidArgument, match="must be set to one of prefill, decode, mixed"):
        convert.role_from_pb(value)
    with pytest.raises(InvalidArgument, match="state"):
        convert.state_from_pb(value)
    if value:
        with pytest.raises(InvalidArgument, match="finish_reason"):
            convert.finish_from_pb(value)


def test_absent_sampling_fields_take_the_documented_defaults() -> None:
    assert convert.sampling_from_pb(common_pb2.SamplingParams(), default_max_tokens=77) == SamplingParams(
        max_tokens=77, temperature=1.0, top_p=1.0, repetition_penalty=1.0, seed=None, logprobs=None
    )


def test_zeros_that_were_set_are_kept() -> None:
    pb = common_pb2.SamplingParams(max_tokens=0, temperature=0, top_p=0, repetition_penalty=0, seed=0, logprobs=0)
    params = convert.sampling_from_pb(pb, default_max_tokens=77)
    assert (params.max_tokens, params.temperature, params.top_p) == (0, 0.0, 0.0)
    assert (params.repetition_penalty, params.seed, params.logprobs) == (0.0, 0, 0)


@given(
    params=st.builds(
        SamplingParams,
        max_tokens=st.integers(-5, 2**31 - 1),
        min_tokens=st.integers(0, 2**31 - 1),
        temperature=st.floats(allow_nan=False),
        top_k=st.integers(-1, 2**31 - 1),
        top_p=st.floats(allow_nan=False),
        min_p=st.floats(allow_nan=False),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        repetition_penalty=st.floats(0, 10),
        logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=5),
        seed=st.none() | st.integers(0, 2**63 - 1),
        stop=st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=4).map(tuple),
        stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple),
        include_stop=st.booleans(),
        ignore_eos=st.booleans(),
        logprobs=st.none() | st.integers(0, 20),
    )
)
@settings(max_examples=100, deadline=None)
def test_sampling_survives(params: SamplingParams) -> None:
    wire = convert.sampling_to_pb(params).SerializeToString()
    assert convert.sampling_from_pb(common_pb2.SamplingParams.FromString(wire), default_max_tokens=1) == params


def test_nan_reaches_the_check() -> None:
    params = convert.sampling_from_pb(common_pb2.SamplingParams(temperature=math.nan), default_max_tokens=1)
    assert math.isnan(params.temperature)


@given(
    refs=st.lists(st.tuples(U32, U64), min_size=1, max_size=20),
    numbers=st.tuples(U32, U64, U64, U32, U32),
    final=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_tickets_survive(refs: list[tuple[int, int]], numbers: tuple[int, ...], final: bool) -> None:
    attempt, lease, incarnation, first, tokens = numbers
    blocks = tuple(BlockRef(block, generation) for block, generation in refs)
    ticket = Ticket(
        RequestKey("r-1", attempt), lease, WorkerKey("p", incarnation), b"\x00" * 16, first, blocks, tokens, final, 1.5
    )
    wire = convert.ticket_to_pb(ticket).SerializeToString()
    assert convert.ticket_from_pb(kv_pb2.KvTicket.FromString(wire)) == ticket


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"generations": [1]}, "2 blocks, 1 generations"),
        ({"generations": [1, 2, 3]}, "2 blocks, 3 generations"),
        ({"blocks": [], "generations": []}, "0 blocks; 1 to 65536 are allowed"),
        ({"request_id": ""}, "request_id and source_worker_id must be set"),
        ({"source_worker_id": ""}, "request_id and source_worker_id must be set"),
        ({"deadline_unix_s": 0}, "deadline 0.0"),
        ({"deadline_unix_s": math.nan}, "deadline nan"),
    ],
)
def test_malformed_tickets_are_void(changes: dict[str, object], detail: str) -> None:
    fields: dict[str, object] = {
        "request_id": "r-1",
        "source_worker_id": "p",
        "blocks": [1, 2],
        "generations": [3, 4],
        "num_tokens": 20,
        "deadline_unix_s": 1.0,
        **changes,
    }
    with pytest.raises(KvReadVoid) as caught:
        convert.ticket_from_pb(kv_pb2.KvTicket(**fields))  # type: ignore[arg-type]
    assert (caught.value.reason, caught.value.detail) == ("malformed", detail)


def test_descriptor_and_fingerprint_survive() -> None:
    wire = convert.descriptor_to_pb(PEER).SerializeToString()
    back = convert.descriptor_from_pb(kv_pb2.PeerDescriptor.FromString(wire))
    assert back == PEER
    assert back.fingerprint.digest() == FINGERPRINT.digest()
    assert convert.fingerprint_from_pb(kv_pb2.KvFingerprint()).tp_degree == 1


def test_descriptors_of_nobody_or_nothing_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"descriptor\.worker_id"):
        convert.descriptor_from_pb(kv_pb2.PeerDescriptor(num_blocks=1, block_bytes=1))
    with pytest.raises(InvalidArgument, match="at least 1 block"):
        convert.descriptor_from_pb(kv_pb2.PeerDescriptor(worker_id="p"))


def test_block_counts_add_up() -> None:
    pb = convert.block_counts_to_pb({"free": 5, "used": 2, "leased": 1})
    assert (pb.free, pb.used, pb.cached, pb.leased, pb.quarantined, pb.total) == (5, 2, 0, 1, 0, 8)
    assert convert.block_counts_from_pb(pb) == {"free": 5, "used": 2, "cached": 0, "leased": 1, "quarantined": 0}
    with pytest.raises(AssertionError, match="total is 9"):
        convert.block_counts_to_pb({"free": 8, "total": 9})
    with pytest.raises(AssertionError, match="unknown block states"):
        convert.block_counts_to_pb({"fre": 8})
