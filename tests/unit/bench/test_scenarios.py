from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from weir.bench.checklist import Finding, LinkFigures, checklist, reasons
from weir.bench.goodput import Slo, parse_goodput
from weir.bench.growth import Reading, growth
from weir.bench.metrics import latencies_ms, summarise
from weir.bench.records import RequestRecord
from weir.bench.report import render_report
from weir.bench.scenarios import SCENARIOS, Scenario, choose_scenarios, judge_split, make_traffic
from weir.bench.svg import Series, cdf, plot
from weir.bench.synthetic import Vocabulary
from weir.errors import InvalidArgument

VOCABULARY = Vocabulary(200, 1000)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_traffic_is_the_same_for_everybody_and_ends_in_time(scenario: Scenario) -> None:
    one, same = (make_traffic(scenario, 40.0, 1.0, 7, VOCABULARY) for _ in range(2))
    assert one == same
    assert list(one.arrivals_s) == sorted(one.arrivals_s)
    for flow in scenario.flows:
        mine = [p for p in one.prompts if p.kind == flow.kind]
        assert len(mine) == round(flow.rate_per_s * 40)
        assert {(len(p.token_ids), p.output_tokens) for p in mine} == {(flow.input_tokens, flow.output_tokens)}
    # The times are scaled to an exact rate, which may put the last one a fraction of a gap beyond the end.
    assert one.arrivals_s[-1] <= 40.0 + 0.5 / min(f.rate_per_s for f in scenario.flows)
    assert len({p.token_ids for p in one.prompts}) == len(one.prompts), "no prompt comes twice"


def test_scenarios_share_no_prompt() -> None:
    seen = [
        p.token_ids for s in SCENARIOS for scale in (1.0, 2.0) for p in make_traffic(s, 9, scale, 1, VOCABULARY).prompts
    ]
    assert len(set(seen)) == len(seen)


def test_choosing_scenarios() -> None:
    assert [s.name for s in choose_scenarios([])] == [
        "steady", "burst", "long-prompt", "decode-heavy", "worker-loss", "network-degradation",
    ]  # fmt: skip
    assert [s.name for s in choose_scenarios(["burst", "steady"])] == ["steady", "burst"]
    with pytest.raises(InvalidArgument, match="worker-loss"):
        choose_scenarios(["nothing"])


def figures(goodput: float, itl_ms: float = 50.0, ttft_ms: float = 100.0) -> dict[str, float]:
    return {"request_goodput": goodput, "p99_itl_ms": itl_ms, "p99_ttft_ms": ttft_ms}


def test_verdicts() -> None:
    long_prompt, decode_heavy = (choose_scenarios([name])[0] for name in ("long-prompt", "decode-heavy"))
    won = judge_split(long_prompt, figures(1.5, 25.0, 300.0), figures(1.0))
    assert (won.outcome, won.goodput_ratio, won.itl_p99_ratio, won.ttft_p99_ratio) == ("win", 1.5, 0.5, 3.0)
    assert won.text.startswith(
        "win: goodput 1.50 against 1.00 requests/s, ITL p99 × 0.50, TTFT p99 × 3.00 (as expected). A long prefill"
    )
    assert "(theory said lose)" in judge_split(decode_heavy, figures(1.5), figures(1.0)).text
    assert judge_split(decode_heavy, figures(0.5), figures(1.0)).outcome == "lose"
    assert judge_split(long_prompt, figures(1.05), figures(1.0)).outcome == "draw"
    assert judge_split(long_prompt, figures(0.1), figures(0.0)).outcome == "win"
    assert judge_split(long_prompt, figures(0.0), figures(0.0)).outcome == "undecided"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_each_scenario_promises_both_latencies(scenario: Scenario) -> None:
    slo = parse_goodput(scenario.objectives)
    assert slo is not None
    assert 0 < slo.tpot_ms < slo.ttft_ms < float("inf")


def measured(
    ttft_p90: float, tpot_p90: float, itl_p50: float = 30.0, itl_p99: float = 40.0, failed: int = 0
) -> dict[str, float]:
    return {
        "p90_ttft_ms": ttft_p90, "p90_tpot_ms": tpot_p90, "median_itl_ms": itl_p50, "p99_itl_ms": itl_p99,
        "failed": failed,
    }  # fmt: skip


def said(findings: list[Finding]) -> list[str]:
    return [finding.speaks_for for finding in findings]


def test_the_checklist_says_what_speaks_for_which_layout() -> None:
    slo = Slo(ttft_ms=8000.0, tpot_ms=42.0)
    won = checklist(slo, measured(3000.0, 33.0), measured(2000.0, 55.0, itl_p99=900.0))
    assert said(won) == ["split", "split", "neither", "split"]
    assert won[1].answer == "ITL p99 is 30.0 × its median (900 and 30 ms)"
    assert won[3].answer == "TPOT p90 33 ms split, 55 ms mixed (promised 42)"
    lost = checklist(slo, measured(9000.0, 60.0, failed=1), measured(100.0, 41.0))
    assert said(lost) == ["split", "mixed", "mixed", "mixed", "mixed"]
    assert lost[-1].answer == "1 failed split, 0 mixed"
    assert reasons("lose", lost) == (
        " Measured: ITL p99 is 1.3 × its median (40 and 30 ms); TTFT p90 9,000 ms split, 100 ms mixed (promised 8,000);"
        " TPOT p90 60 ms split, 41 ms mixed (promised 42); 1 failed split, 0 mixed."
    )
    assert reasons("draw", lost) == ""
    open_ended = checklist(Slo(), measured(1.0, 1.0), measured(2.0, 2.0, itl_p50=0.0))
    assert said(open_ended) == ["mixed", "mixed", "neither", "neither"]


