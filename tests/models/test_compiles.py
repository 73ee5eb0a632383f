"""Every kernel that a model launches is built for an H200 without one, at the sizes of Qwen3.6-35B-A3B."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SOME = {"gates_fwd_kernel", "rms_norm_fwd_kernel", "linear_fwd_kernel", "gated_delta_rule_window_fwd_kernel"}


@pytest.mark.slow
def test_every_kernel_of_a_model_is_built_for_hopper(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    script = Path(__file__).with_name("compile_model.py")
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=560, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(done.stdout.split()) >= SOME
