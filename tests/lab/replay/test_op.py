"""One op from a capture's tensors: as stored, wider, and what follows."""

from __future__ import annotations

import numpy as np
import pytest

from firetower.capture import RawTensor, freeze_request
from firetower.core.errors import ReplayError
from firetower.lab.replay.op import OPS, replay_op

torch = pytest.importorskip("torch")


def raw(values, dtype="float16"):
    tensor = torch.tensor(values, dtype=getattr(torch, dtype))
    size = tensor.element_size()
    bits = tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    return RawTensor(dtype=dtype, shape=tuple(tensor.shape), data=bits.numpy().tobytes())


def captured(name, args, tensors, **more):
    return freeze_request(
        {"model": "m", "prompt": "x"},
        path="/v1/completions",
        engine_settings={"op": {"name": name, "args": args} | more},
        tensors=tensors,
    )


X, Y = {"tensor": "x"}, {"tensor": "y"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_overflow_of_the_stored_type_is_told_from_the_maths(dtype):
    big = 300.0 if dtype == "float16" else 1e30
    found = replay_op(captured("aten.mul.Tensor", [X, Y], {"x": raw([1.0, big], dtype), "y": raw([1.0, big], dtype)}))
    stored, single, double = found.runs
    assert (stored.num_pos_inf, stored.first_index) == (1, 1)
    assert stored.first_bits == ("7c00" if dtype == "float16" else "7f80")
    assert double.absmax == pytest.approx(big * big, rel=1e-2)
    assert single.is_bad is (dtype == "bfloat16")
    blamed = f"the range of {dtype} is to blame" if dtype == "float16" else "the range of float32 is to blame"
    assert blamed in found.sentences[0]


def test_a_domain_error_burns_in_float64_too():
    found = replay_op(captured("log", [X], {"x": raw([1.0, -1.0], "float32")}))
    assert [r.num_nan for r in found.runs] == [1, 1, 1]
    assert "no finite answer" in found.sentences[0]


def test_bad_inputs_point_upstream():
    found = replay_op(captured("add", [X, 1], {"x": raw([1.0, float("nan")])}))
    assert found.bad_inputs == ("x",)
    assert "upstream" in found.sentences[0]


def test_a_clean_op_whose_captured_output_was_another_is_said_to_differ():
    tensors = {"x": raw([1.0, 2.0]), "out": raw([1.0, float("nan")])}
    found = replay_op(captured("aten::neg", [X], tensors, output="out"))
    assert not found.is_bad
    assert found.equals_captured is False
    assert "not the captured ones" in found.sentences[1]
    same = replay_op(captured("aten::neg", [X], tensors | {"out": raw([-1.0, -2.0])}, output="out"))
    assert same.equals_captured is True


def test_integers_and_masks_are_not_widened():
    tensors = {"x": raw([1.0, 2.0]), "y": raw([True, False], "bool")}
    found = replay_op(captured("masked_fill", [X, Y, -1e4], tensors))
    assert not any(r.error for r in found.runs)
    assert [r.output_dtype for r in found.runs] == ["float16", "float32", "float64"]


def test_keywords_and_lists_are_passed_on():
    tensors = {"x": raw([[60000.0, 60000.0]]), "y": raw([1.0, 1.0])}
    found = replay_op(captured("rms_norm", [X, [2]], tensors, kwargs={"weight": Y, "eps": 1e-6}))
    assert not found.is_bad
    assert found.runs[2].absmax == pytest.approx(1.0)


@pytest.mark.parametrize("name", sorted(OPS))
def test_every_listed_op_is_one_of_torch(name):
    from firetower.lab.replay.op import _function

    assert callable(_function(torch, name))


@pytest.mark.parametrize(
    ("op", "rule"),
    [
        (None, "describes no op"),
        ({"name": "load", "args": []}, "cannot be replayed"),
        ({"name": "os.system", "args": []}, "cannot be replayed"),
        ({"name": "nn.functional.__class__", "args": []}, "cannot be replayed"),
        ({"name": "add", "args": [{"tensor": "z"}]}, "is not in the capture; it holds x"),
        ({"name": "add", "args": ["x"]}, "must be a number"),
        ({"name": "add", "args": [X], "kwargs": {"out": X}}, "'out' is not allowed"),
        ({"name": "softmax", "args": [X], "kwargs": {"dtype": {"dtype": "qint8"}}}, "must be float64"),
    ],
)
def test_descriptions_that_cannot_be_are_refused(op, rule):
    capture = freeze_request(
        {"prompt": "x"},
        path="/v1/completions",
        engine_settings={} if op is None else {"op": op},
        tensors={"x": RawTensor.from_array(np.ones(2, np.float32))},
    )
    with pytest.raises(ReplayError, match=rule):
        replay_op(capture)


def test_what_torch_refuses_is_reported_not_raised():
    found = replay_op(captured("matmul", [X, Y], {"x": raw([[1.0]]), "y": raw([[1.0], [2.0]])}))
    assert "RuntimeError" in found.runs[0].error
    assert "does not run as stored" in found.sentences[0]
