"""Any callable as a target: ``module:function``, imported only because the command line says so."""

from __future__ import annotations

import importlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from firetower.core.errors import NonFiniteError, ReplayError
from firetower.core.records import Fire
from firetower.detect import StreamEvent
from firetower.detect.bodies import events_of
from firetower.lab.replay.judge import AnswerJudge, Result, lost
from firetower.lab.replay.records import Sign, TryEnd
from firetower.lab.replay.request import ReplayRequest


class FunctionRunner:
    """Calls one function for each try.

    It is called with the request as a dict: ``kind``, ``body``, ``prompt_token_ids``, ``seed``, ``is_canary``. What
    counts as a fire is told by what comes back:

    * `NonFiniteError`, ``FloatingPointError`` raised, or a `Fire` returned: a fire;
    * True: a fire; False or None: clean;
    * a mapping: an OpenAI-compatible answer, a string: its text; the detectors judge both;
    * a number, an array, a tensor, or a nested list of numbers: a fire where one is NaN or Inf.

    Any other exception, or any other value, is a lost try.

    Args:
        name: ``package.module:function``; the working directory is searched first, as ``python -m`` does.

    Raises:
        ReplayError: it cannot be imported, or is no callable.
    """

    def __init__(self, name: str) -> None:
        module_name, _, path = name.partition(":")
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            found: Any = importlib.import_module(module_name)
            for part in path.split("."):
                found = getattr(found, part)
        except Exception as e:  # anything may go wrong in the user's module; it is named
            raise ReplayError(f"target={name}: cannot be imported: {type(e).__name__}: {e}") from e
        if not callable(found):
            raise ReplayError(f"target={name}: is a {type(found).__name__}, must be callable")
        self._function: Callable[[dict[str, Any]], Any] = found

    def run(self, request: ReplayRequest) -> Result:
        """Call it once."""
        started = time.monotonic()
        try:
            value = self._function(_as_dict(request))
            return _judge(value, request, time.monotonic() - started)
        except NonFiniteError as e:
            return result_of_fire(e.fire, seconds=time.monotonic() - started)
        except FloatingPointError:
            return _burned("FloatingPointError was raised", time.monotonic() - started)
        except Exception as e:  # noqa: BLE001 - the user's code failed, which says nothing of fires; it is shown
            return lost(type(e).__name__, seconds=time.monotonic() - started, message=str(e)[:400])

    def close(self) -> None:
        """Nothing is held."""


def result_of_fire(fire: Fire, *, seconds: float, ignition: int | None = None, num_tokens: int | None = None) -> Result:
    """A try that the guard saw burn."""
    return Result(
        end=TryEnd.FIRE,
        seconds=seconds,
        num_tokens=num_tokens,
        ignition=ignition,
        fire=fire.id,
        origin=fire.origin.name,
        bits=fire.first.bits_hex,
    )


def _as_dict(request: ReplayRequest) -> dict[str, Any]:
    rows = request.prompt_token_ids
    return {
        "kind": request.kind,
        "body": dict(request.body),
        "prompt_token_ids": None if rows is None else [list(r) for r in rows],
        "seed": request.seed,
        "is_canary": request.is_canary,
    }


def _judge(value: Any, request: ReplayRequest, seconds: float) -> Result:
    if value is None or value is False:
        return Result(end=TryEnd.CLEAN, seconds=seconds)
    if value is True:
        return _burned("the function says so", seconds)
    if isinstance(value, Fire):
        return result_of_fire(value, seconds=seconds)
    if isinstance(value, Mapping | str):
        text = [StreamEvent(text=value, finish_reason="stop")] if isinstance(value, str) else events_of(value)
        judge = AnswerJudge(is_streamed=False, is_canary=request.is_canary)
        judge.feed(text)
        if not judge.num_events:
            return lost("the returned mapping is no OpenAI-compatible answer", seconds=seconds)
        return judge.result(seconds=seconds)
    bad = _first_nonfinite(value)
    return Result(end=TryEnd.CLEAN, seconds=seconds) if bad is None else _burned(f"{bad} among the numbers", seconds)


def _burned(reason: str, seconds: float) -> Result:
    sign = Sign(kind="returned", severity="fire", reason=reason)
    return Result(end=TryEnd.FIRE, seconds=seconds, signs=(sign,))


def _first_nonfinite(value: Any) -> str | None:
    """``nan``, ``inf`` or ``-inf``: the first such number of an array, a tensor or nested lists.

    Raises:
        TypeError: something that is no number.
    """
    if hasattr(value, "detach"):
        # a bfloat16 tensor has no numpy type; widening loses nothing
        value = value.detach().cpu().double()
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, int | float):
        return None if math.isfinite(value) else f"{value:g}"
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return next((bad for item in value if (bad := _first_nonfinite(item)) is not None), None)
    raise TypeError(f"returned a {type(value).__name__}: must be a bool, an answer, a text or numbers")
