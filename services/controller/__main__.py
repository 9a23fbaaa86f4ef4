"""``python -m weir.services.controller --nats URL --bind HOST:PORT``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from weir.config.flags import parse_command_line
from weir.errors import InvalidArgument, NotFound, WeirError
from weir.services.controller.app import ControllerSettings, run
from weir.telemetry.logs import configure_logging

_PROG = "python -m weir.services.controller"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 stopped in order, 1 could not run, 2 wrong settings, 130 interrupted at start."""
    try:
        given = parse_command_line(
            sys.argv[1:] if arguments is None else arguments,
            prog=_PROG,
            section="controller",
            example=f"{_PROG} --nats nats://127.0.0.1:4222 --bind 127.0.0.1:7401",
        )
        settings = ControllerSettings.load(given)
        configure_logging("controller", level=settings.telemetry.log_level, form=settings.telemetry.log_format)
        asyncio.run(run(settings, on_ready=_announce))
    except (InvalidArgument, NotFound) as error:
        print(f"controller: {error}", file=sys.stderr)
        return 2
    except WeirError as error:
        print(f"controller: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _announce(address: str) -> None:
    print(f"READY controller {address}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
