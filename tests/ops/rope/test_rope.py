"""`rope`: exact to 2^20, pads and positions beyond the table, every backend, rows apart, sensors."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from firetower.core.errors import ConfigError
from firetower.ops.rope import RopeTable, cases, reference, rope, rope_frequencies, rope_table, torch_path
from firetower.sensors.marks import Mark, mark_rows, new_panel

BACKENDS = ("torch", "triton")

# Triton's interpreter computes with NumPy, which warns where a GPU gives Inf or NaN
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning")


def backend_of(name: str) -> Callable[..., None]:
    if name == "torch":
        return torch_path.rope
    kernels = pytest.importorskip("firetower.ops.rope.kernels")
    return kernels.rope


def table_of(
    parameters: dict[str, object], head_dim: int, device: str, num_positions: int = (1 << 20) + 1
) -> RopeTable:
    return rope_table(
        parameters,
        head_dim=head_dim,
        num_positions=num_positions,
        max_position_embeddings=cases.MAX_POSITION_EMBEDDINGS,
        device=device,
    )


def run(
    backend: str,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    table: RopeTable,
    mark_q: Mark | None = None,
    mark_k: Mark | None = None,
    fill: float = math.nan,
) -> tuple[Tensor, Tensor]:
    """One backend into outputs filled beforehand."""
    outs = [torch.full(x.shape, fill, dtype=x.dtype, device=x.device) for x in (q, k)]
    backend_of(backend)(q, k, positions, table, *outs, mark_q=mark_q, mark_k=mark_k)
    return outs[0], outs[1]


@pytest.mark.parametrize("name", cases.PARAMETERS)
def test_cosines_are_exact_to_2_to_the_20(name):
    parameters = cases.PARAMETERS[name]
    frequencies, factor = rope_frequencies(
        parameters, head_dim=128, max_position_embeddings=cases.MAX_POSITION_EMBEDDINGS
    )
    made = torch.Generator().manual_seed(1)
    positions = [*cases.POSITIONS, *torch.randint(0, 1 << 20, (40,), generator=made).tolist()]
    cos, sin = torch_path.cos_sin(torch.tensor(positions), table_of(parameters, 128, "cpu"))
    truth = torch.stack([reference.cos_sin(p, frequencies) for p in positions]) * factor
    error = (torch.stack((cos, sin), 1).double() - truth).abs().max()
    print(f"{name}: largest error {error:.2g}")
    assert error < cases.ATOL_COS_SIN * factor


def test_positions_in_a_narrow_type_are_off_drill_t1():
    """What the tables make impossible: positions are integers until the lookup, and other types are refused."""
    frequencies = rope_frequencies(cases.Q36, head_dim=256)[0]
    assert torch.tensor(4097).bfloat16().item() == 4096
    assert (torch.tensor(65520.0).half() * frequencies[0]).cos().isnan()
    single = (torch.tensor(float(1 << 20)) * frequencies.float()).double()
    assert (single - (1 << 20) * frequencies).abs().max() > 1e-3, "an angle in float32 is off as well"
    q, k = cases.inputs(1, 2, 1, 256, 1, torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        with pytest.raises(ConfigError, match=r"positions: .* must be int32 or int64"):
            rope(q, k, torch.tensor([4097]).to(dtype), table_of(cases.Q36, 256, "cpu"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("head_dim", "fraction", "heads", "kv_heads"),
    [(256, 0.25, 4, 2), (64, 1.0, 5, 1), (6, 1.0, 2, 2), (63, 0.35, 3, 1)],
    ids=["quarter", "whole", "tiny", "odd head"],
)
def test_backends_against_float64(backend, head_dim, fraction, heads, kv_heads, device, kernel_dtypes, assert_close):
    parameters = {**cases.Q36, "partial_rotary_factor": fraction}
    frequencies, _ = rope_frequencies(parameters, head_dim=head_dim)
    table = table_of(parameters, head_dim, device)
    positions = torch.tensor([0, 5, -1, 100_001, 1 << 20, 1023, -7], device=device)
    for dtype in kernel_dtypes:
        q, k = cases.inputs(7, heads, kv_heads, head_dim, 2, dtype, device)
        for index in (positions, positions.int()):
            q_out, k_out = run(backend, q, k, index, table)
            for name, x, out in (("q", q, q_out), ("k", k, k_out)):
                truth = reference.rope(x.cpu(), index, frequencies)
                assert_close(f"{backend} {name} {dtype}", truth, out, cases.RTOL[dtype])
                assert torch.equal(out[[2, 6]], x[[2, 6]]), "pads are copied"
                assert torch.equal(out[..., table.rotary_dim :], x[..., table.rotary_dim :])


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 1000, 4097])
def test_lengths(num_tokens, device, assert_close):
    q, k = cases.inputs(num_tokens, 2, 1, 16, 3, torch.float32, device)
    frequencies, _ = rope_frequencies(cases.PARAMETERS["default"], head_dim=16)
    table = table_of(cases.PARAMETERS["default"], 16, device)
    positions = torch.arange(num_tokens, device=device) * 251
    q_out, k_out = rope(q, k, positions, table)
    last = slice(max(0, num_tokens - 20), None)
    for x, out in ((q, q_out), (k, k_out)):
        truth = reference.rope(x[last].cpu(), positions[last], frequencies)
        assert_close(f"T={num_tokens}", truth, out[last], cases.RTOL[torch.float32])
        assert out.isfinite().all()


def test_equals_transformers_on_text_sections_or_not(assert_close):
    """Three equal positions make the interleaved sections of Qwen3.5 plain RoPE."""
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    configuration = pytest.importorskip("transformers.models.qwen3_5.configuration_qwen3_5")
    parameters = {**cases.Q36, "mrope_section": [11, 11, 10], "mrope_interleaved": True}
    config = configuration.Qwen3_5TextConfig(
        hidden_size=512, num_attention_heads=2, num_key_value_heads=1, head_dim=256, rope_parameters=parameters
    )
    embedding = modeling.Qwen3_5TextRotaryEmbedding(config)
    positions = torch.arange(50, 66)
    q, k = cases.inputs(16, 2, 1, 256, 4, torch.float32)
    cos, sin = embedding(q, positions[None, None].expand(3, 1, -1))
    theirs = modeling.apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    ours = rope(q, k, positions, table_of(parameters, 256, "cpu"))
    for name, expected, out in zip("qk", theirs, ours, strict=True):
        # their angle is a float32 product: 60 * 6e-8
        assert_close(name, expected[0].transpose(0, 1), out, 5e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_attention_factor_scales_what_is_rotated(backend, device, assert_close):
    parameters = {**cases.PARAMETERS["yarn"], "partial_rotary_factor": 0.5}
    frequencies, factor = rope_frequencies(parameters, head_dim=32)
    assert factor > 1.1
    q, k = cases.inputs(3, 2, 1, 32, 5, torch.float32, device)
    positions = torch.tensor([3, 9000, 100_000], device=device)
    out, _ = run(backend, q, k, positions, table_of(parameters, 32, device))
    assert_close("yarn", reference.rope(q.cpu(), positions, frequencies, factor), out, cases.RTOL[torch.float32])


@pytest.mark.parametrize("backend", BACKENDS)
def test_beyond_the_table_is_nan_and_named(backend, device):
    """Never a read outside the tables, never a plausible answer: the sensor names the first such row."""
    table = table_of(cases.Q36, 32, device, num_positions=1500)
    q, k = cases.inputs(5, 2, 1, 32, 6, torch.float32, device)
    last = torch.iinfo(torch.int64)
    positions = torch.tensor([1499, 1500, last.max, last.min, 3], device=device)
    panel = new_panel(2, 5, device)
    ids = torch.arange(5, device=device)
    q_out, k_out = run(
        backend, q, k, positions, table,
        mark_q=Mark(panel=panel, slot=0, num_signals=2, num_rows=5, row_ids=ids.repeat_interleave(2)),
        mark_k=Mark(panel=panel, slot=1, num_signals=2, num_rows=5, row_ids=ids),
    )  # fmt: skip
    for out in (q_out, k_out):
        assert out[[1, 2], :, :8].isnan().all()
        assert out[[0, 3, 4]].isfinite().all()
        assert out[..., 8:].isfinite().all()
    assert panel[0].item() >> 32 == 1 * 2 * 32
    assert [panel[4 + row].item() < 1 << 62 for row in range(5)] == [False, True, True, False, False]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bad_element_burns_its_pair_alone(backend, device):
    table = table_of(cases.PARAMETERS["default"], 16, device)
    positions = torch.tensor([3, 4, -1], device=device)
    for column, bad in ((2, math.nan), (11, math.inf)):
        q, k = cases.inputs(3, 2, 1, 16, 7, torch.float32, device)
        clean, _ = run(backend, q, k, positions, table)
        q[1, 1, column] = bad
        q[2, 0, 5] = math.nan
        out, _ = run(backend, q, k, positions, table)
        expected = torch.zeros_like(q, dtype=torch.bool)
        expected[1, 1, [column, (column + 8) % 16]] = True
        expected[2, 0, 5] = True
        assert torch.equal(~out.isfinite(), expected), "a pad's partner element stays clean as well"
        assert torch.equal(out[~expected], clean[~expected])


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_place_and_strided_views(backend, device):
    table = table_of(cases.Q36, 64, device)
    positions = torch.tensor([7, -1, 100], device=device)
    fused = cases.inputs(3, 8, 1, 64, 8, torch.float32, device)[0]
    q, k = fused[:, :5], fused[:, 5:7]
    expected = run(backend, q.contiguous(), k.contiguous(), positions, table)
    assert all(torch.equal(a, b) for a, b in zip(run(backend, q, k, positions, table), expected, strict=True))
    untouched = fused[:, 7].clone()
    backend_of(backend)(q, k, positions, table, q, k, mark_q=None, mark_k=None)
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])
    assert torch.equal(fused[:, 7], untouched)


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_bits_do_not_depend_on_the_batch(backend, device):
    table = table_of(cases.Q36, 40, device)
    q, k = cases.inputs(20, 3, 1, 40, 9, torch.float32, device)
    positions = torch.arange(20, device=device) * 777
    together = run(backend, q, k, positions, table)
    for rows in ([0], [19], [1, 2, 3], list(range(4, 17))):
        alone = run(backend, q[rows], k[rows], positions[rows], table)
        assert all(torch.equal(a, b[rows]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_sensors_change_no_bit_and_say_what_mark_rows_says(backend, device, kernel_dtypes):
    table = table_of(cases.Q36, 24, device)
    positions = torch.tensor([3, -1, 5, 1 << 20, -2], device=device)
    token_ids = torch.tensor([0, -1, 1, 2, -1], dtype=torch.int32, device=device)
    for dtype in kernel_dtypes:
        q, k = cases.inputs(5, 3, 2, 24, 10, dtype, device)
        q[1, 2, 23], q[2, 0, 1], k[0, 1, 18], k[4, 0, 0] = math.nan, math.inf, -math.inf, math.nan
        for ids in (token_ids, None):
            row_ids = [None if ids is None else ids.repeat_interleave(heads) for heads in (3, 2)]
            panel, expected = new_panel(2, 4, device), new_panel(2, 4, device)
            marks = [Mark(panel=panel, slot=s, num_signals=2, num_rows=4, row_ids=row_ids[s]) for s in (0, 1)]
            outs = run(backend, q, k, positions, table, *marks)
            for slot, out in enumerate(outs):
                mark = Mark(panel=expected, slot=slot, num_signals=2, num_rows=4, row_ids=row_ids[slot])
                mark_rows(out, mark)
            assert torch.equal(panel, expected)
            off = run(backend, q, k, positions, table, fill=5.0)
            for on, without in zip(outs, off, strict=True):
                assert torch.equal(on.view(torch.uint8), without.view(torch.uint8))


def test_no_tokens_and_refusals():
    table = table_of(cases.Q36, 32, "cpu")
    q, k = cases.inputs(2, 2, 1, 32, 11, torch.float32)
    none = torch.empty(0, dtype=torch.int64)
    assert rope(q[:0], k[:0], none, table)[0].shape == (0, 2, 32)
    positions = torch.tensor([1, 2])
    for bad_q, bad_k, bad_positions, message in (
        (q, k[:1], positions, r"k: torch.float32 \[1, 1, 32\]: must be float \[2, heads"),
        (q, k.half(), positions, "k: torch.float16"),
        (q[..., :6], k, positions, "head_dim=6: must be at least"),
        (q, k, positions[:1], "positions: torch.int64"),
        (q.transpose(1, 2), k, positions, "stride 1 in head_dim"),
    ):
        with pytest.raises(ConfigError, match=message):
            rope(bad_q, bad_k, bad_positions, table)
    with pytest.raises(ConfigError, match=r"q_out: torch\.float16"):
        rope(q, k, positions, table, q_out=q.half())
