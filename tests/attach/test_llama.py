"""The llama.cpp tracer on tensors made here: structs, decoding, finite checks, callback, rerun, fire.

No llama.cpp: `FakeGgml` answers for libggml-base, `FakeSession` plays a graph through the callback in the
order and with the questions of llama.cpp's scheduler. The real library is tried in test_llama_real.py.
"""

from __future__ import annotations

import ctypes
import dataclasses
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firetower.attach import llama
from firetower.attach.llama.ggml import (
    FLOAT_TYPES,
    NAME_OFFSET,
    FloatType,
    GgmlTensor,
    bits_view,
    check_layout,
    first_bad,
    is_finite,
    kind_of,
    shape_of,
    summarise,
    widen,
)
from firetower.attach.llama.report import make_fire
from firetower.attach.llama.run import LlamaRun
from firetower.attach.llama.runtime import LlamaOptions
from firetower.attach.llama.sensor import MAX_BAD_SIGNALS, CheckedTensor, EvalSensor, Step
from firetower.attach.llama.weights import WeightReader
from firetower.core.codec import fire_from_dict, fire_to_dict
from firetower.core.errors import ConfigError, TraceError
from firetower.core.records import Kind, Legal, Phase, Status

TYPE_IDS = {"f4": 0, "f2": 1, "i4": 26, "i8": 27, "f8": 28}
TYPE_NAMES = {0: "f32", 1: "f16", 3: "q4_1", 26: "i32", 27: "i64", 28: "f64", 30: "bf16"}
HOST, DEVICE, REPACKED = 0x10, 0x20, 0x30
Callback = Callable[[int, bool, object], bool]
F32, F16, F64, BF16 = (FLOAT_TYPES[i] for i in (0, 1, 28, 30))


class FakeGgml:
    """Owns the tensors it makes and answers what libggml-base would."""

    def __init__(self) -> None:
        self.ops: dict[int, str] = {}
        self.op_ids: dict[str, int] = {}
        self.kept: list[Any] = []
        self.num_reads = 0

    def tensor(
        self,
        name: str,
        values: np.ndarray[Any, Any],
        op: str = "NONE",
        sources: Sequence[GgmlTensor] = (),
        *,
        type_id: int | None = None,
        buffer: int = HOST,
        ne: Sequence[int] | None = None,
    ) -> GgmlTensor:
        """A tensor over ``values``' own memory and strides."""
        t = GgmlTensor()
        t.type = TYPE_IDS[values.dtype.str[1:]] if type_id is None else type_id
        t.buffer, t.data = buffer, values.ctypes.data
        shape = list(reversed(values.shape)) if ne is None else list(ne)
        strides = list(reversed(values.strides))
        t.ne = (ctypes.c_int64 * 4)(*shape, *[1] * (4 - len(shape)))
        t.nb = (ctypes.c_size_t * 4)(*strides, *[values.nbytes] * (4 - len(strides)))
        t.op = self.op_ids.setdefault(op, len(self.op_ids))
        for i, source in enumerate(sources):
            t.src[i] = ctypes.addressof(source)
        t.name = name.encode()
        self.ops[ctypes.addressof(t)] = op
        self.kept += [t, values]
        return t

    def op_name(self, address: int) -> str:
        return self.ops[address]

    def buffer_name(self, buffer: int | None) -> str:
        return {HOST: "CPU", DEVICE: "CUDA0", REPACKED: "CPU_REPACK", None: ""}[buffer]

    def is_host(self, buffer: int | None) -> bool:
        return buffer == HOST

    def read(self, address: int, num_bytes: int) -> bytes:
        self.num_reads += 1
        return ctypes.string_at(GgmlTensor.from_address(address).data or 0, num_bytes)

    def type_name(self, type_id: int) -> str:
        return TYPE_NAMES[type_id]


def f32(*rows: Sequence[float]) -> np.ndarray[Any, Any]:
    return np.array(rows, np.float32)


def sensor_for(ggml: FakeGgml, level: Any = "full", **options: Any) -> EvalSensor:
    sensor = EvalSensor(ggml, WeightReader(ggml, None), level=level, **options)
    sensor.begin_step(Step(index=0, phase=Phase.PREFILL, first_position=10, num_tokens=2))
    return sensor


def run_graph(sensor: EvalSensor | Callback, graph: Sequence[GgmlTensor]) -> list[str]:
    """Play the graph as ggml's scheduler does; returns the names of the tensors handed over."""
    seen = []
    callback = sensor.callback if isinstance(sensor, EvalSensor) else sensor
    for t in graph:
        address = ctypes.addressof(t)
        if callback(address, True, None):
            seen.append(t.name.decode())
            if not callback(address, False, None):
                break
    return seen


