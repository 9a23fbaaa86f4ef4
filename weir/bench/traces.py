"""Recorded arrivals and lengths: Azure's CSV and Mooncake's jsonl. Pure: lines come in, rows and faults go out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from weir.bench.plan import Prompt
from weir.bench.synthetic import Vocabulary
from weir.errors import InvalidArgument

AZURE_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_BLOCK_TOKENS = 512
MAX_TOKENS = 10_000_000
OWN_STREAM, SHARED_STREAM = 0, 1


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request: arrival in seconds on the trace's own clock, lengths, hashes of its 512-token blocks if known."""

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BadRow:
    """A line (from 1) that is not a request, and why."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class Trace:
    """What a file holds; ``rows`` are in order of arrival."""

    rows: tuple[TraceRow, ...]
    bad: tuple[BadRow, ...]


def read_trace(lines: Iterable[str]) -> Trace:
    """Recognises the format by the first line. InvalidArgument when it is neither."""
    numbered = enumerate(lines, start=1)
    first = next(numbered, (0, ""))[1].strip().lstrip("\ufeff")
    if tuple(first.split(",")) == AZURE_HEADER:
        return _read(numbered, _azure_row)
    if first.startswith("{"):
        return _read(_chain((1, first), numbered), _mooncake_row)
    raise InvalidArgument("--dataset-path", first, f"must begin with {','.join(AZURE_HEADER)} or be JSON lines")


def check_rows(trace: Trace, on_bad: str) -> None:
    """``on_bad`` refuse: raise InvalidArgument naming the first bad line; skip: nothing."""
    if trace.bad and on_bad == "refuse":
        bad = trace.bad[0]
        raise InvalidArgument("--dataset-path", f"line {bad.line}", f"{bad.reason} ({len(trace.bad)} bad rows)")


def trace_prompts(
    rows: Sequence[TraceRow], *, seed: int, vocabulary: Vocabulary, length_scale: float = 1.0, max_tokens: int = 0
) -> list[Prompt]:
    """A prompt for each row: equal hashes give equal tokens, so prefixes are shared as in the recording.

    The tokens of a hash depend on ``seed`` and the hash alone, those of a row without hashes on ``seed`` and its
    place. ``length_scale`` shortens all lengths (blocks too, so that sharing is kept). Rows of more than
    ``max_tokens`` together (0: no limit) are left out.
    """
    if not 0 < length_scale <= 1:
        raise InvalidArgument("--trace-length-scale", length_scale, "must lie in (0, 1]")
    block = max(1, round(MOONCAKE_BLOCK_TOKENS * length_scale))
    prompts = []
    for place, row in enumerate(rows):
        tokens, out = _scaled(row.input_tokens, length_scale), _scaled(row.output_tokens, length_scale)
        if max_tokens and tokens + out > max_tokens:
            continue
        ids = _shared(row.hash_ids, block, seed, vocabulary)[:tokens]
        if len(ids) < tokens:
            own = np.random.default_rng([seed, OWN_STREAM, place])
            ids += vocabulary.draw(tokens - len(ids), own)
        prompts.append(Prompt(out, ids, at_s=row.at_s))
    return prompts


def _shared(hash_ids: Sequence[int], block: int, seed: int, vocabulary: Vocabulary) -> tuple[int, ...]:
    ids: tuple[int, ...] = ()
    for hash_id in hash_ids:
        ids += vocabulary.draw(block, np.random.default_rng([seed, SHARED_STREAM, hash_id]))
    return ids


def _scaled(tokens: int, scale: float) -> int:
    return max(1, round(tokens * scale))


def _chain(first: tuple[int, str], rest: Iterable[tuple[int, str]]) -> Iterable[tuple[int, str]]:
    yield first
    yield from rest


def _read(numbered: Iterable[tuple[int, str]], parse: Callable[[str], TraceRow]) -> Trace:
    rows, bad = [], []
    for line, text in numbered:
        if not text.strip():
            continue
        try:
            rows.append(_checked(parse(text.strip())))
        except (ValueError, KeyError, TypeError) as error:
            reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
            bad.append(BadRow(line, reason))
    return Trace(tuple(sorted(rows, key=lambda row: row.at_s)), tuple(bad))


def _checked(row: TraceRow) -> TraceRow:
    for name, tokens in (("input", row.input_tokens), ("output", row.output_tokens)):
        if not 1 <= tokens <= MAX_TOKENS:
            raise ValueError(f"{tokens} {name} tokens: must lie between 1 and {MAX_TOKENS}")
    if not 0 <= row.at_s < 1e12:
        raise ValueError(f"time {row.at_s!r} is out of range")
    return row


def _azure_row(text: str) -> TraceRow:
    fields = text.split(",")
    if len(fields) != len(AZURE_HEADER):
        raise ValueError(f"{len(fields)} fields instead of {len(AZURE_HEADER)}")
    # Seven digits of a second, one more than fromisoformat is sure to take.
    moment, _, fraction = fields[0].partition(".")
    seconds = datetime.fromisoformat(moment + "+00:00").timestamp() + float(f"0.{fraction or 0}")
    return TraceRow(seconds, int(fields[1]), int(fields[2]))


def _mooncake_row(text: str) -> TraceRow:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    hashes = tuple(_whole(h, "hash_ids") for h in value.get("hash_ids", ()))
    lengths = _whole(value["input_length"], "input_length"), _whole(value["output_length"], "output_length")
    return TraceRow(float(value["timestamp"]) / 1e3, *lengths, hashes)


def _whole(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} {value!r} is not a whole number >= 0")
    return value
