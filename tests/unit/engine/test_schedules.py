"""Random schedules of two engines with tiny pools: whatever happens, tokens are exact and nothing is left.

Any action may come at any time, so that reads finish after cancels, first tokens come late or twice, leases end
before the KV was read, and preemption hits at every point. A failure names its seed; ``Schedule(seed).run()``
replays it.
"""

import dataclasses
import random

import pytest

from tests.unit.engine.fake_model import EMPTY, Harness, logits_after, make_prompt, make_request
from tests.unit.engine.handover import copy_kv
from tests.unit.engine.reference import generate
from weir.engine.request import EngineRequest, Mode
from weir.engine.sampling import SamplingParams
from weir.errors import DeadlineExceeded, InternalError, WeirError
from weir.ids import RequestKey
from weir.lifecycle import FinishReason

BLOCK = 4
ACTIONS = 150


class Schedule:
    """P prefills and holds; D decodes, local or remote. A read is open between its start and its end."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.p = self._make_harness()
        self.d = self._make_harness()
        self.requests: dict[RequestKey, EngineRequest] = {}
        self.open_reads: dict[RequestKey, tuple[int, ...]] = {}
        self.cached: dict[RequestKey, int] = {}
        self.proven: dict[RequestKey, int] = {}

    def _make_harness(self) -> Harness:
        return Harness(
            num_blocks=self.rng.randint(10, 20),
            block_size=BLOCK,
            prefix_cache=self.rng.random() < 0.8,
            max_batch_tokens=self.rng.randint(5, 20),
            max_running=self.rng.randint(2, 5),
            max_waiting=6,
            watermark=self.rng.choice([0.0, 0.1]),
        )

    def run(self) -> None:
        actions = [
            (self.add, 5),
            (self.step_p, 10),
            (self.step_d, 10),
            (self.start_reading, 8),
            (self.prove, 10),
            (self.end_reading, 4),
            (self.bring_first_token, 8),
            (self.cancel, 1),
            (self.end_lease, 1),
            (self.recompute, 1),
            (self.break_model, 0.2),
        ]
        for _ in range(ACTIONS):
            self.rng.choices([act for act, _ in actions], [weight for _, weight in actions])[0]()
        self.come_to_rest()
        self.check_tokens()

    # -- actions ----------------------------------------------------------------------------------------

    def add(self) -> None:
        rng = self.rng
        seeded = rng.random() < 0.5
        params = SamplingParams(
            max_tokens=rng.randint(1, 14),
            temperature=0.8 if seeded else 0.0,
            seed=rng.randint(0, 5) if seeded else None,
            presence_penalty=0.3 if seeded else 0.0,
            ignore_eos=rng.random() < 0.5,
        )
        prompt = make_prompt(rng.randint(1, 26), seed=rng.randint(0, 2))
        name, priority = f"r{len(self.requests)}", rng.randint(0, 1)
        deadline_s = self.d.clock.monotonic_s() + 0.03 * rng.random() if rng.random() < 0.1 else None
        base = make_request(name, prompt, sampling=params, priority=priority, deadline_s=deadline_s)
        remote = rng.random() < 0.6
        request = dataclasses.replace(base, mode=Mode.REMOTE if remote else Mode.LOCAL)
        try:
            # A mixed worker: local sequences compete with held KV on P too.
            (self.d if remote or rng.random() < 0.7 else self.p).add(request)
            self.requests[request.key] = request
            if remote:
                self.p.add(dataclasses.replace(base, mode=Mode.PREFILL))
        except WeirError:
            pass  # a full queue or a pool too small; without P the remote one is recomputed in the end

    def step_p(self) -> None:
        self.p.step()

    def step_d(self) -> None:
        self.d.step()

    def start_reading(self) -> None:
        key = self._some_remote()
        if key is not None and self.d.engine.reads_started(key):
            started = self.d.seen[key].started[-1]
            self.open_reads[key] = started.block_table[started.cached_tokens // BLOCK :]
            self.cached[key] = started.cached_tokens

    def prove(self) -> None:
        key = self._some(list(self.open_reads))
        there = self.p.seen.get(key) if key is not None else None
        if key is None or there is None or there.finished or not self._promised(key):
            return
        context = self.requests[key].context_len
        ready = context if there.prefilled else min(len(there.sealed) * BLOCK, context)
        before = max(self.proven.get(key, 0), self.cached[key])
        if ready > before and self.d.engine.reads_started(key):
            copy_kv(self.p, self.d, key, ready, first_token=before)
            assert self.d.engine.kv_arrived(key, ready)
            self.proven[key] = ready

    def end_reading(self) -> None:
        key = self._some(list(self.open_reads))
        if key is not None:
            self._end_reading(key)

    def bring_first_token(self) -> None:
        key = self._some_remote()
        there = self.p.seen.get(key) if key is not None else None
        if key is not None and there is not None and there.tokens:
            self.d.engine.first_token(key, there.tokens[0])

    def cancel(self) -> None:
        key = self._some(list(self.requests))
        if key is not None:
            self.rng.choice([self.p, self.d]).engine.cancel(key)

    def end_lease(self) -> None:
        key = self._some(list(self.requests))
        if key is not None:
            self.p.engine.release_kv(key)

    def recompute(self) -> None:
        key = self._some_remote()
        if key is not None:
            self.d.engine.recompute(key)

    def break_model(self) -> None:
        self.rng.choice([self.p, self.d]).runner.fail_next = True

    # -- inside -----------------------------------------------------------------------------------------

    def _some(self, keys: list[RequestKey]) -> RequestKey | None:
        return self.rng.choice(keys) if keys else None

    def _some_remote(self) -> RequestKey | None:
        """A REMOTE request that D has not finished, admitted or not."""
        keys = [key for key, request in self.requests.items() if request.mode is Mode.REMOTE]
        return self._some([key for key in keys if self.d.seen[key].finished is None])

    def _promised(self, key: RequestKey) -> bool:
        sealed = self.p.seen[key].sealed.values()
        return bool(sealed) and all(self.p.blocks.generation(block) == promise for block, promise in sealed)

    def _end_reading(self, key: RequestKey) -> None:
        """What has not been proven lands now, as rubbish, wherever it was aimed at when the read began."""
        blocks, cached = self.open_reads.pop(key), self.cached[key]
        for position in range(max(self.proven.get(key, 0), cached), self.requests[key].context_len):
            offset = position - cached
            self.d.runner.pool[blocks[offset // BLOCK] * BLOCK + offset % BLOCK] = EMPTY
        self.d.engine.reads_done(key)

    # -- the end ----------------------------------------------------------------------------------------

    def come_to_rest(self) -> None:
        """End every lease and read; then both engines must get everything done by themselves."""
        for _ in range(3000):
            for key in list(self.open_reads):
                self._end_reading(key)
            for key in self.requests:
                self.d.engine.recompute(key)
                self.p.engine.release_kv(key)
            if not (self.p.engine.has_work() or self.d.engine.has_work()):
                break
            self.p.step()
            self.d.step()
        self.p.assert_idle()
        self.d.assert_idle()

    def check_tokens(self) -> None:
        for key, request in self.requests.items():
            reference = generate(logits_after, request)
            for harness in (self.p, self.d):
                seen = harness.seen.get(key)
                if seen is None:
                    continue
                first = seen.first_index or 0
                assert seen.tokens == reference[first : first + len(seen.tokens)], key
                if harness is self.p and request.mode is Mode.REMOTE:
                    continue
                assert seen.finished is not None, key
                if seen.finished.reason in (FinishReason.STOP, FinishReason.LENGTH):
                    assert seen.finished.usage.completion == len(reference), key
                elif seen.finished.reason is FinishReason.ERROR:
                    assert isinstance(seen.finished.error, DeadlineExceeded | InternalError)
                else:
                    assert seen.finished.reason is FinishReason.CANCELLED


@pytest.mark.parametrize("first_seed", range(0, 200, 25))
def test_any_schedule_gives_exact_tokens_and_leaves_nothing(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 25):
        try:
            Schedule(seed).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
