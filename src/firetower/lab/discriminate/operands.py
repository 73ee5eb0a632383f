"""The first bad op: are its operands finite, what came out, and does a wider type hold it?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from firetower.core.records import Fire, Kind, TensorSummary
from firetower.lab.discriminate.look import Look
from firetower.lab.discriminate.step import Cost, Fact, Step, fact
from firetower.lab.discriminate.values import (
    ABSURD,
    absmax,
    all_finite,
    first_place,
    is_float,
    kinds,
    num_nonfinite,
    number,
    raw_bits,
    root,
    type_max,
    where,
)
from firetower.lab.subject import Array, Floats, Op

_ZERO_MAKERS = ("new_zeros", "zeros", "zeros_like", "zero", "fill")


def _finite(look: Look) -> Iterator[Fact]:
    op = look.op
    bad = [a for a in (*op.inputs, *op.weights) if num_nonfinite(a) and not _is_mask(a)]
    largest = max((absmax(a) for a in (*op.inputs, *op.weights) if is_float(a)), default=0.0)
    text = (
        f"{where(op)} reads {bad[0].name} with {kinds(bad[0])}"
        if bad
        else f"every operand of {where(op)} is finite, absmax {largest:.6g}"
    )
    yield fact("operands_finite", not bad, text)
    absurd = largest >= ABSURD
    yield fact("operands_absurd", absurd, f"largest operand {largest:.3g}{', absurd for a model' if absurd else ''}")
    out = op.outputs[0] if op.outputs else None
    if out is None or not is_float(out) or not num_nonfinite(out):
        return
    has_nan = bool(np.isnan(out.values).any())
    text = f"{where(op)} stores {kinds(out)}, first at {first_place(out)}"
    yield fact("first_is_inf", not has_nan, text)
    bits = raw_bits(out)[~np.isfinite(out.values)]
    ones = (1 << 8 * out.values.dtype.itemsize) - 1
    yield fact("bits_all_ones", bool((bits == ones).all()), f"first bits {int(bits[0]):08x}")


def _is_mask(a: Array) -> bool:
    """Only -Inf beside finite values: legal in scores and masks."""
    x = a.values
    return not (np.isnan(x).any() or np.isposinf(x).any())


def _wider(look: Look) -> Iterator[Fact]:
    op = look.op
    if not op.outputs:
        return
    stored = op.outputs[0]
    dtype = "float64" if stored.type_name in ("float32", "float64") else "float32"
    answer = look.part("reference", dtype, "op")
    if not answer or answer[0].values.shape != stored.values.shape:
        return
    wide = answer[0].values
    bad = ~np.isfinite(stored.values)
    finite = bool(np.isfinite(wide[bad]).all())
    if not finite:
        yield fact("wider_finite", False, f"{where(op)} recomputed in {dtype} is not finite either")
        return
    largest = float(np.abs(wide[bad]).max()) if bad.any() else absmax(answer[0])
    limit = type_max(stored)
    exceeds = bool(bad.any()) and largest > limit
    yield fact("wider_finite", True, f"{where(op)} recomputed in {dtype} is finite, up to {number(largest)}")
    sign = ">" if exceeds else "<="
    yield fact(
        "wider_exceeds",
        exceeds,
        f"recomputed in {dtype}: {number(largest)} {sign} {number(limit)}, the most {stored.type_name} holds",
    )


def _norm(look: Look) -> Iterator[Fact]:
    op = look.op
    source = next(
        (a for a in op.inputs if is_float(a) and op.outputs and a.values.shape == op.outputs[0].values.shape),
        None,
    )
    if source is None:
        yield fact("inf_into_norm", False, f"{where(op)} is no norm of a tensor")
        return
    x, y = (
        source.values.reshape(-1, source.values.shape[-1]),
        op.outputs[0].values.reshape(-1, source.values.shape[-1]),
    )
    # a row of nothing but Inf is a mask or a pole, no vector with an Inf in it
    rows = np.isinf(x).any(-1) & ~np.isnan(x).any(-1) & ~np.isinf(x).all(-1)
    shape = all(
        bool((np.isnan(b) == np.isinf(a)).all()) and not b[~np.isinf(a)].any()
        for a, b in zip(x[rows], y[rows], strict=True)
    )
    hit = bool(rows.any()) and shape
    count = int(np.isinf(x[rows]).sum()) if hit else 0
    text = (
        f"upstream of this norm: {'a single Inf' if count == 1 else f'{count} Inf'} in {source.name}, row "
        f"{int(np.flatnonzero(rows)[0])}; the norm makes NaN of it and exact zeros of the rest"
        if hit
        else f"{where(op)} was not given an Inf that a norm turns into one NaN and zeros"
    )
    yield fact("inf_into_norm", hit, text)
    if not hit:
        return
    made = [o for o in op.producers if o.outputs and num_nonfinite(o.outputs[0]) and all_finite(o.inputs)]
    yield fact("inf_maker_seen", bool(made), f"made by {where(made[0])}" if made else "what made it was not seen")


def _zero(look: Look) -> Iterator[Fact]:
    for op in _upstream(look.op):
        dead = _dead_rows(op)
        if dead is None:
            continue
        answer = _again(look, op)
        if answer is not None and bool(answer.reshape(-1, answer.shape[-1])[dead].any()):
            what = (
                "all zeros"
                if len(dead) == len(answer.reshape(-1, answer.shape[-1]))
                else f"zeros in row {int(dead[0])}"
            )
            text = f"{where(op)} stores {what} for finite, non-zero operands; recomputed it is not zero"
            yield fact("zero_output", True, text)
            return
    if any(root(o) in _ZERO_MAKERS and o.outputs and o.outputs[0].values.ndim for o in _upstream(look.op)):
        # zeros that no operand explains: whether something else should have been there cannot be told
        return
    yield fact("zero_output", False, f"no op up to {where(look.op)} answers zeros for non-zero operands")


def _upstream(op: Op, depth: int = 6) -> Iterator[Op]:
    yield op
    if depth:
        for producer in op.producers:
            yield from _upstream(producer, depth - 1)


def _dead_rows(op: Op) -> Floats | None:
    """Rows of the output that are zero although the same rows of the input, and the weights, are not."""
    if not op.outputs or not op.inputs or not op.outputs[0].values.ndim:
        return None
    operands = [a for a in (*op.inputs, *op.weights) if is_float(a)]
    if len(operands) < 2 or not all_finite(tuple(operands)) or not all(a.values.any() for a in operands):
        return None
    y = op.outputs[0].values.reshape(-1, op.outputs[0].values.shape[-1])
    dead = np.flatnonzero(~y.any(-1))
    return dead if len(dead) else None


def _again(look: Look, op: Op) -> Floats | None:
    """The op computed again: by the subject where it is the first bad one, as a product where it is one."""
    if op is look.op and look.has("reference"):
        answer: Sequence[Array] | None = look.part("reference", "float64", "op")
        return answer[0].values if answer else None
    if root(op) not in ("mm", "matmul", "linear", "addmm", "bmm", "gemm", "dot", "mv"):
        return None
    floats = [a.values.astype(np.float64) for a in (*op.inputs, *op.weights) if is_float(a) and a.values.ndim > 1]
    shape = op.outputs[0].values.shape
    for a in floats:
        for b in floats:
            if a is b:
                continue
            for right in (b, b.swapaxes(-1, -2)):
                if a.shape[-1] == right.shape[-2] and (*a.shape[:-1], right.shape[-1]) == shape:
                    return a @ right
    return None


def _summaries(look: Look) -> Iterator[Fact]:
    """What the summaries in a stored fire establish by themselves."""
    fire: Fire = look.part("fire")
    if fire.inputs and fire.origin.op:
        operands: Sequence[TensorSummary] = (*fire.inputs, *fire.weights)
        bad = [s for s in operands if s.num_nan or s.num_pos_inf]
        text = f"{bad[0].name} is not finite" if bad else f"every operand of {fire.origin.name} is finite"
        yield fact("operands_finite", not bad, f"the stored fire says: {text}")
    bad_weights = [w for w in fire.weights if w.num_nonfinite]
    # a buffer is listed among the weights, but it is written at run time
    if bad_weights and not any("buffer itself" in note for note in fire.notes):
        count = bad_weights[0].num_nonfinite
        text = f"the stored fire says: {bad_weights[0].name} has {count} non-finite elements"
        yield fact("weight_nonfinite", True, text)
        yield fact("op_reads_bad_weight", True, f"{fire.origin.name} reads it")
    is_inf = fire.first.kind is not Kind.NAN
    if fire.output is None or bool(fire.output.num_nan) != is_inf:
        yield fact("first_is_inf", is_inf, f"the first bad value is {fire.first.kind} {fire.first.bits_hex}")


STEPS = (
    Step(
        name="operands-finite",
        title="are the operands of the first bad op finite, and what did it store?",
        cost=Cost.READ,
        needs=("first_bad_op",),
        facts=("operands_finite", "operands_absurd", "first_is_inf", "bits_all_ones"),
        command="firetower.investigate(model, **inputs)",
        run=_finite,
    ),
    Step(
        name="inf-into-norm",
        title="was a norm given an Inf?",
        cost=Cost.READ,
        needs=("first_bad_op",),
        facts=("inf_into_norm", "inf_maker_seen"),
        command="firetower.investigate(model, **inputs)",
        run=_norm,
    ),
    Step(
        name="zero-output",
        title="does an op answer zeros for non-zero operands?",
        cost=Cost.RECOMPUTE,
        needs=("first_bad_op",),
        facts=("zero_output",),
        command="firetower.investigate(model, **inputs): it computes the products before the op again",
        run=_zero,
    ),
    Step(
        name="wider-type",
        title="is the first bad op finite in a wider type, and beyond the stored one?",
        cost=Cost.RECOMPUTE,
        needs=("first_bad_op", "reference"),
        facts=("wider_finite", "wider_exceeds"),
        command="firetower.investigate(model, **inputs): it computes the op again in a wider type",
        run=_wider,
    ),
    # last: the op itself tells more than its summary
    Step(
        name="stored-summaries",
        title="what do the summaries in the stored fire say?",
        cost=Cost.READ,
        needs=("fire",),
        facts=("operands_finite", "weight_nonfinite", "op_reads_bad_weight", "first_is_inf"),
        command="firetower fires show FIRE",
        run=_summaries,
    ),
)
