"""An engine, the images, a running project; skipped by name where there is no engine."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import docker
import docker.errors
import pytest

from tests.e2e.containers.composed import Composed, compose_command
from tests.e2e.containers.images import CannotBuild, Images, build_images

# Its reaper's image would have to come from a registry.
os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")


@pytest.fixture(scope="session")
def engine() -> Iterator[docker.DockerClient]:
    """A container engine that answers."""
    try:
        client = docker.from_env(timeout=300)
        client.ping()
    except (docker.errors.DockerException, OSError) as error:
        pytest.skip(f"no container engine: {str(error)[:120]}")
    yield client
    client.close()


@pytest.fixture(scope="session")
def images(engine: docker.DockerClient) -> Images:
    """The images of this working tree."""
    try:
        built = build_images(engine)
    except CannotBuild as error:
        pytest.skip(f"images cannot be built here: {error}")
    print("images, seconds:", built.seconds)
    return built


@pytest.fixture(scope="session")
def composed(engine: docker.DockerClient, images: Images) -> Iterator[Composed]:
    """The project of compose.yaml, with nothing started; nothing of it is left afterwards."""
    if compose_command() is None:
        pytest.skip("neither docker compose nor docker-compose is here")
    project = Composed.of(engine, f"weirtest{uuid.uuid4().hex[:8]}", images)
    try:
        yield project
    finally:
        project.down()
    assert not engine.containers.list(all=True, filters={"label": f"com.docker.compose.project={project.project}"})
