"""What an image installs, read from pyproject.toml, one requirement a line.

    python requirements.py control
    python requirements.py worker [cpu|cuda]
    python requirements.py model

The Dockerfile installs these before it copies the code, so that a change of code does not install them anew.
"""

import sys
import tomllib
from pathlib import Path

GPU_ONLY = ("triton",)
"""A worker on CPU never imports these, and they are large; torch for CUDA brings its own."""


def requirements(project: dict, image: str, device: str = "cpu") -> list[str]:
    """The requirements of ``image`` out of the ``project`` table; ValueError for an unknown image or device."""
    extras = project["optional-dependencies"]
    if device not in {"cpu", "cuda"}:
        raise ValueError(f"device {device!r}: cpu or cuda")
    if image == "control":
        return [*project["dependencies"], *extras["otlp"]]
    if image == "worker":
        return [line for line in extras["worker"] if device == "cuda" or not line.startswith(GPU_ONLY)]
    if image == "model":
        return [line for line in extras["demo"] if not line.startswith(f"{project['name']}[")]
    raise ValueError(f"image {image!r}: control, worker or model")


if __name__ == "__main__":
    table = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    print("\n".join(requirements(table, *sys.argv[1:])))
