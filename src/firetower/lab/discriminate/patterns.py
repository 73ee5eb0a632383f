"""The shape of the damage around the first bad op: masks, divisions, exponentials, growth over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from firetower.lab.discriminate.look import Look
from firetower.lab.discriminate.step import Cost, Fact, Step, fact
from firetower.lab.discriminate.values import is_float, num_nonfinite, ops_before, root, rows_of, where
from firetower.lab.subject import Array, Floats, Op, Split

_EXPONENTIALS = ("exp", "exp2", "expm1", "softmax", "safe_softmax", "log_softmax")
_INVERSES = ("div", "true_divide", "divide", "reciprocal", "rsqrt")
_GATES = ("sigmoid", "softmax", "gather", "topk", "index", "take_along_axis")
_NARROW = ("float16", "bfloat16")
_MIN_TURNS = 4


def _masked_rows(look: Look) -> Iterator[Fact]:
    op = look.op
    for near in (op, *op.producers):
        for a in near.inputs:
            if not is_float(a) or a.values.ndim < 1 or a.values.shape[-1] < 2:
                continue
            empty = np.asarray(np.isneginf(rows_of(a.values)).all(-1))
            # rows of scores, not of values: what burns are the same rows, and only they
            if not empty.any() or not _burns(op, empty):
                continue
            row = int(np.flatnonzero(empty)[0])
            rows = f"{int(empty.sum())} of {empty.size} rows"
            text = f"row {row} of {a.name} is all -inf ({rows}) before {where(near)}"
            yield fact("row_all_neg_inf", True, text)
            return
    yield fact("row_all_neg_inf", False, f"no row before {where(op)} is all -inf")


def _burns(op: Op, rows: Floats) -> bool:
    """Whether the bad rows of an op's output are exactly ``rows``; True where there is no output to look at."""
    if not op.outputs or not is_float(op.outputs[0]) or not op.outputs[0].values.ndim:
        return True
    out = rows_of(op.outputs[0].values)
    # -Inf of a mask may stay beside it
    bad = np.asarray((np.isnan(out) | np.isposinf(out)).any(-1))
    return bad.shape == rows.shape and bool((bad == rows).all())


def _splits(look: Look) -> Iterator[Fact]:
    splits: Sequence[Split] = look.part("splits")
    empty = [i for i, s in enumerate(splits) if np.isneginf(s.row_max.values).any()]
    bad = [i for i in empty if len(empty) == len(splits) or _is_dirty(splits[i])]
    if bad:
        text = f"split {bad[0]} of {len(splits)} has no key (its row maximum is -inf)"
        if count := num_nonfinite(splits[bad[0]].accumulator):
            text += f" and an accumulator that is not finite ({count} values)"
    elif empty:
        text = f"split {empty[0]} of {len(splits)} has no key, and sums that are finite: a merge gives them weight 0"
    else:
        text = "every split has keys" if splits else "attention is not split"
    yield fact("empty_split", bool(bad), text)


def _is_dirty(split: Split) -> bool:
    return bool(num_nonfinite(split.accumulator) or num_nonfinite(split.row_sum))


def _row_maximum(look: Look) -> Iterator[Fact]:
    for op in ops_before(look.op):
        if root(op) not in ("exp", "exp2"):
            continue
        shifted = rows_of(op.inputs[0].values.astype(np.float64))
        largest = shifted.max(-1)
        # a softmax shifts by the row's own maximum: the largest exponent of a row is then exactly 0
        away = np.isfinite(largest) & (largest < -1)
        dead = ~rows_of(op.outputs[0].values).any(-1) if op.outputs else away
        hit = away & dead
        if hit.any() and _is_shifted(op):
            row = int(np.flatnonzero(hit)[0])
            text = (
                f"row {row} before {where(op)}: the largest exponent is {largest[row]:.4g}, not 0, so the row's "
                "maximum is attained outside of the keys that are summed; every weight underflows to 0"
            )
            yield fact("rowmax_outside", True, text)
            return
    yield fact("rowmax_outside", False, "no softmax row was shifted by a maximum from outside of it")


def _is_shifted(op: Op) -> bool:
    return not op.producers or any(root(p) in ("sub", "subtract", "add") for p in op.producers)


