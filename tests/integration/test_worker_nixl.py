"""Two worker processes, a real model, KV read over NIXL; transformers says what the tokens must be."""

import asyncio
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.tiny_llama import VOCAB, greedy_reference, make_tiny_llama
from tests.integration.worker_rig import Pair, RemoteWorker, begin_decode, begin_prefill, cancel, prefill_session
from weir.rpc.channel import channel
from weir.rpc.v1 import common_pb2, decode_pb2, prefill_pb2
from weir.services.router.view import kv_bytes_per_token

nixl = pytest.importorskip("nixl")

START_S = 90.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("tiny-llama")
    return folder, make_tiny_llama(folder)


@asynccontextmanager
async def worker_process(role: str, folder: Path, *flags: str) -> AsyncIterator[tuple[RemoteWorker, Any]]:
    """A worker process; stopped by SIGTERM, and it must end well unless the test killed it."""
    argv = ["-m", f"weir.services.{role}", "--model", str(folder), "--nats", "none", "--threads", "1"]
    argv += ["--num-blocks", "128", "--worker-id", role, "--session-grace-s", "0.1", *flags]
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            words = (await process.stdout.readline()).decode().split()
        assert words[:4] == ["READY", "worker", role, role], words
        async with channel(words[4]) as opened:
            yield RemoteWorker(opened), process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            code = await process.wait()
    assert code in (0, -signal.SIGKILL)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1_000 + i).randrange(3, VOCAB) for i in range(length)]


def sampled(max_tokens: int, seed: int) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        max_tokens=max_tokens, temperature=0.9, top_k=40, top_p=0.95, seed=seed, ignore_eos=True
    )


async def local_tokens(pair: Pair, name: str, prompt: list[int], **fields: Any) -> list[int]:
    await pair.d.send(begin_decode(name, prompt, **fields))
    await pair.d.ended(name)
    return [t for m in pair.d.seen for b in m.tokens if b.request_id == name for t in b.token_ids]


async def test_handover_between_processes(model: tuple[Path, Any]) -> None:
    folder, reference = model
    chunked = ("--max-batch-tokens", "64")
    async with worker_process("prefill", folder, *chunked) as (p, _), worker_process("decode", folder) as (d, _):
        pair = Pair(p, d)
        pair.releases = True  # a notification is not sent for a last ticket that brings nothing to read
        await pair.open()
        for length in (1, 15, 16, 17, 48, 49, 200):
            prompt = prompt_of(length, seed=length)
            await pair.begin(f"g-{length}", prompt, 12)
            assert await pair.tokens(f"g-{length}") == greedy_reference(reference, prompt, 12), length
        # Together, with prefix hits on both sides, and seeded sampling: as if it all ran on one worker.
        base = prompt_of(64, seed=99)
        prompts = {f"s-{i}": base[: 16 * (i % 5)] + prompt_of(10 + i, seed=i) for i in range(12)}
        for i, (name, prompt) in enumerate(prompts.items()):
            await pair.begin(name, prompt, sampling=sampled(10, seed=i))
        got = {name: await pair.tokens(name) for name in prompts}
        for i, (name, prompt) in enumerate(prompts.items()):
            alone = await local_tokens(pair, f"l-{i}", prompt, sampling=sampled(10, seed=i), tenant_salt=b"%d" % i)
            assert got[name] == alone, name
        state = await d.state()
        assert set(state.transports) == {"prefill"}
        assert state.transports["prefill"].startswith("ucx")
        assert dict(state.void_reads) == {}
        external = state.prompt_tokens_by_source["external_kv_transfer"]
        assert external > 0
        # Whole blocks are read, perhaps some for a last token that is no prompt token of its own.
        token_bytes = kv_bytes_per_token(state.fingerprint)
        assert state.load.kv_read_bytes >= external * token_bytes
        assert state.load.kv_read_bytes % (state.fingerprint.block_size * token_bytes) == 0
        assert (await p.state()).load.kv_read_bytes == 0
        await p.at_baseline()
        await d.at_baseline()
        assert (await p.state()).leases_ended["read_proven"] >= 12
        await pair.close()


