"""Which profile a worker publishes: the stored one of its fingerprint, device and threads, or a rough one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from tests.unit.worker.pool_model import make_parts
from weir.balance.profile import Fit, Profile
from weir.clock import SystemClock
from weir.config import WorkerConfig
from weir.errors import InvalidArgument, NotFound
from weir.services.worker.parts import WorkerParts
from weir.services.worker.profile import profile_to_pb, rough_fit, with_profile


@pytest.fixture
def parts() -> WorkerParts:
    return make_parts(WorkerConfig(num_blocks=32, max_batch_tokens=64), SystemClock())[0]


def stored(parts: WorkerParts, **changes: object) -> Profile:
    profile = Profile(
        fingerprint=parts.fingerprint.digest().hex(),
        device="cpu",
        threads=torch.get_num_threads(),
        prefill=Fit((0.01, 0.001, 1e-8), 0.99, 0.05, 10),
        step=Fit((0.02, 0.002, 1e-7), 0.98, 0.06, 9),
        read=Fit((0.001, 1e-9), 0.97, 0.07, 7),
    )
    return dataclasses.replace(profile, **changes)  # type: ignore[arg-type]


def config(path: Path | str = "", mode: str = "auto") -> WorkerConfig:
    return WorkerConfig(profile=mode, profile_path=str(path))


def test_a_stored_profile_is_published(parts: WorkerParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIR_CACHE", str(tmp_path))
    profile = stored(parts)
    folder = tmp_path / "profiles"
    folder.mkdir()
    (folder / f"{profile.fingerprint}-cpu-{profile.threads}.json").write_text(profile.to_json())
    found = with_profile(parts, config(mode="require"), SystemClock())
    assert found.profile == profile
    message = profile_to_pb(profile)
    assert (tuple(message.prefill_s), tuple(message.step_s)) == ((0.01, 0.001, 1e-8), (0.02, 0.002, 1e-7))
    assert (tuple(message.read_s), message.rough) == ((0.001, 1e-9), False)


def test_without_one_a_rough_profile_is_made_unless_one_is_required(
    parts: WorkerParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIR_CACHE", str(tmp_path))
    before = parts.blocks.counts()
    found = with_profile(parts, config(), SystemClock()).profile
    assert found is not None
    assert profile_to_pb(found).rough
    assert found.prefill_s(64) > 0
    assert parts.blocks.counts() == before
    with pytest.raises(NotFound, match="profile"):
        with_profile(parts, config(mode="require"), SystemClock())
    with pytest.raises(NotFound, match=r"absent\.json"):
        with_profile(parts, config(tmp_path / "absent.json"), SystemClock())


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"fingerprint": "00"}, "fingerprint"),
        ({"device": "cuda"}, "device"),
        ({"threads": 999}, "threads"),
    ],
)
def test_another_workers_profile_is_refused(
    parts: WorkerParts, tmp_path: Path, change: dict[str, object], what: str
) -> None:
    path = tmp_path / "p.json"
    path.write_text(stored(parts, **change).to_json())
    with pytest.raises(InvalidArgument, match=what):
        with_profile(parts, config(path), SystemClock())
    assert with_profile(parts, config(path, "ignore"), SystemClock()).profile is not None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda raw: "{not json",
        lambda raw: json.dumps({**raw, "version": 9}),
        lambda raw: json.dumps({**raw, "prefill": {**raw["prefill"], "coefficients": [1.0, -1.0, 0.0]}}),
        lambda raw: json.dumps({**raw, "step": {**raw["step"], "coefficients": [float("nan"), 1.0, 0.0]}}),
        lambda raw: json.dumps({key: value for key, value in raw.items() if key != "read"}),
    ],
)
def test_a_corrupt_profile_is_a_named_error(parts: WorkerParts, tmp_path: Path, spoil: object) -> None:
    path = tmp_path / "corrupt.json"
    raw = json.loads(stored(parts).to_json())
    path.write_text(spoil(raw))  # type: ignore[operator]
    with pytest.raises(InvalidArgument, match=r"corrupt\.json"):
        with_profile(parts, config(path), SystemClock())


def test_a_rough_prefill_is_never_faster_than_the_weights_are_read() -> None:
    profile = rough_fit("aa", "cpu", 1, 64, 0.1, 0.05)
    assert profile.prefill_s(64) == pytest.approx(0.1)
    assert profile.step_s(1, 0) == pytest.approx(0.05)
    assert rough_fit("aa", "cpu", 1, 64, 0.01, 0.05).prefill_s(64) > 0.05
