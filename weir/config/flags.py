"""Command lines of the services, made from the same declarations as the configuration.

The service's own section has plain flags (``--bind``), telemetry too (``--log-level``); the others carry their
section's name (``--nats-registry-ttl-s``). Some have a short form too (``--nats``, ``--model``, ``--http``);
``--config`` names the TOML file.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from weir.config.load import load_config
from weir.config.sections import SECTIONS
from weir.config.setting import setting_of
from weir.errors import InvalidArgument

T = TypeVar("T")

_PLAIN_SECTIONS = frozenset({"telemetry"})
_SHARED_SECTIONS = ("nats", "limits", "security", "telemetry")
_ALIASES = {
    ("nats", "url"): "--nats",
    ("worker", "model_path"): "--model",
    ("router", "model_path"): "--model",
    ("router", "http_bind"): "--http",
}


@dataclasses.dataclass(frozen=True, slots=True)
class CommandLine:
    """What was given on a command line: texts by section and field, and the path of the TOML file."""

    config_path: Path | None
    flags: Mapping[str, Mapping[str, object]]

    def load(self, cls: type[T], section: str, environ: Mapping[str, str] | None = None) -> T:
        """The section, resolved; raises as ``load_config``."""
        return load_config(
            cls,
            section=section,
            toml_path=self.config_path,
            flags=self.flags.get(section),
            environ=environ,
        )


def parse_command_line(arguments: Sequence[str], *, prog: str, section: str, example: str = "") -> CommandLine:
    """The flags of the service ``section`` and of the sections that all share.

    Raises InvalidArgument with a did-you-mean for unknown flags; ``--help`` prints and exits, as argparse does.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [flags]",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        epilog=f"example: {example}" if example else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with a table per section")
    for name in dict.fromkeys((section, *_SHARED_SECTIONS)):
        _add_section(parser, name, plain=name == section or name in _PLAIN_SECTIONS)
    known, unknown = parser.parse_known_args(list(arguments))
    if unknown:
        raise InvalidArgument("command line", unknown[0], _hint(parser, unknown[0]))
    flags: dict[str, dict[str, object]] = {}
    for destination, value in vars(known).items():
        owner, separator, field = destination.partition(".")
        if separator:
            flags.setdefault(owner, {})[field] = value
    path = getattr(known, "config", None)
    return CommandLine(None if path is None else Path(path), flags)


def _add_section(parser: argparse.ArgumentParser, section: str, *, plain: bool) -> None:
    group = parser.add_argument_group(section)
    cls = SECTIONS[section]
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        flag = field.name.replace("_", "-")
        names = [f"--{flag}" if plain else f"--{section}-{flag}"]
        if alias := _ALIASES.get((section, field.name)):
            names.insert(0, alias)
        destination = f"{section}.{field.name}"
        text = f"{setting_of(field).help} (default: {_default(field.default)})".replace("%", "%%")
        if hints[field.name] is bool:
            parsed = argparse.BooleanOptionalAction
            group.add_argument(*names, dest=destination, action=parsed, help=text)
        else:
            group.add_argument(*names, dest=destination, metavar=field.name.upper(), help=text)


def _default(value: object) -> str:
    return str(getattr(value, "value", value)) if value not in ("", ()) else "empty"


def _hint(parser: argparse.ArgumentParser, given: str) -> str:
    options = [option for action in parser._actions for option in action.option_strings]
    close = difflib.get_close_matches(given.partition("=")[0], options, n=1, cutoff=0.5)
    return f"unknown flag; did you mean {close[0]}?" if close else "unknown flag; --help lists all"
