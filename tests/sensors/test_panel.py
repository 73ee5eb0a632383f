"""The panel: declaration, reading, merging over devices, and its life inside compiled graphs."""

from __future__ import annotations

import math
import os
import shutil

import pytest
import torch
from torch import nn

from firetower.core.errors import AttachError
from firetower.core.records import Kind, Legal
from firetower.core.words import CLEAN, NOT_RUN, pack
from firetower.sensors.check import Layout
from firetower.sensors.mark import MANY, shape_word
from firetower.sensors.panel import Panel, Snapshot, decode_panel

STEP = {"num_sequences": 2, "num_tokens": 3}


def panel_of(*layouts: Layout, legal: Legal = Legal.FINITE, num_rows: int = 4) -> Panel:
    panel = Panel(num_rows=num_rows)
    for layout in layouts:
        panel.declare(legal=legal, layout=layout)
    panel.freeze(["cpu"])
    panel.reset(2, 3)
    return panel


def test_a_step_reads_back_origin_rows_pads_and_coverage():
    panel = panel_of(Layout.TOKENS, Layout.HEADS, Layout.TOKENS)
    x, kv = torch.zeros(2, 3, 4), torch.zeros(2, 2, 3, 5)
    kv[1, 1, 2, 4] = math.inf
    kv[0, 0, 0, 0] = math.nan
    pad = torch.tensor([[True, False, False], [False, False, False]])
    assert panel.mark(0, x, pad=pad, **STEP) is None
    assert panel.mark(1, kv, pad=pad, **STEP) is None
    reading = panel.read()
    assert reading.step == (2, 3)
    assert reading.ran == (True, True, False)
    assert reading.origin is not None
    assert (reading.origin.slot, reading.origin.flat_index, reading.origin.kind) == (1, 59, Kind.POS_INF)
    assert (reading.origin.dtype, reading.origin.shape) == ("float32", (2, 2, 3, 5))
    assert [(f.slot, f.flat_index) for f in reading.first_pads] == [(1, 0)]
    assert [(b.sequence, b.slot, b.offset) for b in reading.burned] == [(1, 1, 29)]
    assert reading.pad_before_real
    panel.reset(1, 1)
    assert panel.read() == decode_panel([NOT_RUN] * 13 + [pack(1, 1)], 3, 4)
    assert not any(panel.read().ran)


def test_a_pad_after_the_origin_is_no_pad_before_real():
    panel = panel_of(Layout.TOKENS, Layout.TOKENS)
    pad = torch.tensor([[True, False, False], [False, False, False]])
    bad, bad_pad = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)
    bad[1, 0, 0] = bad_pad[0, 0, 0] = math.nan
    panel.mark(0, bad, pad=pad, **STEP)
    panel.mark(1, bad_pad, pad=pad, **STEP)
    assert not panel.read().pad_before_real


def test_logits_of_the_last_tokens_are_held_against_the_last_pads():
    panel = panel_of(Layout.TOKENS, legal=Legal.NEG_INF)
    logits = torch.full((2, 1, 4), -math.inf)
    assert (
        panel.mark(0, logits, pad=torch.tensor([[False, False, True], [True, False, False]]), **STEP) is None
    )
    assert panel.read().is_clean
    logits[0, 0, 1] = logits[1, 0, 2] = math.nan
    panel.mark(0, logits, pad=torch.tensor([[False, False, True], [True, False, False]]), **STEP)
    reading = panel.read()
    assert [f.flat_index for f in reading.first] == [6]
    assert [f.flat_index for f in reading.first_pads] == [1]


def test_rows_are_not_named_where_the_shape_does_not_say_them():
    panel = panel_of(Layout.TOKENS)
    panel.mark(0, torch.full((5, 4), math.nan), pad=torch.ones(2, 3, dtype=torch.bool), **STEP)
    reading = panel.read()
    assert len(reading.first) == 1
    assert reading.burned == ()