def test_the_struct_has_the_size_and_the_name_where_ggml_has_it() -> None:
    assert (ctypes.sizeof(GgmlTensor), NAME_OFFSET) == (336, 256)


def test_a_library_with_another_layout_is_refused() -> None:
    kept = [GgmlTensor() for _ in range(4)]

    class Function:
        def __init__(self, result: Any) -> None:
            self.result = result

        def __call__(self, *args: Any) -> Any:
            return self.result

    addresses = iter(ctypes.addressof(t) for t in kept)
    library = SimpleNamespace(
        ggml_init=Function(1),
        ggml_free=Function(None),
        ggml_set_name=Function(None),
        ggml_get_data=Function(None),
        ggml_op_desc=Function(b"NONE"),
        ggml_new_tensor_2d=type("F", (Function,), {"__call__": lambda self, *a: next(addresses)})(None),
        ggml_mul_mat=Function(ctypes.addressof(kept[2])),
        ggml_view_1d=Function(ctypes.addressof(kept[3])),
    )
    with pytest.raises(TraceError, match=r"a layout this firetower does not know"):
        check_layout(library)


def test_shape_is_numpys_and_drops_only_leading_ones() -> None:
    ggml = FakeGgml()
    assert shape_of(ggml.tensor("a", np.zeros((3, 5), "f4"))) == (3, 5)
    assert shape_of(ggml.tensor("b", np.zeros(5, "f4"))) == (1, 5)
    assert shape_of(ggml.tensor("c", np.zeros((1, 3, 5), "f4"))) == (3, 5)
    assert shape_of(ggml.tensor("d", np.zeros((2, 1, 5), "f4"))) == (2, 1, 5)


@pytest.mark.parametrize("dtype", ["f4", "f2", "f8"])
def test_bits_view_is_zero_copy_and_follows_strides(dtype: str) -> None:
    ggml = FakeGgml()
    values = np.arange(60, dtype=dtype).reshape(3, 4, 5).transpose(1, 0, 2)
    t = ggml.tensor("x", values)
    view = bits_view(t, ctypes.addressof(t), ggml)
    np.testing.assert_array_equal(view, values.view(view.dtype))
    values[3, 2, 4] = np.inf
    assert not is_finite(view, FLOAT_TYPES[t.type])
    assert ggml.num_reads == 0


def test_device_memory_is_copied_through_the_library() -> None:
    ggml = FakeGgml()
    t = ggml.tensor("x", f32([1, 2], [3, np.nan]), buffer=DEVICE)
    first = first_bad(bits_view(t, ctypes.addressof(t), ggml), F32)
    assert first is not None
    assert (first.row, first.column, ggml.num_reads) == (1, 1, 1)


@pytest.mark.parametrize(("kind", "dtype"), [(F16, np.float16), (BF16, None)], ids=["float16", "bfloat16"])
def test_every_16_bit_pattern_is_classed_right(kind: FloatType, dtype: Any) -> None:
    patterns = np.arange(1 << 16, dtype="<u2")
    values = patterns.view(dtype) if dtype else (patterns.astype("<u4") << 16).view("<f4")
    for pattern, nan, inf, negative in zip(
        patterns.tolist(), np.isnan(values), np.isinf(values), np.signbit(values), strict=True
    ):
        one = np.array([[pattern]], "<u2")
        assert is_finite(one, kind) == (not (nan or inf))
        if nan or inf:
            expected = Kind.NAN if nan else Kind.NEG_INF if negative else Kind.POS_INF
            assert kind_of(pattern, kind) is expected
            assert is_finite(one, kind, allow_neg_inf=True) == (expected is Kind.NEG_INF)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), st.booleans())
def test_first_bad_finds_what_a_plain_loop_finds(patterns: list[int], allow: bool) -> None:
    bits = np.array([patterns], "<u4")
    bad = [
        i for i, p in enumerate(patterns) if p & 0x7F800000 == 0x7F800000 and not (allow and p == 0xFF800000)
    ]
    first = first_bad(bits, F32, allow_neg_inf=allow)
    assert is_finite(bits, F32, allow_neg_inf=allow) == (not bad)
    assert (first is None) == (not bad)
    if first is not None:
        assert (first.flat_index, first.bits) == (bad[0], patterns[bad[0]])


def test_first_bad_counts_rows_over_all_outer_axes() -> None:
    values = np.zeros((2, 3, 4), np.float32)
    values[1, 2, 3] = -np.inf
    first = first_bad(values.view("<u4"), F32)
    assert first is not None
    assert (first.flat_index, first.row, first.column, first.kind, first.bits_hex) == (
        23,
        5,
        3,
        Kind.NEG_INF,
        "ff800000",
    )


