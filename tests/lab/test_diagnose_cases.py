"""Known causes as small numpy subjects: the verdict that each must get, and how its refuter flips it.

Each builder computes its fault for real and answers "none" for what it has not; with ``refuted`` the same
subject shows the one observation that refutes the cause.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
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
)

NUM_REPLAYS = 40


@dataclasses.dataclass
class Subject:
    """A subject that has looked everywhere and found nothing; builders fill in what is there."""

    name: str = "a subject"
    weights: Any = tuple
    states: Any = tuple
    valid_rows: Any = tuple
    slots: Any = tuple
    routed_rows: Any = tuple
    events: Any = tuple
    quantised: Any = tuple
    splits: Any = tuple
    recurrences: Any = tuple
    sampled: Any = tuple
    collectives: Any = tuple
    laws: Any = tuple
    positions: Any = None
    first_bad_op: Any = None
    reference: Any = None
    recompute_rows: Any = None
    run: Any = None
    switches: Any = tuple
    reset: Any = lambda: None  # noqa: E731
    clean_twin_bit_stable: bool | None = True


def always(value: Any) -> Callable[..., Any]:
    return lambda *_: value


def runs(wrong: Any, right: Any, *cures: Switch, useless: tuple[Switch, ...] = ()) -> dict[str, Any]:
    """Parts of a subject that gives ``wrong`` as served, ``right`` under the switches that cure."""

    def run(request: Request) -> Outcome:
        return Outcome(outputs=(array("y", right if request.switch in cures else wrong),))

    return {"run": run, "switches": always((*cures, *useless))}


def references(op: Any = None, outputs: Any = None, chain: Any = None) -> Callable[..., Any]:
    given = {"op": op, "outputs": outputs, "chain": chain}
    return lambda dtype, what: None if given[what] is None else (array("y", given[what]),)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def sound(*arrays: Any) -> Callable[[], tuple[Weight, ...]]:
    return always(tuple(Weight(name=a.name, now=a, at_load=a) for a in arrays))


@dataclasses.dataclass(frozen=True)
class Known:
    build: Callable[[bool], Subject]
    expected: str
    words: tuple[str, ...] = ()


KNOWN: dict[str, Known] = {}


def known(case: str, expected: str, *words: str) -> Callable[[Any], Any]:
    def register(build: Callable[[bool], Subject]) -> Callable[[bool], Subject]:
        KNOWN[case] = Known(build, expected, words)
        return build

    return register


@known("A1", "A/OVERFLOW_ACTIVATION", "row 2, column 7", "77,922", "65,504")
def overflow(refuted: bool) -> Subject:
    gate = np.full((4, 64), 300, np.float16)
    up = np.full((4, 64), 10, np.float16)
    up[2, 7] = 259.75
    wide = gate.astype(np.float32) * up.astype(np.float32)
    op = Op(name="aten.mul.Tensor", inputs=(array("act", gate), array("up", up)), outputs=(array("out", gate * up),))
    # refuted: in float32 it is no more finite (a pole, not a range)
    wide = np.where(np.isinf(gate * up), np.inf, wide) if refuted else wide
    return Subject(first_bad_op=always(op), reference=references(op=wide))


@known("A2", "A/UPSTREAM_INF", "single Inf", "row 0")
def inf_into_norm(refuted: bool) -> Subject:
    x = rng().normal(size=(1, 64)).astype(np.float32)
    if not refuted:
        x[0, 5] = np.inf
    scale = 1 / np.sqrt((x.astype(np.float32) ** 2).mean(-1, keepdims=True))
    op = Op(name="rms_norm", inputs=(array("hidden", x),), outputs=(array("normed", x * scale),))
    return Subject(first_bad_op=always(op))


@known("B1", "B/SCALE_OVERFLOW", "field=sum", "67,200")
def sum_overflows(refuted: bool) -> Subject:
    x = np.full(32, 2100.0, np.float32)
    total, scale = x.sum(), np.abs(x).max() / 127
    fields = array("sum", np.float16([total])), array("scale", np.float16([scale]))
    wide = array("sum", [np.inf if refuted else total]), array("scale", [scale])
    # the product of the block's minimum with its sum is where the first bad value is seen
    op = Op(name="mul", inputs=(array("min", np.float32([0.0])),), outputs=(array("y", np.float32([0 * np.inf])),))
    q = Quantised(name="activations", sink="activation", block_size=32, fields=fields, wide_fields=wide,
                  original=array("x", x))  # fmt: skip
    return Subject(quantised=always((q,)), first_bad_op=always(op))


@known("B3", "B/SCALE_OVERFLOW", "field=scale", "sink=kv", "first position 9")
def kv_scale_overflows(refuted: bool) -> Subject:
    x = rng().normal(size=(16, 64)).astype(np.float32)
    x[9] *= 1e7
    scale = np.abs(x).max(-1) / 127
    wide = np.where(np.isinf(scale.astype(np.float16)), np.inf, scale) if refuted else scale
    q = Quantised(name="k cache", sink="kv", block_size=64, fields=(array("scale", scale.astype(np.float16)),),
                  wide_fields=(array("scale", wide),), original=array("k", x), first_position=0)  # fmt: skip
    return Subject(quantised=always((q,)))


@known("B4", "B/SCALE_MISCALIBRATED", "no NaN")
def miscalibrated(refuted: bool) -> Subject:
    sigma = 0.05 if refuted else 3.0
    x = rng().normal(size=64) * sigma
    scale = 0.2 / 448
    codes = np.clip(x / scale, -448, 448)
    q = Quantised(name="v cache", sink="kv", block_size=64, fields=(array("scale", np.float32([scale])),),
                  original=array("v", x), restored=array("v", codes * scale), max_code=448.0, is_static=True)  # fmt: skip
    return Subject(quantised=always((q,)), **runs(codes * scale, x), reference=references(outputs=x))


def page(fill: float | None) -> np.ndarray:
    v = rng(1).normal(size=(16, 8)).astype(np.float32)
    v[5:] = 0.5
    v[12] = np.nan if fill is None else fill
    return v


@known("C1", "C/UNINIT_READ", "filled with 1 and -3")
def unread_slot(refuted: bool) -> Subject:
    p = np.zeros((1, 16), np.float32)
    p[0, :5] = 0.2
    # a weight of exactly 0 keeps any finite value out: the fault is told by fills that are read for real
    p[0, 12] = 0.0 if refuted else 1e-3

    def run(request: Request) -> Outcome:
        fill = FILLS.get(request.switch) if request.switch else None
        return Outcome(outputs=(array("y", p @ page(fill)),))

    rows = Rows(name="v page", step=3, is_valid=(True,) * 5 + (False,) * 11, written_at=(3,) * 5 + (None,) * 11,
                values=array("v", page(None)))  # fmt: skip
    op = Op(name="matmul", inputs=(array("p", p), array("v", page(None))), outputs=(array("y", p @ page(None)),))
    switches = always((Switch.FILL_A, Switch.FILL_B, Switch.ZERO_UNREAD))
    return Subject(run=run, switches=switches, valid_rows=always((rows,)), first_bad_op=always(op))


@known("C1-masked", "C/UNINIT_READ", "never written", "zeroed it is clean")
def masked_slot(refuted: bool) -> Subject:
    """The slot's probability is exactly 0: any finite fill is harmless, only 0 times NaN shows."""
    p = np.zeros((1, 16), np.float32)
    p[0, :5] = 0.2

    def run(request: Request) -> Outcome:
        fill = FILLS.get(request.switch) if request.switch else None
        if refuted and request.switch is Switch.ZERO_UNREAD:
            fill = None
        return Outcome(outputs=(array("y", p @ page(fill)),))

    rows = Rows(name="v page", step=3, is_valid=(True,) * 5 + (False,) * 11, written_at=(3,) * 5 + (None,) * 11)
    op = Op(name="matmul", inputs=(array("p", p), array("v", page(None))), outputs=(array("y", p @ page(None)),))
    switches = always((Switch.FILL_A, Switch.FILL_B, Switch.ZERO_UNREAD))
    return Subject(run=run, switches=switches, valid_rows=always((rows,)), first_bad_op=always(op))
