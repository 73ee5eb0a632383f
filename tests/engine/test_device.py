"""The checks of `checks.py`, on a CUDA device; those that are quick on the CPU too."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


def load_checks():
    """The module beside this file, which is no package."""
    path = Path(__file__).with_name("checks.py")
    spec = importlib.util.spec_from_file_location("tests_engine_checks", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


checks = load_checks()
QUICK = ("graphs_stay_within_their_budget", "overlap_chains_windows", "sharers_of_a_bad_block_are_redone")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", checks.CHECKS)
def test_on_a_device(name):
    checks.CHECKS[name]("cuda")


@pytest.mark.parametrize("name", QUICK)
def test_on_the_cpu(name):
    checks.CHECKS[name]("cpu")


def test_a_burned_request_burns_alone_on_the_cpu():
    checks.check_a_burned_request_burns_alone("cpu", trials=4)
