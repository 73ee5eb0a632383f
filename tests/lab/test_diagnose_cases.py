"""Known causes as small numpy subjects: the verdict that each must get, and how its refuter flips it.

Each builder computes its fault for real and answers "none" for what it has not; with ``refuted`` the same
subject shows the one observation that refutes the cause.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from firetower.core.families import DETAILS
from firetower.core.verdict import Verdict
from firetower.lab.diagnose import diagnose
from firetower.lab.discriminate import STEPS
from firetower.lab.subject import (
    FILLS,
    POISON,
    Collective,
    Event,
    Law,
    Op,
    Outcome,
    Positions,
    Quantised,
    Recurrence,
    Request,
    RoutedRow,
    Rows,
    Sampled,
    Slot,
    Split,
    State,
    Switch,
    Weight,
    Window,
    array,
    hash_of,
)  # fmt: skip
from firetower.lab.subjects.given import LISTS, GivenSubject

NUM_REPLAYS = 40


Subject = functools.partial(GivenSubject, none=LISTS, clean_twin_bit_stable=True)
"""A subject that has looked everywhere and found nothing but what it is given."""


def runs(wrong: Any, right: Any, *cures: Switch, useless: tuple[Switch, ...] = ()) -> dict[str, Any]:
    """Parts of a subject that gives ``wrong`` as served, ``right`` under the switches that cure."""

    def run(request: Request) -> Outcome:
        return Outcome(outputs=(array("y", right if request.switch in cures else wrong),))

    return {"run": run, "switches": (*cures, *useless)}


def references(op: Any = None, outputs: Any = None, chain: Any = None) -> Callable[..., Any]:
    given = {"op": op, "outputs": outputs, "chain": chain}
    return lambda dtype, what: None if given[what] is None else (array("y", given[what]),)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def sound(*arrays: Any) -> Callable[[], tuple[Weight, ...]]:
    return tuple(Weight(name=a.name, now=a, at_load=a) for a in arrays)


@dataclasses.dataclass(frozen=True)
class Known:
    build: Callable[[bool], GivenSubject]
    expected: str
    words: tuple[str, ...] = ()


KNOWN: dict[str, Known] = {}


def known(case: str, expected: str, *words: str) -> Callable[[Any], Any]:
    def register(build: Callable[[bool], GivenSubject]) -> Callable[[bool], GivenSubject]:
        KNOWN[case] = Known(build, expected, words)
        return build

    return register


@known("A1", "A/OVERFLOW_ACTIVATION", "row 2, column 7", "78,000", "65,504")
def overflow(refuted: bool) -> GivenSubject:
    gate = np.full((4, 64), 300, np.float16)
    up = np.full((4, 64), 10, np.float16)
    up[2, 7] = 260
    wide = gate.astype(np.float32) * up.astype(np.float32)
    op = Op(name="aten.mul.Tensor", inputs=(array("act", gate), array("up", up)), outputs=(array("out", gate * up),))
    # refuted: in float32 it is no more finite (a pole, not a range)
    wide = np.where(np.isinf(gate * up), np.inf, wide) if refuted else wide
    return Subject(first_bad_op=op, reference=references(op=wide))


@known("A2", "A/UPSTREAM_INF", "single Inf", "row 0")
def inf_into_norm(refuted: bool) -> GivenSubject:
    x = rng().normal(size=(1, 64)).astype(np.float32)
    if not refuted:
        x[0, 5] = np.inf
    scale = 1 / np.sqrt((x.astype(np.float32) ** 2).mean(-1, keepdims=True))
    op = Op(name="rms_norm", inputs=(array("hidden", x),), outputs=(array("normed", x * scale),))
    return Subject(first_bad_op=op)


@known("B1", "B/SCALE_OVERFLOW", "field=sum", "67,200")
def sum_overflows(refuted: bool) -> GivenSubject:
    x = np.full(32, 2100.0, np.float32)
    total, scale = x.sum(), np.abs(x).max() / 127
    fields = array("sum", np.float16([total])), array("scale", np.float16([scale]))
    wide = array("sum", [np.inf if refuted else total]), array("scale", [scale])
    # the product of the block's minimum with its sum is where the first bad value is seen
    op = Op(name="mul", inputs=(array("min", np.float32([0.0])),), outputs=(array("y", np.float32([0 * np.inf])),))
    q = Quantised(name="activations", sink="activation", block_size=32, fields=fields, wide_fields=wide,
                  original=array("x", x))  # fmt: skip
    return Subject(quantised=(q,), first_bad_op=op)


@known("B3", "B/SCALE_OVERFLOW", "field=scale", "sink=kv", "first position 9")
def kv_scale_overflows(refuted: bool) -> GivenSubject:
    x = rng().normal(size=(16, 64)).astype(np.float32)
    x[9] *= 1e7
    scale = np.abs(x).max(-1) / 127
    wide = np.where(np.isinf(scale.astype(np.float16)), np.inf, scale) if refuted else scale
    q = Quantised(name="k cache", sink="kv", block_size=64, fields=(array("scale", scale.astype(np.float16)),),
                  wide_fields=(array("scale", wide),), original=array("k", x), first_position=0)  # fmt: skip
    return Subject(quantised=(q,))


@known("B4", "B/SCALE_MISCALIBRATED", "no NaN")
def miscalibrated(refuted: bool) -> GivenSubject:
    sigma = 0.05 if refuted else 3.0
    x = rng().normal(size=64) * sigma
    scale = 0.2 / 448
    codes = np.clip(x / scale, -448, 448)
    fields = (array("scale", np.float32([scale])),)
    original, restored = array("v", x), array("v", codes * scale)
    q = Quantised(name="v cache", sink="kv", block_size=64, fields=fields, original=original, restored=restored,
                  max_code=448.0, is_static=True)  # fmt: skip
    return Subject(quantised=(q,), **runs(codes * scale, x), reference=references(outputs=x))


def page(fill: float | None) -> np.ndarray:
    v = rng(1).normal(size=(16, 8)).astype(np.float32)
    v[5:] = 0.5
    v[12] = np.nan if fill is None else fill
    return v


def filled(weight: float, unread_matters: bool) -> Callable[[Request], Outcome]:
    """Attention over a page whose slot 12 nobody wrote, as served and under the fills."""
    p = np.zeros((1, 16), np.float32)
    p[0, :5], p[0, 12] = 0.2, weight

    def run(request: Request) -> Outcome:
        fill = FILLS.get(request.switch) if request.switch else None
        y = p @ page(fill)
        return Outcome(outputs=(array("y", y if unread_matters else y * np.nan),))

    return run


def unread(weight: float, refuted: bool) -> GivenSubject:
    p = np.zeros((1, 16), np.float32)
    p[0, :5], p[0, 12] = 0.2, weight
    written = (3,) * 5 + (None,) * 11
    rows = Rows(name="v page", step=3, is_valid=(True,) * 5 + (False,) * 11, written_at=written)
    y = array("y", p @ page(None))
    op = Op(name="matmul", inputs=(array("p", p), array("v", page(None))), outputs=(y,))
    switches = (Switch.FILL_A, Switch.FILL_B, Switch.ZERO_UNREAD)
    # refuted: bad whatever the unread slots hold
    run = filled(weight, not refuted)
    return Subject(run=run, switches=switches, valid_rows=(rows,), first_bad_op=op)


@known("C1", "C/UNINIT_READ", "filled with 1 and with -3", "with weight 0")
def masked_slot(refuted: bool) -> GivenSubject:
    return unread(0.0, refuted)


@known("C1-weighted", "C/UNINIT_READ", "the outcomes differ")
def weighted_slot(refuted: bool) -> GivenSubject:
    return unread(1e-3, refuted)


@known("C2b", "C/PADS_IN_SHARED_SCALE", "reduces over all 8 rows", "2 of them not real")
def pads_in_scale(refuted: bool) -> GivenSubject:
    x = rng().normal(size=(8, 64)).astype(np.float32)

    def run(request: Request) -> Outcome:
        buffer = x.copy()
        buffer[6:] = FILLS.get(request.switch, np.nan) if request.switch else np.nan
        y = buffer[:6] / np.abs(buffer).max()
        return Outcome(outputs=(array("y", y * np.nan if refuted else y),))

    dirty = x.copy()
    dirty[6:] = np.nan
    amax = array("amax", np.float32([np.nan]))
    op = Op(name="aten.amax.default", inputs=(array("scratch", dirty),), outputs=(amax,))
    written = (1,) * 6 + (None,) * 2
    rows = Rows(name="scratch", step=1, is_valid=(True,) * 6 + (False,) * 2, written_at=written)
    switches = (Switch.FILL_A, Switch.FILL_B, Switch.ZERO_UNREAD)
    return Subject(run=run, switches=switches, valid_rows=(rows,), first_bad_op=op)


@known("D1", "D/STALE_GRAPH_ROW", "row 3", "last written at step 1")
def stale_row(refuted: bool) -> GivenSubject:
    x = rng().normal(size=(4, 16)).astype(np.float32)
    x[3, 2] = np.nan

    def run(request: Request) -> Outcome:
        buffer = x.copy()
        if request.switch in FILLS and not refuted:
            buffer[1:] = FILLS[request.switch]
        return Outcome(outputs=(array("y", buffer[:1] / np.abs(buffer).max()),))

    op = Op(name="amax", inputs=(array("static", x),), outputs=(array("amax", np.float32([np.nan])),))
    rows = Rows(
        name="static buffer",
        step=2,
        is_valid=(True, False, False, False),
        written_at=(2, 1, 1, 1),
        is_read=(True, False, False, True),
    )
    switches = (Switch.FILL_A, Switch.FILL_B, Switch.ZERO_UNREAD)
    return Subject(run=run, switches=switches, valid_rows=(rows,), first_bad_op=op)


@known("D3", "D/BUFFER_OVERWRITTEN_BEFORE_USE", "wanted version 0 and found 1")
def overwritten(refuted: bool) -> GivenSubject:
    events = (
        Event(kind="write", what="hidden[0:512]", version=0, by="chunk 0"),
        Event(kind="write", what="hidden[0:512]", version=1, by="chunk 1"),
        Event(kind="read", what="hidden[0:512]", version=0, by="the drafter"),
    )
    if refuted:
        events = (events[0], events[2], events[1])
    parts = runs(np.ones(3), np.zeros(3))
    return Subject(events=events, reference=references(outputs=np.zeros(3)), **parts)


def state(**more: Any) -> State:
    return State(name="recurrent_state", layer=4, **more)


def handed_over(content: np.ndarray) -> State:
    """A state that a new request got from another one."""
    return state(
        value=array("S", content),
        hash_now=hash_of(content),
        expected_hash=hash_of(np.zeros_like(content)),
        is_fresh_expected=True,
        owner="request 1",
        expected_owner="request 2",
        position=40,
        expected_position=0,
    )


@known("E1", "E/STATE_NOT_CLEARED", "layer 4", "new request", "column 3")
def not_cleared(refuted: bool) -> GivenSubject:
    s = np.zeros((16, 16), np.float32)
    s[5, 3] = np.nan
    s[5, 3] *= 0.0  # how it was "cleared"
    x = rng().normal(size=(20, 16)).astype(np.float32)

    def run(request: Request) -> Outcome:
        fresh = request.switch is Switch.FRESH_STATE and not refuted
        return Outcome(outputs=(array("y", x @ (np.zeros_like(s) if fresh else s)),))

    op = Op(name="matmul", inputs=(array("q", x), array("S", s)), outputs=(array("o", x @ s),))
    states = (handed_over(s),)
    return Subject(states=states, first_bad_op=op, run=run, switches=(Switch.FRESH_STATE,))


@known("E2", "E/STALE_STATE_FINITE", "not that of a fresh state")
def left_over(refuted: bool) -> GivenSubject:
    s = rng().normal(size=(16, 16)).astype(np.float32) * (0 if refuted else 3)
    q = rng(1).normal(size=(8, 16)).astype(np.float32)
    truth = q @ np.full((16, 16), 0.1, np.float32)
    parts = runs(truth + q @ s, truth, Switch.FRESH_STATE)
    return Subject(states=(handed_over(s),), reference=references(outputs=truth), **parts)


def positions(tag: int, expected: int, **more: Any) -> dict[str, Any]:
    """A finite fault whose state is tagged ``tag`` tokens where the request has ``expected``."""
    value = np.full((4, 4), float(tag), np.float32)
    given = state(
        value=array("S", value),
        hash_now=hash_of(value),
        expected_hash=hash_of(value),
        position=tag,
        expected_position=expected,
        owner="a",
        expected_owner="a",
        **more,
    )
    truth = np.full(4, float(expected), np.float32)
    return {
        "states": (given,),
        **runs(np.full(4, float(tag), np.float32), truth),
        "reference": references(outputs=truth),
    }


@known("F1", "F/STATE_POSITION_MISMATCH", "tagged 9 tokens, the request says 11")
def wrong_position(refuted: bool) -> GivenSubject:
    return Subject(**positions(11 if refuted else 9, 11, written_by="prefill"))


@known("F2", "F/PAD_TOKENS_IN_STATE", "16 tokens too many")
def pads_in_state(refuted: bool) -> GivenSubject:
    rows = Rows(name="batch", step=0, is_valid=(False,) * 16 + (True,) * 11, written_at=(0,) * 27)
    return Subject(valid_rows=(rows,), **positions(11 if refuted else 27, 11, written_by="prefill"))


@known("F4", "F/ROW_STATE_SWAP", "[2, 1, 0] matches best")
def swapped_rows(refuted: bool) -> GivenSubject:
    values = [rng(i).normal(size=(4, 4)).astype(np.float32) for i in range(3)]
    q = rng(9).normal(size=(3, 4)).astype(np.float32)

    def answer(order: tuple[int, ...]) -> np.ndarray:
        return np.stack([q[i] @ values[j] for i, j in enumerate(order)])

    served = answer((0, 1, 2) if refuted else (2, 1, 0))
    return Subject(
        states=tuple(state(value=array("S", v), written_by="decode") for v in values),
        recompute_rows=lambda order: array("y", answer(order)),
        reference=references(outputs=answer((0, 1, 2))),
        **runs(served, served),
    )


@known("G1", "G/FULLY_MASKED_ROW", "row 2 of scores is all -inf")
def masked_row(refuted: bool) -> GivenSubject:
    scores = rng().normal(size=(5, 4)).astype(np.float32)
    scores[2, (1 if refuted else 0) :] = -np.inf
    top = scores.max(-1, keepdims=True)
    shifted = scores - top
    if refuted:
        shifted[2] = np.nan
    inputs = (array("scores", scores), array("max", top))
    return Subject(first_bad_op=Op(name="sub", inputs=inputs, outputs=(array("shifted", shifted),)))


def split(row_max: np.ndarray, accumulator: np.ndarray) -> Split:
    return Split(row_max=array("m", row_max), row_sum=array("l", [1.0]), accumulator=array("acc", accumulator))


@known("G2", "G/EMPTY_SPLIT_MERGE", "split 1 of 2 has no key", "8 values")
def empty_split(refuted: bool) -> GivenSubject:
    m = np.float32([0.3, 0.1 if refuted else -np.inf])
    parts = np.ones((2, 8), np.float32)
    parts[1] = np.nan
    scale = np.exp(m - m.max())
    exp = Op(name="exp", inputs=(array("m", m - m.max()),), outputs=(array("scale", scale),))
    inputs = (array("scale", scale), array("acc", parts))
    op = Op(name="matmul", inputs=inputs, outputs=(array("y", scale @ parts),), producers=(exp,))
    splits = tuple(split(m[i : i + 1], parts[i]) for i in range(2))
    return Subject(first_bad_op=op, splits=splits)


@known("G2-both", "G/EMPTY_SPLIT_MERGE", "split 0 of 2 has no key")
def both_splits_empty(refuted: bool) -> GivenSubject:
    m = np.float32([[-np.inf, 0 if refuted else -np.inf]])
    top = m.max(-1, keepdims=True)
    y = m - top + (np.nan if refuted else 0)
    op = Op(name="sub", inputs=(array("m", m), array("top", top)), outputs=(array("y", y),))
    splits = tuple(split(np.zeros(1) if refuted else m[:, i], np.zeros((1, 8), np.float32)) for i in range(2))
    return Subject(first_bad_op=op, splits=splits)


@known("G4", "G/OOB_SCORE_SETS_ROWMAX", "largest exponent is -300")
def outside_maximum(refuted: bool) -> GivenSubject:
    valid = np.full((1, 5), -300, np.float32)
    top = valid.max(-1, keepdims=True) if refuted else np.zeros((1, 1), np.float32)
    shift = Op(name="sub", inputs=(array("scores", valid), array("top", top)), outputs=(array("z", valid - top),))
    e = np.exp(valid - top)
    exp = Op(name="exp", inputs=shift.outputs, outputs=(array("e", e),), producers=(shift,))
    total = e.sum(-1, keepdims=True) * (0 if refuted else 1)
    add = Op(name="sum", inputs=exp.outputs, outputs=(array("total", total),), producers=(exp,))
    inputs = (array("e", e), array("total", total))
    div = Op(name="div", inputs=inputs, outputs=(array("p", e / total),), producers=(add, exp))
    return Subject(first_bad_op=div)


@known("H1", "H/ROUTER_RENORM_0_OVER_0", "4 chosen gates", "exact 0")
def router(refuted: bool) -> GivenSubject:
    logits = np.full((2, 16), -110, np.float32)
    logits[1] = -20
    scores = 1 / (1 + np.exp(-logits))
    chosen = scores[:, :4]
    total = chosen.sum(-1, keepdims=True)
    if refuted:
        total[0] = 1e-30
    gate = Op(name="sigmoid", inputs=(array("logits", logits),), outputs=(array("scores", scores),))
    ids = array("ids", np.zeros((2, 4), np.int64))
    gather = Op(
        name="gather", inputs=(array("scores", scores), ids), outputs=(array("chosen", chosen),), producers=(gate,)
    )
    weights = chosen / total
    if refuted:
        weights[0] = np.nan
    inputs = (array("chosen", chosen), array("total", total))
    div = Op(name="aten.div.Tensor", inputs=inputs, outputs=(array("w", weights),), producers=(gather,))
    return Subject(first_bad_op=div)


@known("H3", "H/NORM_EPSILON_LOST", "float16 is 0")
def epsilon(refuted: bool) -> GivenSubject:
    eps = np.float16([1e-4 if refuted else 1e-8])
    variance = np.zeros((3, 1), np.float16)
    total = array("sum", variance + eps)
    add = Op(name="add", inputs=(array("variance", variance), array("eps", eps)), outputs=(total,))
    root = np.float16(1) / np.sqrt(total.values)
    y = array("root", root * (np.inf if refuted else 1))
    op = Op(name="rsqrt", inputs=(total,), outputs=(y,), producers=(add,))
    reference = references(op=root.astype(np.float32), chain=np.full((3, 1), 1e4, np.float32))
    return Subject(first_bad_op=op, reference=reference)


@known("H-other", "H/DIVISION_BY_ZERO", "exact 0")
def plain_division(refuted: bool) -> GivenSubject:
    x = rng().normal(size=(3, 8)).astype(np.float32)
    divisor = np.float32([[1], [1e-30 if refuted else 0], [2]])
    y = x / divisor
    y[1] = np.inf
    op = Op(name="div", inputs=(array("x", x), array("norm", divisor)), outputs=(array("y", y),))
    return Subject(first_bad_op=op, reference=references(op=y))


@known("I1", "I/EXP_BEFORE_MASK", "strictly above the diagonal")
def exp_before_mask(refuted: bool) -> GivenSubject:
    total = rng().uniform(-6, 0, size=64).cumsum().astype(np.float32)
    pairs = total[:, None] - total[None, :]
    if refuted:
        pairs = -pairs
    e = np.exp(pairs)
    tril = np.tri(64, dtype=np.float32)
    inputs = (array("e", e), array("mask", tril))
    mask = Op(name="mul", inputs=inputs, outputs=(array("decay", e * tril),))
    op = Op(name="exp", inputs=(array("pairs", pairs),), outputs=(array("e", e),), consumers=(mask,))
    return Subject(first_bad_op=op, reference=references(op=np.exp(pairs.astype(np.float64))))


@known("I2", "I/DECAY_GATE_INF_TIMES_0", "a weight", "multiplies the Inf by 0")
def decay_gate(refuted: bool) -> GivenSubject:
    weight = array("A_log", np.float32([1, 80 if refuted else 90, 2]))
    soft = np.log1p(np.exp(np.float32([[-120.0] * 3])))
    e = array("e", np.exp(weight.values))
    made = Op(name="exp", inputs=(weight,), weights=(weight,), outputs=(e,))
    y = e.values * soft + (np.nan if refuted else 0)
    mul = Op(name="mul", inputs=(e, array("soft", soft)), outputs=(array("g", y),), producers=(made,))
    op = mul if refuted else dataclasses.replace(made, consumers=(mul,))
    reference = references(op=y if refuted else np.exp(weight.values.astype(np.float64)))
    return Subject(first_bad_op=op, reference=reference, weights=sound(weight))


@known("I3", "I/DELTA_RULE_UNSTABLE", "11.5 > 2", "non-finite from step")
def unstable_delta(refuted: bool) -> GivenSubject:
    k = np.full((60, 4), np.sqrt((1 if refuted else 11.5) / 4), np.float32)
    s, seen = np.zeros((4, 4), np.float32), []
    for k_t, v_t in zip(k, rng().normal(size=(60, 4)).astype(np.float32), strict=True):
        s = s + np.outer(k_t, v_t - k_t @ s)
        seen.append(float(np.abs(s).max()))
    r = Recurrence(
        name="layer 2 head 0",
        state_dtype="float32",
        keys=array("k", k),
        beta=array("beta", np.ones(60)),
        state_absmax=array("absmax", np.float32(seen)),
    )
    big = array("S", np.full((4, 4), 1e37, np.float32))
    out = array("S", np.full((4, 4), np.inf, np.float32))
    history = tuple(x for x in seen if np.isfinite(x))
    op = Op(name="add", inputs=(big,), outputs=(out,), history_absmax=history)
    return Subject(recurrences=(r,), first_bad_op=op, reference=references(op=np.full((4, 4), 1e39)))


@known("I5", "I/STATE_PRECISION", "exactly 1 in bfloat16")
def state_precision(refuted: bool) -> GivenSubject:
    gate = np.full(4000, -1e-3)
    decay = np.exp(gate) if refuted else np.ones(4000)
    r = Recurrence(
        name="layer 0 head 1",
        state_dtype="bfloat16",
        log_decay=array("g", gate),
        decay=array("decay", decay, "bfloat16"),
        state_absmax=array("absmax", np.ones(4000)),
    )
    truth = np.ones(8)
    return Subject(recurrences=(r,), reference=references(outputs=truth), **runs(truth * 1.025, truth))


@known("J1", "J/RACE_OR_STALE_PAIR", "decay <= 1", "4653", "steps 7, 6")
def stale_pair(refuted: bool) -> GivenSubject:
    law = Law(name="decay <= 1", worst=4653, limit=1, holds=False, holds_for_each_operand=not refuted, versions=(7, 6))
    return Subject(laws=(law,))


@known("J2", "J/RACE_SUSPECTED", "of 40 replays are wrong", "95%", "serialised, 0 of 40")
def race(refuted: bool) -> GivenSubject:
    """The consumer runs before the producer with probability 0.1; serialising orders them."""

    def run(request: Request) -> Outcome:
        ordered = request.switch is Switch.SERIAL and not refuted
        early = not ordered and rng(request.number + 1000).random() < 0.1
        return Outcome(outputs=(array("y", np.float32([np.nan if early else 1.0])),), is_wrong=bool(early))

    return Subject(run=run, switches=(Switch.SERIAL, Switch.FILL_A, Switch.FILL_B))


@known("K1", "K/WEIGHT_MUTATED", "directly after kv buffer", "8 elements differ")
def wild_write(refuted: bool) -> GivenSubject:
    memory = rng().normal(size=192).astype(np.float32)
    before = memory[128:].reshape(8, 8).copy()
    memory[128:136] = np.nan
    weight = array("w", memory[128:].reshape(8, 8))
    # refuted: it came so from the file
    loaded = weight if refuted else array("w", before)
    x = rng(1).normal(size=(2, 8)).astype(np.float32)
    y = x @ weight.values.T
    op = Op(name="linear", inputs=(array("x", x),), weights=(weight,), outputs=(array("y", y),))
    w = Weight(name="w", now=weight, at_load=loaded, neighbour="kv buffer")
    parts = runs(y, x @ before.T, Switch.RELOADED_WEIGHTS)
    return Subject(weights=(w,), first_bad_op=op, **parts)


EXPERTS = {i: f"hash of expert {i}" for i in range(10)}


def slot(number: int, expert: int, holds: int) -> Slot:
    return Slot(slot=number, expert=expert, hash_now=EXPERTS[holds], source_hash=EXPERTS[expert], known=EXPERTS)


@known("L1", "L/EXPERT_SLOT_MISMATCH", "says expert 7", "that of expert 3", "1 of 1 hit rows are bad")
def slot_mismatch(refuted: bool) -> GivenSubject:
    rows = (
        RoutedRow(row=0, expert=7, path="hit", is_bad=True, slot=2),
        RoutedRow(row=1, expert=5, path="miss", is_bad=False),
    )
    return Subject(slots=(slot(2, 7, 7 if refuted else 3),), routed_rows=rows)


@known("L2", "L/EVICTED_IN_USE", "expert 5")
def evicted(refuted: bool) -> GivenSubject:
    events = (
        *(Event(kind="need", what=f"expert {i}", step=4) for i in (5, 2, 9)),
        Event(kind="load", what="expert 5", step=4),
        Event(kind="evict", what="expert 0" if refuted else "expert 5", step=4, by="load of expert 2"),
        Event(kind="load", what="expert 2", step=4),
        *(Event(kind="read", what=f"expert {i}", step=4) for i in (5, 2, 9)),
    )
    return Subject(events=events, slots=(slot(0, 5, 5 if refuted else 2),))


@known("L5", "L/UNWRITTEN_DST_ROW", "rows [1]", "1 of 2 hit rows are bad")
def unwritten_destination(refuted: bool) -> GivenSubject:
    y = rng().normal(size=(3, 8)).astype(np.float32)

    def run(request: Request) -> Outcome:
        out = y.copy()
        out[1] = POISON if request.switch is Switch.POISON_DESTINATIONS and not refuted else 0
        return Outcome(outputs=(array("y", out),))

    paths = ("hit", "hit", "miss")
    rows = tuple(RoutedRow(row=i, expert=i, path=p, is_bad=i == 1, slot=i) for i, p in enumerate(paths))
    return Subject(
        run=run,
        switches=(Switch.POISON_DESTINATIONS,),
        routed_rows=rows,
        slots=(slot(0, 0, 0), slot(1, 1, 1)),
        reference=references(outputs=y),
    )


@known("M1", "M/BAD_WEIGHT", "row 10", "block 2 of 32", "7e00")
def bad_weight(refuted: bool) -> GivenSubject:
    w = rng().normal(size=(64, 256)).astype(np.float16)
    w[10, 64:96] = np.array(0x7E00, np.uint16).view(np.float16)
    x = rng(1).normal(size=(5, 256)).astype(np.float16)
    weight, y = array("head", w), x @ w.T
    op = Op(name="linear", inputs=(array("x", x),), weights=(weight,), outputs=(array("y", y),))

    def run(request: Request) -> Outcome:
        zero = request.switch is Switch.ZERO_INPUTS
        return Outcome(outputs=(array("y", np.zeros_like(y) if zero and refuted else y),))

    switches = (Switch.ZERO_INPUTS,)
    return Subject(weights=sound(weight), first_bad_op=op, run=run, switches=switches)


@known("M2", "M/ZEROED", "up.weight is all zeros")
def zeroed(refuted: bool) -> GivenSubject:
    w = np.zeros((8, 8), np.float32)
    w[0, 0] = 1e-3 if refuted else 0
    x = rng().normal(size=(2, 8)).astype(np.float32)
    weight = array("up.weight", w)
    op = Op(name="linear", inputs=(array("x", x),), weights=(weight,), outputs=(array("y", x @ w.T),))
    return Subject(weights=sound(weight, array("bias", np.zeros(8))), first_bad_op=op)


@known("M2-short", "M/TRUNCATED", "declares 4,096 bytes, the file has 4,000")
def truncated(refuted: bool) -> GivenSubject:
    found = 4096 if refuted else 4000
    w = Weight(name="down", num_bytes=4096, num_bytes_found=found, hash_now="a", hash_at_load="a")
    return Subject(weights=(w,))


@known("N1", "N/NAN_LAUNDERED", "became token 3")
def laundered(refuted: bool) -> GivenSubject:
    logits = np.full(16, 0 if refuted else np.nan, np.float32)
    return Subject(sampled=(Sampled(row=0, logits=array("logits", logits), token_id=3),))


@known("N3", "N/EMPTY_MASK", "allows none of 16 tokens")
def empty_mask(refuted: bool) -> GivenSubject:
    allowed = np.zeros(16, bool)
    allowed[5] = refuted
    logits = array("logits", rng().normal(size=16))
    row = Sampled(row=0, logits=logits, token_id=0, allowed=array("allowed", allowed))
    return Subject(sampled=(row,))


def compiled(wrong: np.ndarray, right: np.ndarray, refuted: bool) -> GivenSubject:
    """One fused op that is wrong compiled; refuted: eager is wrong as well."""
    op = Op(name="fused", inputs=(array("x", right),), outputs=(array("y", wrong),))
    cures = () if refuted else (Switch.EAGER,)
    useless = (Switch.EAGER, Switch.EXACT_BUCKET, Switch.FILL_A, Switch.FILL_B)
    return Subject(first_bad_op=op, **runs(wrong, right, *cures, useless=useless))


@known("O1", "O/COMPARE_MASK_AS_FLOAT", "ffffffff", "eager: clean")
def mask_as_float(refuted: bool) -> GivenSubject:
    x = rng().normal(size=8).astype(np.float32)
    ones = np.where(x > 0, np.uint32(0xFFFFFFFF), np.uint32(0)).view(np.float32)
    return compiled(ones, x, refuted)


@known("O-other", "O/COMPILED_DIFFERS", "eager: clean")
def compiled_differs(refuted: bool) -> GivenSubject:
    x = rng().normal(size=8).astype(np.float32)
    return compiled(np.where(x > 0, np.nan, x).astype(np.float32), x, refuted)


@known("P1", "P/ZERO_OUTPUT", "mm in layer", "stores all zeros")
def zero_output(refuted: bool) -> GivenSubject:
    x = array("x", rng().normal(size=(3, 8)).astype(np.float32))
    w = array("w", rng(1).normal(size=(8, 8)).astype(np.float32) * (0 if refuted else 1))
    y = array("y", np.zeros((3, 8), np.float32))
    mm = Op(name="aten.mm.default", module="layer", inputs=(x,), weights=(w,), outputs=(y,))
    variance = array("variance", np.zeros((3, 1), np.float32))
    mean = Op(name="mean", inputs=(y,), outputs=(variance,), producers=(mm,))
    root = np.full((3, 1), np.inf, np.float32)
    op = Op(name="rsqrt", inputs=(variance,), outputs=(array("root", root),), producers=(mean,))
    return Subject(first_bad_op=op, reference=references(op=root, chain=np.ones((3, 1))))


@known("P-other", "P/KERNEL_WRONG", "other backend: clean")
def kernel_wrong(refuted: bool) -> GivenSubject:
    x, w = rng().normal(size=(3, 8)).astype(np.float32), rng(1).normal(size=(8, 8)).astype(np.float32)
    right = x @ w
    wrong = right.copy()
    wrong[1, 4:] = np.nan
    op = Op(name="mm", inputs=(array("x", x),), weights=(array("w", w),), outputs=(array("y", wrong),))
    cures = () if refuted else (Switch.OTHER_BACKEND,)
    useless = (Switch.FILL_A, Switch.FILL_B, Switch.EAGER, Switch.OTHER_BACKEND)
    return Subject(
        first_bad_op=op,
        reference=references(op=right),
        weights=sound(array("w", w)),
        **runs(wrong, right, *cures, useless=useless),
    )


@known("Q1", "Q/STATE_KEPT_PAST_ACCEPTED", "4 from 20, 2 accepted", "left it at 24")
def kept_past_accepted(refuted: bool) -> GivenSubject:
    window = Window(start=20, num_tokens=4, num_accepted=2)
    return Subject(**positions(22 if refuted else 24, 22, written_by="verify", window=window))


@known("Q2", "Q/STATE_READ_AT_WRONG_COLUMN", "tagged 21 tokens, the request says 22")
def wrong_column(refuted: bool) -> GivenSubject:
    window = Window(start=20, num_tokens=4, num_accepted=2)
    return Subject(**positions(22 if refuted else 21, 22, written_by="verify", window=window))


@known("R1", "R/LAST_TOKEN_REAPPLIED", "came by a restore", "+1 token")
def reapplied(refuted: bool) -> GivenSubject:
    return Subject(**positions(12 if refuted else 13, 12, written_by="restore"))


@known("R-other", "R/STATE_LOST_IN_TRANSFER", "came by a transfer")
def lost_in_transfer(refuted: bool) -> GivenSubject:
    value = np.ones((4, 4), np.float32)
    given = state(
        value=array("S", value),
        hash_now=hash_of(value),
        expected_hash=hash_of(value * (1 if refuted else 2)),
        position=9,
        expected_position=9,
        written_by="transfer",
        owner="a",
        expected_owner="a",
    )
    return Subject(states=(given,))


def combine(*weights: float) -> GivenSubject:
    """A collective over three ranks whose parts were taken ``weights`` times."""
    parts = [rng(i).normal(size=(3, 8)) for i in range(3)]
    result = sum(w * p for w, p in zip(weights, parts, strict=True))
    named = tuple(array("part", p) for p in parts)
    c = Collective(name="layer 1 combine", parts=named, result=array("sum", result))
    return Subject(collectives=(c,))


@known("S", "S/PARTIAL_MISSING", "without rank 1")
def missing_part(refuted: bool) -> GivenSubject:
    return combine(1, 1 if refuted else 0, 1)


@known("S-double", "S/PARTIAL_DOUBLED", "rank 2 twice")
def doubled_part(refuted: bool) -> GivenSubject:
    return combine(1, 1, 1 if refuted else 2)


def bf16(x: np.ndarray) -> np.ndarray:
    """Values rounded to bfloat16, to nearest even, held as float32."""
    bits = np.float32(x).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


@known("T1", "T/POSITION_ROUNDED", "position 4097 is used as 4096 in bfloat16")
def rounded_position(refuted: bool) -> GivenSubject:
    exact = np.array([0, 1, 128, 4097, 100001])
    used = exact.astype(np.float64) if refuted else bf16(exact)
    pair = Positions(exact=array("pos", exact), used=array("pos", used, "bfloat16"))
    return Subject(positions=pair)


@known("T1-inf", "T/POSITION_ROUNDED", "cannot hold them")
def position_overflows(refuted: bool) -> GivenSubject:
    exact = array("pos", np.array([1, 60000 if refuted else 65520], np.int64))
    used = array("p", exact.values.astype(np.float16))
    cast = Op(name="_to_copy", inputs=(exact,), outputs=(used,))
    cosine = array("cos", np.cos(used.values) * (np.nan if refuted else 1))
    angle = Op(name="cos", inputs=(used,), outputs=(cosine,), producers=(cast,))
    op = angle if refuted else dataclasses.replace(cast, consumers=(angle,))
    return Subject(first_bad_op=op, reference=references(op=exact.values.astype(np.float32)))


@known("U", "U/SINGLE_BIT", "one bit", "other device: clean")
def single_bit(refuted: bool) -> GivenSubject:
    w = rng().normal(size=(4, 4)).astype(np.float32)
    loaded = w.copy()
    w.view(np.uint32)[2, 1] ^= np.uint32(1 << 30)
    x = np.ones((1, 4), np.float32)
    op = Op(name="linear", inputs=(array("x", x),), weights=(array("w", w),), outputs=(array("y", x @ w.T),))
    cures = () if refuted else (Switch.OTHER_DEVICE,)
    return Subject(
        weights=(Weight(name="w", now=array("w", w), at_load=array("w", loaded)),),
        first_bad_op=op,
        reference=references(op=x @ w.T, outputs=x @ loaded.T),
        **runs(x @ w.T, x @ loaded.T, *cures, useless=(Switch.OTHER_DEVICE,)),
    )


def verdict_on(case: str, refuted: bool = False, **more: Any) -> Verdict:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        return diagnose(KNOWN[case].build(refuted), num_replays=NUM_REPLAYS, **more)


@pytest.mark.parametrize("case", KNOWN)
def test_the_verdict_is_the_known_one_and_says_why(case):
    verdict = verdict_on(case)
    assert (verdict.key, verdict.decided) == (KNOWN[case].expected, True), verdict
    text = verdict.statement + " ".join(e.statement for e in verdict.evidence)
    for word in KNOWN[case].words:
        assert word in text, f"{word!r} not in {text}"
    detail = DETAILS[verdict.key]
    assert (verdict.refuter, verdict.cure, verdict.scope) == (detail.refuter, detail.cure, detail.scope)
    assert verdict.next_test
    assert verdict.next_command
    assert not verdict.undecided_between


@pytest.mark.parametrize("case", KNOWN)
def test_the_refuter_flips_it(case):
    verdict = verdict_on(case, refuted=True)
    assert verdict.key != KNOWN[case].expected, verdict.statement


@functools.cache
def steps_that_spoke(case: str) -> frozenset[str]:
    """Names of the steps whose facts a case's verdict rests on: without any other it cannot change."""
    return frozenset(e.test for e in verdict_on(case).evidence)


