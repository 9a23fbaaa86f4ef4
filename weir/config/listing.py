"""All settings as rows, for the documentation and ``--help``."""

from __future__ import annotations

import dataclasses
import enum
import typing

from weir.config.sections import SECTIONS
from weir.config.setting import setting_of


@dataclasses.dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting: where it can be given, its type, default, limits and meaning, as texts."""

    key: str
    variable: str
    type: str
    default: str
    limits: str
    help: str


def list_settings() -> list[SettingRow]:
    """Every setting of every section, in the order of declaration."""
    return [row for section, cls in SECTIONS.items() for row in _rows(section, cls)]


def settings_markdown() -> str:
    """The rows of ``list_settings`` as one Markdown table."""
    lines = ["| key | environment | type | default | limits | meaning |", "|---|---|---|---|---|---|"]
    for row in list_settings():
        cells = (f"`{row.key}`", f"`{row.variable}`", row.type, f"`{row.default}`", row.limits, row.help)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _rows(section: str, cls: type) -> list[SettingRow]:
    hints = typing.get_type_hints(cls)
    rows = []
    for field in dataclasses.fields(cls):
        described = setting_of(field)
        rows.append(
            SettingRow(
                key=f"{section}.{field.name}",
                variable=f"WEIR_{section}_{field.name}".upper(),
                type=_type_name(hints[field.name]),
                default=_shown(field.default),
                limits=_limits(described.low, described.high, described.choices),
                help=described.help,
            )
        )
    return rows


def _type_name(wanted: object) -> str:
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        return ", ".join(str(member.value) for member in wanted)
    return wanted.__name__ if isinstance(wanted, type) else "list of int"


def _shown(default: object) -> str:
    if isinstance(default, enum.Enum):
        return str(default.value)
    return str(default).lower() if isinstance(default, bool) else repr(default)


def _limits(low: float | None, high: float | None, choices: tuple[str, ...]) -> str:
    if choices:
        return ", ".join(choices)
    return "" if low is None and high is None else f"[{low:g}, {high:g}]"
