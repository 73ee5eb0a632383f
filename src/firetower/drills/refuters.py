"""Ways to make one discriminating test come out the other way: each must overturn the verdict that it refutes.

A refuter changes one observation of a subject and leaves the fault where it is. Torch-free.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from firetower.drills.evidence import Evidence, always
from firetower.drills.spec import Refuter
from firetower.lab.subject import Array, Outcome, Request, Switch


def _with_runs(subject: Evidence, changed: Callable[[Request], Outcome | None]) -> Evidence:
    """The subject with some runs replaced: those for which ``changed`` gives an outcome."""

    def run(request: Request) -> Any:
        assert subject.run is not None
        return changed(request) or subject.run(request)

    return dataclasses.replace(subject, run=run)


def _useless(switch: Switch) -> Callable[[Evidence], Evidence]:
    """Under this switch it is as wrong as served."""

    def flip(subject: Evidence) -> Evidence:
        return _with_runs(subject, lambda r: subject.outcome(number=r.number) if r.switch is switch else None)

    return flip


def useless(switch: Switch, test: str) -> Refuter:
    """The refuter "run so, it is still wrong"."""
    return Refuter(test=test, flip=_useless(switch))


FRESH_STATE = useless(Switch.FRESH_STATE, "fresh-state")
EAGER = useless(Switch.EAGER, "eager")
OTHER_BACKEND = useless(Switch.OTHER_BACKEND, "other-backend")
OTHER_DEVICE = useless(Switch.OTHER_DEVICE, "other-device")
COLD = useless(Switch.COLD, "cold")
DRAFTS_OFF = useless(Switch.DRAFTS_OFF, "drafts-off")
ONE_RANK = useless(Switch.WORLD_SIZE_ONE, "world-size-one")
SERIAL = useless(Switch.SERIAL, "serial")
UNZEROED = useless(Switch.ZERO_UNREAD, "zero-unread")


POISON_GONE = useless(Switch.POISON_DESTINATIONS, "poisoned-destinations")


def _fills_alike(subject: Evidence) -> Evidence:
    fills = (Switch.FILL_A, Switch.FILL_B, Switch.ZERO_UNREAD)
    return _with_runs(subject, lambda r: subject.outcome(number=r.number) if r.switch in fills else None)


FILLS_ALIKE = Refuter(test="two-fills", flip=_fills_alike)


def _wider_not_finite(subject: Evidence) -> Evidence:
    """Recomputed in a wider type the op is as bad as it was."""

    def reference(dtype: str, what: str) -> Any:
        assert subject.reference is not None
        answer = subject.reference(dtype, what)
        op = subject.first_bad_op() if subject.first_bad_op is not None and what == "op" else None
        if answer is None or op is None:
            return answer
        stored = op.outputs[0].values
        bad = np.where(np.isfinite(stored), answer[0].values, stored)
        return (_with_values(answer[0], bad), *answer[1:])

    return dataclasses.replace(subject, reference=reference)


WIDER_NOT_FINITE = Refuter(test="wider-type", flip=_wider_not_finite)


def _with_values(a: Array, values: Any) -> Array:
    return dataclasses.replace(a, values=np.asarray(values))


def _finite_for_zeros(subject: Evidence) -> Evidence:
    """Given zeros the op answers zeros."""

    def changed(request: Request) -> Outcome | None:
        if request.switch is not Switch.ZERO_INPUTS:
            return None
        found = subject.outcome(Switch.ZERO_INPUTS)
        zeros = tuple(_with_values(a, np.zeros_like(a.values)) for a in found.outputs)
        return Outcome(outputs=zeros)

    return _with_runs(subject, changed)


FINITE_FOR_ZEROS = Refuter(test="zero-inputs", flip=_finite_for_zeros)


def _change_op(test: str, change: Callable[[Any], Any]) -> Refuter:
    """A refuter that changes the first bad op, or the ops around it."""

    def flip(subject: Evidence) -> Evidence:
        op = subject.first_bad_op() if subject.first_bad_op is not None else None
        return dataclasses.replace(subject, first_bad_op=always(_each_op(op, change)))

    return Refuter(test=test, flip=flip)


def _each_op(op: Any, change: Callable[[Any], Any]) -> Any:
    if op is None:
        return None
    changed = change(op)
    return dataclasses.replace(
        changed,
        producers=tuple(_each_op(p, change) for p in changed.producers),
        consumers=tuple(_each_op(c, change) for c in changed.consumers),
    )


def _map_arrays(op: Any, change: Callable[[Array], Array], fields: tuple[str, ...]) -> Any:
    return dataclasses.replace(op, **{f: tuple(change(a) for a in getattr(op, f)) for f in fields})


def _is_float(a: Array) -> bool:
    return bool(np.issubdtype(a.values.dtype, np.floating)) and a.values.ndim > 0


def _one_key_allowed(op: Any) -> Any:
    def allow(a: Array) -> Array:
        if not _is_float(a):
            return a
        rows = a.values.reshape(-1, a.values.shape[-1]).copy()
        rows[np.isneginf(rows).all(-1), 0] = 0.0
        return _with_values(a, rows.reshape(a.values.shape))

    return _map_arrays(op, allow, ("inputs",))


ONE_KEY_ALLOWED = _change_op("masked-rows", _one_key_allowed)


def _no_zero(op: Any) -> Any:
    """No exact zero anywhere: neither a divisor nor an epsilon."""

    def lift(a: Array) -> Array:
        return _with_values(a, np.where(a.values == 0, 1e-3, a.values)) if _is_float(a) else a

    return _map_arrays(op, lift, ("inputs", "weights"))


NOT_DIVIDED_BY_ZERO = _change_op("division", _no_zero)


def _finite_inputs(op: Any) -> Any:
    def tame(a: Array) -> Array:
        return _with_values(a, np.where(np.isfinite(a.values), a.values, 1.0)) if _is_float(a) else a

    return _map_arrays(op, tame, ("inputs",))


INPUT_FINITE = _change_op("inf-into-norm", _finite_inputs)


def _inf_is_kept(op: Any) -> Any:
    """The exponential is infinite below the diagonal too: at places which the mask keeps."""

    def everywhere(a: Array) -> Array:
        bad = np.isposinf(a.values).any() if _is_float(a) else False
        return _with_values(a, np.full_like(a.values, np.inf)) if bad else a

    def mask_keeps(a: Array) -> Array:
        return _with_values(a, np.ones_like(a.values)) if a.type_name == "bool" else a

    changed = _map_arrays(op, everywhere, ("outputs",))
    return _map_arrays(changed, mask_keeps, ("inputs", "weights"))


INF_IS_KEPT = _change_op("exponential", _inf_is_kept)


def _exp_finite(op: Any) -> Any:
    def tame(a: Array) -> Array:
        bad = _is_float(a) and np.isposinf(a.values).any()
        return _with_values(a, np.where(np.isposinf(a.values), 1e30, a.values)) if bad else a

    return _map_arrays(op, tame, ("outputs",))


EXP_FINITE = _change_op("exponential", _exp_finite)


def _row_maximum_inside(op: Any) -> Any:
    """The exponents of a row are shifted by the row's own maximum."""
    if "exp" not in op.name or not op.inputs:
        return op

    def shift(a: Array) -> Array:
        return _with_values(a, a.values - a.values.max(-1, keepdims=True))

    return _map_arrays(op, shift, ("inputs",))