def test_a_link_that_carries_less_than_is_made_speaks_for_mixed() -> None:
    both = measured(1.0, 1.0), measured(1.0, 1.0)
    link = LinkFigures(12.5, 12.1, read_mb_s=12.0, made_mb_s=36.9, transport="ucx:tcp")
    finding = checklist(Slo(), *both, link)[-1]
    assert finding.answer == "KV is made at 36.9 MB/s and read at 12.0 (ucx:tcp)"
    assert finding.speaks_for == "mixed"
    assert checklist(Slo(), *both, LinkFigures(125.0, 120.0, 110.0, 36.9, "ucx:tcp"))[-1].speaks_for == "neither"


def test_a_cdf_ends_at_one_and_is_thinned() -> None:
    assert cdf([3.0, 1.0]) == [(1.0, 0.5), (3.0, 1.0)]
    many = cdf([float(i) for i in range(10_000)])
    assert len(many) <= 402
    assert many[-1] == (9999.0, 1.0)


def test_a_plot_is_well_formed_and_escapes_names() -> None:
    root = ElementTree.fromstring(
        plot(
            "a < b",
            [Series("x & y", [(0.0, 0.0), (10.0, 5.0)]), Series("flat", [(1.0, 2.0)])],
            x_label="ms",
            log_x=True,
        )
    )
    assert [line.get("points") for line in root.iter("polyline")][1] is not None
    assert "x & y" in [text.text for text in root.iter("text")]
    assert plot("nothing", [], x_label="ms") == "<p>nothing: no samples</p>"


def run(layout: str) -> dict[str, object]:
    record = RequestRecord(0, "chat", 0.0, 0.0, 0.0, 0.4, (0.1, 0.2, 0.4), 10, 3)
    lost = RequestRecord(1, "chat", 0.0, 0.0, 0.0, 0.4, (), 10, 0, error="UNAVAILABLE")
    summary = summarise([record, lost], 1.0, slo=Slo(ttft_ms=500.0))
    summary["generator"] = {"verdict": ""}
    point = {"at_s": 0.0, "waiting": 1, "running": 2, "leased_blocks": 3}
    return {
        "layout": layout,
        "rate_scale": 1.0,
        "offered_per_s": 1.0,
        "figures": summary,
        "samples_ms": latencies_ms([record]),
        "timeline": [point, {**point, "at_s": 1.0}],
    }


def test_the_report_stands_alone() -> None:
    flow = {"kind": "chat", "rate_per_s": 1.0, "input_tokens": 5, "output_tokens": 3, "burstiness": 1.0}
    scenario = {
        "name": "steady",
        "flows": [flow],
        "runs": [run("<split>"), run("mixed")],
        "verdict": {"outcome": "draw", "text": "draw: A & B"},
    }
    page = render_report({"title": "T", "setup": {"cores": 2}, "scenarios": [scenario]})
    assert "draw: A &amp; B" in page
    assert "&lt;split&gt;" in page
    assert "<split>" not in page
    assert "1 × UNAVAILABLE" in page
    assert page.count("<svg") == 4, "two CDFs, two timelines"
    assert re.search(r"<script|https?://|src=", page) is None
    assert "1.00 (1 of 2)" in page, "goodput, and of how many"
    assert "kept its schedule in all of the 2 runs" in page


def test_the_report_says_first_what_cannot_be_believed_and_what_was_not_run() -> None:
    late: dict[str, Any] = run("mixed")
    late["figures"]["generator"] = {"verdict": "the load generator was a bottleneck: it used 97 % of a core"}
    scenario = {
        "name": "steady",
        "flows": [],
        "objectives": ["ttft:8000", "tpot:42"],
        "link": "link limited to 12.5 MB/s",
        "runs": [run("split"), late],
        "verdict": {"outcome": "lose", "text": "lose: x"},
        "checklist": [{"question": "Is a TPOT promised?", "answer": "42 ms", "speaks_for": "split"}],
    }
    left_out = {"network-degradation": "needs root"}
    page = render_report({"title": "T", "setup": {}, "scenarios": [scenario], "left_out": left_out})
    notice = "The load generator was a bottleneck in 1 of 2 runs: steady / mixed."
    assert page.index(notice) < page.index("Goodput")
    assert "it used 97 % of a core" in page
    assert '<td>network-degradation</td><td class="text">not run: needs root</td>' in page
    for part in ("link limited to 12.5 MB/s", "ttft:8000, tpot:42", "Is a TPOT promised?"):
        assert part in page


def test_growth_is_the_slope_after_what_fills_up_once() -> None:
    readings = [Reading(n, 1000 + min(n, 50) * 100 + 3 * n, 20) for n in range(0, 110, 10)]
    grown = growth(readings)
    assert grown.bytes_per_request == pytest.approx(3.0)
    assert (grown.rss_first, grown.rss_last, grown.files_first, grown.files_last) == (1000, 6300, 20, 20)


@pytest.mark.parametrize(
    ("low", "high", "log", "labels"),
    [
        (0.0, 103.0, False, ["0", "20", "40", "60", "80", "100"]),
        (0.0, 1.0, False, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (0.0, 0.0, False, ["0"]),
        (105.0, 4621.0, True, ["200", "500", "1,000", "2,000"]),
        (1.0, 1e5, True, ["1", "10", "100", "1,000", "10,000", "100,000"]),
        (3.0, 4.0, True, ["3", "4"]),
    ],
)
def test_axes_are_marked_at_round_values(low: float, high: float, log: bool, labels: list[str]) -> None:
    svg = plot("t", [Series("", [(low, 0.0), (high, 0.0)])], x_label="", log_x=log)
    marks = [text.text for text in ElementTree.fromstring(svg).iter("text") if text.get("text-anchor") == "middle"]
    assert marks == labels
