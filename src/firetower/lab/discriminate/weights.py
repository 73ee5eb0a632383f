"""Weights: did they change since load, are they sound, does the bad op read the bad one?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from firetower.core.bits import read_bits
from firetower.lab.discriminate.look import Look
from firetower.lab.discriminate.step import Cost, Fact, Step, fact
from firetower.lab.discriminate.values import is_float, kinds, num_nonfinite, ops_before, raw_bits, where
from firetower.lab.subject import Array, Switch, Weight, hash_of


def _against_load(look: Look) -> Iterator[Fact]:
    weights: Sequence[Weight] = look.part("weights")
    pairs = [(w, *_hashes(w)) for w in weights]
    known = [(w, now, then) for w, now, then in pairs if now is not None and then is not None]
    changed = [w for w, now, then in known if now != then]
    if not changed:
        if len(known) == len(pairs):
            text = f"{len(known)} weights hash as they did at load" if known else "there are no weights"
            yield fact("weight_changed", False, text)
        return
    names = ", ".join(w.name for w in changed)
    yield fact("weight_changed", True, f"{names}: hash differs from the one at load")
    yield from _what_changed(changed[0])


def _hashes(w: Weight) -> tuple[str | None, str | None]:
    if w.now is not None and w.at_load is not None:
        return hash_of(w.now.values), hash_of(w.at_load.values)
    return w.hash_now, w.hash_at_load


def _what_changed(w: Weight) -> Iterator[Fact]:
    if w.now is None or w.at_load is None:
        return
    now, then = raw_bits(w.now), raw_bits(w.at_load)
    places = np.flatnonzero((now != then).reshape(-1))
    if not len(places):
        return
    num_bits = int((now ^ then).reshape(-1)[places[0]]).bit_count()
    one_bit = len(places) == 1 and num_bits == 1
    at = f"{w.name}: {len(places)} elements differ, {places[0]} to {places[-1]} (flat)"
    yield fact("change_is_one_bit", one_bit, f"{at}; {'one bit' if one_bit else f'{num_bits} bits in the first'}")
    is_run = bool(places[-1] - places[0] + 1 == len(places)) and len(places) > 1
    edge = " from the edge of its memory" if places[0] == 0 else ""
    after = f", directly after {w.neighbour}" if w.neighbour and places[0] == 0 else ""
    yield fact("change_is_run", is_run, f"{at}, {'contiguous' if is_run else 'scattered'}{edge}{after}")


def _sound(look: Look) -> Iterator[Fact]:
    weights: Sequence[Weight] = look.part("weights")
    arrays = [w.now for w in weights if w.now is not None]
    bad = [a for a in arrays if num_nonfinite(a)]
    if bad or len(arrays) == len(weights):
        text = "; ".join(_place(a) for a in bad[:4]) or (
            f"{len(arrays)} weights are finite" if arrays else "there are no weights"
        )
        yield fact("weight_nonfinite", bool(bad), text)
    zero = [a for a in arrays if a.values.ndim > 1 and a.values.size and not a.values.any()]
    if zero or len(arrays) == len(weights):
        text = ", ".join(a.name for a in zero) or "no matrix of weights"
        yield fact("weight_zeroed", bool(zero), f"{text} is all zeros")
    sizes = [w for w in weights if w.num_bytes is not None and w.num_bytes_found is not None]
    short = [w for w in sizes if (w.num_bytes_found or 0) < (w.num_bytes or 0)]
    for w in short[:1]:
        text = f"{w.name}: header declares {w.num_bytes:,} bytes, the file has {w.num_bytes_found:,}"
        yield fact("weight_truncated", True, text)
    if sizes and not short:
        yield fact("weight_truncated", False, "every weight has the bytes that its header declares")


def _place(a: Array) -> str:
    """``head [64, 256]: 32 NaN, row 10, columns 64 to 95 (block 2 of 32), first bits 7e00``."""
    rows = a.values.reshape(-1, a.values.shape[-1]) if a.values.ndim else a.values.reshape(1, 1)
    places = np.argwhere(~np.isfinite(rows))
    row, column = (int(i) for i in places[0])
    last = int(places[places[:, 0] == row][-1][1])
    text = f"{a.name} {list(a.values.shape)}: {kinds(a)}, row {row}, columns {column} to {last}"
    width = last - column + 1
    if width in (16, 32, 64, 128, 256) and column % width == 0:
        text += f" (block {column // width} of {width})"
    bits = int(raw_bits(a).reshape(rows.shape)[row, column])
    try:
        return f"{text}, first bits {read_bits(bits, a.type_name).bits_hex}"
    except ValueError:
        return text


def _read_by_op(look: Look) -> Iterator[Fact]:
    near = list(ops_before(look.op))
    bad = [(o, w) for o in near[:1] for w in o.weights if num_nonfinite(w)]
    text = f"{where(bad[0][0])} reads {bad[0][1].name}" if bad else f"the weights of {where(look.op)} are finite"
    yield fact("op_reads_bad_weight", bool(bad), text)
    zero = [(o, w) for o in near for w in o.weights if _is_zero_matrix(w)]
    text = f"{where(zero[0][0])} reads {zero[0][1].name}" if zero else "no op near the first bad one reads zeros"
    yield fact("op_reads_zero_weight", bool(zero), text)
    if not look.has("weights"):
        return
    weights: Sequence[Weight] = look.part("weights")
    changed = {w.name for w in weights if None not in _hashes(w) and _hashes(w)[0] != _hashes(w)[1]}
    read = [(o, w) for o in near for w in o.weights if w.name in changed]
    if changed:
        text = f"{where(read[0][0])} reads {read[0][1].name}" if read else f"{where(look.op)} reads no changed weight"
        yield fact("changed_weight_is_read", bool(read), text)


def _is_zero_matrix(a: Array) -> bool:
    return a.values.ndim > 1 and is_float(a) and a.values.size > 0 and not a.values.any()


def _zero_inputs(look: Look) -> Iterator[Fact]:
    if not look.can(Switch.ZERO_INPUTS) or not look.is_wrong(look.outcome()):
        return
    outcome = look.outcome(Switch.ZERO_INPUTS)
    if outcome is not None:
        bad = any(num_nonfinite(a) for a in outcome.outputs) or outcome.origin is not None
        yield fact("bad_for_zero_inputs", bad, f"with zeros as activations it is {'still bad' if bad else 'clean'}")


def _reloaded(look: Look) -> Iterator[Fact]:
    cured = look.cures(Switch.RELOADED_WEIGHTS)
    if cured is None:
        return
    yield fact("reloading_cures", cured, f"with the weights loaded again it is {'clean' if cured else 'still wrong'}")
    if cured:
        yield fact("changed_weight_is_read", True, "loading the weights again cures it")


STEPS = (
    Step(
        name="weights-vs-load",
        title="do the weights hash as they did at load?",
        cost=Cost.READ,
        needs=("weights",),
        facts=("weight_changed", "change_is_one_bit", "change_is_run"),
        command="firetower scan PATH (is it bad in the file too?), or compare with hashes taken at load",
        run=_against_load,
    ),
    Step(
        name="weights-sound",
        title="is a weight non-finite, all zeros or cut short?",
        cost=Cost.READ,
        needs=("weights",),
        facts=("weight_nonfinite", "weight_zeroed", "weight_truncated"),
        command="firetower scan PATH",
        run=_sound,
    ),
    Step(
        name="weights-read",
        title="does the first bad op read the bad or changed weight?",
        cost=Cost.READ,
        needs=("first_bad_op",),
        facts=("op_reads_bad_weight", "op_reads_zero_weight", "changed_weight_is_read"),
        command="firetower.investigate(model, **inputs)",
        run=_read_by_op,
    ),
    Step(
        name="zero-inputs",
        title="is the first bad op bad for zero activations too?",
        cost=Cost.RECOMPUTE,
        needs=("run", "switches"),
        facts=("bad_for_zero_inputs",),
        command="run the op with zeros as its activations",
        run=_zero_inputs,
    ),
    Step(
        name="weights-loaded-again",
        title="does loading the weights again cure it?",
        cost=Cost.RUN,
        needs=("run", "switches"),
        facts=("reloading_cures", "changed_weight_is_read"),
        command="restart the engine and send the same request",
        run=_reloaded,
    ),
)
