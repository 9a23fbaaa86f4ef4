"""Bad tickets given to a real decode worker that reads over NIXL: each is void, and counted under its reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.faults.tiny import TinyLlama, prompt_of
from tests.integration.test_worker_nixl import worker_process
from tests.integration.worker_rig import Pair, RemoteWorker, begin_decode, begin_prefill, cancel
from weir.rpc.v1 import decode_pb2, kv_pb2, prefill_pb2

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
D = decode_pb2.DecodeServiceSessionRequest
P = prefill_pb2.PrefillServiceSessionRequest
TOKENS = 300
PROMPT = 100


def wrong_worker(ticket: kv_pb2.KvTicket) -> None:
    ticket.source_worker_id = "somebody"


def wrong_incarnation(ticket: kv_pb2.KvTicket) -> None:
    ticket.source_incarnation += 1


def fingerprint(ticket: kv_pb2.KvTicket) -> None:
    ticket.fingerprint_digest = b"another model, 1"


def lease_expired(ticket: kv_pb2.KvTicket) -> None:
    ticket.deadline_unix_s = 1.0


def out_of_range(ticket: kv_pb2.KvTicket) -> None:
    ticket.blocks[1] = 1 << 20


def malformed(ticket: kv_pb2.KvTicket) -> None:
    ticket.num_tokens += 100


def altered(ticket: kv_pb2.KvTicket) -> None:
    ticket.blocks[0], ticket.blocks[1] = ticket.blocks[1], ticket.blocks[0]


BEFORE_READING: list[Callable[[kv_pb2.KvTicket], None]] = [
    wrong_worker, wrong_incarnation, fingerprint, lease_expired, out_of_range, malformed, altered,
]  # fmt: skip


async def voids(worker: RemoteWorker) -> dict[str, int]:
    """Void reads so far, by reason."""
    return dict((await worker.state()).void_reads)


async def test_each_bad_ticket_is_void_for_its_reason(tiny: TinyLlama) -> None:
    flags = ("--num-blocks", "40")
    async with (
        worker_process("prefill", tiny.folder, *flags) as (p, _),
        worker_process("decode", tiny.folder) as (d, _),
    ):
        pair = await Pair(p, d).open()
        await _before_reading(pair, d, tiny)
        await _stale(pair, d)
        await _used_twice(pair, d, tiny)
        await p.at_baseline()
        await d.at_baseline()
        await pair.close()


async def _begun(pair: Pair, name: str, prompt: list[int], max_tokens: int) -> list[prefill_pb2.KvReady]:
    """Both legs begun, the prompt prefilled, its tickets kept back."""
    pair.hold_tickets = True
    await pair.d.send(begin_decode(name, prompt, max_tokens, pair.source))
    await pair.p.send(begin_prefill(name, prompt, max_tokens))
    await pair.p.expect(lambda m: any(made.request_id == name for made in m.first_tokens))
    return [ready for m in pair.p.seen for ready in m.kv_ready if ready.ticket.request_id == name]


async def _before_reading(pair: Pair, d: RemoteWorker, tiny: TinyLlama) -> None:
    """Seven tickets that are refused as they come; then the true one, and the tokens are right."""
    prompt = prompt_of(PROMPT, 300)
    tickets = await _begun(pair, "bad", prompt, 8)
    for spoil in BEFORE_READING:
        bad = prefill_pb2.KvReady()
        bad.CopyFrom(tickets[-1])
        spoil(bad.ticket)
        await pair.d.send(D(kv_ready=[bad]))
    await pair.d.send(D(kv_ready=tickets))
    assert tuple(await pair.tokens("bad")) == tiny.greedy(prompt, 8)
    assert await voids(d) == {spoil.__name__: 1 for spoil in BEFORE_READING}


async def _stale(pair: Pair, d: RemoteWorker) -> None:
    """The lease was ended and the blocks went to other prompts before the ticket is used."""
    tickets = await _begun(pair, "stale", prompt_of(PROMPT, 301), 8)
    await pair.p.send(cancel(P, "stale"))
    for number in range(12):
        await pair.p.send(begin_prefill(f"churn-{number}", prompt_of(PROMPT, 310 + number), 1))
        await pair.p.ended(f"churn-{number}")
    await pair.d.send(D(kv_ready=tickets))
    void = await pair.d.expect(lambda m: next((k for k in m.kv_reads if k.request_id == "stale"), None))
    assert void.void_reason == "generation"
    await pair.d.send(cancel(D, "stale"))
    assert (await pair.d.ended("stale")).code == "CANCELLED"


async def _used_twice(pair: Pair, d: RemoteWorker, tiny: TinyLlama) -> None:
    """The same ticket again while its sequence decodes, and once more when it is over: nothing comes of it."""
    prompt = prompt_of(PROMPT, 302)
    tickets = await _begun(pair, "twice", prompt, TOKENS)
    await pair.d.send(D(kv_ready=tickets))
    await pair.d.expect(lambda m: any(k.request_id == "twice" and not k.void_reason for k in m.kv_reads))
    await pair.d.send(D(kv_ready=tickets))
    assert tuple(await pair.tokens("twice")) == tiny.greedy(prompt, len(await pair.tokens("twice")))
    await pair.d.send(D(kv_ready=tickets))
    assert (await voids(d))["already_used"] == len(tickets)
