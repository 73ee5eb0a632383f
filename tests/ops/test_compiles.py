"""Kernels are built for an H200 without one: the interpreter runs what the compiler refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent
KERNELS = re.compile(r"^def (\w+_fwd_kernel)\(", re.MULTILINE)


@pytest.mark.slow
def test_every_kernel_is_built_for_hopper(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_all.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    built = set(done.stdout.splitlines()[-1].split())
    written = {
        name
        for path in (HERE.parents[1] / "src" / "firetower" / "ops").rglob("*.py")
        for name in KERNELS.findall(path.read_text(encoding="utf-8"))
    }
    assert written
    assert written == built