ROW_MAXIMUM_INSIDE = _change_op("row-maximum", _row_maximum_inside)


def _stored_not_zero(op: Any) -> Any:
    """What was stored for a product is not all zeros."""

    def lift(a: Array) -> Array:
        return _with_values(a, np.ones_like(a.values)) if _is_float(a) and not a.values.any() else a

    return _map_arrays(op, lift, ("outputs",))


STORED_NOT_ZERO = _change_op("zero-output", _stored_not_zero)


def _change_part(name: str, test: str, change: Callable[[Any], Any]) -> Refuter:
    """A refuter that changes every record of a part."""

    def flip(subject: Evidence) -> Evidence:
        part = getattr(subject, name)
        found = part() if part is not None else None
        changed = None if found is None else tuple(c for x in found if (c := change(x)) is not None)
        flipped: dict[str, Any] = {name: always(changed)}
        return dataclasses.replace(subject, **flipped)

    return Refuter(test=test, flip=flip)


def _as_at_load(w: Any) -> Any:
    return dataclasses.replace(w, at_load=w.now, hash_at_load=w.hash_now)


WEIGHTS_AS_AT_LOAD = _change_part("weights", "weights-vs-load", _as_at_load)


def _weight_finite(subject: Evidence) -> Evidence:
    """Every weight is finite, wherever it is looked at."""

    def tame(a: Array) -> Array:
        return _with_values(a, np.nan_to_num(a.values, posinf=0.0, neginf=0.0)) if _is_float(a) else a

    def sound(w: Any) -> Any:
        return dataclasses.replace(w, now=None if w.now is None else tame(w.now))

    found = tuple(sound(w) for w in subject.weights()) if subject.weights is not None else None
    op = subject.first_bad_op() if subject.first_bad_op is not None else None
    op = _each_op(op, lambda o: _map_arrays(o, tame, ("weights",)))
    return dataclasses.replace(subject, weights=always(found), first_bad_op=always(op))


