"""Which backend runs: the first that can, kernel by kernel; pins; frozen before the first call."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import firetower.ops
from firetower.core.errors import ConfigError
from firetower.ops.registry import OPS, Registry, Target, always, needs_triton, read_pins

CUDA = Target(device="cuda", dtype=torch.bfloat16, capability=(9, 0), has_triton=True)
CPU = Target(device="cpu", dtype=torch.float32, has_triton=True)
HERE = "firetower.ops.registry"


def chain() -> Registry:
    """Three kernels of one op, each with a Triton and a PyTorch form."""
    registry = Registry()
    for part in ("gate_up", "down", "combine"):
        registry.register(f"moe.{part}", "triton", f"{HERE}:needs_triton", supports=needs_triton, devices=("cuda",))
        registry.register(f"moe.{part}", "torch", f"{HERE}:always", supports=always)
    return registry


def chosen(table):
    return {name: choice.backend for name, choice in table.items()}


def test_the_first_that_a_device_supports_runs():
    assert set(chosen(chain().table(CUDA, {})).values()) == {"triton"}
    table = chain().table(CPU, {})
    assert set(chosen(table).values()) == {"torch"}
    assert table["moe.down"].passed_over == (("triton", "not for cpu"),)
    assert table["moe.down"].run is always


LACKS = [c for n in range(1, 4) for c in itertools.combinations(("moe.gate_up", "moe.down", "moe.combine"), n)]


@pytest.mark.parametrize("lacks", LACKS, ids="+".join)
def test_only_the_kernel_that_a_device_lacks_falls_back(lacks):
    target = Target(
        device="cuda",
        dtype=torch.bfloat16,
        capability=(9, 0),
        has_triton=True,
        missing=frozenset(f"{k}/triton" for k in lacks),
    )
    table = chain().table(target, {})
    assert chosen(table) == {k: "torch" if k in lacks else "triton" for k in table}
    for kernel in lacks:
        assert table[kernel].passed_over == (("triton", "the device lacks it"),)


def test_a_type_that_a_kernel_cannot_compute_falls_back_with_its_reason():
    target = Target(device="cuda", dtype=torch.float64, capability=(9, 0), has_triton=True)
    choice = chain().table(target, {})["moe.down"]
    assert choice.backend == "torch"
    assert choice.passed_over == (("triton", "dtype float64: the kernel computes in float32"),)


def test_a_machine_without_triton_says_so():
    choice = chain().table(Target(device="cuda", dtype=torch.float32), {})["moe.down"]
    assert choice.passed_over == (("triton", "triton is not installed: pip install triton"),)


def test_a_pin_goes_before_the_order():
    table = chain().table(CUDA, {"moe.down": "torch"})
    assert chosen(table) == {"moe.gate_up": "triton", "moe.down": "torch", "moe.combine": "triton"}
    assert table["moe.down"].is_pinned
    assert not table["moe.combine"].is_pinned


def test_a_pin_may_run_the_interpreter_on_the_cpu():
    target = Target(device="cpu", dtype=torch.float32, has_triton=True, is_interpreted=True)
    assert chosen(chain().table(target, {"moe.down": "triton"}))["moe.down"] == "triton"


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"moe.up": "torch"}, "FIRETOWER_OPS: moe.up: no such kernel; known: moe.gate_up, moe.down, moe.combine"),
        ({"moe.down": "cuda"}, "FIRETOWER_OPS: moe.down=cuda: no such backend; known: triton, torch"),
        ({"moe.down": "triton"}, "FIRETOWER_OPS: moe.down=triton: cannot run on cpu: triton: Triton compiles for CUDA"),
    ],
    ids=["kernel", "backend", "device"],
)
def test_a_pin_that_cannot_be_is_an_error(pins, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        chain().table(CPU, pins)


def test_pins_are_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("FIRETOWER_OPS", "moe.down=torch")
    assert chosen(chain().table(CUDA))["moe.down"] == "torch"
    assert read_pins({"FIRETOWER_OPS": " a=b , c.d=e,"}) == {"a": "b", "c.d": "e"}
    assert read_pins({}) == {}


@pytest.mark.parametrize("value", ["torch", "=torch", "moe.down="])
def test_a_pin_without_both_sides_is_an_error(value):
    with pytest.raises(ConfigError, match="must be kernel=backend"):
        read_pins({"FIRETOWER_OPS": value})


def test_no_backend_is_registered_once_its_kernel_was_chosen():
    registry = chain()
    registry.choice("moe.down", CUDA, {})
    assert registry.is_frozen("moe.down")
    assert not registry.is_frozen("moe.combine")
    with pytest.raises(ConfigError, match="register before the first call"):
        registry.register("moe.down", "late", f"{HERE}:always", supports=always)
    registry.register("moe.combine", "late", f"{HERE}:always", supports=always)
    assert registry.table(CUDA, {"moe.down": "torch"})["moe.down"].backend == "triton"


def test_every_folder_is_an_op_of_the_list():
    folders = {p.parent.name for p in Path(firetower.ops.__file__).parent.glob("*/__init__.py")}
    assert set(OPS) == folders


def test_a_pin_is_known_before_its_op_is_imported():
    code = (
        "import sys, torch\n"
        "from firetower.ops.rms_norm import rms_norm\n"
        "rms_norm(torch.ones(1, 4), torch.ones(4))\n"
        "assert 'firetower.ops.moe' in sys.modules and 'firetower.ops.moe.kernels' not in sys.modules\n"
    )
    environment = os.environ | {"FIRETOWER_OPS": "moe.down=torch"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    environment = os.environ | {"FIRETOWER_OPS": "moe.dwn=torch"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "FIRETOWER_OPS: moe.dwn: no such kernel" in done.stderr


def test_one_name_is_registered_once():
    registry = chain()
    with pytest.raises(ConfigError, match="registered already"):
        registry.register("moe.down", "torch", f"{HERE}:always", supports=always)


def test_a_kernel_that_nothing_can_run_names_every_reason():
    registry = Registry()
    registry.register("moe.down", "triton", f"{HERE}:needs_triton", supports=needs_triton, devices=("cuda",))
    with pytest.raises(ConfigError, match=r"kernel=moe\.down: nothing can run it on cpu .*triton: not for cpu"):
        registry.table(CPU, {})
