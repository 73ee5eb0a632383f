"""What the subject declares about its own tensors: quantised fields, recurrences, positions, laws, parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from firetower.lab.discriminate.look import Look
from firetower.lab.discriminate.step import Cost, Fact, Run, Step, fact
from firetower.lab.discriminate.values import absmax, num_nonfinite, root, where
from firetower.lab.subject import Array, Collective, Floats, Law, Positions, Quantised, Recurrence

MIN_SATURATED_FRAC = 0.1
"""Share of values at the largest code from which a fixed scale counts as too small; outliers are fewer."""

_ANGLES = ("cos", "sin", "polar")
_CASTS = ("to_copy", "to", "cast", "convert", "astype", "float", "half", "bfloat16")


def _fields(look: Look) -> Iterator[Fact]:
    tensors: Sequence[Quantised] = look.part("quantised")
    for q in tensors:
        wide = {a.name: a for a in q.wide_fields}
        for field in q.fields:
            if not num_nonfinite(field) or q.sink == "weight":
                continue
            if q.original is not None and num_nonfinite(q.original):
                continue
            fits = field.name in wide and not num_nonfinite(wide[field.name])
            yield fact("quant_field_overflows", fits or not wide, _field(q, field, wide.get(field.name)))
            yield fact("wide_field_finite", fits, f"{field.name} in float32 is {'finite' if fits else 'not known'}")
            return
    count = len(tensors)
    yield fact(
        "quant_field_overflows",
        False,
        f"every field of {count} quantised tensors is finite" if count else "nothing is quantised",
    )


def _field(q: Quantised, field: Array, wide: Array | None) -> str:
    block = int(np.flatnonzero(~np.isfinite(field.values).reshape(-1))[0])
    position = f", first position {q.first_position + block}" if q.first_position is not None else ""
    was = f"; in float32 it is {float(wide.values.reshape(-1)[block]):,.6g}" if wide is not None else ""
    value = field.values.reshape(-1)[block]
    at = f"{q.name}: field={field.name} of block {block} ({q.block_size} values) is {value}"
    return f"{at}, sink={q.sink}{position}{was}"


def _saturation(look: Look) -> Iterator[Fact]:
    tensors: Sequence[Quantised] = look.part("quantised")
    for q in tensors:
        if q.original is None or q.max_code is None or not q.is_static:
            continue
        scale = next((f for f in q.fields if f.name == "scale"), None)
        if scale is None or num_nonfinite(scale):
            continue
        blocks = q.original.values.astype(np.float64).reshape(scale.values.size, -1)
        limit = scale.values.astype(np.float64).reshape(-1, 1) * q.max_code
        frac = float((np.abs(blocks) >= limit).mean())
        if frac >= MIN_SATURATED_FRAC:
            text = (
                f"{q.name}: {frac:.0%} of the values are beyond the range of a scale that was fixed before "
                f"(range {float(limit.min()):.4g}, values up to {absmax(q.original):.4g}); no NaN"
            )
            yield fact("scale_saturates", True, text)
            return
    yield fact("scale_saturates", False, "no fixed scale saturates")


def _recurrence(look: Look) -> Iterator[Fact]:
    heads: Sequence[Recurrence] = look.part("recurrences")
    gains = [(r, g) for r in heads if (g := _gain(r)) is not None]
    hit = next(((r, g) for r, g in gains if g > 2), None)
    if gains or not heads:
        text = (
            f"{hit[0].name}: beta times squared key norm is up to {hit[1]:.3g} > 2"
            if hit
            else "no update gain is over 2"
        )
        yield fact("gain_over_two", hit is not None, text)
    grown = next((r for r in heads if _grew(r)), None)
    if grown is not None or all(r.state_absmax is not None for r in heads):
        yield fact("state_grows", grown is not None, _growth(grown) if grown else "no state grows without bound")
    rounded = next(((r, n) for r in heads if (n := _num_rounded(r))), None)
    if rounded or all(r.decay is not None and r.log_decay is not None for r in heads):
        text = (
            f"{rounded[0].name}: the decay is exactly 1 in {rounded[0].state_dtype} at {rounded[1]} tokens "
            "whose gate is not 0"
            if rounded
            else "no decay is rounded to 1"
        )
        yield fact("decay_rounds_to_one", rounded is not None, text)


def _gain(r: Recurrence) -> float | None:
    if r.keys is None or r.beta is None:
        return None
    keys = r.keys.values.astype(np.float64)
    return float((r.beta.values.astype(np.float64).reshape(-1) * (keys * keys).sum(-1).reshape(-1)).max())


def _grew(r: Recurrence) -> bool:
    if r.state_absmax is None:
        return False
    seen = r.state_absmax.values.astype(np.float64)
    if not np.isfinite(seen).all():
        return True
    start = seen[seen > 0]
    return bool(len(start)) and float(seen[-1]) > 1e3 * float(start[0])


def _growth(r: Recurrence) -> str:
    assert r.state_absmax is not None
    seen = r.state_absmax.values.astype(np.float64)
    bad = np.flatnonzero(~np.isfinite(seen))
    return (
        f"{r.name}: the state is non-finite from step {int(bad[0])} on"
        if len(bad)
        else f"{r.name}: the state grows to {seen[-1]:.3g}"
    )


def _num_rounded(r: Recurrence) -> int:
    if r.decay is None or r.log_decay is None:
        return 0
    gate = r.log_decay.values.astype(np.float64)
    # what float32 holds apart from 1 is lost by the type; a smaller gate is lost by anybody
    return int(((r.decay.values == 1) & (gate < -1e-6)).sum())


def _positions(look: Look) -> Iterator[Fact]:
    p: Positions = look.part("positions")
    exact, used = p.exact.values.reshape(-1).astype(np.float64), p.used.values.reshape(-1).astype(np.float64)
    off = np.flatnonzero(exact != used)
    text = (
        f"position {int(exact[off[0]])} is used as {used[off[0]]:g} in {p.used.type_name} "
        f"({len(off)} of {len(exact)} are off)"
        if len(off)
        else f"{len(exact)} positions are used exactly"
    )
    yield fact("positions_wrong", bool(len(off)), text)


def _angles(look: Look) -> Iterator[Fact]:
    """Where positions are not shown: whether the first bad op could be about positions at all."""
    op = look.op
    near = (op, *op.producers, *op.consumers)
    integers = [a for o in (op, *op.producers) for a in o.inputs if a.is_integer and a.type_name != "bool"]
    angular = any(root(o) in _ANGLES for o in near)
    cast = [
        (o, o.inputs[0], o.outputs[0])
        for o in (op, *op.producers)
        if root(o) in (*_CASTS, *_ANGLES)
        and o.inputs
        and o.outputs
        and o.inputs[0].is_integer
        and o.inputs[0].values.shape == o.outputs[0].values.shape
    ]
    off = [(o, a, b) for o, a, b in cast if (a.values.astype(np.float64) != b.values.astype(np.float64)).any()]
    if off and (angular or num_nonfinite(off[0][2])):
        o, integers_in, floats_out = off[0]
        text = (
            f"{where(o)} turns integers up to {absmax(integers_in):g} into {floats_out.type_name}, "
            "which cannot hold them"
        )
        yield fact("positions_wrong", True, text)
    elif not integers and not angular:
        yield fact("positions_wrong", False, f"{where(op)} has to do with no positions")


def _laws(look: Look) -> Iterator[Fact]:
    laws: Sequence[Law] = look.part("laws")
    broken = next((x for x in laws if not x.holds), None)
    text = (
        f"{broken.name}: {broken.worst:.4g} where at most {broken.limit:g} is the law"
        if broken
        else f"{len(laws)} laws hold"
    )
    yield fact("law_broken", broken is not None, text)
    if broken is None:
        return
    if broken.holds_for_each_operand is not None:
        each = "holds" if broken.holds_for_each_operand else "is broken too"
        versions = f" (operands written in steps {', '.join(map(str, broken.versions))})" if broken.versions else ""
        yield fact(
            "operands_lawful",
            broken.holds_for_each_operand,
            f"with all operands of one step it {each}{versions}",
        )


def _collectives(look: Look) -> Iterator[Fact]:
    found: Sequence[Collective] = look.part("collectives")
    for c in found:
        total = np.sum([p.values.astype(np.float64) for p in c.parts], axis=0)
        result = c.result.values.astype(np.float64)
        for rank, part in enumerate(p.values.astype(np.float64) for p in c.parts):
            if _near(result, total) or not part.any():
                break
            if _near(result, total - part):
                yield fact("part_missing", True, f"{c.name}: the result is the sum without rank {rank}")
                return
            if _near(result, total + part):
                yield fact("part_doubled", True, f"{c.name}: the result has the part of rank {rank} twice")
                return
    yield fact(
        "part_missing",
        False,
        f"{len(found)} collectives give the sum of their parts" if found else "there are no collectives",
    )
    yield fact(
        "part_doubled",
        False,
        f"{len(found)} collectives give the sum of their parts" if found else "there are no collectives",
    )


def _near(a: Floats, b: Floats) -> bool:
    return bool(np.allclose(a, b, rtol=1e-2, atol=1e-6))


def _step(name: str, title: str, needs: str, facts: tuple[str, ...], command: str, run: Run) -> Step:
    return Step(name=name, title=title, cost=Cost.READ, needs=(needs,), facts=facts, command=command, run=run)


STEPS = (
    _step("quantised-fields", "is a stored scale or sum of a quantised block finite?", "quantised",
          ("quant_field_overflows", "wide_field_finite"), "quantise the block with float32 fields", _fields),
    _step("saturation", "do the values fit their fixed scale?", "quantised",
          ("scale_saturates",), "count the values at the largest code", _saturation),
    _step("recurrence", "do gates, keys and state type keep the recurrence stable?", "recurrences",
          ("gain_over_two", "state_grows", "decay_rounds_to_one"), "print beta * |k|^2 and the decay", _recurrence),
    _step("positions", "are the positions used as they are?", "positions",
          ("positions_wrong",), "compare the positions with exact ones", _positions),
    _step("angles", "has the first bad op to do with positions?", "first_bad_op",
          ("positions_wrong",), "firetower.investigate(model, **inputs)", _angles),
    _step("laws", "do the laws of the model hold (decay at most 1, ...)?", "laws",
          ("law_broken", "operands_lawful"), "check the law on the operands of one step", _laws),
    _step("collectives", "is each collective's result the sum of its parts?", "collectives",
          ("part_missing", "part_doubled"), "run with world size 1", _collectives),
)  # fmt: skip
