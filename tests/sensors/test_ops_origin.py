"""Which op is the origin: the cases of the families, each told from the op where NaN first shows."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firetower.core.records import Kind
from firetower.sensors.ops_events import Cause, OpEvent
from firetower.sensors.ops_mode import OpsMode

INF, NAN = math.inf, math.nan


def run(fn: Callable[[], object], model: nn.Module | None = None) -> OpsMode:
    """Run ``fn`` under the mode, its result checked as a model's output."""
    with OpsMode(model) as mode:
        mode.check_output(fn())
    assert mode.failures == 0, mode.last_failure
    return mode


def origin(fn: Callable[[], object], model: nn.Module | None = None) -> OpEvent:
    found = run(fn, model).origin
    assert found is not None
    return found


def rms_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def test_a1_overflow_of_the_activation_product() -> None:
    gate = torch.full((4, 64), 300.0, dtype=torch.float16)
    up = torch.full((4, 64), 10.0, dtype=torch.float16)
    up[2, 7] = 260.0
    weight = torch.randn(64, 64, dtype=torch.float16)

    mode = run(lambda: rms_norm((F.silu(gate) * up @ weight).float()))
    found = mode.origin
    assert found is not None
    assert (found.op, found.first.row, found.first.column) == ("aten.mul.Tensor", 2, 7)
    assert (found.first.kind, found.first.bits_hex, found.first.dtype) == (Kind.POS_INF, "7c00", "float16")
    assert found.cause is Cause.OWN
    assert "every input is finite" in found.notes
    assert [s.num_nonfinite for s in found.inputs] == [0, 0]
    assert found.output is not None
    assert found.output.num_pos_inf == 1
    spread = mode.propagators
    assert spread[0].op == "aten.mm.default"
    assert all(e.origin_index == found.index for e in spread)


def test_a1_is_silent_in_bfloat16() -> None:
    gate = torch.full((4, 64), 300.0, dtype=torch.bfloat16)
    up = torch.full((4, 64), 260.0, dtype=torch.bfloat16)
    assert run(lambda: F.silu(gate) * up).origin is None


def test_a2_norm_over_a_written_inf_names_the_write() -> None:
    def fn() -> Tensor:
        h = torch.ones(1, 64)
        h[0, 9] = INF
        return rms_norm(h)

    found = origin(fn)
    assert found.op == "aten.copy_.default"
    assert (found.first.row, found.first.column) == (0, 9)
    assert found.seen_at == "aten.pow.Tensor_Scalar"


def test_g1_manual_softmax_of_a_masked_row() -> None:
    scores = torch.randn(4, 4)
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[1] = True

    def fn() -> Tensor:
        s = scores.masked_fill(mask, -INF)
        e = torch.exp(s - s.max(-1, keepdim=True).values)
        return e / e.sum(-1, keepdim=True)

    found = origin(fn)
    assert (found.op, found.first.row, found.first.kind) == ("aten.sub.Tensor", 1, Kind.NAN)
    assert found.cause is Cause.MASK
    assert "aten.masked_fill.Scalar" in found.culprit
    assert "a row of its input is all -Inf" in found.notes


def test_fully_masked_softmax_is_the_softmax() -> None:
    found = origin(lambda: torch.full((2, 3), -INF).softmax(-1))
    assert (found.op, found.cause) == ("aten._softmax.default", Cause.MASK)


def test_h1_router_renormalisation() -> None:
    logits, bias = torch.full((1, 16), -110.0), torch.zeros(16)
    bias[:4] = 12.0

    def fn() -> Tensor:
        scores = logits.sigmoid()
        weights = scores.gather(1, (scores + bias).topk(4).indices)
        return weights / weights.sum(-1, keepdim=True)

    found = origin(fn)
    assert (found.op, found.first.row, found.cause) == ("aten.div.Tensor", 0, Cause.OWN)
    assert {"input self is all zeros", "input other is all zeros"} <= set(found.notes)


def test_h3_epsilon_lost_in_float16() -> None:
    found = origin(lambda: rms_norm(torch.zeros(1, 8, dtype=torch.float16), eps=1e-8))
    assert (found.op, found.first.kind) == ("aten.rsqrt.default", Kind.POS_INF)


