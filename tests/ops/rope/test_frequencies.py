"""Frequencies: those of transformers, in float64; every degenerate parameter refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firetower.core.errors import ConfigError
from firetower.ops.rope import cases, rope_frequencies, rope_table

HEAD_DIM = 128


def theirs(parameters: dict[str, object], seq_len: int | None = None) -> tuple[torch.Tensor, float]:
    """Frequencies of transformers, float32."""
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=cases.MAX_POSITION_EMBEDDINGS,
        rope_parameters=dict(parameters),
    )
    if parameters["rope_type"] == "default":
        base, dim = parameters["rope_theta"], int(HEAD_DIM * parameters.get("partial_rotary_factor", 1.0))
        return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)), 1.0
    make = utils.ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    return make(config, "cpu", seq_len=seq_len)


@pytest.mark.parametrize("name", cases.PARAMETERS)
def test_equals_transformers(name):
    parameters = cases.PARAMETERS[name]
    seq_len = 100_000 if name == "dynamic" else None
    expected, factor = theirs(parameters, seq_len)
    frequencies, ours = rope_frequencies(
        parameters,
        head_dim=HEAD_DIM,
        max_position_embeddings=cases.MAX_POSITION_EMBEDDINGS,
        seq_len=seq_len,
    )
    assert frequencies.dtype is torch.float64
    # theirs is rounded at each step, and YaRN subtracts numbers near 1
    torch.testing.assert_close(frequencies.float(), expected, rtol=5e-6, atol=0)
    assert ours == pytest.approx(factor, rel=1e-12)


def test_dynamic_starts_to_stretch_beyond_the_models_length():
    def frequencies(seq_len: int | None) -> torch.Tensor:
        return rope_frequencies(
            cases.PARAMETERS["dynamic"], head_dim=64, max_position_embeddings=1000, seq_len=seq_len
        )[0]

    assert torch.equal(frequencies(None), frequencies(10))
    assert torch.equal(frequencies(None), frequencies(1000))
    assert (frequencies(4000)[1:] < frequencies(1000)[1:]).all()


BAD_NUMBERS = (0, 0.0, -1.0, math.nan, math.inf, -math.inf, "8", True, 1e300)


@pytest.mark.parametrize("name", ["linear", "dynamic", "yarn", "llama3"])
@pytest.mark.parametrize("bad", [*BAD_NUMBERS, None], ids=repr)
def test_a_bad_factor_is_refused(name, bad):
    parameters = {**cases.PARAMETERS[name], "factor": bad}
    if name == "yarn" and bad is None:
        # the ratio of lengths takes its place, as in transformers
        assert rope_frequencies(parameters, head_dim=64, max_position_embeddings=32768)[1] > 1
        parameters.pop("original_max_position_embeddings")
        with pytest.raises(ConfigError, match="original_max_position_embeddings=None"):
            rope_frequencies(parameters, head_dim=64)
        return
    with pytest.raises(ConfigError, match="factor="):
        rope_frequencies(parameters, head_dim=64, max_position_embeddings=32768)


@pytest.mark.parametrize("bad", [*BAD_NUMBERS, None, 1.0, 0.5], ids=repr)
@pytest.mark.parametrize("name", cases.PARAMETERS)
def test_a_bad_base_is_refused(name, bad):
    with pytest.raises(ConfigError, match="rope_theta="):
        rope_frequencies({**cases.PARAMETERS[name], "rope_theta": bad}, head_dim=64, max_position_embeddings=32768)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_type": "longrope"}, "rope_type='longrope': must be one of"),
        ({"betafast": 3}, "betafast: not known for rope_type=yarn"),
        ({"attention_factor": math.nan}, "attention_factor=nan"),
        ({"attention_factor": -1.0}, "attention_factor=-1.0"),
        ({"beta_fast": 0.5}, "must not be below beta_slow"),
        ({"beta_slow": math.inf}, "beta_slow=inf"),
        ({"mscale": math.nan, "mscale_all_dim": 1.0}, "mscale=nan"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings=0"),
        ({"partial_rotary_factor": 0.01}, "rotates 0 of head_dim=64"),
        ({"partial_rotary_factor": 2.0}, "rotates 128 of head_dim=64"),
        ({"partial_rotary_factor": 0.05}, "rotates 3 of head_dim=64"),
        ({"factor": 1e29, "rope_theta": 1e29}, "frequencies leave float32"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else None,
)
def test_refusals(change, message):
    with pytest.raises(ConfigError, match=message):
        rope_frequencies({**cases.PARAMETERS["yarn"], **change}, head_dim=64)


def test_llama3_bounds_and_dynamic_head_are_checked():
    with pytest.raises(ConfigError, match=r"high_freq_factor=1\.0: must be above"):
        rope_frequencies({**cases.PARAMETERS["llama3"], "high_freq_factor": 1.0}, head_dim=64)
    with pytest.raises(ConfigError, match="dynamic needs 4"):
        rope_frequencies(cases.PARAMETERS["dynamic"], head_dim=2, max_position_embeddings=10)
    with pytest.raises(ConfigError, match="max_position_embeddings=None"):
        rope_frequencies(cases.PARAMETERS["dynamic"], head_dim=64)
    with pytest.raises(ConfigError, match="num_positions=0"):
        rope_table(cases.Q36, head_dim=256, num_positions=0)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["linear", "dynamic", "yarn"]),
    base=st.floats(allow_nan=True, allow_infinity=True),
    factor=st.floats(allow_nan=True, allow_infinity=True),
    original=st.integers(min_value=-1, max_value=1 << 50),
    dim=st.integers(min_value=0, max_value=64),
)
def test_any_parameters_give_a_finite_table_or_a_refusal(kind, base, factor, original, dim):
    parameters = {"rope_type": kind, "rope_theta": base, "factor": factor}
    try:
        table = rope_table(
            parameters, head_dim=dim, num_positions=3000, max_position_embeddings=original, seq_len=abs(original) + 1
        )
    except ConfigError:
        return
    assert table.low.isfinite().all()
    assert table.high.isfinite().all()
    assert table.low.dtype is table.high.dtype is torch.float32
