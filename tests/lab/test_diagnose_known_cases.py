"""What stored fires look like: resemblances, and the verdict on a fire alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import firetower
from firetower.core.records import BurnedRow, Kind, Phase, Signal, SignalReading, Status, TensorSummary
from firetower.core.verdict import Verdict
from firetower.lab.discriminate import STEPS
from firetower.lab.known_cases import diagnose_fire, match


def summary(name: str = "self", **fields: Any) -> TensorSummary:
    defaults: dict[str, Any] = {
        "shape": (4, 8),
        "dtype": "float16",
        "num_nan": 0,
        "num_pos_inf": 0,
        "num_neg_inf": 0,
        "absmax": 300.0,
        "zero_frac": 0.0,
        "headroom": 218.0,
    }
    return TensorSummary(name=name, **(defaults | fields))


def op(name: str, stage: str = "op", module: str = "") -> Signal:
    return Signal(stage=stage, module=module, op=f"aten.{name}.default")


INF = {"kind": Kind.POS_INF, "bits": 0x7C00}

LOOKS: dict[str, tuple[str, dict[str, Any]]] = {
    "overflow": ("A", {"origin": op("mul"), "inputs": (summary(),), "first": INF}),
    "overflow-by-type": ("A", {"first": INF}),
    "inf-into-norm": ("A", {"origin": op("native_layer_norm"), "inputs": (summary(num_pos_inf=1),)}),
    "bad-weight": ("M", {"weights": (summary("w", num_nan=32),)}),
    "weight-maybe-changed": ("K", {"weights": (summary("w", num_nan=32),)}),
    "unwritten": ("C", {"notes": ("reads memory nobody wrote: allocated by aten.empty",)}),
    "pads": ("C", {"pad_before_real": True}),
    "absurd": ("C", {"inputs": (summary(absmax=3e38, dtype="float32"),)}),
    "masked": ("G", {"notes": ("a row of its input is all -Inf",)}),
    "division": ("H", {"origin": op("div"), "inputs": (summary(),)}),
    "router": ("H", {"origin": Signal(stage="router", layer=3)}),
    "zero-input": ("P", {"inputs": (summary(zero_frac=1.0),)}),
    "product-of-finite": ("P", {"origin": op("mm"), "inputs": (summary(),)}),
    "exp": ("I", {"origin": op("exp"), "first": INF}),
    "state-grown": ("I", {"origin": Signal(stage="recurrent_state", layer=1), "first": {"position": 40}}),
    "state-at-start": ("E", {"origin": Signal(stage="recurrent_state", layer=1), "first": {"position": 0}}),
    "clean-again": ("J", {"notes": ("clean second run: state, ordering or layout; run it several times",)}),
    "clean-again-stale": ("D", {"notes": ("clean second run: state, ordering or layout",)}),
    "routed": ("L", {"origin": Signal(stage="routed", layer=3)}),
    "verify": ("Q", {"phase": Phase.VERIFY}),
    "laundered": ("N", {"laundered": True}),
    "half-payload": ("L", {"first": {"dtype": "float32", "bits": 0x7FD6E000}}),
    "all-ones": ("O", {"first": {"bits": 0xFFFF}}),
    "rope": ("T", {"origin": op("cos")}),
    "integer-cast": ("T", {"origin": op("_to_copy"), "first": INF}),
    "buffer": ("C", {"notes": ("the buffer itself is non-finite: scratch",), "weights": (summary(num_nan=9),)}),
}  # fmt: skip


@pytest.mark.parametrize(("family", "fields"), LOOKS.values(), ids=LOOKS)
def test_a_fire_looks_like_its_family(make_fire, family, fields):
    found = {m.family: m for m in match(make_fire(**fields))}
    assert family in found, found
    m = found[family]
    assert str(m).startswith(f"looks like {family} ")
    assert m.test in {s.name for s in STEPS}
    assert m.command
    assert m.reports.endswith("of 172 public reports")


def test_a_plain_fire_looks_like_nothing(make_fire):
    assert match(make_fire(first={"bits": 0x7FFF})) == ()


def test_several_sequences_at_one_signal(make_fire):
    burned = tuple(BurnedRow(sequence=i, signal=Signal(stage="down", layer=2), column=5) for i in range(3))
    assert "D" in [m.family for m in match(make_fire(burned=burned))]
    assert "D" not in [m.family for m in match(make_fire(burned=burned[:1]))]


def test_a_bad_shared_expert_does_not_look_like_the_expert_cache(make_fire):
    routed = Signal(stage="routed", layer=3)
    both = tuple(SignalReading(signal=Signal(stage=s, layer=3), status=Status.BAD) for s in ("routed", "shared"))
    assert "L" not in [m.family for m in match(make_fire(origin=routed, bad_signals=both))]


def test_strong_resemblances_come_first(make_fire):
    fire = make_fire(origin=op("div"), inputs=(summary(),), phase=Phase.VERIFY)
    assert [m.strength for m in match(fire)] == sorted((m.strength for m in match(fire)), key=["strong", "weak"].index)
    assert match(fire)[0].family == "H"


def test_a_stored_fire_alone_is_undecided_and_says_what_to_run(make_fire):
    verdict, matches = diagnose_fire(make_fire(origin=op("mul"), inputs=(summary(),), first=INF))
    assert not verdict.decided
    assert verdict.undecided_between[0] == "A" == matches[0].family
    assert verdict.next_test == "wider-type"
    assert "It looks like A (overflow)" in verdict.statement
    assert any(e.startswith("first_bad_op: ") for e in verdict.not_testable)


def test_a_fire_that_tells_nothing_gets_no_resemblance(make_fire):
    verdict, matches = diagnose_fire(make_fire(first={"bits": 0x7FFF}))
    assert (verdict.decided, matches) == (False, ())
    assert verdict.next_test


def test_the_verdict_goes_back_into_the_fire(make_fire):
    fire = make_fire(origin=op("mul"), inputs=(summary(),), first=INF)
    verdict, _ = diagnose_fire(fire)
    kept = dataclasses.replace(fire, verdict=verdict.to_mapping())
    assert kept.verdict is not None
    assert Verdict.from_mapping(kept.verdict) == verdict


class Softmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.amax(-1, keepdim=True)


class Scratch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / torch.empty(4).abs().amax()


@pytest.mark.usefixtures("deterministic_fill")
@pytest.mark.parametrize(
    ("model", "x", "family"),
    [
        (Softmax(), torch.full((2, 3), float("-inf")), "G"),
        (Scratch(), torch.ones(3), "C"),
    ],
    ids=["masked-row", "unwritten"],
)
def test_the_notes_of_a_real_investigation_are_understood(model, x, family):
    """The words are those of `investigate`: should it change them, this fails."""
    found = firetower.investigate(model, x, firetower_store=False)
    assert found.fire is not None
    assert family in [m.family for m in match(found.fire)]
