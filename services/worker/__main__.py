"""``python -m weir.services.worker --role prefill|decode|mixed --model DIR --nats URL --bind HOST:PORT``."""

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from weir.config import WorkerConfig
from weir.config.flags import parse_command_line
from weir.errors import InvalidArgument, NotFound, WeirError
from weir.services.worker.process import bound_kernel_caches, keep_to_cores
from weir.telemetry.logs import configure_logging

if TYPE_CHECKING:
    from weir.services.worker.app import Ready

FAILED = 70
"""EX_SOFTWARE of sysexits.h: whoever supervises the process starts it again."""
_PROG = "python -m weir.services.worker"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 stopped in order, 1 could not run, 2 wrong settings, 70 failed, 130 interrupted at start."""
    try:
        given = parse_command_line(
            sys.argv[1:] if arguments is None else arguments,
            prog=_PROG,
            section="worker",
            example=f"{_PROG} --role prefill --model ./SmolLM2 --nats nats://127.0.0.1:4222 --bind 127.0.0.1:0",
        )
        keep_to_cores(given.load(WorkerConfig, "worker").cpus)
        bound_kernel_caches()
        # Only now: what torch and gRPC start inherits the cores.
        from weir.services.worker.app import WorkerFailed, WorkerSettings, run

        settings = WorkerSettings.load(given)
        configure_logging("worker", level=settings.telemetry.log_level, form=settings.telemetry.log_format)
        try:
            asyncio.run(run(settings, on_ready=_announce))
        except WorkerFailed as error:
            print(f"worker: {error}", file=sys.stderr, flush=True)
            # At once: a thread that hangs in a device or a transport would keep the interpreter from its end.
            os._exit(FAILED)
    except (InvalidArgument, NotFound) as error:
        print(f"worker: {error}", file=sys.stderr)
        return 2
    except WeirError as error:
        print(f"worker: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _announce(ready: "Ready") -> None:
    print(f"READY worker {ready.worker_id} {ready.role} {ready.address}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
