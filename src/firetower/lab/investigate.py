"""`firetower.investigate`: the op where a call begins to burn, and a verdict on why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from firetower.core.errors import FiretowerError
from firetower.core.records import Fire
from firetower.core.verdict import Verdict
from firetower.fires.safe import keep_fire
from firetower.fires.store import Store
from firetower.lab.diagnose import diagnose

if TYPE_CHECKING:
    from torch import Tensor, nn

    from firetower.attach.investigate import Investigation

NUM_REPLAYS = 3
"""Replays for a verdict: enough to see that a fault comes back; a rate needs ``firetower replay``."""


def investigate(
    fn_or_model: Callable[..., Any] | nn.Module,
    /,
    *args: Any,
    firetower_store: Store | str | Path | Literal[False] | None = None,
    firetower_verdict: bool = True,
    firetower_at_load: Mapping[str, Tensor] | None = None,
    **kwargs: Any,
) -> Investigation:
    """Find the op where a call's first bad value begins, and say what kind of cause it is.

    As `firetower.attach.investigate.investigate`; when the call burned, it is then run a few times more, each time
    from the same state, for the discriminating tests of `firetower.lab`.

    Args:
        fn_or_model: a module, a bound method such as ``model.generate``, or any function.
        *args, **kwargs: passed on unchanged.
        firetower_store: where the fire goes: the default store (None), a path, a `Store`, or False for nowhere.
        firetower_verdict: False skips the further runs.
        firetower_at_load: the weights as loaded (a ``state_dict``): tells a bad file from a weight that changed later;
            without it such a verdict stays undecided between the two.

    Returns:
        What was found; ``verdict`` is None where nothing burned or the further runs could not be made (a note says
        why).

    Raises:
        InvestigateError: state that cannot be put back, found before anything runs.
    """
    from firetower.attach.investigate import investigate as find_op

    found = find_op(fn_or_model, *args, firetower_store=False, **kwargs)
    if found.fire is None:
        return found
    verdict, notes = None, list(found.notes)
    if firetower_verdict:
        try:
            verdict = _judge(fn_or_model, args, kwargs, found.fire, firetower_at_load)
        except FiretowerError as e:
            notes.append(f"no verdict: {e}")
    fire = found.fire if verdict is None else dataclasses.replace(found.fire, verdict=verdict.to_mapping())
    notes += keep_fire(fire, firetower_store)
    return dataclasses.replace(found, fire=fire, verdict=verdict, notes=tuple(notes))


def _judge(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fire: Fire, at_load: Mapping[str, Tensor] | None
) -> Verdict:
    from firetower.lab.subjects.torch_call import TorchSubject

    subject = TorchSubject(fn, *args, kwargs=kwargs, fire=fire, at_load=at_load)
    try:
        return diagnose(subject, num_replays=NUM_REPLAYS)
    finally:
        subject.reset()
