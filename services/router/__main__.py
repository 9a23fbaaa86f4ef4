"""``python -m weir.services.router --nats URL --bind HOST:PORT --http-bind HOST:PORT --model-path DIR``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from weir.config.flags import parse_command_line
from weir.errors import InvalidArgument, NotFound, WeirError
from weir.services.router.app import Addresses, RouterSettings, run
from weir.services.router.process import run_process, settle_memory
from weir.telemetry.logs import configure_logging

_PROG = "python -m weir.services.router"
_SHORT = {"--http": "--http-bind", "--model": "--model-path"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 stopped in order, 1 could not run, 2 wrong settings, 130 interrupted at start."""
    try:
        given = parse_command_line(
            _spelled_out(sys.argv[1:] if arguments is None else arguments),
            prog=_PROG,
            section="router",
            example=f"{_PROG} --nats nats://127.0.0.1:4222 --bind 127.0.0.1:7400 --http 127.0.0.1:8000",
        )
        settings = RouterSettings.load(given)
        configure_logging("router", level=settings.telemetry.log_level, form=settings.telemetry.log_format)
        run_process(run(settings, on_ready=_announce))
    except (InvalidArgument, NotFound) as error:
        print(f"router: {error}", file=sys.stderr)
        return 2
    except WeirError as error:
        print(f"router: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _spelled_out(arguments: Sequence[str]) -> list[str]:
    """``--http`` and ``--model`` are short for ``--http-bind`` and ``--model-path``."""
    spelled = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        spelled.append(_SHORT.get(name, name) + equals + value)
    return spelled


def _announce(addresses: Addresses) -> None:
    settle_memory()
    print(f"READY router grpc={addresses.grpc} http={addresses.http}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
