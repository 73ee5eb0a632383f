"""Writing keys and values into pages: what lands where, 8-bit scales that saturate, bad rows that stay visible."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firetower.core.errors import ConfigError
from firetower.ops.attention import PagedKV, cases, gather_kv, new_kv, reference, torch_path, write_kv
from firetower.ops.attention.cache import LARGEST, LARGEST_SCALE, SMALLEST_SCALE
from firetower.sensors.marks import Mark, mark_rows, new_panel

write_kernels = pytest.importorskip("firetower.ops.attention.write_kernels")

NAN, INF = float("nan"), float("inf")
BACKENDS = {"torch": torch_path.write_kv, "triton": write_kernels.write_kv}
EIGHT_BITS = [torch.int8, torch.float8_e4m3fn]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaNs in the interpreter


def make(kv_dtype, dtype=torch.float32, device="cpu", scale_dtype=torch.float32, rows=6, dim=24):
    """Keys and values of some rows, pages full of NaN, slots with a pad."""
    g = torch.Generator().manual_seed(1)
    key, value = (torch.randn(rows, 2, dim, generator=g).to(device=device, dtype=dtype) for _ in range(2))
    kv = new_kv(4, 3, 2, dim, kv_dtype, device, scale_dtype)
    cases.fill(kv, NAN)
    slots = torch.tensor([7, 0, -1, 11, 4, 5][:rows], device=device)
    return key, value, kv, slots


def write(backend, key, value, kv, slots, mark=None):
    BACKENDS[backend](key, value, kv, slots, mark)
    return kv


def read(kv, slot):
    """Keys and values that stand in a slot, in float64."""
    page = torch.tensor([slot // 3], device=kv.key.device)
    key, value = reference.read(kv, page, slot % 3 + 1)
    return key[-1], value[-1]


def raw(kv):
    """Every byte of the pages and scales."""
    return [x.view(torch.uint8).clone() for x in (kv.key, kv.value, kv.key_scale, kv.value_scale) if x is not None]


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16, torch.bfloat16, *EIGHT_BITS], ids=str)
def test_rows_land_in_their_slots_and_nowhere_else(backend, kv_dtype, device):
    key, value, kv, slots = make(kv_dtype, device=device)
    before = raw(kv)
    write(backend, key, value, kv, slots)
    rtol = cases.QUANTISED_RTOL.get(kv_dtype, cases.RTOL[torch.bfloat16])
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            for expected, got in zip((key[row], value[row]), read(kv, slot), strict=True):
                assert (got - expected.double()).norm() <= rtol * expected.double().norm()
    untouched = torch.ones(12, dtype=torch.bool)
    untouched[slots[slots >= 0].cpu()] = False
    for old, new in zip(before, raw(kv), strict=True):
        old, new = (x.view(12, -1) for x in (old, new))
        assert torch.equal(old[untouched], new[untouched])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32], ids=["scale16", "scale32"])
@pytest.mark.parametrize("kv_dtype", EIGHT_BITS, ids=["int8", "e4m3"])
def test_both_backends_write_the_same_bits(kv_dtype, scale_dtype, dtype, device):
    pages = []
    for backend in BACKENDS:
        key, value, kv, slots = make(kv_dtype, dtype, device, scale_dtype)
        key[3] *= 1e-4
        value[4] = 0
        pages.append(raw(write(backend, key, value, kv, slots)))
    assert all(torch.equal(a, b) for a, b in zip(*pages, strict=True))


@pytest.mark.parametrize("kv_dtype", EIGHT_BITS, ids=["int8", "e4m3"])
def test_scales_saturate_and_stay_finite(backend, kv_dtype, device):
    """Beyond what a float16 scale can hold, up to float32's largest; down to subnormals and zero."""
    limit = LARGEST[kv_dtype] * LARGEST_SCALE[torch.float16]
    for size in (0.0, 1e-45, 1e-30, 1e-6, limit, 2 * limit, 3e38):
        key, value, kv, slots = make(kv_dtype, device=device, scale_dtype=torch.float16)
        key[0] = torch.linspace(-1, 1, 24, device=device) * size
        write(backend, key, value, kv, slots)
        got, scale = read(kv, 7)[0], kv.key_scale.view(12, 2)[7].float()
        assert got.isfinite().all()
        assert (scale >= SMALLEST_SCALE[torch.float16]).all()
        assert (got.abs() <= limit * 1.001).all()
        assert torch.equal(got[0, 0].sign(), torch.tensor(-1.0 if size > 1e-9 else 0.0, dtype=got.dtype, device=device))


