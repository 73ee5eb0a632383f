"""A drill's case as a *Subject* of the lab: what was seen of it, and nothing of what was planted."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from firetower.drills.spec import Case
from firetower.lab.subject import PARTS, Array, Op, Outcome, Request, Switch, Weight

Part = Callable[..., Any] | None
"""A part of the lab's protocol: a function that answers, or None where nobody can look."""


def nothing(*_: Any) -> tuple[()]:
    """The answer of somebody who looked and found none."""
    return ()


def always(value: Any) -> Callable[..., Any]:
    """A part that answers the same each time."""
    return lambda *_: value


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Evidence:
    """A subject made of its parts, so that one of them can be replaced; see `lab.subject` for each."""

    name: str = ""
    fire: Any = None
    run: Part = None
    switches: Part = nothing
    reset: Part = None
    clean_twin_bit_stable: bool | None = True
    weights: Part = nothing
    states: Part = nothing
    recompute_rows: Part = None
    valid_rows: Part = nothing
    slots: Part = nothing
    routed_rows: Part = nothing
    events: Part = nothing
    first_bad_op: Part = None
    reference: Part = None
    quantised: Part = nothing
    splits: Part = nothing
    recurrences: Part = nothing
    positions: Part = None
    sampled: Part = nothing
    launderers: Part = nothing
    collectives: Part = nothing
    laws: Part = nothing

    def outcome(self, switch: Switch | None = None, number: int = 0) -> Outcome:
        """Run under a switch."""
        assert self.run is not None
        found = self.run(Request(switch=switch, number=number))
        assert isinstance(found, Outcome)
        return found


def remembered(subject: Evidence) -> Evidence:
    """The same subject; each part is asked once however many diagnoses ask it."""

    def once(part: Part) -> Part:
        return functools.cache(part) if part is not None else None

    parts: dict[str, Any] = {n: once(getattr(subject, n)) for n in PARTS if callable(getattr(subject, n, None))}
    return dataclasses.replace(subject, **(parts | {"reset": None}))


def subject_of(case: Case) -> Evidence:
    """What can be asked of a case.

    Ops, weights and replays are taken from the model; other parts are those that the case has. Parts that
    a case does not have are answered with "none" (a drill has no states or slots that it does not show),
    except a recurrence that the model has and nobody looked at.
    """
    seen = _Seen(case)
    own: dict[str, Any] = {
        "weights": seen.weights,
        "first_bad_op": seen.first_bad_op,
        "reference": seen.reference,
        "run": seen.run,
        "switches": seen.switches,
        "launderers": seen.launderers,
    }
    if any(hasattr(m, "A_log") for m in case.model.modules()):
        own["recurrences"] = None
    return Evidence(**(own | {n: _as_part(n, v) for n, v in case.parts.items()}))


def _as_part(name: str, value: Any) -> Any:
    is_plain = value is None or callable(value) or name == "clean_twin_bit_stable"
    return value if is_plain else always(value)


class _Seen:
    """Looks at a case's model: its weights, its ops, its runs."""

    def __init__(self, case: Case) -> None:
        from firetower.drills.arrays import tensor_hash

        self._case = case
        self._hashes = {n: tensor_hash(p) for n, p in case.model.named_parameters()}

    @functools.cached_property
    def _recording(self) -> Any:
        from firetower.drills.trace import Recording

        recording = Recording(self._case.model, self._case.kernels)
        with recording:
            result = self._case.call()
            recording.sensed.check_output(result)
        return recording

    def first_bad_op(self) -> Op | None:
        """The op where it began, None where no value is bad."""
        ran = self._first_bad
        return None if ran is None else self._recording.op(ran)

    @property
    def _first_bad(self) -> Any:
        return self._recording.first_bad_in(self._case.real_rows)

    def launderers(self) -> Sequence[str]:
        """The ops that a bad value went into and did not come out of."""
        return tuple(str(e) for e in self._recording.sensed.laundered)

    def weights(self) -> Sequence[Weight]:
        """Every parameter as it is, with its hash at the time when the case was built."""
        from firetower.drills.arrays import tensor_hash, to_array

        return tuple(
            Weight(
                name=n,
                now=to_array(n, p),
                hash_now=tensor_hash(p),
                hash_at_load=self._hashes[n],
            )
            for n, p in self._case.model.named_parameters()
        )

    def reference(self, dtype: str, what: str) -> Sequence[Array] | None:
        """The first bad op computed again; what the call should have returned, where the case knows."""
        from firetower.drills.arrays import arrays_of
        from firetower.drills.trace import WIDE, again

        if what == "outputs":
            return None if self._case.right is None else arrays_of(self._right)
        ran = self._first_bad
        if ran is None:
            return None
        return arrays_of(again(ran, WIDE[dtype], chain=what == "chain"))

    @functools.cached_property
    def _right(self) -> Any:
        import torch

        assert self._case.right is not None
        with torch.no_grad():
            return self._case.right()

    def switches(self) -> Sequence[Switch]:
        """Those that the case has, and zeros as inputs of the first bad op."""
        return (*self._case.switches, Switch.ZERO_INPUTS)

    def run(self, request: Request) -> Outcome | None:
        """The call again, as it is or under a switch."""
        import torch

        from firetower.drills.arrays import arrays_of
        from firetower.drills.trace import zero_inputs

        if request.switch is None:
            return Outcome(outputs=arrays_of(self._case.call(request.number)))
        if request.switch in self._case.switches:
            with torch.no_grad():
                return Outcome(outputs=arrays_of(self._case.switches[request.switch](request.number)))
        ran = self._first_bad
        return None if ran is None else Outcome(outputs=arrays_of(zero_inputs(ran)))
