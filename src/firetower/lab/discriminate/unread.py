"""Rows that should not be read: who wrote them last, and does filling or zeroing them change the outcome?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from firetower.lab.discriminate.look import Look
from firetower.lab.discriminate.step import Cost, Fact, Step, fact
from firetower.lab.discriminate.values import root, where
from firetower.lab.subject import FILLS, Op, Rows, Switch

_REDUCTIONS = (
    "amax",
    "max",
    "amin",
    "min",
    "aminmax",
    "absmax",
    "sum",
    "mean",
    "norm",
    "vector_norm",
    "linalg_vector_norm",
)


def _written(look: Look) -> Iterator[Fact]:
    buffers: Sequence[Rows] = look.part("valid_rows")
    untold = [b for b in buffers if not b.written_at]
    stale = [
        (b, i) for b in buffers for i in _read(b) if (w := _at(b, i)) is not None and w < b.step and not b.is_valid[i]
    ]
    if stale:
        b, i = stale[0]
        text = f"{b.name}: row {i} is read in step {b.step}, last written at step {b.written_at[i]}"
        yield fact("reads_stale_row", True, text)
    elif not untold:
        yield fact(
            "reads_stale_row",
            False,
            "no row of an earlier step is read" if buffers else "every row read is of this step",
        )
    never = [(b, i) for b in buffers if b.written_at for i in _read(b) if b.written_at[i] is None]
    if never:
        b, i = never[0]
        text = f"{b.name}: row {i} is read in step {b.step} and was never written ({len(never)} such rows)"
        yield fact("reads_unwritten", True, text)
    elif not untold:
        yield fact("reads_unwritten", False, "no unwritten row is read")


def _read(b: Rows) -> Iterator[int]:
    return (i for i in range(len(b.is_valid)) if not b.is_read or b.is_read[i])


def _at(b: Rows, i: int) -> int | None:
    return b.written_at[i] if b.written_at else None


def _reduced(look: Look) -> Iterator[Fact]:
    """Whether the op that reads the rows reduces over them, so that one bad pad reaches every real row."""
    op, buffers = look.op, look.part("valid_rows")
    pads = [b for b in buffers if not all(b.is_valid)]
    near = (op, *op.consumers)
    hit = next(((o, b) for b in pads for o in near if _reduces(o, b)), None)
    if hit is not None:
        o, b = hit
        num_pads = sum(not v for v in b.is_valid)
        text = f"{where(o)} reduces over all {len(b.is_valid)} rows of {b.name}, {num_pads} of them not real"
    else:
        text = f"{where(op)} reduces over no pad row"
    yield fact("reduces_over_pads", hit is not None, text)


def _reduces(op: Op, b: Rows) -> bool:
    if root(op) not in _REDUCTIONS or not op.outputs or not op.inputs:
        return False
    rows, values = len(b.is_valid), op.inputs[0].values
    # one result for several rows; a result a row would keep pads and real rows apart
    return rows in values.shape and op.outputs[0].values.size * values.shape[-1] < values.size


_NUM_EACH = 4
"""Runs of each content. What is read shows in every run; of a race, some runs agree whatever the content is."""


def _fills(look: Look) -> Iterator[Fact]:
    if not (look.can(Switch.FILL_A) and look.can(Switch.FILL_B)):
        return
    found = [[look.outcome(s, n) for n in range(_NUM_EACH)] for s in (None, Switch.FILL_A, Switch.FILL_B)]
    runs = [[o for o in some if o is not None] for some in found]
    if any(len(some) < _NUM_EACH for some in runs):
        return
    served, first, second = (some[0] for some in runs)
    values = f"unread places filled with {FILLS[Switch.FILL_A]:g} and with {FILLS[Switch.FILL_B]:g}"
    alike = [o for o in runs[0] if all(any(look.same(o, other) for other in some) for some in runs[1:])]
    if len(alike) == _NUM_EACH:
        yield fact("fills_differ", False, f"{values}: the outcome stays the same")
    elif alike:
        yield fact("fills_differ", False, f"{values}: runs of either give the outcome of the real content")
    elif not all(look.same(some[0], other) for some in runs for other in some[1:]):
        # an outcome that differs from itself says nothing about fills
        return
    elif look.is_wrong(served) is False:
        # the places may be read where it does no harm: into pad rows of the output
        return
    elif not look.same(first, second):
        yield fact("fills_differ", True, f"{values}: the outcomes differ, so the places are read")
    else:
        text = "both outcomes are the same and not that of the real content: it is read, with weight 0"
        yield fact("fills_differ", True, f"{values}: {text}")


def _zeroed(look: Look) -> Iterator[Fact]:
    cured = look.cures(Switch.ZERO_UNREAD)
    if cured is not None:
        text = f"with the rows beyond the valid ones zeroed it is {'clean' if cured else 'still wrong'}"
        yield fact("zeroing_cures", cured, text)


STEPS = (
    Step(
        name="rows-written",
        title="when was each row that is read written?",
        cost=Cost.READ,
        needs=("valid_rows",),
        facts=("reads_stale_row", "reads_unwritten"),
        command="note the step in which each row of the buffer was written",
        run=_written,
    ),
    Step(
        name="rows-reduced",
        title="does a reduction take in rows that are not real?",
        cost=Cost.READ,
        needs=("valid_rows", "first_bad_op"),
        facts=("reduces_over_pads",),
        command="firetower.investigate(model, **inputs)",
        run=_reduced,
    ),
    Step(
        name="two-fills",
        title="does the outcome depend on what unread places hold?",
        cost=Cost.RUN,
        needs=("run", "switches"),
        facts=("fills_differ",),
        command="firetower.investigate(model, **inputs): it fills unwritten memory with two values",
        run=_fills,
    ),
    Step(
        name="zero-unread",
        title="does zeroing the unread rows cure it?",
        cost=Cost.RUN,
        needs=("run", "switches"),
        facts=("zeroing_cures",),
        command="zero the rows beyond the valid ones before each step",
        run=_zeroed,
    ),
)
