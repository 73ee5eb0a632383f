"""A PyTorch call as a subject: what it finds out by itself, and verdicts on faults planted here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firetower.core.errors import SubjectError
from firetower.lab.diagnose import NOTHING_SEEN, diagnose
from firetower.lab.subject import Recurrence, Request, Switch, array
from firetower.lab.subjects.torch_call import TorchSubject


class Gated(nn.Module):
    """An MLP in float16 whose product overflows in row 1 when ``big``."""

    def __init__(self, big: bool) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)
        self.big = big

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return F.rms_norm((y * x * (300 if self.big else 1)).float(), (8,))


def half_inputs() -> Tensor:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    x[1] = 40
    return x.half()


def gated(big: bool) -> Gated:
    model = Gated(big).half()
    model.up.weight.data.fill_(0.5)
    return model


def test_an_overflow_is_found_with_its_figures():
    verdict = diagnose(TorchSubject(gated(True), half_inputs()))
    assert verdict.key == "A/OVERFLOW_ACTIVATION"
    assert "row 1" in verdict.statement
    assert "> 65,504" in verdict.statement


def test_its_twin_shows_nothing():
    verdict = diagnose(TorchSubject(gated(False), half_inputs()), num_replays=3)
    assert (verdict.detail, verdict.decided) == (NOTHING_SEEN, False)


def test_the_op_comes_with_operands_makers_and_users():
    op = TorchSubject(gated(True), half_inputs()).first_bad_op()
    assert op is not None
    assert op.name == "aten.mul.Tensor"
    assert [a.values.shape for a in op.inputs if a.values.ndim == 2] == [(3, 8)]
    assert np.isinf(op.outputs[0].values).any()
    [product] = op.producers
    assert product.name == "aten.mul.Tensor"
    [linear] = [p for p in product.producers if p.name == "linear"]
    assert (linear.module, [w.name for w in linear.weights]) == ("up", ["up.weight"])
    assert op.consumers[0].name == "aten._to_copy.default"


def test_computing_again_in_a_wider_type():
    subject = TorchSubject(gated(True), half_inputs())
    [again] = subject.reference("float32", "op") or ()
    assert again.values.max() == pytest.approx(160 * 40 * 300)
    assert subject.reference("float64", "outputs") is None
    given = TorchSubject(gated(True), half_inputs(), parts={"reference": lambda d, w: (array("y", np.ones(1)),)})
    assert given.reference("float64", "outputs")


class Divide(nn.Module):
    """Sum of sigmoids in the divisor: exactly 0 in float32, not in float64."""

    def forward(self, logits: Tensor) -> Tensor:
        chosen = torch.sigmoid(logits).topk(2, dim=-1).values
        return chosen / chosen.sum(-1, keepdim=True)


def test_computing_the_chain_again_keeps_what_the_type_lost():
    subject = TorchSubject(Divide(), torch.tensor([[-110.0] * 4, [0.0] * 4]))
    [op] = subject.reference("float64", "op") or ()
    [chain] = subject.reference("float64", "chain") or ()
    assert np.isnan(op.values[0]).all()
    assert chain.values[0] == pytest.approx([0.5, 0.5])
    assert diagnose(subject).key == "H/ROUTER_RENORM_0_OVER_0"


class Scratch(nn.Module):
    """Writes some rows of an allocation and reads all of them."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.num_rows = num_rows

    def forward(self, x: Tensor) -> Tensor:
        scratch = torch.empty(self.num_rows, x.shape[-1])
        scratch[: len(x)] = x
        return x / scratch.abs().amax()


@pytest.mark.usefixtures("deterministic_fill")
def test_memory_that_nobody_wrote():
    verdict = diagnose(TorchSubject(Scratch(5), torch.ones(3, 4)))
    assert verdict.family == "C"
    assert "filled with 1 and with -3" in verdict.statement


@pytest.mark.usefixtures("deterministic_fill")
def test_memory_that_is_written_as_far_as_it_is_read_is_no_finding():
    assert diagnose(TorchSubject(Scratch(3), torch.ones(3, 4)), num_replays=3).detail == NOTHING_SEEN


class Head(nn.Module):
    """A linear head, with a NaN block in its weight when ``bad``; its output may be turned into ids."""

    def __init__(self, *, bad: bool, sample: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 6, bias=False)
        if bad:
            self.linear.weight.data[2, 32:64] = float("nan")
        self.sample = sample

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y.argmax(-1) if self.sample else y


def test_a_weight_that_came_bad():
    verdict = diagnose(TorchSubject(Head(bad=True), torch.ones(2, 64), at_load="now"))
    assert verdict.key == "M/BAD_WEIGHT"
    assert "linear.weight" in verdict.statement
    assert "row 2, columns 32 to 63 (block 1 of 32)" in verdict.statement


def test_a_bad_weight_of_which_nobody_knows_since_when():
    verdict = diagnose(TorchSubject(Head(bad=True), torch.ones(2, 64)))
    assert not verdict.decided
    assert {"M/BAD_WEIGHT", "K/WEIGHT_MUTATED"} <= set(verdict.undecided_between)
    assert verdict.next_command.startswith("firetower scan PATH")


def test_a_weight_that_went_bad_since_load():
    model = Head(bad=False)
    loaded = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.linear.weight.data[2, 32:40] = float("nan")
    verdict = diagnose(TorchSubject(model, torch.ones(2, 64), at_load=loaded))
    assert verdict.key == "K/WEIGHT_MUTATED"
    assert "8 elements differ, 160 to 167" in verdict.statement