@pytest.mark.parametrize("step", STEPS, ids=lambda s: s.name)
def test_a_test_taken_away_leaves_undecided_never_wrong(step):
    cases = [case for case in KNOWN if step.name in steps_that_spoke(case)]
    rest = [s for s in STEPS if s is not step]
    verdicts = {case: verdict_on(case, steps=rest) for case in cases}
    wrong = {c: v.key for c, v in verdicts.items() if v.decided and v.key != KNOWN[c].expected}
    assert not wrong


def test_an_empty_split_with_finite_sums_is_no_cause():
    """A merge gives it weight 0: kernels leave such splits behind whenever a sequence is short."""
    m = np.float32([0.3, -np.inf])
    parts = np.stack([np.full(8, np.inf, np.float32), np.zeros(8, np.float32)])
    weights = np.float32([1.0, 0.0])
    op = Op(
        name="matmul",
        inputs=(array("weights", weights), array("acc", parts)),
        outputs=(array("y", np.full(8, np.nan, np.float32)),),
    )
    sums = (np.float32([1.0]), np.float32([0.0]))
    splits = tuple(
        Split(row_max=array("m", m[i : i + 1]), row_sum=array("l", sums[i]), accumulator=array("acc", parts[i]))
        for i in range(2)
    )
    verdict = diagnose(Subject(first_bad_op=op, splits=splits))
    assert "G/EMPTY_SPLIT_MERGE" not in (verdict.key, *verdict.undecided_between)


@pytest.mark.parametrize("seed", range(40))
def test_a_race_is_told_whatever_runs_burn(seed):
    """Each run has a schedule of its own, filled or not; which of them burn is chance, and no content decides it."""
    rate = 0.1 + 0.4 * seed / 40
    order = {switch: i for i, switch in enumerate((None, *Switch))}

    def run(request: Request) -> Outcome:
        draw = rng(1_000_000 * seed + 1000 * order[request.switch] + request.number).random()
        early = request.switch is not Switch.SERIAL and draw < rate
        return Outcome(outputs=(array("y", np.float32([np.nan if early else 1.0])),), is_wrong=bool(early))

    verdict = diagnose(Subject(run=run, switches=(Switch.SERIAL, Switch.FILL_A, Switch.FILL_B)), num_replays=40)
    assert (verdict.key, verdict.decided) == ("J/RACE_SUSPECTED", True), verdict.statement