def test_i1_exp_before_mask() -> None:
    log_decay = torch.cumsum(-6 * torch.rand(64), 0)
    tril = torch.ones(64, 64).tril()
    mode = run(lambda: (log_decay[:, None] - log_decay[None, :]).exp() * tril)
    assert mode.origin is not None
    assert (mode.origin.op, mode.origin.first.kind) == ("aten.exp.default", Kind.POS_INF)
    row, column = mode.origin.first.row, mode.origin.first.column
    assert column > row
    assert run(lambda: ((log_decay[:, None] - log_decay[None, :]) * tril).exp() * tril).origin is None


def test_i2_gate_of_inf_times_zero() -> None:
    a_log, dt = torch.tensor([90.0]), torch.tensor([-120.0])
    found = origin(lambda: a_log.exp() * F.softplus(dt))
    assert (found.op, found.cause) == ("aten.exp.default", Cause.OWN)


def test_log_of_zero_is_a_fire() -> None:
    found = origin(lambda: torch.zeros(3).log())
    assert (found.op, found.first.kind, found.cause) == ("aten.log.default", Kind.NEG_INF, Cause.OWN)


@pytest.mark.parametrize("ctx", [torch.enable_grad, torch.no_grad, torch.inference_mode], ids=lambda c: c.__name__)
@pytest.mark.parametrize("value", [NAN, INF], ids=["nan", "inf"])
def test_a_value_written_between_taps(ctx: Callable[[], object], value: float) -> None:
    def fn() -> Tensor:
        h = torch.ones(1, 4, 8)
        h[0, 3, 5] = value
        return rms_norm(h.clone())

    with ctx():  # type: ignore[attr-defined]
        found = origin(fn)
    assert found.op == "aten.copy_.default"
    assert (found.first.row, found.first.column, found.first.shape) == (3, 5, (1, 4, 8))
    assert found.first.kind is (Kind.NAN if math.isnan(value) else Kind.POS_INF)
    assert "test_ops_origin.py" in found.source
    assert "in fn" in found.source


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda h: h.__setitem__((0, slice(2)), INF), id="slice"),
        pytest.param(lambda h: h.masked_fill_(torch.arange(8) == 5, INF), id="masked_fill_"),
        pytest.param(lambda h: h.__setitem__((0, torch.tensor([1, 2])), INF), id="index_put_"),
        pytest.param(lambda h: h.copy_(torch.full_like(h, INF)), id="copy_"),
    ],
)
def test_a_plus_inf_fill_is_silent_until_it_does_damage(write: Callable[[Tensor], object]) -> None:
    def compared() -> Tensor:
        h = torch.ones(1, 4, 8)
        write(h)
        return torch.minimum(h, torch.zeros(()))

    def computed() -> Tensor:
        h = torch.ones(1, 4, 8)
        write(h)
        return (h.transpose(0, 1).contiguous() * 2.0).sum()

    assert run(compared).origin is None
    found = origin(computed)
    assert found.seen_at == "aten.mul.Tensor"
    assert found.cause is Cause.CONSTANT


def test_a_plus_inf_that_turned_negative_is_still_its_writers() -> None:
    def fn() -> Tensor:
        up = torch.ones(2, 4)
        up[1, 2] = INF
        product = torch.full((2, 4), -0.5) * up
        return product @ torch.tensor([[1.0], [1.0], [-1.0], [1.0]])

    found = origin(fn)
    assert (found.op, found.cause, found.seen_at) == ("aten.copy_.default", Cause.CONSTANT, "aten.mm.default")
    assert (found.first.row, found.first.column) == (1, 2)


def test_a_plus_inf_that_leaves_the_model_names_its_writer() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            x[0, 1] = INF
            return x

    with OpsMode(Writes()) as mode:
        mode.stack.roots[0](torch.zeros(2, 3))
    assert mode.origin is not None
    assert mode.origin.op == "aten.copy_.default"
    assert mode.origin.seen_at == "the model's output"


