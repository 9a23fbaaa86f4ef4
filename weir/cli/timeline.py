"""A request's stages as a picture for the terminal."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from weir.client import Final, KvReadTimings, Timings

BAR_CHARS = 40


def stages(times: Timings) -> list[tuple[str, float, str]]:
    """Name, milliseconds and colour of each stage in order; together they are the whole request."""
    return [
        ("admit", times.admit_ms, "grey62"),
        ("queue", times.queue_ms, "yellow"),
        ("prefill", times.prefill_ms, "blue"),
        ("first token", times.first_token_ms, "cyan"),
        ("2nd token", times.second_token_ms, "magenta"),
        ("decode", times.decode_ms, "green"),
    ]


def _bar(start_ms: float, length_ms: float, total_ms: float, colour: str) -> Text:
    scale = BAR_CHARS / total_ms if total_ms > 0 else 0.0
    left = min(BAR_CHARS - 1, int(start_ms * scale))
    width = max(1, min(BAR_CHARS - left, round(length_ms * scale)))
    return Text(" " * left) + Text("█" * width, style=colour)


def kv_read_line(kv: KvReadTimings) -> str:
    """The hand-over in one line."""
    hidden = f"{kv.exposed_ms:.1f} ms exposed"
    return (
        f"KV read: {kv.bytes / 1e6:.2f} MB in {kv.reads} read(s), {kv.descriptors} descriptor(s), {kv.transport}, "
        f"{kv.gigabytes_per_s:.2f} GB/s, {kv.busy_ms:.1f} ms of which {hidden} "
        f"(guard {kv.guard_ms:.2f} ms, checksum {kv.checksum_ms:.2f} ms)"
    )


def timeline(final: Final) -> RenderableType:
    """Stages as bars, then the hand-over, TTFT, TPOT and token counts."""
    times, usage = final.timings, final.usage
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_column(justify="left", no_wrap=True)
    start_ms = 0.0
    for name, length_ms, colour in stages(times):
        table.add_row(name, f"{length_ms:.1f} ms", _bar(start_ms, length_ms, times.e2e_ms, colour))
        start_ms += length_ms
    lines = [kv_read_line(times.kv_read)] if times.kv_read is not None else ["KV read: none (one worker did both)"]
    lines.append(
        f"TTFT {times.ttft_ms:.1f} ms   TPOT {times.tpot_ms:.1f} ms   end to end {times.e2e_ms:.1f} ms   "
        f"attempts {times.attempts}"
    )
    lines.append(
        f"prompt {usage.prompt_tokens} tokens = {usage.local_compute_tokens} computed here + "
        f"{usage.local_cache_hit_tokens} cached here + {usage.external_kv_tokens} read from the prefill worker; "
        f"{usage.completion_tokens} generated ({final.finish_reason.value})"
    )
    lines.append(f"prefill on {times.prefill_worker or '-'}, decode on {times.decode_worker or '-'}")
    return Group(table, *(Text(line) for line in lines))


def print_timeline(console: Console, final: Final) -> None:
    """Print it with a rule above."""
    console.rule("timeline", align="left", style="grey50")
    console.print(timeline(final))
