"""A server that burns, captures to replay on it, and settings in one line."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from firetower.capture import freeze_request, write_capture
from firetower.lab.replay.arms import parse_arms
from firetower.lab.replay.settings import CampaignSettings
from firetower.lab.replay.targets import parse_target

EXAMPLES = Path(__file__).parents[3] / "examples"


def load_example(name: str) -> ModuleType:
    """Import a file of examples/."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def burning_server() -> Any:
    """The class `BurningServer`."""
    return load_example("burning_server").BurningServer


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """A captured chat request, streamed, that makes the server burn."""
    return make_capture(tmp_path / "capture")


def make_capture(folder: Path, **body: Any) -> Path:
    """Write a capture; ``body`` on top of the usual request."""
    usual = {
        "model": "tower-1",
        "messages": [{"role": "user", "content": "You are an agent. PRIVATE-PROMPT"}],
        "stream": True,
        "max_tokens": 400,
    }
    return write_capture(freeze_request(usual | body), folder)


@pytest.fixture
def settings() -> Callable[..., CampaignSettings]:
    """Settings from a target's text, a number of tries, arms as on the command line, and anything else."""

    def make(target: str, tries: int = 10, *, arms: tuple[str, ...] = (), **more: Any) -> CampaignSettings:
        spec = parse_target(target, store="")
        quick: dict[str, Any] = {"recover_wait_s": 0.5, "timeout_s": 20.0, "idle_s": 10.0}
        return CampaignSettings(target=spec, tries=tries, arms=parse_arms(arms), **quick | more)

    return make