WEIGHT_FINITE = Refuter(test="weights-sound", flip=_weight_finite)


def _not_zero(w: Any) -> Any:
    if w.now is None or w.now.values.any():
        return w
    values = w.now.values.copy()
    values.reshape(-1)[0] = 1e-3
    return dataclasses.replace(w, now=_with_values(w.now, values))


WEIGHT_NOT_ZERO = _change_part("weights", "weights-sound", _not_zero)


def _whole_file(w: Any) -> Any:
    return dataclasses.replace(w, num_bytes_found=w.num_bytes)


FILE_WHOLE = _change_part("weights", "weights-sound", _whole_file)


def _fresh(s: Any) -> Any:
    return dataclasses.replace(s, hash_now=s.expected_hash, value=None)


STATE_FRESH = _change_part("states", "state-content", _fresh)
STATE_AS_SENT = STATE_FRESH


def _position_agrees(s: Any) -> Any:
    return dataclasses.replace(s, position=s.expected_position)


POSITION_AGREES = _change_part("states", "state-tags", _position_agrees)


def _owner_agrees(s: Any) -> Any:
    return dataclasses.replace(s, owner=s.expected_owner)


OWNER_AGREES = _change_part("states", "state-tags", _owner_agrees)


def _in_own_order(subject: Evidence) -> Evidence:
    """What the rows' own states give is what was served."""
    assert subject.recompute_rows is not None
    num_rows = len(subject.states()) if subject.states is not None else 0
    own, recompute = tuple(range(num_rows)), subject.recompute_rows

    def answer(order: tuple[int, ...]) -> Any:
        return subject.outcome().outputs[0] if tuple(order) == own else recompute(order)

    return dataclasses.replace(subject, recompute_rows=answer)


OWN_ORDER = Refuter(test="state-order", flip=_in_own_order)
OWNER_AGREES_IN_ORDER = Refuter(test="state-tags", flip=lambda s: _in_own_order(OWNER_AGREES.flip(s)))


def _holds(law: Any) -> Any:
    return dataclasses.replace(law, holds=True, worst=law.limit)


LAW_HOLDS = _change_part("laws", "laws", _holds)


def _slot_right(slot: Any) -> Any:
    return dataclasses.replace(slot, hash_now=slot.source_hash)


SLOT_RIGHT = _change_part("slots", "slot-hash", _slot_right)


def _no_evictions(e: Any) -> Any:
    return None if e.kind == "evict" else e


NOT_EVICTED = _change_part("events", "order-of-events", _no_evictions)
NOT_EVICTED_SLOT_RIGHT = Refuter(test="order-of-events", flip=lambda s: NOT_EVICTED.flip(SLOT_RIGHT.flip(s)))