def test_summary_counts_classes_and_ranges_over_finite_values() -> None:
    s = summarise("x", np.array([[1.0, -4.0, 0.0, np.nan, np.inf, -np.inf]]), "float16")
    assert (s.num_nan, s.num_pos_inf, s.num_neg_inf, s.absmax) == (1, 1, 1, 4.0)
    assert s.headroom == 65504 / 4
    assert summarise("q", np.ones(3), "q4_1").headroom is None


def test_bfloat16_widens_exactly() -> None:
    assert widen(np.array([0x3F80, 0xC000], "<u2"), BF16).tolist() == [1.0, -2.0]


def mlp_graph(ggml: FakeGgml, weight: np.ndarray[Any, Any], hidden: np.ndarray[Any, Any]) -> list[GgmlTensor]:
    """One MLP of layer 12, two tokens: down product, a view of it, residual, logits, computed with NumPy."""
    swiglu = ggml.tensor("ffn_swiglu-12", hidden, "SWIGLU")
    w = ggml.tensor("blk.12.ffn_down.weight", weight)
    with np.errstate(all="ignore"):
        product = (hidden @ weight.T).astype(np.float32)
        total = product + np.float32(1)
    down = ggml.tensor("ffn_out-12", product, "MUL_MAT", [w, swiglu])
    view = ggml.tensor("ffn_out-12 (reshaped)", product, "RESHAPE", [down])
    out = ggml.tensor("l_out-12", total, "ADD", [view])
    logits = ggml.tensor("result_output", np.ascontiguousarray(total[1:]), "MUL_MAT", [out])
    return [swiglu, down, view, out, logits]


def test_a_clean_graph_is_silent_at_both_levels() -> None:
    for level, expected in (("full", 4), ("filtered", 2), ("off", 0)):
        ggml = FakeGgml()
        sensor = sensor_for(ggml, level)
        run_graph(sensor, mlp_graph(ggml, f32([1, 2], [3, 4]), f32([1, 1], [2, 2])))
        assert sensor.burn is None
        assert (sensor.num_checked, sensor.num_errors) == (expected, 0)


def test_filtered_wants_layer_outputs_only_and_full_skips_views() -> None:
    ggml = FakeGgml()
    graph = mlp_graph(ggml, f32([1, 2], [3, 4]), f32([1, 1], [2, 2]))
    assert run_graph(sensor_for(ggml, "filtered"), graph) == ["l_out-12", "result_output"]
    assert run_graph(sensor_for(ggml), graph) == ["ffn_swiglu-12", "ffn_out-12", "l_out-12", "result_output"]


def test_memory_seen_before_is_checked_again_in_every_step() -> None:
    ggml = FakeGgml()
    sensor = sensor_for(ggml)
    values = f32([1, 2], [3, 4])
    t = ggml.tensor("l_out-4", values, "ADD")
    for step in range(3):
        sensor.begin_step(Step(index=step, phase=Phase.DECODE, first_position=step, num_tokens=2))
        run_graph(sensor, [t])
    assert (sensor.burn, sensor.num_checked) == (None, 3)
    values[1, 1] = np.inf
    run_graph(sensor, [t])
    assert sensor.burn is not None
    assert (sensor.burn.first.row, sensor.burn.first.column, sensor.num_checked) == (1, 1, 4)


def test_memory_seen_before_is_not_confused_with_another_shape_or_type_there() -> None:
    ggml = FakeGgml()
    sensor = sensor_for(ggml)
    values = f32([1, 2], [3, np.inf])
    for view in (values[:1], values[:1].view("f2"), values[:1], values):
        run_graph(sensor, [ggml.tensor("l_out-4", view, "ADD")])
    assert sensor.burn is not None
    assert sensor.burn.checked.shape == (1, 1, 2, 2)


def test_a_bad_weight_is_told_from_a_bad_activation() -> None:
    ggml = FakeGgml()
    sensor = sensor_for(ggml)
    run_graph(sensor, mlp_graph(ggml, f32([1, 2], [3, np.nan]), f32([1, 1], [2, 2])))
    assert sensor.burn is not None
    checked, first = sensor.burn.checked, sensor.burn.first
    assert (checked.name, checked.op, checked.place.layer, checked.place.stage) == (
        "ffn_out-12",
        "MUL_MAT",
        12,
        "down",
    )
    assert (first.row, first.column, first.token, first.position) == (0, 1, 0, 10)
    weight, activation = sensor.burn.sources
    assert (weight.role, weight.status) == ("weight", Status.BAD)
    assert weight.detail == "row 1: 1 of 2 non-finite, column 1"
    assert (activation.name, activation.role, activation.status) == (
        "ffn_swiglu-12",
        "activation",
        Status.CLEAN,
    )


