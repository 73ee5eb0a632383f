"""The discriminating tests, cheap first, by what they ask about; `step.Step` says what each declares."""

from __future__ import annotations

from firetower.lab.discriminate import (
    cache,
    declared,
    operands,
    patterns,
    replays,
    sampling,
    states,
    unread,
    weights,
)
from firetower.lab.discriminate.step import Step

__all__ = ["STEPS", "Step"]


def _in_order() -> tuple[Step, ...]:
    # the order in which a person would ask; then cheap before dear, the order kept among equals
    asked = (
        *weights.STEPS,
        *states.STEPS,
        *operands.STEPS,
        *patterns.STEPS,
        *declared.STEPS,
        *unread.STEPS,
        *cache.STEPS,
        *replays.SWITCH_STEPS,
        *sampling.STEPS,
        *replays.REPLAY_STEPS,
    )
    return tuple(sorted(asked, key=lambda s: s.cost))


STEPS: tuple[Step, ...] = _in_order()
"""Every discriminating test in the order in which they run."""
