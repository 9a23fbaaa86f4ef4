"""Datasets of text: ShareGPT's JSON and jsonl files of one's own. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from weir.bench.plan import Prompt
from weir.bench.traces import BadRow
from weir.errors import InvalidArgument

MIN_TOKENS = 4
MAX_PROMPT_TOKENS = 1024
MAX_TOGETHER = 2048

CountTokens = Callable[[str], int]


def sharegpt_prompts(
    document: Any, count: int, count_tokens: CountTokens, random: np.random.Generator, output_tokens: int | None = None
) -> list[Prompt]:
    """First turns of conversations, in random order, with the length of the answer that was given.

    Left out as in ``vllm bench serve``: fewer than 4 tokens on either side, prompts over 1,024, over 2,048 together.
    Raises InvalidArgument when the document is not ShareGPT's or has fewer than ``count`` of them.
    """
    if not isinstance(document, list):
        raise InvalidArgument("--dataset-path", type(document).__name__, "ShareGPT is a JSON array of conversations")
    prompts: list[Prompt] = []
    for place in random.permutation(len(document)).tolist():
        if len(prompts) == count:
            break
        entry = document[place]
        turns: list[Any] = entry.get("conversations", []) if isinstance(entry, dict) else []
        if len(turns) < 2:
            continue
        question, answer = str(turns[0].get("value", "")), str(turns[1].get("value", ""))
        n_in, n_out = count_tokens(question), output_tokens or count_tokens(answer)
        if n_in >= MIN_TOKENS and n_out >= MIN_TOKENS and n_in <= MAX_PROMPT_TOKENS and n_in + n_out <= MAX_TOGETHER:
            prompts.append(Prompt(n_out, text=question))
    if len(prompts) < count:
        raise InvalidArgument("--num-prompts", count, f"the file has {len(prompts)} usable conversations")
    return prompts


def custom_prompts(lines: Iterable[str], output_tokens: int) -> tuple[list[Prompt], list[BadRow]]:
    """JSON lines with ``prompt`` (text) or ``prompt_token_ids``, and ``output_tokens`` if it is not the default."""
    prompts, bad = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_custom(json.loads(line), output_tokens))
        except (ValueError, TypeError) as error:
            bad.append(BadRow(number, str(error)))
    return prompts, bad


def _custom(value: Any, output_tokens: int) -> Prompt:
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    tokens = value.get("output_tokens", output_tokens)
    if not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"output_tokens {tokens!r} is not a whole number >= 1")
    ids, text = value.get("prompt_token_ids"), value.get("prompt")
    if isinstance(ids, list) and ids and all(isinstance(i, int) for i in ids):
        return Prompt(tokens, tuple(ids))
    if isinstance(text, str) and text:
        return Prompt(tokens, text=text)
    raise ValueError("neither prompt (text) nor prompt_token_ids")
