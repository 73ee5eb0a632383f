"""What runs a try: a server's URL, a model's folder, or ``module:function``, told apart by how they are written."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from firetower.core.errors import ReplayError
from firetower.lab.replay.client import parse_url
from firetower.lab.replay.judge import Result
from firetower.lab.replay.request import ReplayRequest

_FUNCTION = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


class TargetKind(StrEnum):
    """How a target is reached."""

    SERVER = "server"
    MODEL = "model"
    CALLABLE = "callable"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """A target as the command line names it, and how a model is loaded and watched.

    Attributes:
        text: as given; of a model the absolute path.
        device, dtype: of a model; ``auto`` takes a GPU where there is one, and the type of the weights.
        level: of the watch. store: where its fires go; None for the usual store, "" for nowhere.
    """

    kind: TargetKind
    text: str
    device: str = "auto"
    dtype: str = "auto"
    level: str = "layers"
    store: str | None = None


class Runner(Protocol):
    """Runs requests in this process, one at a time."""

    def run(self, request: ReplayRequest) -> Result:
        """Run one; whatever goes wrong is a lost try."""
        ...

    def close(self) -> None:
        """Let go of what it holds."""
        ...


def parse_target(text: str, **options: Any) -> TargetSpec:
    """Tell which kind of target a text names.

    Raises:
        ReplayError: none of the three.
    """
    if "://" in text:
        parse_url(text)
        return TargetSpec(kind=TargetKind.SERVER, text=text, **options)
    path = Path(text).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return TargetSpec(kind=TargetKind.MODEL, text=str(path.absolute()), **options)
    if _FUNCTION.fullmatch(text):
        return TargetSpec(kind=TargetKind.CALLABLE, text=text, **options)
    raise ReplayError(
        f"target={text[:120]!r}: must be a URL (http://HOST:PORT), a model's folder (or .gguf) that exists, "
        "or module:function"
    )


def open_runner(spec: TargetSpec) -> Runner:
    """Load a model, or import a callable, into this process.

    Raises:
        ReplayError: it cannot be loaded or imported.
        MissingExtraError: a model without torch or Transformers.
    """
    makers: dict[TargetKind, Callable[[TargetSpec], Runner]] = {
        TargetKind.CALLABLE: _open_callable,
        TargetKind.MODEL: _open_model,
    }
    return makers[spec.kind](spec)


def _open_callable(spec: TargetSpec) -> Runner:
    from firetower.lab.replay.function import FunctionRunner

    return FunctionRunner(spec.text)


def _open_model(spec: TargetSpec) -> Runner:
    from firetower.lab.replay.model import ModelRunner

    return ModelRunner(spec)