def test_overflow_beside_a_legal_mask_is_found() -> None:
    scores = torch.full((2, 3), -6e4, dtype=torch.float16)
    mask = torch.zeros(2, 3, dtype=torch.float16)
    found = origin(lambda: scores + mask.masked_fill(torch.tensor([True, False, False]), -INF) + scores)
    assert (found.op, found.first.column, found.first.kind) == ("aten.add.Tensor", 1, Kind.NEG_INF)


class TestWhoseTensor:
    """A bad value that no op wrote: weight, buffer, caller, or unknown."""

    def model(self) -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    @pytest.mark.parametrize("bits", [0x7FD6E000, 0x7F800000, 0xFF800000], ids=["nan", "+inf", "-inf"])
    @pytest.mark.parametrize("given", [True, False], ids=["model given", "model found"])
    def test_weight(self, bits: int, given: bool) -> None:
        model = self.model()
        weight = model[2].weight.data
        weight.view(torch.int32)[1, 2] = bits - (1 << 32 if bits >= 1 << 31 else 0)
        x = torch.ones(2, 4)
        model[0].weight.data.fill_(0.25)
        found = origin(lambda: model(x), model if given else None)
        assert (found.op, found.module, found.cause) == ("aten.addmm.default", "2", Cause.WEIGHT)
        assert found.culprit == "the weight itself is non-finite: 2.weight"
        assert found.tensor_first is not None
        assert (found.tensor_first.row, found.tensor_first.column, found.tensor_first.bits) == (1, 2, bits)

    def test_tied_weight_is_one_event_with_both_names(self) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Embedding(5, 4)
                self.head = nn.Linear(4, 5, bias=False)
                self.head.weight = self.embed.weight

            def forward(self, ids: Tensor) -> Tensor:
                return self.head(self.embed(ids))

        model = Tied()
        with torch.no_grad():
            model.embed.weight[3, 1] = NAN
        mode = run(lambda: model(torch.tensor([0, 1])), model)
        assert mode.origin is not None
        assert mode.origin.module == "head"
        assert mode.origin.tensor == "embed.weight (tied with head.weight)"
        assert run(lambda: model.embed(torch.tensor([0, 1])), model).origin is None
        assert origin(lambda: model(torch.tensor([3])), model).op == "aten.embedding.default"

    def test_buffer(self) -> None:
        model = nn.BatchNorm1d(3).eval()
        assert model.running_mean is not None
        model.running_mean[1] = NAN
        found = origin(lambda: model(torch.ones(2, 3)), model)
        assert (found.cause, found.tensor) == (Cause.BUFFER, "running_mean")

    def test_caller(self) -> None:
        model = self.model()
        x = torch.tensor([[1.0, NAN, 1.0, 1.0]])
        found = origin(lambda: model(x), model)
        assert (found.cause, found.op, found.module) == (Cause.CALLER, "aten.addmm.default", "0")
        assert found.tensor_first is not None
        assert found.tensor_first.column == 1

    def test_unknown(self) -> None:
        x = torch.tensor([1.0, NAN])
        found = origin(lambda: x * 2)
        assert found.cause is Cause.OUTSIDE

    def test_second_step_says_carried_over(self) -> None:
        state = torch.zeros(3)
        with OpsMode() as mode:
            state.copy_(torch.zeros(3).log())
            first = mode.origin
            mode.reset()
            assert mode.origin is None
            state.add_(1.0)
        assert first is not None
        assert mode.origin is not None
        assert mode.origin.cause is Cause.CARRIED
        assert "aten.log.default" in mode.origin.culprit


