"""What a worker says it can do: its stored profile, or a rough one from timing a few steps at its start."""

import logging
from dataclasses import replace
from pathlib import Path

import torch

from weir.balance.profile import Fit, Profile, profile_from_json
from weir.clock import Clock
from weir.config import WorkerConfig
from weir.config.folders import profile_path
from weir.engine.batch import Batch
from weir.errors import InvalidArgument, NotFound
from weir.rpc.v1 import events_pb2
from weir.services.worker.parts import WorkerParts

_log = logging.getLogger(__name__)

ROUGH_TOKENS = 64
ROUGH_STEPS = 3
ROUGH_READ = (1e-3, 0.5e-9)
"""Seconds, and seconds per byte (2 GB/s), of a KV read until some are observed."""
ROUGH_PER_SEQUENCE = 0.1
"""What one more sequence adds to a step, as a share of the step of one."""
ROUGH = "rough"


def with_profile(parts: WorkerParts, config: WorkerConfig, clock: Clock) -> WorkerParts:
    """``parts`` with the profile to publish. To be called after ``warm_up``, before the step thread starts.

    Raises InvalidArgument for a stored profile that is corrupt or another worker's, NotFound when one is required
    or named and there is none.
    """
    threads = torch.get_num_threads()
    profile = None if config.profile == "ignore" else stored_profile(parts, config, threads)
    if profile is None:
        profile = rough_profile(parts, clock, config.device, threads)
        _log.info("no profile is stored for this worker; a rough one is used until it is observed (weir profile)")
    return replace(parts, profile=profile)


def stored_profile(parts: WorkerParts, config: WorkerConfig, threads: int) -> Profile | None:
    """The profile kept for this fingerprint, device and number of threads. Raises as ``with_profile``."""
    fingerprint = parts.fingerprint.digest().hex()
    path = Path(config.profile_path) if config.profile_path else profile_path(fingerprint, config.device, threads)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if config.profile == "require" or config.profile_path:
            raise NotFound("profile", str(path)) from None
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument("worker.profile_path", str(path), f"must be a readable profile: {error}") from None
    profile = profile_from_json(text, source=str(path))
    for field, found, wanted in (
        ("fingerprint", profile.fingerprint, fingerprint),
        ("device", profile.device, config.device),
        ("threads", profile.threads, threads),
    ):
        if found != wanted:
            raise InvalidArgument(f"{path}.{field}", found, f"must be {wanted}, as this worker has it")
    return profile


def rough_profile(parts: WorkerParts, clock: Clock, device: str, threads: int) -> Profile | None:
    """A guess from one short prefill and a few decode steps, run past the engine; None when the pool is too small.

    The block manager knows nothing of it: what it leaves in the pool is not promised to anybody.
    """
    size = parts.blocks.block_size
    tokens = min(ROUGH_TOKENS, parts.context_tokens - 1, parts.pool.num_blocks * size - 1)
    if tokens < 1:
        return None
    prefill_s = _seconds(parts, clock, prefill_batch(0, tokens, size))
    step_s = min(_seconds(parts, clock, decode_batch(1, tokens + 1, size)) for _ in range(ROUGH_STEPS))
    return rough_fit(parts.fingerprint.digest().hex(), device, threads, tokens, prefill_s, step_s)


def _seconds(parts: WorkerParts, clock: Clock, batch: Batch) -> float:
    start_s = clock.monotonic_s()
    parts.runner.run(batch)
    return max(clock.monotonic_s() - start_s, 1e-6)


def prefill_batch(first: int, tokens: int, block_size: int) -> Batch:
    """One sequence computes positions [first, first + tokens), in the blocks from 0 on."""
    end = first + tokens
    table = list(range(-(-end // block_size)))
    positions = list(range(first, end))
    return Batch([1] * tokens, positions, positions, [tokens], [end], [table], [0], 0)


def decode_batch(batch: int, context: int, block_size: int) -> Batch:
    """``batch`` sequences of ``context`` tokens, each in blocks of its own, compute their last token."""
    per = -(-context // block_size)
    tables = [list(range(row * per, (row + 1) * per)) for row in range(batch)]
    last = context - 1
    slots = [table[last // block_size] * block_size + last % block_size for table in tables]
    rows = list(range(batch))
    return Batch([1] * batch, [last] * batch, slots, [1] * batch, [context] * batch, tables, rows, batch)


def rough_fit(fingerprint: str, device: str, threads: int, tokens: int, prefill_s: float, step_s: float) -> Profile:
    """A profile from one prefill of ``tokens`` and one step of a single sequence.

    A prefill cannot be faster than reading the weights once, which is what that step is.
    """
    per_token = max((prefill_s - step_s) / tokens, 0.01 * step_s)
    each = ROUGH_PER_SEQUENCE * step_s
    return Profile(
        fingerprint=fingerprint,
        device=device,
        threads=threads,
        prefill=Fit((step_s, per_token, 0.0), 0.0, 1.0, 1),
        step=Fit((step_s - each, each, 0.0), 0.0, 1.0, 1),
        read=Fit(ROUGH_READ, 0.0, 1.0, 0),
        notes={ROUGH: "from warm-up"},
    )


def profile_to_pb(profile: Profile) -> events_pb2.WorkerProfile:
    """As the registry entry carries it."""
    return events_pb2.WorkerProfile(
        prefill_s=profile.prefill.coefficients,
        step_s=profile.step.coefficients,
        read_s=profile.read.coefficients,
        rough=ROUGH in profile.notes,
        device=profile.device,
        threads=profile.threads,
    )
