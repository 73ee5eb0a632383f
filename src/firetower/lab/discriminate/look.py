"""A cautious view of a subject: each part asked once, a missing one remembered, runs judged the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from firetower.lab.discriminate.values import bits_equal, num_nonfinite, relative_error
from firetower.lab.subject import Array, Op, Outcome, Request, Subject, Switch

WRONG_ERROR = 0.01
"""Relative error of finite outputs against the reference from which a run counts as wrong.

bfloat16 end to end is within 0.005 of its reference on the models measured; the faults that stay finite are
off by 0.02 (a state in bfloat16 after thousands of steps) to 10."""

_MISSING = object()


class Look:
    """Asks the parts of one subject.

    Attributes:
        missing: parts that could not be had, each with the reason.
        num_replays: how many replays a replay step may take.
    """

    def __init__(self, subject: Subject, *, num_replays: int = 40) -> None:
        self._subject = subject
        self._parts: dict[Any, Any] = {}
        self._outcomes: dict[Request, Outcome | None] = {}
        self.missing: dict[str, str] = {}
        self.num_replays = num_replays

    def part(self, name: str, *args: Any) -> Any:
        """What a part returns, asked once; None where it is missing, and then `missing` has the reason."""
        key = (name, *args)
        if key not in self._parts:
            self._parts[key] = self._ask(name, args)
        return self._parts[key]

    def has(self, name: str) -> bool:
        """Whether a part is there. A method that takes arguments counts as there until it answers None."""
        if name in ("run", "reference", "recompute_rows", "reset"):
            found = getattr(self._subject, name, None) is not None
            if not found:
                self.missing[name] = "the subject has no such part"
            return found
        return self.part(name) is not None

    def _ask(self, name: str, args: tuple[Any, ...]) -> Any:
        asked = getattr(self._subject, name, None)
        if asked is None:
            self.missing[name] = "the subject has no such part"
            return None
        try:
            found = asked(*args) if callable(asked) else asked
        except Exception as e:  # noqa: BLE001 - a part that breaks is a missing part, and is reported as one
            self.missing[name] = f"failed with {type(e).__name__}: {e}"
            return None
        if found is None and not args:
            self.missing[name] = "the subject cannot tell"
        return found

    @property
    def op(self) -> Op:
        """The first bad op; only for steps that need ``first_bad_op``."""
        op = self.part("first_bad_op")
        assert isinstance(op, Op)
        return op

    def can(self, switch: Switch) -> bool:
        """Whether the subject understands a switch."""
        switches = self.part("switches") if self.has("run") else None
        if switches is not None and switch in switches:
            return True
        self.missing[f"switch {switch}"] = "the subject cannot run so"
        return False

    def outcome(self, switch: Switch | None = None, number: int = 0) -> Outcome | None:
        """Run, once for each switch and number, each time from the same starting point."""
        request = Request(switch=switch, number=number)
        if request not in self._outcomes:
            self._outcomes[request] = self._run(request)
        return self._outcomes[request]

    def _run(self, request: Request) -> Outcome | None:
        if getattr(self._subject, "reset", None) is not None:
            self._ask("reset", ())
            self.missing.pop("reset", None)
        found = self._ask("run", (request,))
        return found if isinstance(found, Outcome) else None

    def is_wrong(self, outcome: Outcome | None) -> bool | None:
        """Whether a run went wrong: what the subject knows, non-finite outputs, or the float64 reference."""
        if outcome is None:
            return None
        if outcome.is_wrong is not None:
            return outcome.is_wrong
        if outcome.origin is not None or any(num_nonfinite(a) for a in outcome.outputs):
            return True
        error = self.error_of(outcome)
        if error is not None:
            return error > WRONG_ERROR
        served = self.outcome()
        burned = served is not None and any(num_nonfinite(a) for a in served.outputs)
        return False if burned and outcome.outputs else None

    def error_of(self, outcome: Outcome) -> float | None:
        """Largest relative error of the outputs against the reference, None without one."""
        reference = self.part("reference", "float64", "outputs") if self.has("reference") else None
        if reference is None or len(reference) != len(outcome.outputs) or not outcome.outputs:
            return None
        return max(relative_error(a, b) for a, b in zip(outcome.outputs, reference, strict=True))

    def cures(self, switch: Switch) -> bool | None:
        """Whether a run that is wrong as served is right under a switch; None where that cannot be told.

        Both runs are made under the same replay number, so that a seeded scheduler repeats itself.
        """
        if not self.can(switch) or not self.is_wrong(self.outcome()):
            return None
        wrong = self.is_wrong(self.outcome(switch))
        return None if wrong is None else not wrong

    def same(self, first: Outcome, second: Outcome) -> bool:
        """Whether two outcomes are one: by bits where clean runs are bit-stable, else within `WRONG_ERROR`."""
        if (first.origin, first.kind) != (second.origin, second.kind):
            return False
        if len(first.outputs) != len(second.outputs):
            return False
        if self.part("clean_twin_bit_stable"):
            return all(map(bits_equal, first.outputs, second.outputs))
        return all(_close(a, b) for a, b in zip(first.outputs, second.outputs, strict=True))

    def operands(self, op: Op | None = None) -> Sequence[Array]:
        """Inputs and weights of an op, the first bad one when none is given."""
        op = op or self.op
        return (*op.inputs, *op.weights)


def _close(a: Array, b: Array) -> bool:
    if a.values.shape != b.values.shape:
        return False
    bad_a, bad_b = ~np.isfinite(a.values), ~np.isfinite(b.values)
    return bool((bad_a == bad_b).all()) and relative_error(a, b) <= WRONG_ERROR