def _division(look: Look) -> Iterator[Fact]:
    op = look.op
    divisor = _divisor(op)
    if divisor is None:
        yield fact("zero_denominator", False, f"{where(op)} does not divide")
        yield fact("renormalises_gates", False, f"{where(op)} does not divide")
        return
    zeros = divisor.values == 0
    if not zeros.any():
        yield fact("zero_denominator", False, f"no divisor of {where(op)} is 0")
        yield fact("renormalises_gates", False, f"no divisor of {where(op)} is 0")
        return
    place = int(np.flatnonzero(zeros.reshape(-1))[0])
    text = f"{where(op)} divides by an exact 0 ({int(zeros.sum())} of {zeros.size} divisors, first {place})"
    yield fact("zero_denominator", True, text)
    gates = _sums_itself(op, divisor) and any(root(p) in _GATES for p in ops_before(op))
    text = (
        f"the divisor is the sum of the {op.inputs[0].values.shape[-1]} chosen gates of its row, all exactly 0"
        if gates
        else "the divisor is not a sum of chosen gates"
    )
    yield fact("renormalises_gates", gates, text)


def _divisor(op: Op) -> Array | None:
    if root(op) not in _INVERSES:
        return None
    floats = [a for a in (*op.inputs, *op.weights) if is_float(a)]
    if root(op) in ("rsqrt", "reciprocal"):
        return floats[0] if floats else None
    return floats[1] if len(floats) > 1 else None


def _sums_itself(op: Op, divisor: Array) -> bool:
    if root(op) in ("rsqrt", "reciprocal"):
        return False
    top = rows_of(op.inputs[0].values.astype(np.float64))
    sums = top.sum(-1)
    below = divisor.values.astype(np.float64).reshape(-1)
    if divisor.values.shape == op.inputs[0].values.shape:
        below = rows_of(divisor.values.astype(np.float64))[:, 0]
    if sums.shape != below.shape or (top < 0).any():
        return False
    return bool(np.allclose(sums, below, rtol=0.05))


def _epsilon(look: Look) -> Iterator[Fact]:
    op = look.op
    divisor = _divisor(op)
    if divisor is None or not (divisor.values == 0).any():
        yield fact("epsilon_lost", False, f"{where(op)} divides by no 0")
        return
    adds = [p for p in ops_before(op) if root(p) == "add"]
    # an epsilon of 0 in float32 was meant as none
    single = [a for p in adds for a in (*p.inputs, *p.weights) if a.values.size == 1 and a.type_name in _NARROW]
    lost = [a for a in single if not a.values.any()]
    if lost:
        text = f"{where(op)}: the epsilon as stored in {lost[0].type_name} is 0, and so is the vector"
        yield fact("epsilon_lost", True, text)
        return
    answer = look.part("reference", "float32", "chain") if look.has("reference") else None
    if answer is not None:
        finite = not num_nonfinite(answer[0])
        text = f"recomputed in float32 with its producers it is {'finite' if finite else 'not finite either'}"
        is_norm = root(op) in ("rsqrt", "reciprocal") or any(root(p) in ("sqrt", "add") for p in ops_before(op))
        yield fact("epsilon_lost", finite and is_norm and not _sums_itself(op, divisor), text)
    else:
        yield fact("epsilon_lost", False, "no epsilon of 0 was added")


def _exponential(look: Look) -> Iterator[Fact]:
    op = look.op
    made = next((p for p in ops_before(op) if root(p) in _EXPONENTIALS and _has_inf(p)), None)
    if made is None:
        text = f"no exponential before {where(op)} is infinite"
        yield fact("exp_of_weight", False, text)
        yield fact("inf_only_where_masked", False, text)
        yield fact("inf_meets_zero", False, text)
        return
    source = made.inputs[0] if made.inputs else None
    of_weight = source is None or any(source.name == w.name for w in made.weights)
    text = f"{where(made)} is Inf for {'a weight' if of_weight else 'an activation'}"
    yield fact("exp_of_weight", of_weight, text)
    out = made.outputs[0].values
    above = _above_diagonal(out)
    meets = _met_zero(op if made is not op else None, made)
    masked = above or (meets is not None and meets[1])
    text = (
        f"{int(np.isinf(out).sum())} of {out.size} values are Inf, all strictly above the diagonal"
        if above
        else f"{int(np.isinf(out).sum())} of {out.size} values are Inf, "
        f"{'all' if masked else 'not all'} discarded afterwards"
    )
    yield fact("inf_only_where_masked", masked, text)
    text = f"{where(meets[0])} multiplies the Inf by 0" if meets else "no op multiplies the Inf by 0"
    yield fact("inf_meets_zero", meets is not None, text)