@pytest.mark.raw_empty
class TestUnwrittenMemory:
    """Allocations are unchecked until they are read in a way that gives NaN or Inf."""

    def page(self) -> Tensor:
        page = torch.empty(4, 4)
        # what an allocator may hand back; written where no op sees it
        page.numpy()[:] = NAN
        page[:2] = 1.0
        return page

    def test_reading_written_rows_is_silent(self) -> None:
        assert run(lambda: self.page()[:2] * 2).origin is None

    def test_copying_is_silent_and_reading_is_the_origin(self) -> None:
        def fn() -> Tensor:
            moved = torch.cat([self.page(), torch.ones(1, 4)]).clone()
            torch.where(torch.isnan(moved), 0.0, moved)
            return moved @ torch.ones(4)

        found = origin(fn)
        assert (found.op, found.cause) == ("aten.mv.default", Cause.UNWRITTEN)
        assert found.first.row == 0
        assert found.first.column == 2
        assert "reads memory nobody wrote" in found.culprit
        assert "aten.empty.memory_format" in found.culprit

    def test_returning_it_is_the_allocation(self) -> None:
        found = origin(self.page)
        assert (found.op, found.seen_at) == ("aten.empty.memory_format", "the model's output")

    def test_a_full_write_ends_it(self) -> None:
        def fn() -> Tensor:
            page = self.page()
            page.copy_(torch.zeros(4, 4))
            page.numpy()[0, 0] = NAN
            return page * 2

        assert origin(fn).cause is Cause.OUTSIDE

    @pytest.mark.parametrize("make", [torch.empty_like, lambda x: x.new_empty(4, 4)], ids=["empty_like", "new_empty"])
    def test_every_allocator(self, make: Callable[[Tensor], Tensor]) -> None:
        def fn() -> Tensor:
            page = make(torch.ones(4, 4))
            page.numpy()[:] = NAN
            return page + 1

        assert origin(fn).cause is Cause.UNWRITTEN


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2],
    ids=str,
)
def test_every_float_type_is_checked_as_stored(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, NAN]])
    found = origin(lambda: x.to(dtype).clone())
    if dtype is torch.float32:
        assert found.op == "aten.clone.default"
    else:
        assert found.op == "aten._to_copy.default"
        assert found.first.dtype == str(dtype).removeprefix("torch.")
    assert (found.first.row, found.first.column) == (1, 1)


def test_complex_is_checked_in_both_parts() -> None:
    x = torch.tensor([complex(1, 2), complex(0, 0)])
    found = origin(lambda: (1 / x).conj() * 2)
    assert found.op == "aten.reciprocal.default"
    assert (found.first.shape, found.first.row) == ((2, 2), 1)


def test_bytes_read_as_floats_are_checked() -> None:
    raw = torch.tensor([0x3C00, 0x7E00], dtype=torch.int16)
    found = origin(lambda: raw.view(torch.float16))
    assert (found.op, found.first.bits_hex) == ("aten.view.dtype", "7e00")


def test_a_sum_that_overflows_over_finite_values_is_no_fire() -> None:
    x = torch.full((4,), 3e38)
    assert run(lambda: x.clone()).origin is None
    assert run(lambda: torch.full((70000,), 60000.0, dtype=torch.float16) * 1).origin is None


def test_in_place_and_foreach_ops() -> None:
    def in_place() -> Tensor:
        x = torch.tensor([1.0, 0.0])
        x.div_(torch.tensor([1.0, 0.0]))
        return x

    def foreach() -> object:
        return torch._foreach_div_([torch.ones(2), torch.zeros(2)], [torch.ones(2), torch.zeros(2)])

    assert origin(in_place).op == "aten.div_.Tensor"
    assert origin(foreach).op == "aten._foreach_div_.List"
    out = torch.empty(2)
    assert origin(lambda: torch.log(torch.zeros(2), out=out)).op == "aten.log.out"


def test_events_are_capped_and_counted() -> None:
    def fn() -> Tensor:
        x = torch.zeros(2).log()
        for _ in range(400):
            x = x * 1
        return x

    mode = run(fn)
    assert mode.num_events == 401
    assert len(mode.events) == 257
    assert mode.events[0] is mode.origin


def test_layer_stage_and_module_path() -> None:
    class Mlp(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model = Model()
    found = origin(lambda: model(torch.full((2,), 14.0, dtype=torch.float16)))
    assert (found.module, found.layer, found.stage) == ("layers.2.mlp", 2, "swiglu")
    signal = found.signal
    assert (signal.op, signal.layer, signal.stage) == ("aten.mul.Tensor", 2, "swiglu")
    assert signal.source is not None
    assert "in forward" in signal.source