def test_an_overflow_has_clean_sources_and_the_second_tokens_position() -> None:
    ggml = FakeGgml()
    sensor = sensor_for(ggml)
    run_graph(sensor, mlp_graph(ggml, f32([1, 1], [1e30, 1]), f32([1, 1], [1e10, 1])))
    assert sensor.burn is not None
    assert (sensor.burn.first.kind, sensor.burn.first.row, sensor.burn.first.position) == (
        Kind.POS_INF,
        1,
        11,
    )
    assert [s.status for s in sensor.burn.sources] == [Status.CLEAN, Status.CLEAN]


def test_later_bad_tensors_of_the_step_are_kept_and_counted() -> None:
    ggml = FakeGgml()
    sensor = sensor_for(ggml, "filtered")
    graph = mlp_graph(ggml, f32([1, 2], [3, np.nan]), f32([1, 1], [2, 2]))
    run_graph(sensor, graph[:-1] + [graph[-2]] * MAX_BAD_SIGNALS + graph[-1:])
    assert sensor.num_bad == MAX_BAD_SIGNALS + 2
    assert len(sensor.bad_signals) == MAX_BAD_SIGNALS
    assert sensor.logits_bad is True


def test_a_laundered_value_is_still_a_fire() -> None:
    ggml = FakeGgml()
    sensor = sensor_for(ggml)
    graph = mlp_graph(ggml, f32([1, 2], [3, np.nan]), f32([1, 1], [2, 2]))
    graph[-1] = ggml.tensor("result_output", f32([1, 2]), "CLAMP")
    run_graph(sensor, graph)
    assert sensor.burn is not None
    assert sensor.logits_bad is False
    session: Any = FakeSession(ggml, lambda step: [])
    assert make_fire(sensor, None, session, LlamaRun(session, sensor, (1,))).laundered is True


def test_minus_inf_is_legal_in_masks_and_what_they_are_added_to() -> None:
    ggml = FakeGgml()
    sensor = sensor_for(ggml)
    mask = ggml.tensor("KQ_mask (copy)", f32([0, -np.inf], [0, 0]), "CPY")
    fill = ggml.tensor("node_1", f32([-np.inf, -np.inf], [0, 0]), "FILL")
    added = ggml.tensor("kq_masked-0", f32([1, -np.inf], [1, 1]), "ADD", [mask])
    scaled = ggml.tensor("node_3", f32([1, -np.inf], [1, 1]), "SCALE", [added])
    run_graph(sensor, [mask, fill, added, scaled])
    assert sensor.burn is None
    bad = ggml.tensor("node_4", f32([1, np.nan], [1, 1]), "SOFT_MAX", [scaled])
    run_graph(sensor, [bad])
    assert sensor.burn is not None
    assert sensor.burn.checked.op == "SOFT_MAX"


def test_minus_inf_is_a_fire_elsewhere_and_nan_is_one_in_a_mask() -> None:
    ggml = FakeGgml()
    plain, masked = sensor_for(ggml), sensor_for(ggml)
    run_graph(plain, [ggml.tensor("l_out-0", f32([1, -np.inf], [1, 1]), "ADD")])
    run_graph(masked, [ggml.tensor("KQ_mask", f32([-np.inf, np.nan], [1, 1]), "CPY")])
    assert plain.burn is not None
    assert masked.burn is not None
    assert (plain.burn.first.kind, masked.burn.first.kind) == (Kind.NEG_INF, Kind.NAN)
    assert masked.bad_signals[0].signal.legal is Legal.NEG_INF


def test_an_op_in_place_does_not_blame_its_overwritten_source() -> None:
    ggml = FakeGgml()
    sensor = sensor_for(ggml)
    values = f32([1, 2], [3, 4])
    before = ggml.tensor("ffn_inp-1", values, "ADD")
    after = ggml.tensor("l_out-1", values, "SQR", [before])
    run_graph(sensor, [before])
    values[1, 0] = np.inf
    run_graph(sensor, [after])
    assert sensor.burn is not None
    (source,) = sensor.burn.sources
    assert (source.status, source.detail, source.summary) == (Status.CLEAN, "overwritten in place", None)


def test_states_masks_integers_and_unwatched_sources_are_named_for_what_they_are() -> None:
    ggml = FakeGgml()
    sensor = sensor_for(ggml, "filtered")
    cache = ggml.tensor("cache_k_l3", np.array([[1, np.nan]], np.float16))
    view = ggml.tensor("cache_k_l3 (view)", np.array([[1, np.nan]], np.float16), "VIEW", [cache])
    mask = ggml.tensor("attn_inp_kq_mask", f32([0, -np.inf]))
    ids = ggml.tensor("inp_pos", np.array([[1, 2]], np.int32))
    query = ggml.tensor("Qcur-3", f32([1, 1]), "ROPE")
    out = ggml.tensor("attn_out-3", f32([np.nan, 1], [1, 1]), "FLASH_ATTN_EXT", [query, view, mask, ids])
    run_graph(sensor, [query, out])
    assert sensor.burn is not None
    found = [(s.role, s.status, s.detail) for s in sensor.burn.sources]
    assert found == [
        ("activation", Status.NOT_COVERED, "not watched at this level"),
        ("state", Status.BAD, ""),
        ("input", Status.CLEAN, "-inf is legal here"),
        ("input", Status.CLEAN, "integers"),
    ]


