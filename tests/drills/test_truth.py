"""What drills expect, held against plain runs with recorders of our own: nothing of the watch is used."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from firetower.attach.discover import STAGES
from firetower.core.records import Kind
from firetower.drills import all_drills, find_drills
from firetower.drills.spec import Origin
from firetower.drills.truth import first_nonfinite

VARIANTS = [(d, v) for d in all_drills() for v in d.variants(0) if v.host != "smollm2"]


def _params(finite):
    """Variants whose fault stays finite, or those that it does not matter of (None)."""
    quick = {(d.name, d.variants(0)[0].id) for d in all_drills()}
    for d, v in VARIANTS:
        if finite is None or (v.level == "finite") is finite:
            marks = () if (d.name, v.id) in quick else (pytest.mark.slow,)
            yield pytest.param(d, v, id=f"{d.name}-{v.host}-{v.id}", marks=marks)


_NO_SIGNAL = ("embed_tokens", "rotary_emb", "act_fn", "norm")
"""Modules whose output is no signal of its own: the signal computed from it is the origin."""
_MAKES_LEGAL_INF = ("masked_fill", "where", "full", "lift_fresh", "scalar_tensor", "zeros", "empty")


class FirstBadOp(TorchDispatchMode):
    """The first op that stores NaN or Inf, and where; views and legal fills are passed over."""

    def __init__(self) -> None:
        super().__init__()
        self.first: tuple[str, dict] | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        own = not func.is_view and not any(name in str(func) for name in _MAKES_LEGAL_INF)
        for x in tree_leaves(out) if self.first is None and own else ():
            masked = isinstance(x, torch.Tensor) and any(
                isinstance(a, torch.Tensor) and bool(torch.isneginf(a).any()) and a.is_floating_point()
                for a in tree_leaves(args)
            )
            if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel():
                place = first_nonfinite(x.masked_fill(torch.isneginf(x), 0.0) if masked else x)
                if place:
                    self.first = (str(func), place)
        return out


class Modules:
    """Every module's start and end in order, with whether what it put out was finite in its real rows."""

    def __init__(self, model) -> None:
        self.log: list[tuple[str, str, bool]] = []
        for path, module in model.named_modules():
            module.register_forward_pre_hook(lambda m, a, path=path: self.log.append(("start", path, True)))
            module.register_forward_hook(lambda m, a, out, path=path: self.log.append(("end", path, _finite(out))))

    def bad_before(self, path: str) -> list[str]:
        """Modules that ended with a bad output before ``path`` started."""
        start = next(i for i, (event, p, _) in enumerate(self.log) if event == "start" and p == path)
        return [p for event, p, finite in self.log[:start] if event == "end" and not finite]

    def bad(self) -> list[str]:
        return [p for _, p, finite in self.log if not finite]


def _finite(out) -> bool:
    floats = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return all(bool(x.isfinite().all()) for x in floats)


def test_reading_the_drills_imports_no_torch():
    code = (
        "import sys; from firetower.drills import all_drills; "
        "[d.variants(0) for d in all_drills()]; sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60)
    assert done.returncode == 0


def test_the_families_asked_for_are_all_there():
    cases = {d.case for d in all_drills()}
    assert {"A1", "A2", "C2b", "G1", "H1", "H3", "I1", "I2", "I3", "M1", "N1", "N4", "P1", "T1"} <= cases
    assert len({d.name for d in all_drills()}) == len(all_drills())


@pytest.mark.parametrize("drill", all_drills(), ids=lambda d: d.name)
def test_variants_are_many_seeded_and_half_of_them_in_host_models(drill):
    variants = drill.variants(5)
    ids = [(v.host, v.id) for v in variants]
    assert len(variants) >= 5
    assert len(set(ids)) == len(ids)
    assert sum(v.host != "pure" for v in variants) * 2 >= len(variants)
    assert ids == [(v.host, v.id) for v in drill.variants(5)]
    assert any(ids != [(v.host, v.id) for v in drill.variants(seed)] for seed in (6, 7, 8))


def test_every_stage_is_the_origin_of_a_variant():
    every_stage = find_drills(["every-stage"])[0]
    assert every_stage.stages == set(STAGES)
    seen = {v.build(True).expected.stage for v in every_stage.variants(0)}
    assert seen == set(STAGES)


@pytest.mark.parametrize(("drill", "variant"), [*_params(finite=False)])
def test_planted_origin_is_the_first_bad_value_of_a_plain_run(drill, variant):
    case = variant.build(True)
    expected = case.expected
    if variant.level == "ops":
        with FirstBadOp() as recorder:
            case.call()
        assert recorder.first is not None
        op, place = recorder.first
        assert (op, place["row"], place["column"]) == (expected.op, expected.row, expected.column)
        assert place["kind"] is expected.kind
        return
    assert expected.stage in drill.stages or variant.host == "pure"
    modules = Modules(case.model)
    case.call()
    before = [p for p in modules.bad_before(expected.module) if not p.endswith(_NO_SIGNAL)]
    # where pads are dirty from the start, real rows are told apart by the recorder of the drill itself
    assert not before or expected.pad_before_real


@pytest.mark.parametrize(("drill", "variant"), [*_params(finite=True)])
def test_a_finite_fault_is_finite_and_says_where_it_is(drill, variant):
    case = variant.build(True)
    assert case.expected is None
    assert case.places
    modules = Modules(case.model)
    case.call()
    assert modules.bad() == []


@pytest.mark.parametrize(("drill", "variant"), [*_params(finite=None)])
def test_clean_twin_is_finite_throughout(drill, variant):
    case = variant.build(False)
    assert case.expected is None
    modules = Modules(case.model)
    out = case.call()
    if drill.case == "C2b" and variant.host != "pure":
        assert out.isfinite().all()
        real = case.kwargs["attention_mask"].bool()
        logits = case.model(*case.args, **case.kwargs).logits
        assert logits[real].isfinite().all()
        assert not logits[~real].isfinite().all(), "the twin's pads must be as dirty as the fault's"
    else:
        assert modules.bad() == []


def test_first_nonfinite_places_and_reads_bits():
    x = torch.zeros(2, 3, 5)
    assert first_nonfinite(x) is None
    x.view(torch.int32)[1, 2, 4] = 0x7FD6E000
    assert first_nonfinite(x) == {"row": 5, "column": 4, "kind": Kind.NAN, "bits": 0x7FD6E000}
    half = torch.tensor([0.0, float("-inf")], dtype=torch.float16)
    assert first_nonfinite(half) == {"row": 0, "column": 1, "kind": Kind.NEG_INF, "bits": 0xFC00}
    rows = torch.tensor([[float("nan")], [float("inf")]])
    assert first_nonfinite(rows, torch.tensor([False, True]))["kind"] is Kind.POS_INF


def test_origin_compares_only_what_it_asserts():
    want = Origin(module="m", row=2, column=0)
    assert want.mismatches(Origin(module="m", row=2, column=0, bits=5, op="x")) == ()
    assert want.mismatches(Origin(module="m", row=3)) == ("row", "column")