async def test_a_moved_request_continues(model: tuple[Path, Any]) -> None:
    """Another attempt is given the tokens that were sent already: it continues as if nothing had happened."""
    folder, _ = model
    async with worker_process("prefill", folder) as (p, _), worker_process("decode", folder) as (d, _):
        pair = await Pair(p, d).open()
        prompt, sampling = prompt_of(40), sampled(16, seed=5)
        whole = await local_tokens(pair, "whole", prompt, sampling=sampling)
        assert len(whole) == 16
        await pair.begin("moved", prompt, sampling=sampling, attempt=2, generated_token_ids=whole[:7])
        await pair.d.ended("moved", 2)
        first = await pair.p.expect(lambda m: next(iter(m.first_tokens), None))
        rest = [t for m in pair.d.seen for b in m.tokens if b.request_id == "moved" for t in b.token_ids]
        assert first.index == 7
        assert [first.token_id, *rest] == whole[7:]
        await p.at_baseline()
        await d.at_baseline()
        await pair.close()


async def test_cancel_and_a_killed_peer(model: tuple[Path, Any]) -> None:
    folder, reference = model
    async with worker_process("decode", folder) as (d, _):
        async with worker_process("prefill", folder, "--max-batch-tokens", "16", "--max-running", "16") as (p, process):
            pair = await Pair(p, d).open()
            for i in range(6):
                await pair.begin(f"c-{i}", prompt_of(300, seed=i))
            await pair.p.expect(lambda m: list(m.kv_ready))
            for i in range(6):
                await pair.p.send(cancel(prefill_pb2.PrefillServiceSessionRequest, f"c-{i}"))
                await pair.d.send(cancel(decode_pb2.DecodeServiceSessionRequest, f"c-{i}"))
            await p.at_baseline()
            await d.at_baseline()
            # Its KV waits under a lease when the owner dies; the read must end void, not hang.
            pair.hold_tickets = True
            await pair.begin("k", prompt_of(100))
            await pair.p.expect(lambda m: [f for f in m.first_tokens if f.request_id == "k"])
            process.kill()
            await process.wait()
            tickets = [t for t in pair.tickets if t.ticket.request_id == "k"]
            await pair.d.send(decode_pb2.DecodeServiceSessionRequest(kv_ready=tickets))
            void = await pair.d.expect(lambda m: next((k for k in m.kv_reads if k.request_id == "k"), None))
            assert void.void_reason in ("transport", "timeout")
            await pair.d.send(cancel(decode_pb2.DecodeServiceSessionRequest, "k"))
            await d.at_baseline()
            await pair.close()
        # The decode worker is as good as before, and takes a worker of the same name that comes back.
        async with worker_process("prefill", folder) as (p, _):
            pair = await Pair(p, d).open()
            prompt = prompt_of(50, seed=8)
            await pair.begin("again", prompt, 6)
            assert await pair.tokens("again") == greedy_reference(reference, prompt, 6)
            await p.at_baseline()
            await d.at_baseline()
            await pair.close()


async def test_memory_does_not_grow_with_the_number_of_prompt_lengths(model: tuple[Path, Any]) -> None:
    folder, _ = model
    async with worker_process("prefill", folder) as (p, _):
        session = await prefill_session(p)
        resident = []
        for first in (1, 120, 240):
            for length in range(first, first + 120):
                await session.send(begin_prefill(f"r-{length}", prompt_of(length), max_tokens=1))
            for length in range(first, first + 120):
                assert (await session.ended(f"r-{length}")).code == "OK"
            resident.append((await p.state()).rss_bytes)
        assert resident[2] - resident[1] < 30 << 20, resident
        await p.at_baseline()
        await session.close()


async def test_wrong_settings_are_said() -> None:
    argv = ["-m", "weir.services.worker", "--model", "/nowhere", "--nats", "none"]
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, stderr=asyncio.subprocess.PIPE)
    _, stderr = await process.communicate()
    assert process.returncode == 1
    assert b"/nowhere" in stderr
    assert b"Traceback" not in stderr
