"""Bad values that disappear: an op that hides one is named, one that only looks or picks elsewhere is not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from firetower.core.records import Kind
from firetower.sensors.ops_events import Cause
from firetower.sensors.ops_mode import OpsMode

NAN = math.nan

TABLE: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "argmax": (lambda x: x.argmax(-1), "aten.argmax.default"),
    "fmax": (lambda x: torch.fmax(x, torch.zeros_like(x)), "aten.fmax.default"),
    "where": (lambda x: torch.where(torch.isnan(x), 0.0, x), "aten.where.self"),
    "compare": (lambda x: x > 0, "aten.gt.Scalar"),
    "sigmoid": (lambda x: x.sigmoid() > 0.5, "aten.gt.Scalar"),
    "int cast": (lambda x: x.long(), "aten._to_copy.default"),
    "nan_to_num": (lambda x: x.nan_to_num(), "aten.nan_to_num.default"),
    "masked_fill": (lambda x: x.masked_fill(torch.isnan(x), 0.0), "aten.masked_fill.Scalar"),
    "masked_fill_": (lambda x: x.clone().masked_fill_(torch.isnan(x), 0.0), "aten.masked_fill_.Scalar"),
    "index_put_": (
        lambda x: x.clone().index_put_((torch.isnan(x),), torch.zeros(())),
        "aten.index_put_.default",
    ),
    "bottom k": (lambda x: x.topk(2, largest=False), "aten.topk.default"),
    "tril": (lambda x: x.expand(3, 3).tril(-2), "aten.tril.default"),
    "pow zero": (lambda x: x**0, "aten.pow.Tensor_Scalar"),
}


@pytest.mark.parametrize("name", TABLE)
def test_what_an_op_made_is_reported_when_it_is_hidden(name: str) -> None:
    hide, op = TABLE[name]
    base = torch.tensor([0.0, 1.0, 2.0])
    with OpsMode() as mode:
        bad = base / torch.tensor([1.0, 0.0, 1.0]) * torch.tensor([1.0, 0.0, 1.0])
        hide(bad)
    assert mode.failures == 0, mode.last_failure
    assert mode.origin is not None
    assert mode.origin.op == "aten.div.Tensor"
    last = mode.laundered[-1]
    assert last.op == op
    assert last.origin_index == mode.origin.index
    assert last.first.kind is Kind.NAN


@pytest.mark.parametrize("name", [n for n in TABLE if n != "pow zero"])
def test_what_a_caller_gave_is_reported_when_it_is_hidden(name: str) -> None:
    hide, op = TABLE[name]
    x = torch.tensor([0.0, NAN, 2.0])
    with OpsMode() as mode:
        mode.note_inputs((), {"x": x})
        hide(x)
    assert mode.failures == 0, mode.last_failure
    assert op in [e.op for e in mode.laundered]
    assert mode.origin is not None
    assert (mode.origin.cause, mode.origin.tensor) == (Cause.CALLER, "x")


@pytest.mark.parametrize(
    "look",
    [
        pytest.param(lambda x: (x.isnan().any(), x.isfinite().all(), x.isinf()), id="isnan"),
        pytest.param(lambda x: (x != x).sum(), id="compare with itself"),
        pytest.param(lambda x: x[0].item(), id="item"),
        pytest.param(lambda x: x[2:] * 2, id="slice elsewhere"),
        pytest.param(lambda x: x.index_select(0, torch.tensor([0, 2])) * 2, id="index_select"),
        pytest.param(lambda x: torch.nn.functional.embedding(torch.tensor([0, 2]), x[:, None]), id="embedding"),
        pytest.param(lambda x: (torch.zeros_like(x), x.new_ones(3), x.shape), id="shape only"),
        pytest.param(lambda x: x.clone().zero_(), id="cleared by assignment"),
        pytest.param(lambda x: x.clone().index_copy_(0, torch.tensor([1]), torch.ones(1)), id="overwritten by place"),
    ],
)
def test_looking_and_picking_elsewhere_is_no_laundering(look: Callable[[Tensor], object]) -> None:
    with OpsMode() as mode:
        x = torch.zeros(3) / torch.tensor([1.0, 0.0, 1.0])
        look(x)
    assert mode.failures == 0, mode.last_failure
    assert mode.laundered == []


def test_the_same_place_is_counted_once() -> None:
    with OpsMode() as mode:
        x = torch.zeros(3) / torch.tensor([1.0, 0.0, 1.0])
        for _ in range(5):
            x.nan_to_num()
    assert [e.count for e in mode.laundered] == [5]
    assert "5 times" in str(mode.laundered[0])


def test_an_illegal_inf_that_is_clamped_is_laundered_and_a_legal_one_is_not() -> None:
    with OpsMode() as mode:
        (torch.full((3,), 300.0, dtype=torch.float16) ** 2).clamp(max=60000.0)
        torch.full((3,), -math.inf).clamp(min=-1.0)
    assert [e.op for e in mode.laundered] == ["aten.clamp.default"]


def test_a_cleared_storage_is_clean_again() -> None:
    with OpsMode() as mode:
        x = torch.zeros(3).log()
        x.fill_(1.0)
        num_bad = mode.num_events
        (x * 2).argmax()
    assert mode.num_events == num_bad == 1
    assert mode.laundered == []