def _has_inf(op: Op) -> bool:
    return bool(op.outputs) and bool(np.isposinf(op.outputs[0].values).any())


def _above_diagonal(x: Floats) -> bool:
    if x.ndim < 2 or x.shape[-1] != x.shape[-2] or x.shape[-1] < 2:
        return False
    bad = np.isinf(x)
    return bool(bad.any()) and not bool((bad & np.tri(x.shape[-1], dtype=bool)).any())


def _met_zero(op: Op | None, made: Op) -> tuple[Op, bool] | None:
    """The op that multiplies the Inf by zeros; and whether by zeros at every one of its places."""
    for user in (*((op,) if op is not None else ()), *made.consumers):
        # the sign of a gate may be turned between exp and product
        inner = user.consumers if root(user) == "neg" else ()
        for o in (user, *inner):
            if root(o) not in ("mul", "multiply", "tril", "where"):
                continue
            for a in (*o.inputs, *o.weights):
                try:
                    zeros = np.broadcast_arrays(a.values == 0, made.outputs[0].values)[0]
                except ValueError:
                    continue
                bad = np.broadcast_arrays(np.isinf(made.outputs[0].values), zeros)[0]
                if (zeros & bad).any():
                    return o, bool(zeros[bad].all())
    return None


def _growth(look: Look) -> Iterator[Fact]:
    op = look.op
    history = np.asarray([h for h in op.history_absmax if h > 0], dtype=np.float64)
    if len(history) < _MIN_TURNS:
        yield fact("grows_with_time", False, f"{where(op)} is in no loop over time that was seen to grow")
        return
    with np.errstate(over="ignore"):
        ratios = history[1:] / history[:-1]
    rate = float(np.exp(np.log(ratios).mean()))
    grows = rate > 1.05 and history[-1] > 1e3 * history[0]
    span = f"from {history[0]:.3g} to {history[-1]:.3g} in {len(history)} turns"
    text = f"{where(op)}: absmax went {span}, x{rate:.3g} each"
    yield fact("grows_with_time", grows, text)


STEPS = (
    Step(
        name="masked-rows",
        title="is a row of scores masked entirely?",
        cost=Cost.READ,
        needs=("first_bad_op",),
        facts=("row_all_neg_inf",),
        command="firetower.investigate(model, **inputs)",
        run=_masked_rows,
    ),
    Step(
        name="splits",
        title="is a split of the softmax empty?",
        cost=Cost.READ,
        needs=("splits",),
        facts=("empty_split",),
        command="run with one split",
        run=_splits,
    ),
    Step(
        name="row-maximum",
        title="is the maximum of a softmax row attained at a valid key?",
        cost=Cost.READ,
        needs=("first_bad_op",),
        facts=("rowmax_outside",),
        command="compare each row's maximum with that over its valid keys",
        run=_row_maximum,
    ),
    Step(
        name="division",
        title="does the first bad op divide by zero?",
        cost=Cost.READ,
        needs=("first_bad_op",),
        facts=("zero_denominator", "renormalises_gates"),
        command="firetower.investigate(model, **inputs)",
        run=_division,
    ),
    Step(
        name="epsilon",
        title="was a norm's epsilon lost in its type?",
        cost=Cost.RECOMPUTE,
        needs=("first_bad_op",),
        facts=("epsilon_lost",),
        command="firetower.investigate(model, **inputs): it computes the norm again in float32",
        run=_epsilon,
    ),
    Step(
        name="exponential",
        title="is an exponential infinite, of what, and is that value used?",
        cost=Cost.READ,
        needs=("first_bad_op",),
        facts=("exp_of_weight", "inf_only_where_masked", "inf_meets_zero"),
        command="firetower.investigate(model, **inputs)",
        run=_exponential,
    ),
    Step(
        name="growth",
        title="did the op's output grow with every turn of a loop?",
        cost=Cost.READ,
        needs=("first_bad_op",),
        facts=("grows_with_time",),
        command="plot the state's absmax over the tokens",
        run=_growth,
    ),
)
