"""The safetensors file: against the safetensors package, every type, and damaged headers."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firetower.capture.tensors import DTYPE_BYTES, RawTensor, read_table, read_tensors, tensor_file_parts
from firetower.core.errors import CaptureError


def written(tensors):
    return b"".join(tensor_file_parts(tensors))


def read(raw):
    return read_tensors(io.BytesIO(raw), len(raw))


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=10).filter(lambda n: n != "__metadata__"),
        st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(0, 4), max_size=3), st.binary()),
        max_size=5,
    )
)
@settings(max_examples=150, deadline=None)
def test_every_type_shape_and_bit_round_trips(raw):
    tensors = {}
    for name, (dtype, shape, data) in raw.items():
        size = DTYPE_BYTES[dtype] * int(np.prod(shape))
        tensors[name] = RawTensor(dtype=dtype, shape=tuple(shape), data=(data * (size + 1) + bytes(size))[:size])
    assert read(written(tensors)) == tensors


def test_the_safetensors_package_reads_it_and_is_read():
    from safetensors.numpy import load, save

    rng = np.random.default_rng(0)
    arrays = {
        "state": rng.standard_normal((3, 5)).astype(np.float32),
        "half": np.array([[np.nan, np.inf, -np.inf, 6e-8]], dtype=np.float16),
        "ids": np.arange(7, dtype=np.int64),
        "mask": np.array([True, False, True]),
        "scalar": np.array(2.5),
        "empty": np.zeros((0, 4), dtype=np.uint8),
    }
    ours = written({k: RawTensor.from_array(v) for k, v in arrays.items()})
    theirs = load(ours)
    for name, array in arrays.items():
        assert theirs[name].dtype == array.dtype
        assert theirs[name].tobytes() == array.tobytes()
    back = read(save(arrays))
    for name, array in arrays.items():
        assert back[name].to_array().tobytes() == array.tobytes()
        assert back[name].shape == array.shape


def test_types_that_numpy_lacks_are_kept_as_their_bits():
    bits = np.array([[0x7FC1, 0x3F80]], dtype=np.uint16)
    tensor = RawTensor.from_array(bits, dtype="bfloat16")
    assert read(written({"x": tensor}))["x"].to_array().tolist() == bits.tolist()


def test_big_endian_and_strided_arrays_are_stored_in_order():
    array = np.arange(12, dtype=">f4").reshape(3, 4).T
    tensor = RawTensor.from_array(array)
    assert tensor.dtype == "float32"
    assert tensor.to_array().tolist() == array.tolist()


def test_a_tensor_that_is_none_is_refused():
    with pytest.raises(CaptureError, match="dtype='complex64'"):
        RawTensor.from_array(np.zeros(2, np.complex64))
    with pytest.raises(CaptureError, match="takes 8 bytes, data has 4"):
        RawTensor(dtype="float32", shape=(2,), data=bytes(4))
    with pytest.raises(CaptureError, match="shape"):
        RawTensor(dtype="uint8", shape=(-1, -4), data=bytes(4))
    with pytest.raises(CaptureError, match="__metadata__"):
        written({"__metadata__": RawTensor(dtype="uint8", shape=(0,), data=b"")})


GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


@pytest.mark.parametrize(
    ("header", "rule"),
    [
        ({"a": GOOD["a"] | {"data_offsets": [0, 4]}}, "elements of its shape"),
        ({"a": GOOD["a"] | {"data_offsets": [8, 16]}}, "must start at"),
        ({"a": GOOD["a"] | {"dtype": "F31"}}, "dtype must be one of"),
        ({"a": GOOD["a"] | {"shape": [-2]}}, "whole numbers"),
        ({"a": GOOD["a"] | {"shape": [2.0]}}, "whole numbers"),
        ({"a": GOOD["a"] | {"pickle": ""}}, "exactly dtype"),
        ({"a": GOOD["a"], "b": GOOD["a"]}, "must start at"),
        ({}, "the data ends at"),
        ([], "must be a JSON object"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_header_that_contradicts_itself_is_refused(header, rule):
    text = json.dumps(header).encode()
    raw = len(text).to_bytes(8, "little") + text + bytes(8)
    with pytest.raises(CaptureError, match=rule):
        read_table(io.BytesIO(raw), len(raw))


def test_lengths_that_cannot_be_true_are_refused_before_anything_is_read():
    for raw in (b"", b"\x01", (1 << 62).to_bytes(8, "little") + b"{}", (3).to_bytes(8, "little") + b"{}"):
        with pytest.raises(CaptureError, match="header length"):
            read_table(io.BytesIO(raw), len(raw))


def test_a_name_twice_is_refused():
    text = b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    raw = len(text).to_bytes(8, "little") + text
    with pytest.raises(CaptureError, match="twice"):
        read_table(io.BytesIO(raw), len(raw))


@given(st.integers(0, 400), st.integers(0, 255))
@settings(max_examples=300, deadline=None)
def test_any_flipped_byte_gives_a_clean_error_or_a_tensor(place, value):
    raw = bytearray(written({"a": RawTensor(dtype="float16", shape=(2, 2), data=bytes(8))}))
    raw[place % len(raw)] = value
    problem = ""
    try:
        read(bytes(raw))
    except CaptureError as e:
        problem = str(e)
    assert "\n" not in problem
