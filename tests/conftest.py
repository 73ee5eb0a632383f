"""What every test gets: one thread, its own data folder, a fixed seed, NaN in unwritten memory."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# set before torch is imported anywhere: two threads on tiny models under load were 10-100x slower, and
# subprocesses of tests inherit it
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
# whoever imports Triton first, some test of a compiled model say, decides how it runs kernels
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

SEED = 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none, and say so."""
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu or _has_cuda():
        return
    for item in gpu:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device, torch sees none"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def own_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the user's store, or another test's."""
    folder = tmp_path / "firetower-data"
    monkeypatch.setenv("FIRETOWER_DATA", str(folder))
    monkeypatch.delenv("FIRETOWER_STORE", raising=False)
    return folder


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test starts from the same random numbers, alone or in a full run."""
    random.seed(SEED)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(SEED)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(SEED)
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan(request: pytest.FixtureRequest) -> Iterator[None]:
    """`torch.empty` gives NaN, so that a read of unwritten memory shows. ``@pytest.mark.raw_empty`` opts out.

    Only where torch is imported already, and not on CUDA, where deterministic mode also forbids ops.
    """
    torch: Any = sys.modules.get("torch")
    if (
        torch is None
        or request.node.get_closest_marker("gpu")
        or request.node.get_closest_marker("raw_empty")
    ):
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def deterministic_fill(unwritten_memory_is_nan: None) -> None:
    """Named by tests whose subject is the fill itself."""
    import torch

    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.are_deterministic_algorithms_enabled()