def test_what_an_earlier_step_said_of_a_tensor_is_forgotten() -> None:
    ggml = FakeGgml()
    sensor = sensor_for(ggml)
    product = ggml.tensor("ffn_out-1", f32([1, 1]), "MUL_MAT")
    run_graph(sensor, [product])
    sensor.level = "filtered"
    sensor.begin_step(Step(index=1, phase=Phase.DECODE, first_position=12, num_tokens=1))
    run_graph(sensor, [product, ggml.tensor("l_out-1", f32([np.nan, 1]), "ADD", [product])])
    assert sensor.burn is not None
    assert [s.status for s in sensor.burn.sources] == [Status.NOT_COVERED]


def test_quantised_tensors_are_not_covered_and_integers_need_no_check() -> None:
    ggml = FakeGgml()
    sensor = sensor_for(ggml)
    q = ggml.tensor("cache_k_l0 (view)", np.zeros((2, 20), np.uint8), "SET_ROWS", type_id=3, ne=(32, 2))
    run_graph(sensor, [q, ggml.tensor("ffn_moe_topk-0", np.zeros((2, 2), np.int32), "TOP_K")])
    assert (dict(sensor.not_covered), sensor.num_integer, sensor.num_checked) == ({"q4_1": 1}, 1, 0)


def test_of_a_cache_only_the_rows_written_now_are_checked() -> None:
    ggml = FakeGgml()
    cache = np.zeros((8, 4), np.float16)
    cache[7, 0] = np.nan  # an older row's, not this step's
    rows = ggml.tensor("attn_inp_k_idxs", np.array([5, 2], np.int64))
    new = ggml.tensor("Kcur-0", f32([1, 1, 1, 1], [1, 1, 1, 1]), "ROPE")
    write = ggml.tensor("cache_k_l0 (view)", cache, "SET_ROWS", [new, rows])
    sensor = sensor_for(ggml)
    run_graph(sensor, [write])
    assert sensor.burn is None
    cache[2, 3] = np.inf
    run_graph(sensor, [write])
    assert sensor.burn is not None
    first = sensor.burn.first
    assert (first.row, first.column, first.flat_index, first.shape) == (2, 3, 11, (8, 4))
    assert (first.token, first.position) == (1, 11)
    assert (sensor.burn.checked.place.stage, sensor.burn.checked.place.layer) == ("kv", 0)


@pytest.mark.parametrize(
    ("name", "op", "shape", "bad", "token"),
    [
        ("l_out-1", "ADD", (2, 5), (1, 3), 1),
        ("result_output", "MUL_MAT", (1, 5), (0, 3), 1),  # logits of the last token only
        ("Qcur-1", "ROPE", (2, 3, 4), (1, 0, 0), 1),
        ("Qcur-1", "ROPE", (2, 2, 4), (1, 0, 0), 1),  # as many heads as tokens: the op settles it
        ("kq-1", "MUL_MAT", (2, 2, 4), (1, 0, 0), 0),
        ("node_9", "CONT", (2, 2, 4), (1, 0, 0), None),  # open: not guessed
        ("new_state-1", "ADD", (3, 4, 4), (1, 0, 0), None),
    ],
    ids=lambda v: str(v),
)
def test_the_token_of_a_bad_element(
    name: str, op: str, shape: tuple[int, ...], bad: tuple[int, ...], token: int | None
) -> None:
    ggml = FakeGgml()
    values = np.zeros(shape, np.float32)
    values[bad] = np.nan
    sensor = sensor_for(ggml)
    run_graph(sensor, [ggml.tensor(name, values, op)])
    assert sensor.burn is not None
    assert sensor.burn.first.token == token
    assert sensor.burn.first.position == (None if token is None else 10 + token)


def test_on_tensor_sees_every_checked_tensor_with_its_place() -> None:
    ggml, seen = FakeGgml(), list[CheckedTensor]()
    sensor = sensor_for(ggml, on_tensor=seen.append)
    run_graph(sensor, mlp_graph(ggml, f32([1, 2], [3, np.nan]), f32([1, 1], [2, 2])))
    assert [(c.name, c.place.stage, c.first is None) for c in seen] == [
        ("ffn_swiglu-12", "swiglu", True),
        ("ffn_out-12", "down", False),
        ("l_out-12", "output", False),
        ("result_output", "logits", False),
    ]