@given(st.lists(st.floats(width=32), min_size=1, max_size=20), st.sampled_from(EIGHT_BITS))
@settings(max_examples=60, deadline=None)
def test_any_row_is_close_or_says_nan(values, kv_dtype):
    """Finite in: within half a step of what was written. Not finite in: the scale is NaN, all of it reads NaN."""
    x = torch.tensor(values)
    steps, scale = torch_path.quantise(x, kv_dtype, torch.float32)
    got = steps.double() * scale.double()
    if not x.isfinite().all():
        assert scale.isnan()
        return
    step = scale.double() * (0.5 if kv_dtype is torch.int8 else 16)
    assert ((got - x.double()).abs() <= step * 1.001).all()


@pytest.mark.parametrize("bad", [NAN, -INF])
@pytest.mark.parametrize("kv_dtype", EIGHT_BITS, ids=["int8", "e4m3"])
def test_a_bad_row_is_never_laundered(backend, kv_dtype, bad, device):
    key, value, kv, slots = make(kv_dtype, device=device, scale_dtype=torch.float16)
    clean = [read(write(backend, key, value, kv, slots), s) for s in (0, 4)]
    key[0, 1, 3] = bad
    panel = new_panel(1, 6, device)
    write(backend, key, value, kv, slots, Mark(panel=panel, slot=0, num_signals=1, num_rows=6))
    got = read(kv, 7)[0]
    assert got[1].isnan().all()
    assert got[0].isfinite().all()
    # row 0, column 1 of [T, 2 * Hkv] scales
    assert int(panel[0]) >> 32 == 1
    for (k, v), slot in zip(clean, (0, 4), strict=True):
        assert torch.equal(read(kv, slot)[0], k)
        assert torch.equal(read(kv, slot)[1], v)


@pytest.mark.parametrize(
    ("kv_dtype", "with_ids"),
    [(torch.float32, True), (torch.float16, False), (torch.int8, True), (torch.float8_e4m3fn, False)],
    ids=str,
)
def test_marks_what_is_stored_and_changes_no_bit(backend, kv_dtype, with_ids, device):
    key, value, kv, slots = make(kv_dtype, torch.float16, device)
    key[2, 0, 1], key[3, 1, 2], value[5, 0, 3], value[1, 1] = NAN, INF, NAN, NAN
    off = raw(write(backend, key, value, kv, slots))
    ids = torch.tensor([3, 2, 0, 1, -1, 5], dtype=torch.int32, device=device) if with_ids else None
    words = [new_panel(2, 6, device) for _ in range(2)]
    kwargs = {"slot": 1, "num_signals": 2, "num_rows": 6, "row_ids": ids}
    cases.fill(kv, NAN)
    on = raw(write(backend, key, value, kv, slots, Mark(panel=words[0], **kwargs)))
    assert all(torch.equal(a, b) for a, b in zip(on, off, strict=True))
    both = (kv.key, kv.value) if kv.key_scale is None else (kv.key_scale, kv.value_scale)
    stored = torch.cat([x.flatten(0, 1)[slots.clamp_min(0)].flatten(1) for x in both], 1)
    stored[slots < 0] = 0
    mark_rows(stored, Mark(panel=words[1], **kwargs))
    assert torch.equal(words[0], words[1])


def test_a_slot_beyond_the_pool_is_not_written_and_shows(backend, device):
    for kv_dtype in (torch.float32, torch.int8):
        key, value, kv, slots = make(kv_dtype, device=device)
        before = raw(kv)
        panel = new_panel(1, 6, device)
        slots[:] = -1
        slots[3] = 12
        write(backend, key, value, kv, slots, Mark(panel=panel, slot=0, num_signals=1, num_rows=6))
        assert all(torch.equal(a, b) for a, b in zip(before, raw(kv), strict=True))
        assert int(panel[0]) >> 32 == 3 * (2 * 2 if kv_dtype is torch.int8 else 2 * 2 * 24)