def _wanted_is_found(subject: Evidence) -> Evidence:
    """Every read comes directly after the write that it wanted."""
    events = list(subject.events()) if subject.events is not None else []
    reads = {(e.what, e.version): e for e in events if e.kind == "read"}
    ordered = []
    for e in events:
        if e.kind == "write":
            ordered.append(e)
            ordered += [r for key, r in reads.items() if key == (e.what, e.version)]
        elif e.kind != "read":
            ordered.append(e)
    return dataclasses.replace(subject, events=always(tuple(ordered)))


READ_IN_TIME = Refuter(test="order-of-events", flip=_wanted_is_found)


def _wide_not_finite(q: Any) -> Any:
    """In float32 the field is as infinite as it was."""
    stored = {f.name: f for f in q.fields}
    wide = tuple(dataclasses.replace(w, values=stored[w.name].values) for w in q.wide_fields)
    return dataclasses.replace(q, wide_fields=wide)


WIDE_FIELD_NOT_FINITE = _change_part("quantised", "quantised-fields", _wide_not_finite)


def _fits(q: Any) -> Any:
    limit = min(float(f.values.min()) for f in q.fields if f.name == "scale") * (q.max_code or 1.0)
    largest = float(np.abs(q.original.values).max())
    return dataclasses.replace(q, original=_with_values(q.original, q.original.values * 0.5 * limit / largest))


VALUES_FIT = _change_part("quantised", "saturation", _fits)


def _has_keys(split: Any) -> Any:
    tame = np.where(np.isneginf(split.row_max.values), 0.0, split.row_max.values)
    return dataclasses.replace(split, row_max=_with_values(split.row_max, tame))


SPLITS_HAVE_KEYS = _change_part("splits", "splits", _has_keys)


def _normalised(r: Any) -> Any:
    k = r.keys.values
    unit = k / np.maximum(np.linalg.norm(k, axis=-1, keepdims=True), 1e-30)
    return dataclasses.replace(r, keys=_with_values(r.keys, unit))


KEYS_NORMALISED = _change_part("recurrences", "recurrence", _normalised)


def _decay_held(r: Any) -> Any:
    return dataclasses.replace(r, decay=_with_values(r.decay, np.exp(r.log_decay.values)))


DECAY_HELD = _change_part("recurrences", "recurrence", _decay_held)


def _sum_of_parts(c: Any) -> Any:
    total = np.sum([p.values for p in c.parts], axis=0)
    return dataclasses.replace(c, result=_with_values(c.result, total))


RESULT_IS_SUM = _change_part("collectives", "collectives", _sum_of_parts)


def _logits_finite(s: Any) -> Any:
    return dataclasses.replace(s, logits=_with_values(s.logits, np.nan_to_num(s.logits.values)))


LOGITS_FINITE = _change_part("sampled", "sampler-row", _logits_finite)


def _one_allowed(s: Any) -> Any:
    if s.allowed is None or s.allowed.values.any():
        return s
    allowed = s.allowed.values.copy()
    allowed[0] = True
    return dataclasses.replace(s, allowed=_with_values(s.allowed, allowed))


ONE_TOKEN_ALLOWED = _change_part("sampled", "sampler-row", _one_allowed)


def _exact_positions(subject: Evidence) -> Evidence:
    found = subject.positions() if subject.positions is not None else None
    changed = None if found is None else dataclasses.replace(found, used=found.exact)
    flipped = dataclasses.replace(subject, positions=None if changed is None else always(changed))
    return POSITIONS_CAST.flip(flipped)


def _cast_exact(op: Any) -> Any:
    """A cast of integers holds them."""
    if not (op.inputs and op.outputs and op.inputs[0].is_integer):
        return op
    if op.inputs[0].values.shape != op.outputs[0].values.shape:
        return op
    return dataclasses.replace(op, outputs=(_with_values(op.outputs[0], op.inputs[0].values.astype(np.float32)),))


POSITIONS_CAST = _change_op("angles", _cast_exact)
POSITIONS_EXACT = Refuter(test="positions", flip=_exact_positions)
