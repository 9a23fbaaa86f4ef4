"""Flags: a command line of ``vllm bench serve`` means the same here."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from weir.bench.cancels import CancelSample
from weir.bench.checklist import LinkFigures
from weir.bench.plan import Target
from weir.cli import bench_serve
from weir.cli.bench_cancel import cancel_figures
from weir.cli.bench_layouts import External, parse_external
from weir.cli.bench_matrix import MatrixOptions, MatrixRunner, goodput_table, link_line
from weir.cli.bench_serve import DatasetOptions, ServeOptions, load_dataset, make_plan
from weir.cli.main import app
from weir.clock import ManualClock
from weir.errors import FailedPrecondition, InvalidArgument

VLLM_LINE = (
    "bench serve --backend openai --base-url http://127.0.0.1:8100 --model m --dataset-name random"
    " --random-input-len 48 --random-output-len 8 --random-range-ratio 0.25 --random-prefix-len 16 --num-prompts 6"
    " --request-rate inf --burstiness 0.5 --max-concurrency 4 --ignore-eos --seed 7 --temperature 0.5 --num-warmups 2"
    " --goodput ttft:200 tpot:50 --percentile-metrics ttft,itl --metric-percentiles 50,99 --save-result"
    " --result-dir out --result-filename x.json --metadata a=b --disable-tqdm"
)


def parsed(line: str, monkeypatch: pytest.MonkeyPatch) -> ServeOptions:
    seen: list[ServeOptions] = []

    async def capture(_: Any, options: ServeOptions) -> None:
        seen.append(options)

    monkeypatch.setattr(bench_serve, "run_bench_serve", capture)
    result = CliRunner().invoke(app, shlex.split(line), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen[0]


def test_a_command_line_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parsed(VLLM_LINE, monkeypatch)
    assert options.target == Target("openai", "http://127.0.0.1:8100", "m")
    assert options.goodput == ("ttft:200", "tpot:50")
    assert (options.burstiness, options.max_concurrency, options.ignore_eos) == (0.5, 4, True)
    assert (options.save, options.save_detailed, options.quiet, options.metadata) == (True, False, True, ("a=b",))
    dataset = load_dataset(options.dataset, as_text=False)
    assert (len(dataset.prompts), len(dataset.warmups)) == (6, 2)
    assert all(16 + 36 <= len(p.token_ids) <= 16 + 60 for p in dataset.prompts)
    plan = make_plan(options, dataset)
    assert (plan.arrivals_s, plan.seed, plan.temperature) == ((0.0,) * 6, 7, 0.5)


def test_goodput_may_be_given_word_by_word(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parsed("bench serve --goodput ttft:200 --goodput tpot:50", monkeypatch)
    assert options.goodput == ("ttft:200", "tpot:50")
    assert options.target == Target("weir", "127.0.0.1:7600")
    with pytest.raises(InvalidArgument, match="not known"):
        CliRunner().invoke(app, ["bench", "serve", "stray"], catch_exceptions=False)


def test_another_rate_changes_arrivals_but_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = (parsed(f"bench serve --num-prompts 5 --request-rate {rate}", monkeypatch) for rate in (1, 2))
    plans = [make_plan(options, load_dataset(options.dataset, as_text=False)) for options in (slow, fast)]
    assert plans[0].prompts == plans[1].prompts
    assert plans[0].arrivals_s == pytest.approx([2 * t for t in plans[1].arrivals_s])


@pytest.mark.parametrize("name", ["sharegpt", "trace", "custom"])
def test_a_dataset_without_its_file_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"--dataset-path|--tokenizer"):
        load_dataset(DatasetOptions(name=name), as_text=False)


def test_running_systems() -> None:
    text = "vLLM 1P1D=vllm-pd:http://127.0.0.1:8100,http://127.0.0.1:8200"
    target = Target("vllm-pd", "http://127.0.0.1:8100,http://127.0.0.1:8200", "m")
    assert parse_external(text, "m") == External("vLLM 1P1D", target)
    for wrong in ("vLLM", "x=http://a", "x=openai:", "=openai:http://a"):
        with pytest.raises(InvalidArgument, match="--external"):
            parse_external(wrong, "m")


def matrix(scenarios: tuple[str, ...], obstacle: str, goodput: tuple[str, ...] = ()) -> MatrixRunner:
    options = MatrixOptions(Path("m"), scenarios, 1.0, (1.0,), goodput, 0, Path("out"))
    return MatrixRunner(Console(quiet=True), options, ManualClock(), obstacle)


def test_a_link_that_cannot_be_limited_is_refused_by_name_and_else_left_out() -> None:
    with pytest.raises(FailedPrecondition, match="scenario network-degradation: needs root"):
        matrix(("steady", "network-degradation"), "needs root")
    assert "network-degradation" in matrix((), "").runs
    assert list(matrix((), "needs root").runs) == ["steady", "burst", "long-prompt", "decode-heavy", "worker-loss"]
    with pytest.raises(InvalidArgument, match="--goodput"):
        matrix((), "", ("ttft:soon",))


def test_goodput_of_all_systems_in_one_table() -> None:
    def run(layout: str, rate: float) -> dict[str, Any]:
        return {"layout": layout, "figures": {"request_goodput": rate}}

    long_prompt = {"name": "long-prompt", "runs": [run("split", 0.5), run("split", 0.9), run("vLLM", 0.25)]}
    table = goodput_table({"scenarios": [long_prompt, {"name": "burst", "runs": [run("split", 0.125)]}]})
    assert [column.header for column in table.columns] == ["scenario", "split", "vLLM"]
    assert [list(column.cells) for column in table.columns] == [
        ["long-prompt", "burst"],
        ["0.50", "0.12"],
        ["0.25", "-"],
    ]


def test_what_was_measured_of_a_link_in_words() -> None:
    assert link_line(LinkFigures(12.5, 12.04)) == (
        "link limited to 12.5 MB/s: a TCP stream measured 12.0 MB/s; no KV was read"
    )
    assert link_line(LinkFigures(12.5, 12.04, 11.96, 36.9, "ucx:tcp")).endswith(
        "a KV read by ucx:tcp 12.0 MB/s, while prefill alone makes 36.9 MB/s"
    )


def test_cancels_are_grouped_by_phase_and_way() -> None:
    samples = [CancelSample(1.0, float(ms), tokens, by) for ms, tokens, by in
               ((10, 0, "leave"), (30, 0, "call"), (5, 1, "leave"), (7, 9, "call"))]  # fmt: skip
    figures = cancel_figures(samples)
    assert {name: group["count"] for name, group in figures.items()} == {
        "all": 4, "prefill": 2, "by leave": 2, "by call": 2, "hand-over": 1, "decode": 1,
    }  # fmt: skip
    assert figures["prefill"] == {"count": 2, "p50_ms": 20.0, "p99_ms": pytest.approx(29.8), "max_ms": 30.0}
