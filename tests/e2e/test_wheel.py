"""What is installed from the wheel works away from the clone: everything is in it, under one import name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.e2e.conftest import TAG, tagged_processes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from the sdist, which is made from the clone: both are checked."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(out.glob("*.tar.gz"))) == 1
    return next(out.glob("*.whl"))


def test_the_wheel_holds_kernels_and_services_under_weir(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"weir/kernels/reference.py", "weir/services/router/book.py", "weir/py.typed"} <= names
    assert {name.split("/")[0] for name in names} == {"weir", "weir-0.1.0.dist-info"}


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """The python of a fresh environment with the wheel; third-party packages are borrowed from this one."""
    folder = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    zipfile.ZipFile(wheel).extractall(site)
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "bin" / "python"


def test_weir_up_runs_from_the_wheel(installed: Path, demo_model: Path, tmp_path: Path, tag: str) -> None:
    where = [str(installed), "-c", "import weir; print(weir.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert found.startswith(str(tmp_path)), found
    command = [
        str(installed),
        "-u",
        "-m",
        "weir.cli.main",
        "up",
        "--model",
        str(demo_model),
        "--http",
        "0",
        "--grpc",
        "0",
    ]
    command += ["--prefill", "1", "--decode", "1", "--logs", str(tmp_path / "logs")]
    process = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, TAG: tag, "TERM": "dumb"}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("ready:"):
            break
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130, "".join(lines) + rest
    assert any(line.startswith("ready:") for line in lines), "".join(lines)
    assert tagged_processes(tag) == []
