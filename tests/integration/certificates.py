"""Certificates for tests, made by the script that users run."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from weir.config import SecurityConfig

SCRIPT = Path(__file__).parents[2] / "deploy" / "tls" / "certs.sh"
ALICE = "alice-token-0123456789"


@dataclass(frozen=True)
class Certificates:
    """What the script wrote to ``folder``, with one client more."""

    folder: Path

    @property
    def operator_token(self) -> str:
        """The token that the script made up."""
        return (self.folder / "tokens").read_text().splitlines()[0].split()[1]

    def path(self, name: str) -> str:
        """Of one of the files."""
        return str(self.folder / name)

    def config(self, **changed: str) -> SecurityConfig:
        """Settings of a service that has all files."""
        files = {
            "ca_file": self.path("ca.pem"),
            "cert_file": self.path("cert.pem"),
            "key_file": self.path("key.pem"),
            "tokens_file": self.path("tokens"),
        }
        return SecurityConfig(enabled=True, **{**files, **changed})


def make_certificates(folder: Path, group: int | None = None) -> Certificates:
    """Run the script; skips the test where there is no openssl. ``group`` may read what is secret."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    environment = os.environ if group is None else {**os.environ, "GROUP": str(group)}
    command = [str(SCRIPT), str(folder), "localhost", "127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True, env=environment)
    with (folder / "tokens").open("a") as tokens:
        tokens.write(f"\n# a client\nalice {ALICE}\n")
    return Certificates(folder)
