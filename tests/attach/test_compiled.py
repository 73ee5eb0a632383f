"""Compiled modules: attaching recompiles with the marks inside, and detaching takes them out again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import firetower
from firetower.core.errors import NonFiniteError
from firetower.drills import hosts

pytestmark = [
    pytest.mark.slow,
    # PyTorch hides this one by itself while it traces, but not from a filter that makes errors of warnings
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.act(self.a(x)))


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["aot_eager", "inductor"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_wrapper_fires_like_eager(backend: str) -> None:
    net = Net()
    x = torch.randn(3, 5, 8)
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    clean = compiled(x)
    with firetower.attach(compiled, store=False) as watch:
        assert torch.equal(compiled(x), clean)
        assert watch.coverage() == (4, 4)
        assert watch.last.is_clean
        x[1, 2, 3] = float("nan")
        with pytest.raises(NonFiniteError) as caught:
            compiled(x)
    fire = caught.value.fire
    assert (fire.origin.module, fire.first.sequence, fire.first.token, fire.first.column) == ("a", 1, 2, 0)
    assert [b.sequence for b in fire.burned] == [1]
    compiled(x)
    assert len(watch.fires) == 1


def test_same_origin_as_eager_on_a_hybrid_moe() -> None:
    model = hosts.small_qwen35_moe()
    model.model.layers[1].mlp.shared_expert.up_proj.weight.data[3, 2] = float("inf")
    ids = torch.randint(5, 90, (2, 6), generator=torch.Generator().manual_seed(0))
    with firetower.attach(model, store=False, on_fire="record") as watch, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    eager = watch.fires[0]
    compiled = torch.compile(model, backend="aot_eager")
    with firetower.attach(compiled, store=False, on_fire="record") as watch, torch.no_grad():
        compiled(input_ids=ids, use_cache=False)
        other = watch.fires[0]
    assert other.origin == eager.origin
    assert other.first == eager.first


def test_compile_in_place(backend: str) -> None:
    net = Net()
    net.compile(backend=backend)
    x = torch.randn(4, 8)
    net(x)
    with firetower.attach(net, store=False, on_fire="record") as watch:
        net(x)
        assert watch.read().coverage == (4, 4)
        assert watch.last.is_clean
        net.b.bias.data[2] = float("inf")
        net(x)
        reading = watch.read()
        assert (reading.origin.signal.module, reading.origin.first.column) == ("b", 2)
        assert len(watch.fires) == 1


def test_a_compiled_layer_inside_an_eager_model() -> None:
    model: Any = hosts.small_llama()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    ids = torch.randint(5, 90, (2, 6))
    with firetower.attach(model, store=False, on_fire="record") as watch, torch.no_grad():
        model(input_ids=ids, use_cache=False)
        not_covered = {s.signal.stage for s in watch.last.not_covered}
        assert not_covered <= {"kv"}
        model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
        model(input_ids=ids, use_cache=False)
    assert (watch.fires[0].origin.stage, watch.fires[0].origin.layer) == ("up", 1)
