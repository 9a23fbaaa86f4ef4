"""One setting: its default, its meaning and its limits, written where the field is declared."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """What is known of a field beside its type. ``low`` and ``high`` are inclusive."""

    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    address: bool = False


_KEY = "weir.setting"


def setting(
    default: object,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    address: bool = False,
) -> Any:
    """A dataclass field with its documentation and limits; ``address`` means ``host:port`` (or empty)."""
    described = Setting(help=help, low=low, high=high, choices=choices, address=address)
    return dataclasses.field(default=default, metadata={_KEY: described})


def setting_of(field: dataclasses.Field[Any]) -> Setting:
    """The description of ``field``."""
    described = field.metadata.get(_KEY)
    assert isinstance(described, Setting), f"{field.name} was not declared with setting()"
    return described
