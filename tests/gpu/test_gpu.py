"""The checks of checks.py under pytest; ``make test-gpu`` runs them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _checks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tests_gpu_checks", Path(__file__).with_name("checks.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


CHECKS = _checks().CHECKS


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.filterwarnings("default")
def test_on_a_cuda_device(name: str) -> None:
    assert isinstance(CHECKS[name](), dict)