def test_python_errors_in_the_callback_are_counted_and_inference_goes_on() -> None:
    ggml = FakeGgml()

    def fail(checked: CheckedTensor) -> None:
        raise RuntimeError(f"no {checked.name}")

    sensor = sensor_for(ggml, on_tensor=fail)
    graph = mlp_graph(ggml, f32([1, 2], [3, 4]), f32([1, 1], [2, 2]))
    assert len(run_graph(sensor, graph)) == 4
    assert (sensor.num_errors, sensor.first_error) == (4, "RuntimeError: no ffn_swiglu-12")


def test_a_tensor_without_memory_is_counted_not_read() -> None:
    ggml = FakeGgml()
    t = ggml.tensor("l_out-0", f32([1]), "ADD")
    t.data = None
    sensor = sensor_for(ggml)
    run_graph(sensor, [t])
    assert sensor.num_errors == 1
    assert "no memory" in (sensor.first_error or "")


def test_a_source_that_cannot_be_read_does_not_lose_the_fire() -> None:
    ggml = FakeGgml()
    source = ggml.tensor("inp_scale", f32([1]))
    source.data = None
    sensor = sensor_for(ggml)
    run_graph(sensor, [ggml.tensor("l_out-0", f32([np.nan]), "MUL", [source])])
    assert sensor.burn is not None
    assert (sensor.burn.sources, sensor.num_errors) == ((), 1)


def test_ctrl_c_stops_the_graph_and_waits_to_be_raised_outside_c() -> None:
    ggml = FakeGgml()

    def interrupt(checked: CheckedTensor) -> None:
        raise KeyboardInterrupt

    sensor = sensor_for(ggml, on_tensor=interrupt)
    assert run_graph(sensor, mlp_graph(ggml, f32([1, 2], [3, 4]), f32([1, 1], [2, 2]))) == ["ffn_swiglu-12"]
    assert isinstance(sensor.interrupt, KeyboardInterrupt)


def operand_of(ggml: FakeGgml, output: GgmlTensor, path: Path | None = None) -> Any:
    first = first_bad(bits_view(output, ctypes.addressof(output), ggml), F32)
    assert first is not None
    return WeightReader(ggml, path).operand(output, 0, first, "blk.0.ffn_down.weight")


def test_a_quantised_weights_row_is_dequantised() -> None:
    from gguf.quants import GGMLQuantizationType, quantize

    raw = quantize(np.ones((3, 64), np.float32), GGMLQuantizationType.Q4_1)
    raw[2].view("<u2")[10] = 0x7E00  # the second block's scale
    ggml = FakeGgml()
    weight = ggml.tensor("blk.0.ffn_down.weight", raw, type_id=3, ne=(64, 3))
    found = operand_of(ggml, ggml.tensor("ffn_out-0", f32([0, 0, np.nan]), "MUL_MAT", [weight]))
    assert (found.status, found.detail) == (Status.BAD, "row 2: 32 of 64 non-finite, columns 32-63")
    clean = operand_of(ggml, ggml.tensor("ffn_out-0", f32([0, np.nan, 0]), "MUL_MAT", [weight]))
    assert (clean.status, clean.detail) == (Status.CLEAN, "row 1 is finite")


def test_a_stacked_weight_names_the_expert_that_was_used() -> None:
    ggml = FakeGgml()
    experts = np.zeros((4, 3, 2), np.float16)
    experts[3, 1, 0] = np.inf
    weight = ggml.tensor("blk.0.ffn_down_exps.weight", experts)
    ids = ggml.tensor("ffn_moe_topk-0", np.array([[0, 1], [2, 3]], np.int32), "TOP_K")
    values = np.zeros((2, 2, 3), np.float32)
    values[1, 1, 1] = np.nan
    x = ggml.tensor("x", f32([1, 1]))
    found = operand_of(ggml, ggml.tensor("ffn_moe_down-0", values, "MUL_MAT_ID", [weight, x, ids]))
    assert (found.status, found.detail) == (Status.BAD, "expert 3 row 1: 1 of 2 non-finite, column 0")


def test_an_embeddings_row_is_that_of_the_token() -> None:
    ggml = FakeGgml()
    table = np.zeros((5, 2), np.float32)
    table[4] = np.nan
    weight = ggml.tensor("token_embd.weight", table)
    ids = ggml.tensor("inp_tokens", np.array([1, 4], np.int32))
    found = operand_of(ggml, ggml.tensor("embd", f32([0, 0], [np.nan, np.nan]), "GET_ROWS", [weight, ids]))
    assert (found.status, found.detail) == (Status.BAD, "row 4: 2 of 2 non-finite, columns 0-1")


