"""Install a CPU build of PyTorch where this runs: ``python tools/install_torch.py torch==2.13.0``.

On Linux the default package index serves builds that pull gigabytes of CUDA libraries. pip is asked first
what it would install; only if that includes CUDA libraries is PyTorch's own CPU index named.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_PREFIXES = ("nvidia-", "cuda-")


def pulls_cuda(report: dict[str, Any]) -> bool:
    """Whether pip's installation report (``--report``) holds CUDA libraries."""
    names = [item["metadata"]["name"].lower() for item in report["install"]]
    return any(name.startswith(CUDA_PREFIXES) for name in names)


def pip_arguments(requirement: str, report: dict[str, Any]) -> list[str]:
    """Arguments of ``pip`` that install ``requirement`` without CUDA, given what a plain install would do."""
    return ["install", requirement, *(["--index-url", CPU_INDEX] if pulls_cuda(report) else [])]


def main(requirement: str) -> int:
    """Ask pip, then install; returns pip's exit code."""
    pip = [sys.executable, "-m", "pip"]
    question = ["install", "--quiet", "--dry-run", "--report", "-", requirement]
    asked = subprocess.run([*pip, *question], stdout=subprocess.PIPE, check=True)
    arguments = pip_arguments(requirement, json.loads(asked.stdout))
    return subprocess.run([*pip, *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
