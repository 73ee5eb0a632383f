"""A callable for `firetower replay CAPTURE --target replay_target:overflow`: any function can be a target.

It gets the request as a dict and returns numbers here: a NaN or Inf among them is a fire. What else it may return is
in docs/reference/replay.md.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np


def overflow(request: dict[str, Any]) -> Any:
    """The product of gate and up in float16; now and then an activation is large enough to overflow."""
    rng = random.Random(request["seed"])
    gate = np.full(8, 200.0, dtype=np.float16)
    spike = not request["is_canary"] and rng.random() < request["body"].get("probability", 0.1)
    up = np.full(8, 400.0 if spike else 1.0, dtype=np.float16)
    with np.errstate(over="ignore"):
        return gate * up
