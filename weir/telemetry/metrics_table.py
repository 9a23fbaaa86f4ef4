"""The table of all metrics in the documentation, from the registries themselves.

python -m weir.telemetry.metrics_table docs/operations.md     writes it between its two marks
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from weir.clock import ManualClock
from weir.events.bus import BusStats
from weir.rpc.descriptors import DescriptorStats
from weir.telemetry.metrics import ControllerMetrics, ProcessMetrics, RouterMetrics, WorkerMetrics
from weir.telemetry.spans import SpanCollector, Tracer

BEGIN, END = "<!-- metrics: begin -->", "<!-- metrics: end -->"
PROCESSES: dict[str, type[ProcessMetrics]] = {
    "router": RouterMetrics,
    "worker": WorkerMetrics,
    "controller": ControllerMetrics,
}


@dataclass(slots=True)
class Row:
    """One metric. ``texts``: what each process that exports it means by it."""

    kind: str
    labels: tuple[str, ...]
    texts: dict[str, str]


def rows() -> dict[str, Row]:
    """All metrics by the name that is scraped, sorted."""
    found: dict[str, Row] = {}
    for process, make in PROCESSES.items():
        for name, kind, labels, text in _families(_made(make)):
            row = found.setdefault(name, Row(kind, labels, {}))
            assert (row.kind, row.labels) == (kind, labels), f"{name} differs between processes"
            row.texts[process] = text
    return dict(sorted(found.items()))


def table() -> str:
    """The table in Markdown."""
    lines = ["| metric | type | labels | exported by: meaning |", "|---|---|---|---|"]
    for name, row in rows().items():
        texts: dict[str, list[str]] = {}
        for process, text in row.texts.items():
            texts.setdefault(text, []).append(process)
        meaning = "<br>".join(
            f"{'all' if len(processes) == len(PROCESSES) else ', '.join(processes)}: {text}"
            for text, processes in texts.items()
        )
        labels = ", ".join(f"`{label}`" for label in row.labels)
        lines.append(f"| `{name}` | {row.kind} | {labels} | {meaning} |")
    return "\n".join(lines)


def updated(document: str) -> str:
    """``document`` with the table of now between its marks."""
    head, _, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    assert end, f"the document has no {BEGIN} … {END}"
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


def _made(make: type[ProcessMetrics]) -> ProcessMetrics:
    metrics = make() if make is ControllerMetrics else make("")
    metrics.watch_bus(BusStats)
    metrics.watch_descriptors(lambda: DescriptorStats(0, 0))
    SpanCollector(Tracer("table", ManualClock(), lambda bits: 1)).register(metrics.registry)
    return metrics


def _families(metrics: ProcessMetrics) -> Iterable[tuple[str, str, tuple[str, ...], str]]:
    """Name as scraped, type, labels, text."""
    # The labels of a metric without any sample are only known to the client library's inside.
    for collector in list(metrics.registry._collector_to_names):
        for family in collector.collect():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = getattr(collector, "_labelnames", None)
            if labels is None:
                labels = family.samples[0].labels if family.samples else ()
            yield name, family.type, tuple(labels), family.documentation


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")
