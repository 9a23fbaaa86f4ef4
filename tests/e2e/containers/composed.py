"""deploy/compose/compose.yaml as a running project, with the compose command that this machine has."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

import docker
from docker.models.containers import Container

from tests.e2e.containers.images import COMPOSE, Images

STOP_S = 5


def compose_command() -> list[str] | None:
    """``docker compose`` (v2) or ``docker-compose`` (1.29), whichever is here."""
    if shutil.which("docker"):
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        if plugin.returncode == 0:
            return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else None


def free_port() -> int:
    """A port that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Composed:
    """One project. Its containers can be reached from this machine by their own addresses too."""

    engine: docker.DockerClient
    project: str
    environ: dict[str, str]
    files: tuple[Path, ...] = (COMPOSE / "compose.yaml",)

    @classmethod
    def of(cls, engine: docker.DockerClient, project: str, images: Images, *overlays: str) -> Composed:
        """With free ports, one thread and little memory a worker."""
        settings = {
            "WEIR_GRPC_PORT": str(free_port()),
            "WEIR_HTTP_PORT": str(free_port()),
            "WEIR_IMAGE_CONTROL": images.control,
            "WEIR_IMAGE_WORKER": images.worker,
            "WEIR_IMAGE_NATS": images.nats,
            "WEIR_WORKER_THREADS": "1",
            "WEIR_WORKER_KV_MEMORY_MB": "256",
            "WEIR_HEALTH_INTERVAL": "60s",
        }
        files = (COMPOSE / "compose.yaml", *(COMPOSE / name for name in overlays))
        return cls(engine, project, {**os.environ, **settings}, files)

    @property
    def router_address(self) -> str:
        """gRPC, as published on this machine."""
        return f"127.0.0.1:{self.environ['WEIR_GRPC_PORT']}"

    @property
    def http_address(self) -> str:
        """OpenAI's API, as published on this machine."""
        return f"127.0.0.1:{self.environ['WEIR_HTTP_PORT']}"

    def compose(self, *arguments: str) -> str:
        """Run the compose command; returns what it printed."""
        command = compose_command()
        assert command is not None
        named = [part for file in self.files for part in ("-f", str(file))]
        done = subprocess.run(
            [*command, "-p", self.project, *named, *arguments],
            env=self.environ, cwd=COMPOSE, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"compose {' '.join(arguments)}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def up(self, *, prefill: int, decode: int) -> None:
        """Start what is missing, in these numbers."""
        self.compose("up", "-d", "--no-build", "--scale", f"prefill={prefill}", "--scale", f"decode={decode}")

    def down(self) -> None:
        """Remove containers, network and volumes."""
        self.compose("down", "--volumes", "--timeout", str(STOP_S))

    def containers(self, service: str) -> list[Container]:
        """Running containers of ``service``, by number."""
        labels = [f"com.docker.compose.project={self.project}", f"com.docker.compose.service={service}"]
        found: list[Container] = self.engine.containers.list(filters={"label": labels})
        return sorted(found, key=lambda container: str(container.name))

    def address_of(self, container: Container) -> str:
        """The container's own address on the project's network."""
        container.reload()
        networks = container.attrs["NetworkSettings"]["Networks"]
        return str(networks[self.network]["IPAddress"])

    @property
    def network(self) -> str:
        """Name of the project's network."""
        return f"{self.project}_default"

    def container_at(self, address: str) -> Container:
        """The worker's container that announces ``address`` (host:port)."""
        host = address.rpartition(":")[0]
        for container in (*self.containers("prefill"), *self.containers("decode")):
            if self.address_of(container) == host:
                return container
        raise AssertionError(f"no container has the address {host}")

    def logs(self) -> str:
        """The end of each container's log, for a failure's message."""
        labels = {"label": f"com.docker.compose.project={self.project}"}
        parts = []
        for container in self.engine.containers.list(all=True, filters=labels):
            state = json.dumps(container.attrs["State"].get("Status"))
            parts.append(f"--- {container.name} {state}\n{container.logs(tail=15).decode(errors='replace')}")
        return "\n".join(parts)
