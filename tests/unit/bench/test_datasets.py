from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from weir.bench.synthetic import Vocabulary, random_prompts
from weir.bench.texts import custom_prompts, sharegpt_prompts
from weir.bench.traces import BadRow, TraceRow, check_rows, read_trace, trace_prompts
from weir.errors import InvalidArgument

VOCABULARY = Vocabulary(200, 1000)
TRACES = Path(__file__).parents[4] / "shared" / "traces"


def test_random_prompts_have_the_lengths_and_the_prefix_asked_for() -> None:
    made = random_prompts(
        200,
        input_tokens=10,
        output_tokens=4,
        range_ratio=0.5,
        prefix_tokens=3,
        vocabulary=VOCABULARY,
        random=np.random.default_rng(1),
    )
    assert len({p.token_ids[:3] for p in made}) == 1
    assert {len(p.token_ids) - 3 for p in made} == set(range(5, 16))
    assert {p.output_tokens for p in made} == {2, 3, 4, 5, 6}
    assert all(200 <= i < 1000 for p in made for i in p.token_ids)
    assert len({p.token_ids for p in made}) == 200


def test_random_prompts_depend_on_the_seed_alone() -> None:
    def make(seed: int) -> list[tuple[int, ...]]:
        prompts = random_prompts(
            3,
            input_tokens=8,
            output_tokens=1,
            range_ratio=0.0,
            prefix_tokens=0,
            vocabulary=VOCABULARY,
            random=np.random.default_rng(seed),
        )
        assert [len(p.token_ids) for p in prompts] == [8, 8, 8]
        return [p.token_ids for p in prompts]

    assert make(1) == make(1) != make(2)


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:47.6805901,x,109
2023-11-16 18:15:47.1805900,5,0
yesterday,5,1

2023-11-16 18:15:48.1805900,10,2
"""


def test_azure_rows_and_the_lines_of_bad_ones() -> None:
    trace = read_trace(AZURE.splitlines())
    start_s = trace.rows[0].at_s
    assert [(round(r.at_s - start_s, 6), r.input_tokens, r.output_tokens) for r in trace.rows] == [
        (0.0, 374, 44),
        (1.5, 10, 2),
    ]
    assert [bad.line for bad in trace.bad] == [3, 4, 5]
    assert trace.bad[1].reason == "0 output tokens: must lie between 1 and 10000000"
    check_rows(trace, "skip")
    with pytest.raises(InvalidArgument, match=r"line 3.*3 bad rows"):
        check_rows(trace, "refuse")


def test_mooncake_rows_and_the_lines_of_bad_ones() -> None:
    lines = [
        '{"timestamp": 1500, "input_length": 700, "output_length": 5, "hash_ids": [0, 9]}',
        '{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [0, 1]}',
        '{"timestamp": 0, "input_length": 600}',
        "{",
        '{"timestamp": 0, "input_length": 1.5, "output_length": 2}',
    ]
    trace = read_trace(lines)
    assert trace.rows == (TraceRow(0.0, 600, 2, (0, 1)), TraceRow(1.5, 700, 5, (0, 9)))
    assert [bad.line for bad in trace.bad] == [3, 4, 5]
    assert trace.bad[0] == BadRow(3, "output_length is missing")


def test_a_file_of_neither_kind_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="TIMESTAMP"):
        read_trace(["a,b,c"])
    with pytest.raises(InvalidArgument):
        read_trace([])


def test_equal_hashes_give_equal_prefixes_and_nothing_else_is_shared() -> None:
    rows = [TraceRow(0, 1024, 1, (4, 5)), TraceRow(1, 1000, 1, (4, 6)), TraceRow(2, 520, 1, (5,)), TraceRow(3, 8, 1)]
    a, b, c, d = (p.token_ids for p in trace_prompts(rows, seed=1, vocabulary=VOCABULARY))
    assert [len(a), len(b), len(c), len(d)] == [1024, 1000, 520, 8]
    assert a[:512] == b[:512]
    assert a[512:1000] != b[512:]
    assert c[:512] == a[512:], "the tokens of a hash do not depend on where it stands"
    assert (a, b) == tuple(p.token_ids for p in trace_prompts(rows[:2], seed=1, vocabulary=VOCABULARY))
    assert a != trace_prompts(rows, seed=2, vocabulary=VOCABULARY)[0].token_ids


def test_a_trace_can_be_shortened_and_its_longest_rows_left_out() -> None:
    rows = [TraceRow(0, 1024, 100, (4, 5)), TraceRow(1, 1000, 3, (4, 6)), TraceRow(2, 5000, 1)]
    made = trace_prompts(rows, seed=1, vocabulary=VOCABULARY, length_scale=0.125, max_tokens=200)
    assert [(len(p.token_ids), p.output_tokens, p.at_s) for p in made] == [(128, 12, 0), (125, 1, 1)]
    assert made[0].token_ids[:64] == made[1].token_ids[:64], "sharing is kept"
    assert made[0].token_ids[64:125] != made[1].token_ids[64:]


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("AzureLLMInferenceTrace_conv.csv", 19_366),
        ("AzureLLMInferenceTrace_code.csv", 8_819),
        ("mooncake_conversation_trace.jsonl", 12_031),
    ],
)
def test_published_traces_are_read_whole(name: str, rows: int) -> None:
    path = TRACES / name
    if not path.is_file():
        pytest.skip(f"{name} is not here")
    with path.open(encoding="utf-8") as lines:
        trace = read_trace(lines)
    assert trace.bad == ()
    assert len(trace.rows) == rows


def test_sharegpt_takes_first_turns_of_usable_length() -> None:
    def talk(*texts: str) -> dict[str, object]:
        return {"conversations": [{"from": "x", "value": text} for text in texts]}

    document = [talk("one two three four", "a b c d e"), talk("too short", "a b c d"), talk("alone for ever and ever")]
    made = sharegpt_prompts(document, 1, lambda text: len(text.split()), np.random.default_rng(0))
    assert [(p.text, p.output_tokens) for p in made] == [("one two three four", 5)]
    with pytest.raises(InvalidArgument, match="1 usable"):
        sharegpt_prompts(document, 2, lambda text: len(text.split()), np.random.default_rng(0))
    with pytest.raises(InvalidArgument, match="JSON array"):
        sharegpt_prompts({}, 1, len, np.random.default_rng(0))


def test_custom_lines() -> None:
    lines = [
        json.dumps({"prompt": "hello"}),
        json.dumps({"prompt_token_ids": [1, 2], "output_tokens": 3}),
        "",
        json.dumps({"prompt": ""}),
        "[]",
        json.dumps({"prompt": "x", "output_tokens": 0}),
    ]
    prompts, bad = custom_prompts(lines, 7)
    assert [(p.text, p.token_ids, p.output_tokens) for p in prompts] == [("hello", (), 7), ("", (1, 2), 3)]
    assert [b.line for b in bad] == [4, 5, 6]
