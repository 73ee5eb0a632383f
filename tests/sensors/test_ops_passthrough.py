"""The mode changes nothing: results, random streams, subclasses, other modes, hooks, exceptions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from firetower.sensors import ops_mode
from firetower.sensors.ops_mode import OpsMode
from firetower.sensors.ops_modules import ModuleStack, layer_of, stage_of


def test_random_ops_draw_the_same_numbers() -> None:
    def draw() -> list[Tensor]:
        torch.manual_seed(5)
        return [
            torch.randn(4),
            torch.rand(3).bernoulli(),
            torch.empty(4).normal_(),
            torch.empty(4).exponential_(),
            torch.multinomial(torch.rand(2, 8), 3),
            torch.randperm(6),
            nn.functional.dropout(torch.ones(9), 0.5),
        ]

    bare = draw()
    with OpsMode() as mode:
        watched = draw()
    assert all(torch.equal(a, b) for a, b in zip(bare, watched, strict=True))
    assert (mode.failures, mode.num_events) == (0, 0)


def test_parameters_under_inference_mode_keep_their_matrix_product() -> None:
    # whether linear folds a strided input depends on requires_grad of the weight's view, and the bits with it
    weight = nn.Parameter(torch.randn(512, 128) * 0.05)
    x = torch.randn(2, 9, 128)
    with torch.inference_mode():
        bare = nn.functional.linear(x[:, -1:], weight)
        with OpsMode() as mode:
            watched = nn.functional.linear(x[:, -1:], weight)
    assert torch.equal(bare, watched)
    assert mode.num_checked == 1


def test_composite_ops_are_taken_apart_under_inference_mode() -> None:
    x = torch.zeros(2, 3, 4)
    with torch.inference_mode(), OpsMode() as mode:
        torch.nn.functional.layer_norm(x, (4,), eps=0.0).reshape(6, 4) @ torch.ones(4, 2)
    assert mode.origin is not None
    assert mode.origin.op == "aten.native_layer_norm.default"


def test_gradients_are_unchanged() -> None:
    def step() -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
        model(torch.randn(3, 4)).square().mean().backward()
        assert model[0].weight.grad is not None
        return model[0].weight.grad

    bare = step()
    with OpsMode() as mode:
        watched = step()
    assert torch.equal(bare, watched)
    assert (mode.failures, mode.num_events) == (0, 0)


def test_a_subclass_unwraps_itself_and_its_inner_ops_are_checked() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    a = TwoTensor(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0]))
    with OpsMode() as mode:
        out = a.log()
    assert isinstance(out, TwoTensor)
    assert torch.equal(out.a, torch.tensor([1.0, 0.0]).log())
    assert mode.origin is not None
    assert mode.origin.op == "aten.log.default"


class Counting(TorchDispatchMode):
    """Counts what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_another_mode_sees_none_of_our_reads() -> None:
    def work() -> None:
        x = torch.zeros(3).log()
        x.add_(1).nan_to_num()

    with Counting() as bare:
        work()
    with Counting() as outer, OpsMode() as mode:
        work()
    assert outer.seen == bare.seen
    assert mode.origin is not None
    with OpsMode() as mode, Counting() as inner:
        work()
    assert inner.seen == bare.seen
    assert mode.origin is not None


def test_an_exception_of_an_op_passes_and_the_mode_stays_usable() -> None:
    with OpsMode() as mode:
        bad = torch.zeros(2, 3).log().softmax(-1)
        with pytest.raises(RuntimeError, match="probability tensor"):
            torch.multinomial(bad, 1)
        torch.ones(2) + 1
    assert mode.failures == 0
    assert mode.origin is not None


def test_our_own_failure_does_not_stop_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("sensor broke")

    monkeypatch.setattr(ops_mode, "is_clean", broken)
    with OpsMode() as mode:
        assert torch.equal(torch.ones(2) + 1, torch.full((2,), 2.0))
    assert mode.failures == 3
    assert mode.last_failure == "RuntimeError: sensor broke"
    assert caplog.text.count("op-level sensing failed") == 1


