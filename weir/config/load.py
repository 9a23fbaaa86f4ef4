"""Resolving a section: defaults, then the TOML file, then the environment, then flags; then it is frozen."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from weir.config.parse import check_limits, parse_value
from weir.config.sections import SECTIONS
from weir.config.setting import setting_of
from weir.errors import InvalidArgument, NotFound

T = TypeVar("T")

# Kubernetes sets these in every pod for every service of the namespace; they are no settings of ours.
_SERVICE_LINK = re.compile(r"(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?)$")


def load_config(
    cls: type[T],
    *,
    section: str,
    toml_path: Path | None = None,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> T:
    """``section`` as an instance of ``cls``; flags that are None count as not given.

    ``environ`` None reads the process's environment (``WEIR_<SECTION>_<FIELD>``). Raises InvalidArgument that
    names key, value, limit and where it came from; NotFound when the TOML file does not exist.
    """
    assert dataclasses.is_dataclass(cls), cls
    names = [field.name for field in dataclasses.fields(cls)]
    given: dict[str, tuple[object, str]] = {}
    if toml_path is not None:
        for key, value in _read_toml(toml_path, section).items():
            given[_known(key, names, f"{section}.{key}")] = (value, str(toml_path))
    for variable, value in _from_environ(section, os.environ if environ is None else environ).items():
        key = variable.removeprefix(f"WEIR_{section.upper()}_").lower()
        given[_known(key, names, variable)] = (value, variable)
    for key, flag in (flags or {}).items():
        if flag is not None:
            given[_known(key, names, _flag(key))] = (flag, _flag(key))
    return _build(cls, section, given)


def _build(cls: type[T], section: str, given: Mapping[str, tuple[object, str]]) -> T:
    assert dataclasses.is_dataclass(cls)
    hints = typing.get_type_hints(cls)
    resolved: dict[str, object] = {}
    for field in dataclasses.fields(cls):
        if field.name not in given:
            continue
        raw, origin = given[field.name]
        key = f"{section}.{field.name}"
        try:
            value = parse_value(key, raw, hints[field.name])
            check_limits(key, value, setting_of(field))
        except InvalidArgument as error:
            raise InvalidArgument(key, raw, f"{error.limit} (from {origin})") from None
        resolved[field.name] = value
    return cls(**resolved)


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _known(key: str, names: Iterable[str], shown: str) -> str:
    known = list(names)
    if key in known:
        return key
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
    raise InvalidArgument(shown, key, f"unknown setting; {hint}")


def _read_toml(path: Path, section: str) -> Mapping[str, object]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFound("configuration file", str(path)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument("config", str(path), f"not valid TOML: {error}") from None
    for name in document:
        _known(name, SECTIONS, name)
    table = document.get(section, {})
    if not isinstance(table, dict):
        raise InvalidArgument(section, table, f"must be a table [{section}] in {path}")
    return table


def _from_environ(section: str, environ: Mapping[str, str]) -> dict[str, str]:
    prefix = f"WEIR_{section.upper()}_"
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(prefix) and not _SERVICE_LINK.fullmatch(name.removeprefix(prefix))
    }
