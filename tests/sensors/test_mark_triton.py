"""The marking kernel without a GPU: in Triton's interpreter against the CPU operator, and compiled for sm_90.

Both run in a fresh process: the interpreter is chosen when Triton is imported, and the suite's own PyTorch
should not see Triton.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton"
    ),
]

HERE = Path(__file__).parent


def run(script: str, tmp_path: Path, **variables: str) -> str:
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environ |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(
        [sys.executable, str(HERE / script)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_interpreted_kernel_writes_the_words_of_the_cpu_operator(tmp_path):
    assert "cases agree" in run("mark_interpreted.py", tmp_path, TRITON_INTERPRET="1")


def test_the_kernel_compiles_for_hopper_with_wide_loads_and_one_atomic_minimum(tmp_path):
    assert "kernels compiled" in run("mark_compiled.py", tmp_path)
