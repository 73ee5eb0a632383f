from __future__ import annotations

import install_torch
import pytest


def report(*names):
    return {"install": [{"metadata": {"name": name}} for name in names]}


@pytest.mark.parametrize("library", ["nvidia-cublas-cu13", "NVIDIA-cudnn", "cuda-bindings"])
def test_a_build_with_cuda_libraries_is_replaced_by_the_cpu_one(library):
    arguments = install_torch.pip_arguments("torch==2.13.0", report("torch", "sympy", library))
    assert arguments == ["install", "torch==2.13.0", "--index-url", install_torch.CPU_INDEX]


@pytest.mark.parametrize("names", [("torch", "sympy", "numpy"), ()])
def test_a_cpu_build_is_installed_as_pip_found_it(names):
    assert install_torch.pip_arguments("torch==2.13.0", report(*names)) == ["install", "torch==2.13.0"]
