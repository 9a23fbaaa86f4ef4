"""``weir demo`` as a person runs it: the answer, the timeline, Ctrl-C, and nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import TAG, tagged_processes
from tests.e2e.test_serving import ANSWER

COMMAND = [sys.executable, "-u", "-m", "weir.cli.main", "demo"]


def environment(tag: str) -> dict[str, str]:
    return {**os.environ, TAG: tag, "COLUMNS": "140", "TERM": "dumb"}


def test_demo_answers_and_leaves_nothing(demo_model: Path, tag: str) -> None:
    done = subprocess.run(
        COMMAND,
        env=environment(tag),
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ANSWER in done.stdout
    for word in ("queue", "prefill", "first token", "KV read:", "GB/s", "exposed", "decode", "TTFT", "TPOT"):
        assert word in done.stdout, word
    assert done.stderr == ""
    assert tagged_processes(tag) == []


@pytest.mark.parametrize("moment", ["starting", "router ", "prefill ", "user ", "planets"])
def test_interrupt_is_clean(demo_model: Path, tag: str, moment: str) -> None:
    process = subprocess.Popen(
        COMMAND, env=environment(tag), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if moment in line:
            break
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert "Traceback" not in out + err
    assert tagged_processes(tag) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["up", "--prefil", "2"], "--prefill"),
        (["up", "--prefill", "1", "--decode", "0"], "--decode"),
        (["demo", "--model", "/does/not/exist"], "--model"),
        (["chat", "hi", "--router", "127.0.0.1:1"], "127.0.0.1:1"),
        (["role", "w", "janitor"], "prefill, decode, mixed"),
        (["nonsense"], "nonsense"),
    ],
)
def test_wrong_input_gets_a_useful_line(arguments: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "weir.cli.main", *arguments],
        capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "200", "TERM": "dumb"}, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "up",
        "demo",
        "generate",
        "chat",
        "workers",
        "role",
        "doctor",
        "profile",
        "model",
        "health",
        "top",
        "trace",
        "simulate",
        "balance",
        "decisions",
    ],
)
def test_every_command_has_help_with_an_example(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "weir.cli.main", command, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert f"Example: weir {command}" in done.stdout