class Overrun(nn.Module):
    """A buffer and a weight in one storage; the call writes past the end of the buffer, then reads the weight."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.ones(192)
        self.buffer = nn.Buffer(memory[:128].view(16, 8))
        self.weight = nn.Parameter(memory[128:].view(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.buffer.as_strided((136,), (1,))[128:] = float("nan")
        return x @ self.weight.T


def test_a_weight_that_the_call_itself_overwrites():
    subject = TorchSubject(Overrun(), torch.ones(2, 8))
    verdict = diagnose(subject)
    assert verdict.key == "K/WEIGHT_MUTATED"
    assert "8 elements differ, 0 to 7" in verdict.statement


def test_a_nan_that_became_a_token_is_the_aftermath():
    verdict = diagnose(TorchSubject(Head(bad=True, sample=True), torch.ones(2, 64), at_load="now"))
    assert verdict.key == "M/BAD_WEIGHT"
    assert verdict.aftermath.startswith("N/NAN_LAUNDERED")


class Masked(nn.Module):
    """Softmax by hand; row 1 of the mask allows nothing when ``empty``."""

    def __init__(self, empty: bool) -> None:
        super().__init__()
        mask = torch.ones(3, 3, dtype=torch.bool).tril()
        mask[1] &= not empty
        self.mask = nn.Buffer(mask)

    def forward(self, x: Tensor) -> Tensor:
        scores = (x @ x.T).masked_fill(~self.mask, float("-inf"))
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        return weights / weights.sum(-1, keepdim=True) @ x


def test_a_row_without_keys():
    verdict = diagnose(TorchSubject(Masked(True), torch.ones(3, 4)))
    assert verdict.key == "G/FULLY_MASKED_ROW"
    assert "row 1 of" in verdict.statement


def test_a_mask_of_minus_inf_is_legal():
    assert diagnose(TorchSubject(Masked(False), torch.ones(3, 4)), num_replays=3).detail == NOTHING_SEEN


class Zeros(nn.Linear):
    """A product that answers zeros for three rows."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.new_zeros(y.shape) if len(x) == 3 else y


def test_a_product_of_zeros_is_blamed_and_not_the_norm_behind_it():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = Zeros(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.proj(x)
            return y * torch.rsqrt((y * y).mean(-1, keepdim=True))

    model = Model()
    assert diagnose(TorchSubject(model, torch.ones(3, 8))).key == "P/ZERO_OUTPUT"
    assert diagnose(TorchSubject(model, torch.ones(4, 8)), num_replays=3).detail == NOTHING_SEEN


class Growing(nn.Module):
    """A delta rule whose keys are longer than 1."""

    def forward(self, k: Tensor, v: Tensor) -> Tensor:
        state = torch.zeros(4, 4)
        for k_t, v_t in zip(k, v, strict=True):
            state = state + torch.outer(k_t, v_t - k_t @ state)
        return state


def test_growth_alone_is_told_as_undecided_and_keys_decide():
    k = torch.full((60, 4), (11.5 / 4) ** 0.5)
    v = torch.ones(60, 4)
    verdict = diagnose(TorchSubject(Growing(), k, v))
    assert (verdict.decided, verdict.undecided_between[0]) == (False, "I/DELTA_RULE_UNSTABLE")
    assert verdict.next_test == "recurrence"
    seen = Recurrence(name="head 0", state_dtype="float32", keys=array("k", k.numpy()), beta=array("b", np.ones(60)))
    known = diagnose(TorchSubject(Growing(), k, v, parts={"recurrences": lambda: (seen,)}))
    assert known.key == "I/DELTA_RULE_UNSTABLE"


class Counting(nn.Module):
    """Adds one to a buffer at each call, and burns at the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x / (2 - self.count)


def test_every_run_starts_from_the_same_state():
    subject = TorchSubject(Counting(), torch.ones(2))
    outcomes = [subject.run(Request(number=i)) for i in range(4)]
    assert [o.origin for o in outcomes if o is not None] == [None] * 4
    subject.reset()
    assert float(subject._model.count) == 0


def test_a_call_that_raises_is_an_outcome():
    def call(x: Tensor) -> Tensor:
        raise IndexError("token 8191 is out of bounds")

    outcome = TorchSubject(call, torch.ones(2)).run(Request())
    assert outcome is not None
    assert outcome.is_wrong
    assert outcome.origin == "IndexError: token 8191 is out of bounds"


def test_further_switches_and_parts_of_the_caller():
    @contextlib.contextmanager
    def small() -> Iterator[None]:
        model.big = False
        yield
        model.big = True

    model = gated(True)
    subject = TorchSubject(model, half_inputs(), switches={Switch.OTHER_BACKEND: small}, parts={"slots": tuple})
    assert Switch.OTHER_BACKEND in subject.switches()
    served, other = subject.run(Request()), subject.run(Request(switch=Switch.OTHER_BACKEND))
    assert served is not None
    assert other is not None
    assert served.is_wrong
    assert not other.is_wrong
    assert subject.slots() == ()
    with pytest.raises(SubjectError, match="parts='slot'"):
        TorchSubject(model, half_inputs(), parts={"slot": tuple})


def test_tracing_does_not_change_what_is_run():
    """A factory whose result is held elsewhere runs one op more: the traced run must count as the first did."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            upper = torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)
            return torch.exp(x) * ~upper

    x = torch.full((4, 4), 100.0).triu(1)
    subject = TorchSubject(Model(), x)
    op = subject.first_bad_op()
    assert op is not None
    assert op.name == "aten.exp.default"
    assert diagnose(subject).key == "I/EXP_BEFORE_MASK"


def test_bfloat16_keeps_its_name_and_values():
    subject = TorchSubject(lambda x: x / 0 * 0, torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    op = subject.first_bad_op()
    assert op is not None
    assert op.inputs[0].type_name == "bfloat16"
    assert op.inputs[0].values.tolist() == [1.0, 2.0]
