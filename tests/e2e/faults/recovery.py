"""What each fault cost the client: its longest silence from the fault on.

``pytest tests/e2e/faults --recovery-times FILE``, then ``python -m tests.e2e.faults.recovery FILE`` prints the table.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one fault in one phase. ``load`` is the machine's load average of the last minute."""

    fault: str
    phase: str
    silence_s: float
    attempts: int
    load: float


_noted: list[Cost] = []


def note(fault: str, phase: str, silence_s: float, attempts: int) -> None:
    """Remember one until the end of the run."""
    _noted.append(Cost(fault, phase, silence_s, attempts, os.getloadavg()[0]))


def write(path: Path) -> None:
    """All that was noted, added to what the file has from earlier runs."""
    before = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps(before + [asdict(cost) for cost in _noted], indent=1), encoding="utf-8")


def table(costs: list[Cost]) -> list[str]:
    """Lines of Markdown: one row for each fault and phase."""
    groups: dict[tuple[str, str], list[Cost]] = {}
    for cost in costs:
        groups.setdefault((cost.fault, cost.phase), []).append(cost)
    lines = [
        "| fault | in phase | attempts | runs | shortest | longest | load average |",
        "|---|---|---|---|---|---|---|",
    ]
    for (fault, phase), group in sorted(groups.items()):
        times = [cost.silence_s for cost in group]
        attempts = ", ".join(str(n) for n in sorted({cost.attempts for cost in group}))
        load = sum(cost.load for cost in group) / len(group)
        lines.append(
            f"| {fault} | {phase} | {attempts} | {len(group)} | {min(times):.2f} s | {max(times):.2f} s | {load:.1f} |"
        )
    return lines


if __name__ == "__main__":
    print("\n".join(table([Cost(**cost) for cost in json.loads(Path(sys.argv[1]).read_text())])))