def test_the_words_of_several_devices_are_merged():
    panel = panel_of(Layout.TOKENS, Layout.TOKENS, num_rows=1)
    shape = shape_word(torch.float32, (2, 2))
    one = torch.tensor([pack(3, 5), NOT_RUN, NOT_RUN, NOT_RUN, pack(0, 3), shape, NOT_RUN, pack(1, 2)])
    two = torch.tensor([NOT_RUN, CLEAN, NOT_RUN, NOT_RUN, NOT_RUN, NOT_RUN, shape, pack(1, 2)])
    for copies in ([one, two], [two, one]):
        reading = Snapshot(panel, copies, []).result()
        assert reading.ran == (True, True)
        assert reading.origin is not None
        assert reading.origin.flat_index == 3
        assert [b.offset for b in reading.burned] == [3]


def test_what_a_panel_refuses():
    with pytest.raises(AttachError, match="num_rows=-1"):
        Panel(num_rows=-1)
    panel = Panel(num_rows=1)
    with pytest.raises(AttachError, match="has no signal"):
        panel.freeze(["cpu"])
    with pytest.raises(AttachError, match=r"num_elements=2147483648: .* split the tensor by rows"):
        panel.declare(num_elements=2**31)
    with pytest.raises(AttachError, match="call freeze"):
        panel.read()
    panel.declare(num_elements=2**31 - 1)
    panel.freeze(["cpu"])
    with pytest.raises(AttachError, match="declare every signal before"):
        panel.declare()
    with pytest.raises(AttachError, match="frozen already"):
        panel.freeze(["cpu"])
    assert "meta" in str(panel.mark(0, torch.zeros(1, device="meta"), **STEP))
    assert "not a real float type" in str(panel.mark(0, torch.zeros(1, dtype=torch.int8), **STEP))


