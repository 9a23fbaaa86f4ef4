"""Texts and TOML values to typed settings, and the check of their limits. Pure."""

from __future__ import annotations

import enum
import math
import typing

from weir.config.setting import Setting
from weir.errors import InvalidArgument

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_MAX_RANGE = 4_096


def parse_value(key: str, raw: object, wanted: object) -> object:
    """``raw`` (a text from environment or flag, or a TOML value) as ``wanted``; InvalidArgument otherwise."""
    if wanted is bool:
        return _parse_bool(key, raw)
    if wanted is int:
        return _parse_int(key, raw)
    if wanted is float:
        return _parse_float(key, raw)
    if wanted is str:
        if not isinstance(raw, str):
            raise InvalidArgument(key, raw, "must be a text")
        return raw.strip()
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        return _parse_enum(key, raw, wanted)
    assert typing.get_args(wanted) == (int, ...), f"{key}: no way to read {wanted}"
    return _parse_ints(key, raw)


def check_limits(key: str, value: object, described: Setting) -> None:
    """Raise InvalidArgument when ``value`` is out of the limits that its field declares."""
    if described.choices and value not in described.choices:
        raise InvalidArgument(key, value, f"must be one of {', '.join(described.choices)}")
    if described.address and value:
        check_address(key, str(value))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    low = -math.inf if described.low is None else described.low
    high = math.inf if described.high is None else described.high
    if not low <= value <= high:
        raise InvalidArgument(key, value, f"must lie in [{low:g}, {high:g}]")


def check_address(key: str, address: str) -> None:
    """Raise InvalidArgument unless ``address`` is ``host:port`` with a port in [0, 65535]."""
    host, separator, port = address.rpartition(":")
    if not separator or not host:
        raise InvalidArgument(key, address, "must be host:port")
    if not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise InvalidArgument(key, address, "port must lie in [0, 65535]")


def _parse_bool(key: str, raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    text = str(raw).strip().lower()
    if text not in _TRUE | _FALSE:
        raise InvalidArgument(key, raw, "must be true or false")
    return text in _TRUE


def _parse_int(key: str, raw: object) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    try:
        if not isinstance(raw, str):
            raise ValueError
        return int(raw)
    except ValueError:
        raise InvalidArgument(key, raw, "must be a whole number") from None


def _parse_float(key: str, raw: object) -> float:
    try:
        if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
            raise ValueError
        value = float(raw)
    except ValueError:
        raise InvalidArgument(key, raw, "must be a number") from None
    if not math.isfinite(value):
        raise InvalidArgument(key, raw, "must be a finite number")
    return value


def _parse_enum(key: str, raw: object, wanted: type[enum.Enum]) -> enum.Enum:
    if isinstance(raw, wanted):
        return raw
    for member in wanted:
        if str(raw).strip().lower() == member.value:
            return member
    raise InvalidArgument(key, raw, f"must be one of {', '.join(str(m.value) for m in wanted)}")


def _parse_ints(key: str, raw: object) -> tuple[int, ...]:
    if isinstance(raw, (list, tuple)):
        return tuple(_parse_int(key, item) for item in raw)
    if not isinstance(raw, str):
        raise InvalidArgument(key, raw, 'must be a list or a text like "0-3,6"')
    numbers: list[int] = []
    for part in filter(None, (p.strip() for p in raw.split(","))):
        first, _, last = part.partition("-")
        low, high = _parse_int(key, first), _parse_int(key, last or first)
        if not 0 <= low <= high < low + _MAX_RANGE:
            raise InvalidArgument(key, raw, f"ranges go up and hold at most {_MAX_RANGE} numbers")
        numbers.extend(range(low, high + 1))
    return tuple(numbers)
