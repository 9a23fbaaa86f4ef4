"""A real Prometheus on the repository's own configuration, with the addresses of a cluster under test."""

from __future__ import annotations

import asyncio
import shutil
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml  # type: ignore[import-untyped, unused-ignore]

COMPOSE = Path(__file__).resolve().parents[2] / "deploy" / "compose"
CONFIG = COMPOSE / "prometheus"
needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="needs prometheus and promtool"
)


class Prometheus:
    """Its HTTP API."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """(labels, value) of each sample now. Raises AssertionError with Prometheus' words when it does not answer."""
        answer = (await self._http.get("/api/v1/query", params={"query": expr})).json()
        assert answer["status"] == "success", f"{expr}: {answer}"
        assert not answer.get("warnings"), f"{expr}: {answer['warnings']}"
        return [(sample["metric"], float(sample["value"][1])) for sample in answer["data"]["result"]]

    async def value(self, expr: str) -> float:
        """The value of the one sample; none, or several, are an error."""
        found = await self.query(expr)
        assert len(found) == 1, f"{expr}: {found}"
        return found[0][1]

    async def get(self, what: str) -> Any:
        """``data`` of another endpoint, e.g. ``rules``."""
        answer = (await self._http.get(f"/api/v1/{what}")).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    async def scraped(self, wanted: int, since_unix_s: float, timeout_s: float = 30.0) -> None:
        """Wait until each of ``wanted`` targets is up and was scraped after ``since_unix_s``."""
        fresh: list[Any] = []
        async with asyncio.timeout(timeout_s):
            while len(fresh) < wanted:
                found = await self.query(f'up{{job=~"weir-.*"}} == 1 and timestamp(up) > {since_unix_s:.3f}')
                fresh = found
                await asyncio.sleep(0.1)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def configured(targets: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The repository's configuration, scraping ``targets`` (addresses by job) once a second."""
    config: dict[str, Any] = yaml.safe_load((CONFIG / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(CONFIG / name) for name in config["rule_files"]]
    assert {job["job_name"] for job in config["scrape_configs"]} == set(targets)
    for job in config["scrape_configs"]:
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": list(targets[job["job_name"]])}]
    return config


@asynccontextmanager
async def prometheus(folder: Path, targets: Mapping[str, Sequence[str]]) -> AsyncIterator[Prometheus]:
    """Run it; when this returns it answers and has scraped every target once."""
    folder.mkdir()
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configured(targets)))
    port = free_port()
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            "prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}", stdout=log, stderr=log,
        )  # fmt: skip
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            await _ready(http, process, folder / "log")
            server = Prometheus(http)
            await server.scraped(sum(len(addresses) for addresses in targets.values()), time.time() - 60)
            yield server
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _ready(http: httpx.AsyncClient, process: asyncio.subprocess.Process, log: Path) -> None:
    async with asyncio.timeout(60):
        while process.returncode is None:
            try:
                if (await http.get("/-/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)
    raise AssertionError(f"prometheus ended:\n{log.read_text()[-3000:]}")
