"""Reading a JSON object's fields, each with its type; what nobody read is refused. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from weir.errors import InvalidArgument


class Fields:
    """The fields of one JSON object. ``null`` is the same as absent for every field that is known.

    Each reader takes a field out; ``end`` refuses what is left. All raise InvalidArgument naming the field,
    with ``path`` in front (``"stream_options."``).
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._left = dict(values)
        self._path = path

    def take(self, name: str) -> Any:
        """The value as it came; None when absent or null."""
        return self._left.pop(name, None)

    def wrong(self, name: str, value: object, limit: str) -> InvalidArgument:
        """The error that field ``name`` breaks ``limit``."""
        return InvalidArgument(self._path + name, value, limit)

    def integer(self, name: str) -> int | None:
        """A whole number; a bool or 1.0 is none."""
        value = self.take(name)
        if value is not None and type(value) is not int:
            raise self.wrong(name, value, "must be an integer")
        return value

    def number(self, name: str) -> float | None:
        """A number; JSON has no NaN and no infinity."""
        value = self.take(name)
        if value is None:
            return None
        if type(value) is not float and type(value) is not int:
            raise self.wrong(name, value, "must be a number")
        return float(value)

    def flag(self, name: str) -> bool:
        """A bool; absent is False."""
        value = self.take(name)
        if value is None:
            return False
        if type(value) is not bool:
            raise self.wrong(name, value, "must be true or false")
        return value

    def text(self, name: str) -> str | None:
        """A string."""
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, value, "must be a string")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A string or a list of strings; absent is empty."""
        value = self.take(name)
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, value, "must be a string or a list of strings")
        return tuple(value)

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers; absent is empty."""
        value = self.take(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all_integers(value):
            raise self.wrong(name, value, "must be a list of integers")
        return tuple(value)

    def mapping(self, name: str) -> dict[str, Any]:
        """An object; absent is empty."""
        value = self.take(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.wrong(name, value, "must be an object")
        return value

    def fixed(self, name: str, allowed: Iterable[Any], limit: str) -> None:
        """Accept only the values that ask for nothing; ``limit`` says what is not supported."""
        value = self.take(name)
        if value is not None and not any(type(value) is type(item) and value == item for item in allowed):
            raise self.wrong(name, value, limit)

    def ignore(self, names: Iterable[str]) -> None:
        """Accept fields that do not change the answer."""
        for name in names:
            self._left.pop(name, None)

    def end(self) -> None:
        """Refuse the first field that was not read."""
        for name, value in self._left.items():
            raise self.wrong(name, value, "is not a known field")


def all_integers(values: list[Any]) -> bool:
    """Whether all are whole numbers, bools not counted; fast for long prompts."""
    return set(map(type, values)) <= {int}
