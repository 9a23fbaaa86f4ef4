"""Protobuf to domain objects and back; the only file that sees both.

What comes from a peer is checked for shape here (lists of equal length, known enum values) and for meaning
where it is used (``check_sampling``, ``check_ticket``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from weir.engine.sampling import SamplingParams
from weir.errors import InvalidArgument, KvReadVoid
from weir.ids import RequestKey, WorkerKey
from weir.lifecycle import FinishReason, RequestState, Role
from weir.rpc.v1 import common_pb2, kv_pb2
from weir.transfer.fingerprint import Fingerprint
from weir.transfer.ticket import MAX_TICKET_BLOCKS, BlockRef, PeerDescriptor, Ticket, VoidReason

V = TypeVar("V")

_ROLES: dict[Role, common_pb2.Role] = {
    Role.PREFILL: common_pb2.ROLE_PREFILL,
    Role.DECODE: common_pb2.ROLE_DECODE,
    Role.MIXED: common_pb2.ROLE_MIXED,
}

_STATES: dict[RequestState, common_pb2.RequestState] = {
    state: getattr(common_pb2, f"REQUEST_STATE_{state.name}") for state in RequestState
}

_FINISH_REASONS: dict[FinishReason, common_pb2.FinishReason] = {
    reason: getattr(common_pb2, f"FINISH_REASON_{reason.name}") for reason in FinishReason
}


def _inverse(table: Mapping[V, int]) -> dict[int, V]:
    return {value: key for key, value in table.items()}


_ROLES_BACK = _inverse(_ROLES)
_STATES_BACK = _inverse(_STATES)
_FINISH_REASONS_BACK = _inverse(_FINISH_REASONS)


def role_to_pb(role: Role) -> common_pb2.Role:
    """The wire value of ``role``."""
    return _ROLES[role]


def role_from_pb(value: int, field: str = "role") -> Role:
    """The role; InvalidArgument naming ``field`` when unset or unknown."""
    return _looked_up(_ROLES_BACK, value, field)


def state_to_pb(state: RequestState) -> common_pb2.RequestState:
    """The wire value of ``state``."""
    return _STATES[state]


def state_from_pb(value: int) -> RequestState:
    """The state; InvalidArgument when unset or unknown."""
    return _looked_up(_STATES_BACK, value, "state")


def finish_to_pb(reason: FinishReason | None) -> common_pb2.FinishReason:
    """The wire value of ``reason``; None is UNSPECIFIED (not finished)."""
    return common_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_REASONS[reason]


def finish_from_pb(value: int) -> FinishReason | None:
    """The reason; None when unset; InvalidArgument when unknown."""
    if value == common_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    return _looked_up(_FINISH_REASONS_BACK, value, "finish_reason")


def _looked_up(table: Mapping[int, V], value: int, field: str) -> V:
    found = table.get(value)
    if found is None:
        names = ", ".join(str(getattr(member, "value", member)) for member in table.values())
        raise InvalidArgument(field, value, f"must be set to one of {names}")
    return found


def sampling_to_pb(params: SamplingParams) -> common_pb2.SamplingParams:
    """``params`` with every optional field set that has a value."""
    return common_pb2.SamplingParams(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=dict(params.logit_bias),
        seed=params.seed,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        include_stop=params.include_stop,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
    )


def sampling_from_pb(pb: common_pb2.SamplingParams, *, default_max_tokens: int) -> SamplingParams:
    """The parameters, absent fields at their defaults. Not checked: call ``check_sampling`` on the result."""

    def given(name: str, default: V) -> V:
        return getattr(pb, name) if pb.HasField(name) else default

    return SamplingParams(
        max_tokens=given("max_tokens", default_max_tokens),
        min_tokens=pb.min_tokens,
        temperature=given("temperature", 1.0),
        top_k=pb.top_k,
        top_p=given("top_p", 1.0),
        min_p=pb.min_p,
        presence_penalty=pb.presence_penalty,
        frequency_penalty=pb.frequency_penalty,
        repetition_penalty=given("repetition_penalty", 1.0),
        logit_bias=dict(pb.logit_bias),
        seed=given("seed", None),
        stop=tuple(pb.stop),
        stop_token_ids=tuple(pb.stop_token_ids),
        include_stop=pb.include_stop,
        ignore_eos=pb.ignore_eos,
        logprobs=given("logprobs", None),
    )


def fingerprint_to_pb(fingerprint: Fingerprint) -> kv_pb2.KvFingerprint:
    """All fields of ``fingerprint``."""
    return kv_pb2.KvFingerprint(
        weights=fingerprint.weights,
        architecture=fingerprint.architecture,
        dtype=fingerprint.dtype,
        kv_dtype=fingerprint.kv_dtype,
        layers=fingerprint.layers,
        kv_heads=fingerprint.kv_heads,
        head_dim=fingerprint.head_dim,
        block_size=fingerprint.block_size,
        layout_version=fingerprint.layout_version,
        tokenizer=fingerprint.tokenizer,
        adapter=fingerprint.adapter,
        rope=fingerprint.rope,
        tp_degree=fingerprint.tp_degree,
    )


def fingerprint_from_pb(pb: kv_pb2.KvFingerprint) -> Fingerprint:
    """The fingerprint; a ``tp_degree`` that is absent is 1."""
    return Fingerprint(
        weights=pb.weights,
        architecture=pb.architecture,
        dtype=pb.dtype,
        kv_dtype=pb.kv_dtype,
        layers=pb.layers,
        kv_heads=pb.kv_heads,
        head_dim=pb.head_dim,
        block_size=pb.block_size,
        layout_version=pb.layout_version,
        tokenizer=pb.tokenizer,
        adapter=pb.adapter,
        rope=pb.rope,
        tp_degree=pb.tp_degree or 1,
    )


def descriptor_to_pb(peer: PeerDescriptor) -> kv_pb2.PeerDescriptor:
    """All fields of ``peer``."""
    return kv_pb2.PeerDescriptor(
        worker_id=peer.worker.worker_id,
        incarnation=peer.worker.incarnation,
        fingerprint=fingerprint_to_pb(peer.fingerprint),
        agent_metadata=peer.agent_metadata,
        memory=peer.memory,
        device_id=peer.device_id,
        pool_base=peer.pool_base,
        block_bytes=peer.block_bytes,
        num_blocks=peer.num_blocks,
        guard_base=peer.guard_base,
        host_id=peer.host_id,
    )


def descriptor_from_pb(pb: kv_pb2.PeerDescriptor) -> PeerDescriptor:
    """The peer; InvalidArgument when it names no worker or no memory."""
    if not pb.worker_id:
        raise InvalidArgument("descriptor.worker_id", pb.worker_id, "must be set")
    if pb.num_blocks < 1 or pb.block_bytes < 1:
        raise InvalidArgument("descriptor.num_blocks", pb.num_blocks, "must describe at least 1 block")
    return PeerDescriptor(
        worker=WorkerKey(pb.worker_id, pb.incarnation),
        fingerprint=fingerprint_from_pb(pb.fingerprint),
        agent_metadata=pb.agent_metadata,
        memory=pb.memory,
        device_id=pb.device_id,
        pool_base=pb.pool_base,
        block_bytes=pb.block_bytes,
        num_blocks=pb.num_blocks,
        guard_base=pb.guard_base,
        host_id=pb.host_id,
    )


def ticket_to_pb(ticket: Ticket) -> kv_pb2.KvTicket:
    """All fields of ``ticket``."""
    return kv_pb2.KvTicket(
        request_id=ticket.key.request_id,
        attempt=ticket.key.attempt,
        lease_id=ticket.lease_id,
        source_worker_id=ticket.source.worker_id,
        source_incarnation=ticket.source.incarnation,
        fingerprint_digest=ticket.fingerprint_digest,
        first_block=ticket.first_block,
        blocks=[ref.block for ref in ticket.blocks],
        generations=[ref.generation for ref in ticket.blocks],
        num_tokens=ticket.num_tokens,
        final=ticket.final,
        deadline_unix_s=ticket.deadline_unix_s,
        seal=ticket.seal,
    )


def ticket_from_pb(pb: kv_pb2.KvTicket) -> Ticket:
    """The ticket; KvReadVoid (malformed) when its shape is nonsense. Its promise is checked by ``check_ticket``."""
    _check_ticket_shape(pb)
    return Ticket(
        key=RequestKey(pb.request_id, pb.attempt),
        lease_id=pb.lease_id,
        source=WorkerKey(pb.source_worker_id, pb.source_incarnation),
        fingerprint_digest=pb.fingerprint_digest,
        first_block=pb.first_block,
        blocks=tuple(map(BlockRef, pb.blocks, pb.generations)),
        num_tokens=pb.num_tokens,
        final=pb.final,
        deadline_unix_s=pb.deadline_unix_s,
        seal=pb.seal,
    )


def _check_ticket_shape(pb: kv_pb2.KvTicket) -> None:
    if not pb.request_id or not pb.source_worker_id:
        _malformed("request_id and source_worker_id must be set")
    if len(pb.blocks) != len(pb.generations):
        _malformed(f"{len(pb.blocks)} blocks, {len(pb.generations)} generations")
    if not 0 < len(pb.blocks) <= MAX_TICKET_BLOCKS:
        _malformed(f"{len(pb.blocks)} blocks; 1 to {MAX_TICKET_BLOCKS} are allowed")
    if not pb.deadline_unix_s > 0:
        _malformed(f"deadline {pb.deadline_unix_s}")


def _malformed(detail: str) -> None:
    raise KvReadVoid(VoidReason.MALFORMED.value, detail)


def block_counts_to_pb(counts: Mapping[str, int]) -> common_pb2.BlockCounts:
    """``counts`` by state name (free, used, cached, leased, quarantined; absent is 0) and their sum as total."""
    known = {state: counts.get(state, 0) for state in _BLOCK_STATES}
    unknown = counts.keys() - known.keys() - {"total"}
    assert not unknown, f"unknown block states {sorted(unknown)}"
    total = sum(known.values())
    assert counts.get("total", total) == total, f"states add up to {total}, total is {counts['total']}"
    return common_pb2.BlockCounts(**known, total=total)


_BLOCK_STATES = ("free", "used", "cached", "leased", "quarantined")


def block_counts_from_pb(pb: common_pb2.BlockCounts) -> dict[str, int]:
    """The counts by state name, without the total."""
    return {state: int(getattr(pb, state)) for state in _BLOCK_STATES}
