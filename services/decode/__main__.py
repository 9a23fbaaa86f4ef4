"""``python -m weir.services.decode``: a worker that starts in the decode role; the flags are the worker's."""

import runpy
import sys

if __name__ == "__main__":
    # By name: the worker imports this package, so this package must not import the worker.
    sys.argv[1:1] = ["--role", "decode"]
    runpy.run_module("weir.services.worker", run_name="__main__", alter_sys=True)
