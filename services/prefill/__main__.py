"""``python -m weir.services.prefill``: a worker that starts in the prefill role; the flags are the worker's."""

import runpy
import sys

if __name__ == "__main__":
    # By name: the worker imports this package, so this package must not import the worker.
    sys.argv[1:1] = ["--role", "prefill"]
    runpy.run_module("weir.services.worker", run_name="__main__", alter_sys=True)
