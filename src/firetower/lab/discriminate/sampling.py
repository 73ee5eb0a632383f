"""The rows that were sampled, logits, mask and token; and bad values that disappeared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from firetower.lab.discriminate.look import Look
from firetower.lab.discriminate.step import Cost, Fact, Step, fact
from firetower.lab.discriminate.values import kinds, num_nonfinite
from firetower.lab.subject import Sampled


def _rows(look: Look) -> Iterator[Fact]:
    rows: Sequence[Sampled] = look.part("sampled")
    burned = [s for s in rows if num_nonfinite(s.logits) and not _only_banned(s)]
    laundered = [s for s in burned if s.token_id is not None]
    if laundered:
        s = laundered[0]
        text = f"row {s.row}: logits with {kinds(s.logits)} became token {s.token_id}"
    else:
        text = "no non-finite row of logits became a token"
    yield fact("nan_row_sampled", bool(laundered), text)
    yield fact(
        "logits_finite",
        not burned,
        "the logits are finite before the mask" if not burned else f"row {burned[0].row} has {kinds(burned[0].logits)}",
    )
    masked = [s for s in rows if s.allowed is not None and not s.allowed.values.any()]
    text = (
        f"row {masked[0].row}: the mask allows none of {masked[0].logits.values.size} tokens"
        if masked
        else "no mask is empty"
    )
    yield fact("mask_is_empty", bool(masked), text)


def _only_banned(s: Sampled) -> bool:
    x = s.logits.values
    return not (np.isnan(x).any() or np.isposinf(x).any()) and bool(np.isfinite(x).any())


def _launderers(look: Look) -> Iterator[Fact]:
    found: Sequence[str] = look.part("launderers")
    served = look.outcome() if look.has("run") else None
    hidden = served is not None and bool(served.outputs) and not any(num_nonfinite(a) for a in served.outputs)
    text = f"what is returned is finite: {found[0]}" if found else "no bad value disappeared"
    yield fact("value_laundered", bool(found) and hidden, text)


STEPS = (
    Step(
        name="launderers",
        title="did a bad value disappear before the end?",
        cost=Cost.READ,
        needs=("launderers",),
        facts=("value_laundered",),
        command="firetower.investigate(model, **inputs)",
        run=_launderers,
    ),
    Step(
        name="sampler-row",
        title="was a non-finite row, or an empty mask, turned into a token?",
        cost=Cost.READ,
        needs=("sampled",),
        facts=("nan_row_sampled", "logits_finite", "mask_is_empty"),
        command="keep the logits before the mask, the mask and the token of one row",
        run=_rows,
    ),
)
