"""Events, traffic, metrics, models, traces, the command."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import xml.etree.ElementTree
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.simulate.machines import SLO, WORKER
from tests.unit.simulate.shared import shared
from weir.balance.profile import Fit, Profile
from weir.bench.traces import TraceRow
from weir.cli.main import app
from weir.errors import InvalidArgument, NotFound
from weir.simulate import setup
from weir.simulate.events import EventQueue
from weir.simulate.metrics import Metrics
from weir.simulate.models import from_profile
from weir.simulate.splitwise import splitwise_fits, splitwise_model
from weir.simulate.traffic import Arrival, Phase, lengths, phases, sampled, varying

PROFILE = Profile(
    fingerprint="ab",
    device="cpu",
    threads=2,
    prefill=Fit((0.01, 1e-4, 1e-8), 1.0, 0.0, 9),
    step=Fit((0.02, 1e-3, 1e-6), 1.0, 0.0, 9),
    read=Fit((0.001, 1e-9), 1.0, 0.0, 9),
)
"""Round numbers."""


def test_events_keep_the_order_of_time_then_of_adding() -> None:
    queue = EventQueue()
    seen: list[str] = []
    for when_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (3.0, "d")):
        queue.at(when_s, seen.append, name)
    queue.run(2.5)
    assert (seen, queue.now_s, queue.next_s) == (["a", "b", "c"], 2.5, 3.0)
    with pytest.raises(AssertionError):
        queue.at(2.0, seen.append, "late")


def test_phases_follow_their_rates_and_means() -> None:
    arrivals = list(phases([Phase(500, 20, 1000, 100), Phase(500, 2, 50, 400)], 3))
    first = [one for one in arrivals if one.at_s < 500]
    second = [one for one in arrivals if one.at_s >= 500]
    assert len(first) / 500 == pytest.approx(20, rel=0.05)
    assert len(second) / 500 == pytest.approx(2, rel=0.1)
    assert statistics.fmean(one.prompt for one in first) == pytest.approx(1000, rel=0.03)
    assert statistics.fmean(one.output for one in second) == pytest.approx(400, rel=0.06)
    assert [one.at_s for one in arrivals] == sorted(one.at_s for one in arrivals)


def test_burstiness_is_the_inverse_square_of_the_cv() -> None:
    at_s = [one.at_s for one in sampled([(1, 1)], 10.0, 20_000, seed=1, burstiness=4.0)]
    gaps = [after - before for before, after in itertools.pairwise(at_s)]
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(0.5, rel=0.03)


def test_varying_rates_are_thinned() -> None:
    arrivals = list(varying(lambda now_s: 10.0 if now_s < 100 else 1.0, 10.0, 200, 10, 10, 5))
    assert sum(one.at_s < 100 for one in arrivals) == pytest.approx(1000, rel=0.1)
    assert sum(one.at_s >= 100 for one in arrivals) == pytest.approx(100, rel=0.3)


@pytest.mark.parametrize("bad", [{"seconds": 0}, {"rate": -1}, {"rate": math.nan}, {"isl": 0}, {"spread": -0.1}])
def test_bad_phases_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument):
        Phase(**({"seconds": 1.0, "rate": 1.0, "isl": 1.0, "osl": 1.0} | bad))


def test_metrics_by_hand() -> None:
    metrics = Metrics(SLO)
    metrics.arrived = 4
    metrics.finished(0.0, 1.0, 2.0, 101)  # TTFT 1, TPOT 0.01: good
    metrics.finished(0.0, 3.0, 4.0, 101)  # TTFT 3: late
    metrics.finished(5.0, 6.0, 11.0, 101)  # TPOT 0.05: slow
    metrics.gap(0.010, 90)
    metrics.gap(0.100, 10)
    summary = metrics.summary(10.0)
    assert (summary.finished, summary.attainment, summary.goodput, summary.throughput) == (3, 0.25, 0.1, 0.3)
    assert summary.itl_p50_s == pytest.approx(0.010, rel=0.05)
    assert summary.itl_p99_s == pytest.approx(0.100, rel=0.05)
    assert metrics.good_by_bucket(5.0, 10.0) == ([0.4, 0.2], [0.2, 0.0])
    assert Metrics(SLO, per_output=True).gap_quantile(0.5) == 0.0


def test_a_profile_becomes_a_worker() -> None:
    profile = PROFILE
    model = from_profile(profile, bytes_per_token=1000.0, kv_tokens=4096)
    assert model.prefill_s([(100, 50)]) == pytest.approx(profile.prefill_s(100, 50))
    assert model.step_s(4, 1000) == pytest.approx(profile.step_s(4, 1000))
    assert model.read_s(1e6) == pytest.approx(profile.read_s(1e6))
    assert model.profile().step.coefficients == profile.step.coefficients


def test_a_mixed_step_pays_one_constant() -> None:
    assert WORKER.mixed_s(3, 900, [(100, 20)]) == pytest.approx(
        WORKER.step_s(3, 900) + WORKER.prefill_s([(100, 20)]) - 0.005
    )


def test_splitwise_fits() -> None:
    folder = shared("splitwise_perf_model.csv")
    prefill, step = splitwise_fits(folder, "llama2-70b", "h100-80gb", 8)
    assert prefill.r_squared > 0.9
    assert step.r_squared > 0.96
    assert splitwise_model(folder).kv_tokens == int((8 * 80e9 * 0.9 - 138e9) / 327_680)
    with pytest.raises(InvalidArgument, match="not measured"):
        splitwise_fits(folder, "llama2-70b", "h100-80gb-pcap", 8)
    with pytest.raises(InvalidArgument, match="is not in the table"):
        splitwise_model(folder, "bloom-176b", tp=4)


def test_a_trace_is_stretched_and_repeated() -> None:
    rows = [TraceRow(100.0, 10, 1), TraceRow(101.0, 20, 2), TraceRow(104.0, 30, 3)]
    arrivals, seconds, count = setup.replayed(rows, rate=None, scale=2.0, requests=4, prefix_cache=False)
    assert list(arrivals) == [Arrival(0.0, 10, 1), Arrival(0.5, 20, 2), Arrival(2.0, 30, 3), Arrival(3.0, 10, 1)]
    assert (seconds, count) == (3.0, 4)
    at_rate, _, _ = setup.replayed(rows, rate=1.0, scale=1.0, requests=None, prefix_cache=False)
    assert [one.at_s for one in at_rate] == pytest.approx([0.0, 0.5, 2.0])


def test_a_shared_prefix_is_cached() -> None:
    rows = [TraceRow(0.0, 1100, 1, (1, 2, 3)), TraceRow(1.0, 1030, 1, (1, 2, 9)), TraceRow(2.0, 1024, 1, (1, 2))]
    arrivals, _, _ = setup.replayed(rows, rate=None, scale=1.0, requests=None, prefix_cache=True)
    assert [one.cached for one in arrivals] == [0, 1024, 1023]


def test_bad_rows_are_told_by_line_and_skipped_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    good = "2023-11-16 18:17:03.9799600,48,10"
    file.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{good}\nnonsense\n{good}\n2023-11-16 18:17:04.0,0,5\n")
    profile = ["--profile", str(write_profile(tmp_path))]
    runner = CliRunner()
    refused = runner.invoke(app, ["simulate", "--trace", str(file), *profile])
    assert "bad row line 3: 1 fields instead of 3" in refused.output
    assert "bad row line 5: 0 input tokens" in refused.output
    assert isinstance(refused.exception, InvalidArgument)
    assert "'line 3'" in str(refused.exception)
    skipped = runner.invoke(app, ["simulate", "--trace", str(file), "--on-bad-row", "skip", *profile])
    assert skipped.exit_code == 0, skipped.output
    assert "2 arrived, 2 finished" in skipped.output


def write_profile(folder: Path) -> Path:
    """PROFILE as a file."""
    path = folder / "profile.json"
    path.write_text(PROFILE.to_json())
    return path


def test_the_command_writes_json_and_a_plot(tmp_path: Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    options = ["--profile", str(write_profile(tmp_path)), "--seconds", "60", "--rate", "3", "--isl", "200"]
    files = ["--json", str(out), "--plot", str(plot)]
    wanted = ["--prefill", "2", "--decode", "2", "--controller", "auto", "--slo-ttft", "500", "--policy", "slo"]
    done = CliRunner().invoke(app, ["simulate", *options, *files, *wanted])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert found["roles"] == "2P+2D"
    assert found["slo"] == {"ttft_s": 0.5, "tpot_s": None}
    assert found["summary"]["arrived"] == found["summary"]["finished"] > 100
    assert len(found["workers"]) == 4
    assert found["roles_over_time"][0] == {"at_s": 0.0, "prefill": 2, "decode": 2, "mixed": 0}
    root = xml.etree.ElementTree.fromstring(plot.read_text())
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rate", "-3"], "--rate = -3.0: must be a finite number above 0"),
        (["--policy", "best"], "--policy = 'best': must be one of least-loaded, slo"),
        (["--controller", "maybe"], "--controller = 'maybe': must be off or auto"),
        (["--requests", "0"], "--requests = 0: must lie in"),
        (["--slo-ttft", "-5"], "ttft_s = -0.005: must be above 0"),
        (["--prefill", "3"], "workers = '3P': prefill and decode, or mixed ones"),
        (["--isl", "0"], "isl = 0.0: must be above 0"),
        (["--workers-max", "3"], "--workers-max = 3: needs --controller auto"),
        (["--workers-max", "1", "--controller", "auto"], "--workers-max = 1: at least the 2 at the start"),
        (["--trace", "nowhere.csv"], "trace 'nowhere.csv' not found"),
    ],
)
def test_bad_flags_are_named_before_anything_runs(flags: list[str], message: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["simulate", "--profile", str(write_profile(tmp_path)), *flags])
    assert isinstance(done.exception, InvalidArgument | NotFound), done.output
    assert message in str(done.exception)


def test_a_corrupt_profile_is_named(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text("{")
    done = CliRunner().invoke(app, ["simulate", "--profile", str(file)])
    assert isinstance(done.exception, InvalidArgument)
    assert "must be JSON" in str(done.exception)


def test_lengths_without_spread_are_the_mean() -> None:
    import numpy as np

    assert lengths(7.4, 0.0, 3, np.random.default_rng(0)) == [7, 7, 7]
