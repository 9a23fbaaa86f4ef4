import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.conftest import COMPILING, INTERPRETED_TESTS

HERE = Path(__file__).parent


def test_every_interpreted_test_is_listed() -> None:
    others = {"test_aot.py", "test_isolated.py"}
    assert sorted(INTERPRETED_TESTS) == sorted(path.name for path in HERE.glob("test_*.py") if path.name not in others)


@pytest.mark.skipif(not COMPILING, reason="the interpreted tests run in this process")
def test_interpreted_tests_pass_in_a_process_of_their_own() -> None:
    command = [sys.executable, "-m", "pytest", "-q", *(str(HERE / name) for name in INTERPRETED_TESTS)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:]
