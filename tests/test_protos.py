"""The checked-in stubs are what the protos say, byte for byte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STUBS = ROOT / "weir" / "rpc" / "v1"


def test_stubs_are_fresh(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHON": sys.executable}
    subprocess.run(["sh", "protos/generate.sh", str(tmp_path)], cwd=ROOT, env=env, check=True)
    made = {p.name: p.read_bytes() for p in (tmp_path / "weir/rpc/v1").iterdir() if p.is_file()}
    kept = {p.name: p.read_bytes() for p in STUBS.iterdir() if p.is_file() and p.name != "__init__.py"}
    assert sorted(made) == sorted(kept)
    stale = [name for name in made if made[name] != kept[name]]
    assert stale == [], "run `make protos`"


def test_every_message_field_and_enum_value_is_commented() -> None:
    """buf's COMMENTS rules need buf; this keeps the rule where only Python is."""
    bare = []
    for proto in sorted((ROOT / "protos").rglob("*.proto")):
        previous = ""
        for number, line in enumerate(proto.read_text().splitlines(), 1):
            text = line.strip()
            opens = text.startswith(("message ", "enum ", "service ", "rpc ", "oneof "))
            field = text.endswith(";") and "=" in text and not text.startswith("syntax")
            if (opens or field) and not previous.startswith("//"):
                bare.append(f"{proto.name}:{number}: {text}")
            previous = text
    assert bare == []