def test_a_view_is_not_a_computation() -> None:
    x = torch.randn(4, 4)
    with OpsMode() as mode:
        x.t()[1:].unsqueeze(0).transpose(0, 1)
    assert (mode.num_checked, mode.num_ops) == (0, 4)


def test_compiled_modules_run_and_are_checked_op_by_op() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: (x * 2).log(), backend="eager")
    x = torch.tensor([0.0, 1.0])
    assert torch.equal(compiled(x), (x * 2).log())
    with OpsMode() as mode:
        assert torch.equal(compiled(x), (x * 2).log())
    assert mode.origin is not None
    assert mode.origin.op == "aten.log.default"


def test_flex_attention_runs(recwarn: pytest.WarningsRecorder) -> None:
    from types import SimpleNamespace

    from torch.nn.attention.flex_attention import flex_attention

    class Flex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(_attn_implementation="flex_attention")

        def forward(self, q: Tensor) -> Tensor:
            out = flex_attention(q, q, q)
            assert isinstance(out, Tensor)
            return out / 0

    torch._dynamo.reset()
    model, q = Flex(), torch.randn(1, 2, 16, 8)
    bare = model(q)
    with OpsMode(model) as mode:
        assert torch.equal(model(q), bare)
    assert mode.failures == 0
    assert mode.origin is not None
    assert mode.origin.op == "aten.div.Tensor"


class TestModuleStack:
    """Which module runs, and no hooks left behind."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))

    @pytest.mark.parametrize("given", [True, False])
    def test_no_hook_is_left(self, given: bool) -> None:
        from torch.nn.modules import module as nn_module

        model = self.model()
        before = (len(nn_module._global_forward_hooks), len(nn_module._global_forward_pre_hooks))
        with OpsMode(model if given else None), pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(1, 3))
        assert (len(nn_module._global_forward_hooks), len(nn_module._global_forward_pre_hooks)) == before
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

    @pytest.mark.parametrize("given", [True, False])
    def test_path_follows_an_exception_out(self, given: bool) -> None:
        model = self.model()
        model[1][1].forward = lambda _: 1 / 0  # type: ignore[method-assign]
        stack = ModuleStack(model if given else None)
        stack.install()
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(1, 2))
        assert stack.path == ""
        assert stack._stack == []
        stack.remove()

    def test_hooks_put_on_inside_the_root_do_not_take_a_child_for_it(self) -> None:
        class Writes(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.full_like(x, torch.inf)

        class Root(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.child = Writes()

            def forward(self, x: Tensor) -> Tensor:
                with OpsMode(self) as self.mode:
                    return torch.minimum(self.child(x), x)

        root = Root()
        root(torch.ones(2))
        assert root.mode.origin is None

    @pytest.mark.parametrize(
        ("path", "root", "layer", "stage"),
        [
            ("model.layers.12.mlp.down_proj", "mm", 12, "down"),
            ("model.layers.12.mlp", "mul", 12, "swiglu"),
            ("model.layers.3.mlp.experts", "mul", 3, "swiglu"),
            ("model.layers.3.mlp.experts", "mm", 3, "routed"),
            ("model.layers.3.mlp.gate", "mm", 3, "router"),
            ("model.layers.3.mlp.shared_expert.up_proj", "mm", 3, "up"),
            ("model.layers.0.self_attn.q_proj", "mm", 0, "attention"),
            ("model.layers.1.linear_attn", "mul", 1, "attention"),
            ("transformer.h.7.ln_1", "add", 7, "op"),
            ("lm_head", "mm", None, "logits"),
            ("", "add", None, "op"),
        ],
    )
    def test_layer_and_stage(self, path: str, root: str, layer: int | None, stage: str) -> None:
        assert (layer_of(path), stage_of(path, root)) == (layer, stage)