def test_a_norms_weight_is_examined_whole() -> None:
    ggml = FakeGgml()
    weight = ggml.tensor("blk.0.attn_norm.weight", f32([1, np.nan, 1, np.nan])[0])
    found = operand_of(ggml, ggml.tensor("attn_norm-0", f32([0, np.nan, 0, 0]), "MUL", [weight]))
    assert found.detail == "whole tensor: 2 of 4 non-finite, 2 columns from 1 to 3"


def test_a_repacked_weight_is_read_from_the_file(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    values = np.zeros((3, 4), np.float32)
    values[2, 1] = np.inf
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.ffn_down.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ggml = FakeGgml()
    weight = ggml.tensor("blk.0.ffn_down.weight", np.zeros((3, 4), np.float32), buffer=REPACKED)
    output = ggml.tensor("ffn_out-0", f32([0, 0, np.nan]), "MUL_MAT", [weight])
    found = operand_of(ggml, output, tmp_path / "m.gguf")
    assert found.status is Status.BAD
    assert (
        found.detail
        == "row 2: 1 of 4 non-finite, column 1 (in the file; its copy on the device was not read)"
    )
    assert operand_of(ggml, output).status is Status.NOT_COVERED


class FakeSession:
    """Plays ``graph_of(step index)`` through the sensor at each decode; greedy tokens count up from 100."""

    runtime = "llama-cpp-python 0.0"
    num_vocab = 1000

    def __init__(
        self, ggml: FakeGgml, graph_of: Callable[[int], Sequence[GgmlTensor]], end: int = 10**6
    ) -> None:
        self.ggml, self.path = ggml, Path("model.gguf")
        self.graph_of, self.end = graph_of, end
        self.fed: list[list[tuple[int, ...]]] = []

    def __enter__(self) -> FakeSession:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def context(self, num_tokens: int, callback: Callback | None) -> Any:
        fed: list[tuple[int, ...]] = []
        self.fed.append(fed)

        def decode(tokens: tuple[int, ...]) -> None:
            fed.append(tuple(tokens))
            if callback is not None:
                run_graph(callback, self.graph_of(len(fed) - 1))

        context = SimpleNamespace(decode=decode, greedy=lambda num_vocab: 99 + len(fed))
        return _Managed(context)

    def tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(range(1, len(text.split()) + 1))

    def chat_prompt(self, prompt: str) -> str | None:
        return None

    def piece(self, token: int) -> bytes:
        return "é".encode()[token % 2 : token % 2 + 1]

    def is_end(self, token: int) -> bool:
        return token >= self.end


class _Managed:
    def __init__(self, context: Any) -> None:
        self.context = context

    def __enter__(self) -> Any:
        return self.context

    def __exit__(self, *error: object) -> None:
        pass


def trace_with(session: FakeSession, monkeypatch: pytest.MonkeyPatch, **options: Any) -> llama.LlamaTrace:
    monkeypatch.setattr(llama, "LlamaSession", lambda path, options: session)
    return llama.trace("model.gguf", prompt="a b c d e", **options)


def clean_then_bad(
    ggml: FakeGgml, burning: int, *, only_once: bool = False
) -> Callable[[int], list[GgmlTensor]]:
    """Graphs that are clean before step ``burning``; from then on (``only_once``: then) a weight is NaN."""
    burned: list[int] = []

    def graph_of(step: int) -> list[GgmlTensor]:
        bad = step >= burning and not (only_once and burned)
        if bad:
            burned.append(step)
        return mlp_graph(ggml, f32([1, 2], [3, np.nan if bad else 4]), f32([1, 1], [2, 2]))

    return graph_of


def test_a_clean_run_gives_text_tokens_and_coverage(monkeypatch: pytest.MonkeyPatch) -> None:
    ggml, pieces = FakeGgml(), list[str]()
    session = FakeSession(ggml, clean_then_bad(ggml, 99), end=103)
    result = trace_with(session, monkeypatch, max_tokens=8, on_piece=pieces.append)
    assert (result.fire, result.token_ids, result.num_checked, result.num_steps) == (
        None,
        (100, 101, 102),
        8,
        4,
    )
    assert "".join(pieces) == result.text == "é�"  # the last token ended inside a character
    assert result.decode_tokens_per_s is not None
    assert session.fed == [[(1, 2, 3, 4, 5), (100,), (101,), (102,)]]


def test_the_prompt_goes_in_chunks_of_the_ubatch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    ggml = FakeGgml()
    session = FakeSession(ggml, clean_then_bad(ggml, 99))
    trace_with(session, monkeypatch, max_tokens=1, options=LlamaOptions(ubatch_size=2))
    assert session.fed == [[(1, 2), (3, 4), (5,)]]


def test_a_filtered_fire_is_rerun_to_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    ggml = FakeGgml()
    session = FakeSession(ggml, clean_then_bad(ggml, 2))
    result = trace_with(session, monkeypatch)
    fire = result.fire
    assert fire is not None
    assert session.fed == [[(1, 2, 3, 4, 5), (100,), (101,)]] * 2
    assert (fire.origin.layer, fire.origin.stage, fire.origin.module, fire.origin.op) == (
        12,
        "down",
        "blk.12.ffn_down",
        "MUL_MAT",
    )
    assert (fire.phase, fire.step, fire.first.position) == (Phase.DECODE, 2, 6)
    assert fire.notes == (
        "the weight itself is non-finite: blk.12.ffn_down.weight row 1: 1 of 2 non-finite, column 1",
    )
    assert [s.signal.stage for s in fire.bad_signals] == ["down", "output", "logits"]
    assert fire.bad_signals[0].first == fire.first
    assert fire.token_ids == (1, 2, 3, 4, 5, 100, 101)
    assert fire_from_dict(fire_to_dict(fire)) == fire


def test_without_a_rerun_the_fire_says_how_far_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    ggml = FakeGgml()
    session = FakeSession(ggml, clean_then_bad(ggml, 0))
    fire = trace_with(session, monkeypatch, rerun=False).fire
    assert fire is not None
    assert len(session.fed) == 1
    assert (fire.origin.stage, fire.extra["level"]) == ("output", "filtered")
    assert any("at or before this tensor" in note for note in fire.notes)


def test_a_clean_rerun_is_kept_as_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    ggml = FakeGgml()
    fire = trace_with(FakeSession(ggml, clean_then_bad(ggml, 1, only_once=True)), monkeypatch).fire
    assert fire is not None
    assert fire.origin.stage == "output"
    assert any("every tensor watched was clean" in note for note in fire.notes)


def test_a_state_bad_before_the_step_is_traced_back_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    ggml = FakeGgml()

    def graph_of(step: int) -> list[GgmlTensor]:
        # step 0 writes a NaN key that nothing reads until step 1
        key = ggml.tensor("Kcur-3", f32([np.nan if step == 0 else 1, 1]), "ROPE")
        cache = ggml.tensor("cache_k_l3", f32([np.nan, 1]))
        value = np.nan if step else 1.0
        attention = ggml.tensor("node_7", f32([value, 1]), "FLASH_ATTN_EXT", [cache])
        return [key, attention, ggml.tensor("l_out-3", f32([value, 1]), "ADD", [attention])]

    session = FakeSession(ggml, graph_of)
    fire = trace_with(session, monkeypatch).fire
    assert fire is not None
    assert len(session.fed) == 3
    assert (fire.step, fire.origin.module, fire.origin.op) == (0, "Kcur-3", "ROPE")
    assert "first seen at level filtered in step 1; it started earlier" in fire.notes


def test_an_op_with_finite_sources_is_blamed_itself() -> None:
    ggml = FakeGgml()
    sensor = sensor_for(ggml)
    run_graph(sensor, mlp_graph(ggml, f32([1, 1], [1e30, 1]), f32([1, 1], [1e10, 1])))
    session: Any = FakeSession(ggml, lambda step: [])
    fire = make_fire(sensor, None, session, LlamaRun(session, sensor, (1,)))
    assert fire.notes == ("every source of MUL_MAT is finite: this op made the bad value",)
    assert [t.name for t in fire.inputs] == ["ffn_swiglu-12"]
    assert fire.output is not None
    assert fire.output.num_pos_inf == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "all"}, r"level='all': must be filtered or full"),
        ({"max_tokens": 0}, r"max_tokens=0: must be at least 1"),
        ({"prompt": ""}, r"prompt='': has no tokens"),
    ],
    ids=["level", "max_tokens", "prompt"],
)
def test_bad_options_are_named(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    ggml = FakeGgml()
    monkeypatch.setattr(llama, "LlamaSession", lambda path, o: FakeSession(ggml, lambda step: []))
    with pytest.raises(ConfigError, match=message):
        llama.trace("model.gguf", **{"prompt": "x", **options})


@pytest.mark.parametrize(
    "option",
    [{"num_threads": 0}, {"ubatch_size": 0}, {"num_gpu_layers": -1}, {"flash_attention": "maybe"}],
    ids=lambda o: next(iter(o)),
)
def test_bad_runtime_options_are_named(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"{next(iter(option))}="):
        LlamaOptions(**option)


def test_options_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LlamaOptions().debug = True  # type: ignore[misc]


def test_the_tracer_imports_neither_torch_nor_llama_cpp() -> None:
    code = (
        "import firetower.attach.llama.worker, sys; print(sorted({'torch', 'llama_cpp'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