def test_all_pads_and_no_rows_write_nothing(backend, device):
    key, value, kv, slots = make(torch.float32, device=device)
    before = raw(kv)
    write(backend, key, value, kv, slots.fill_(-1))
    write(backend, key[:0], value[:0], kv, slots[:0])
    assert all(torch.equal(a, b) for a, b in zip(before, raw(kv), strict=True))


def test_a_row_writes_the_same_bits_in_any_company(backend, device):
    key, value, kv, slots = make(torch.int8, device=device)
    whole = [x[4 // 3, 4 % 3].clone() for x in (kv.key, kv.key_scale)]
    write(backend, key, value, kv, slots)
    whole = [x[4 // 3, 4 % 3].clone() for x in (kv.key, kv.key_scale)]
    cases.fill(kv, NAN)
    write(backend, key[4:5], value[4:5], kv, slots[4:5])
    assert all(torch.equal(x[4 // 3, 4 % 3], y) for x, y in zip((kv.key, kv.key_scale), whole, strict=True))


def test_window_shapes_and_gather(device):
    """[N, W, Hkv, D] with [N, W] slots, read back behind one another."""
    key, value, kv, _ = make(torch.float32, device=device)
    slots = torch.tensor([[0, 1, 2], [9, 10, -1]], dtype=torch.int32, device=device)
    write_kv(key.view(2, 3, 2, 24), value.view(2, 3, 2, 24), kv, slots)
    table = torch.tensor([[0, 2**30], [3, 2**30]], dtype=torch.int32, device=device)
    got_key, got_value, bounds = gather_kv(kv, table, [3, 2], torch.float32)
    assert bounds == [0, 3, 5]
    assert torch.equal(got_key, key[:5])
    assert torch.equal(got_value, value[:5])
    with pytest.raises(ConfigError, match=r"seq_lens\[0\]=7: must be from 0 to 6"):
        gather_kv(kv, table, [7], torch.float32)


def test_gather_of_8_bits_applies_the_scales(device):
    for kv_dtype in EIGHT_BITS:
        key, value, kv, slots = make(kv_dtype, device=device)
        write_kv(key, value, kv, slots)
        got_key, got_value, _ = gather_kv(kv, torch.tensor([[2, 0]], device=device), [2], torch.float32)
        assert got_key[0].isnan().all()  # slot 6 was never written
        assert torch.allclose(got_key[1], key[0], atol=0.1)
        assert torch.allclose(got_value[1], value[0], atol=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(2, 2, 5)}, r"key=\(2, 2, 5\)"),
        ({"value": torch.zeros(1, 2, 4)}, r"value=\(1, 2, 4\)"),
        ({"slot_mapping": torch.zeros(3, dtype=torch.int64)}, r"slot_mapping=\(3,\)"),
        ({"slot_mapping": torch.zeros(2)}, "must be int32 or int64"),
    ],
)
def test_refuses_what_does_not_fit(change, message):
    arguments = {
        "key": torch.zeros(2, 2, 4),
        "value": torch.zeros(2, 2, 4),
        "kv": new_kv(1, 4, 2, 4, torch.float32),
        "slot_mapping": torch.zeros(2, dtype=torch.int64),
        **change,
    }
    with pytest.raises(ConfigError, match=message):
        write_kv(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"key": torch.zeros(1, 2, 3)}, "must be alike"),
        (dict.fromkeys(("key", "value"), torch.zeros(1, 2, 1, 4).int()), "must be a float type or one of"),
        ({"value": torch.zeros(1, 2, 1, 8)[..., ::2]}, "strides"),
        ({"key_scale": torch.zeros(1, 2, 1)}, "float32 has no scales"),
        (dict.fromkeys(("key", "value"), torch.zeros(1, 2, 1, 4, dtype=torch.int8)), "needs scales"),
    ],
)
def test_refuses_pages_that_do_not_fit(arguments, message):
    with pytest.raises(ConfigError, match=message):
        PagedKV(**{"key": torch.zeros(1, 2, 1, 4), "value": torch.zeros(1, 2, 1, 4), **arguments})