class Mlp(nn.Module):
    """Gate, up, product, down, with a residual: the shapes of a decoder's MLP."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Watched(nn.Module):
    """Layers whose every linear map is marked by a hook; reset and flush are traced in the forward."""

    def __init__(self, num_layers: int, dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(dim) for _ in range(num_layers))
        self.panel: Panel | None = None

    def watch(self, num_rows: int = 4) -> Panel:
        linears = [m for m in self.modules() if isinstance(m, nn.Linear)]
        panel = Panel(num_rows=num_rows)
        for module in linears:
            slot = panel.declare()

            def hook(module: nn.Module, args: object, y: torch.Tensor, slot: int = slot) -> None:
                panel.mark(slot, y, num_sequences=y.shape[0], num_tokens=y.shape[1])

            module.register_forward_hook(hook)
        panel.freeze(["cpu"])
        self.panel = panel
        return panel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.panel is not None:
            self.panel.reset(x.shape[0], x.shape[1])
        for layer in self.layers:
            x = layer(x)
        if self.panel is not None:
            self.panel.flush()
        return x


BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(
                not (os.environ.get("CXX") or shutil.which("g++")), reason="inductor needs a C++ compiler"
            ),
        ],
    ),
]


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_compiled_model_leaves_the_words_of_the_eager_one(backend, fresh_dynamo):
    num_layers = MANY // 3 + 1
    model = Watched(num_layers, 16).to(torch.bfloat16).eval().requires_grad_(False)
    assert 3 * num_layers > MANY
    x = torch.randn(3, 5, 16, dtype=torch.bfloat16)
    bare, bare_compiled = model(x), torch.compile(model, backend=backend, fullgraph=True)(x)
    torch._dynamo.reset()
    panel = model.watch()
    assert torch.equal(model(x), bare)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert torch.equal(compiled(x), bare_compiled)
    assert panel.read().is_clean
    assert all(panel.read().ran)

    burned = x.clone()
    burned[1, 4, 3], burned[2, 1, 7] = math.inf, math.nan
    weight = model.layers[2].up.weight
    for fault in ("input", "weight"):
        kept = weight[5, 2].item()
        if fault == "weight":
            weight[5, 2] = math.nan
        given = burned if fault == "input" else x
        model(given)
        eager = panel.read()
        compiled(given)
        traced = panel.read()
        weight[5, 2] = kept
        assert traced.origin == eager.origin
        assert eager.origin is not None
        assert eager.origin.slot == (0 if fault == "input" else 2 * 3 + 1)
        assert [f.slot for f in traced.first] == [f.slot for f in eager.first]
        assert traced.burned == eager.burned
        assert {b.sequence for b in eager.burned} == ({1, 2} if fault == "input" else {0, 1, 2})
    compiled(x)
    assert panel.read().is_clean


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_marks_go_out_in_few_launches_and_survive_dead_code_elimination(fresh_dynamo):
    seen = []

    def record(graph, example_inputs):
        seen.extend(n.target for n in graph.graph.nodes if "firetower" in str(n.target))
        return graph.forward

    num_layers = MANY // 3 + 1
    model = Watched(num_layers, 8).eval().requires_grad_(False)
    model.watch()
    torch.compile(model, backend=record, fullgraph=True)(torch.randn(1, 2, 8))
    assert seen.count(torch.ops.firetower.reset.default) == 1
    assert seen.count(torch.ops.firetower.mark_many.default) == math.ceil(3 * num_layers / MANY) > 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_value_overwritten_in_place_after_its_mark_is_checked_as_it_was(fresh_dynamo):
    panel = panel_of(Layout.TOKENS)

    def step(x):
        y = x * 2
        panel.mark(0, y, **STEP)
        y.nan_to_num_()
        panel.flush()
        return y

    x = torch.ones(2, 3, 4)
    x[1, 1, 1] = math.nan
    assert torch.compile(step, backend="aot_eager", fullgraph=True)(x).isfinite().all()
    origin = panel.read().origin
    assert origin is not None
    assert origin.flat_index == 17


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_one_slot_marked_twice_in_a_graph_is_not_sent_in_one_launch(fresh_dynamo):
    panel = panel_of(Layout.TOKENS)

    def step(x):
        panel.mark(0, x, **STEP)
        panel.mark(0, x[..., :2], **STEP)
        panel.flush()
        return x

    x = torch.full((2, 3, 4), math.nan)
    torch.compile(step, backend="aot_eager", fullgraph=True)(x)
    origin = panel.read().origin
    assert origin is not None
    assert origin.shape is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_dynamic_lengths_do_not_fix_the_geometry(fresh_dynamo):
    model = Watched(1, 8).eval().requires_grad_(False)
    panel = model.watch()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for num_tokens in (3, 5, 7):
        x = torch.randn(2, num_tokens, 8)
        x[1, num_tokens - 1, 2] = math.inf
        compiled(x)
        reading = panel.read()
        assert reading.step == (2, num_tokens)
        assert reading.origin is not None
        assert reading.origin.shape == (2, num_tokens, 16)
        assert reading.origin.flat_index == 16 * (2 * num_tokens - 1)


def test_a_tensor_written_in_place_before_the_flush_is_told_not_taken_for_clean():
    panel = Panel(num_rows=2)
    kept, written = panel.declare(), panel.declare()
    panel.freeze(["cpu"])
    panel.reset(2, 3)
    x, y = torch.ones(2, 3, 4), torch.ones(2, 3, 4)
    panel.mark(kept, x, num_sequences=2, num_tokens=3)
    panel.mark(written, y, num_sequences=2, num_tokens=3)
    y[0, 0, 0] = float("nan")
    reading = panel.read()
    assert reading.ran == (True, False)
    assert panel.overwritten == {written}


def test_an_inference_tensor_is_marked_at_once():
    panel = Panel(num_rows=2)
    slot = panel.declare()
    panel.freeze(["cpu"])
    panel.reset(1, 1)
    with torch.inference_mode():
        x = torch.ones(1, 1, 4)
        panel.mark(slot, x, num_sequences=1, num_tokens=1)
        x[0, 0, 2] = float("nan")
    assert panel.read().is_clean


def test_marks_of_a_step_cut_short_do_not_reach_the_next():
    panel = Panel(num_rows=2)
    slot = panel.declare()
    panel.freeze(["cpu"])
    panel.reset(1, 1)
    panel.mark(slot, torch.full((1, 1, 4), float("nan")), num_sequences=1, num_tokens=1)
    panel.reset(1, 1)
    assert panel.read().ran == (False,)
