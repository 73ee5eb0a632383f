"""What stays in the distribution: the filters against transformers and against a slow reference in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firetower.ops.sample import SampleParams, cases, filtered_logits, pack_mask, reference, unpack_mask

INF = math.inf
EXTREMES = [-3e38, -50.0, -1.0, -0.0, 0.0, 0.5, 1.0, 1.0, 40.0, 3e38, -INF]


def f32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def full(rows: int, value: float) -> torch.Tensor:
    return torch.full((rows,), value, dtype=torch.float32)


def left(logits: torch.Tensor, params: SampleParams) -> torch.Tensor:
    return filtered_logits(logits, params) > -INF


def warpers(**values: float):
    """transformers' processors in the order of its ``generate``."""
    from transformers.generation import logits_process as theirs

    made = []
    if (temperature := values.get("temperature")) is not None:
        made.append(theirs.TemperatureLogitsWarper(temperature))
    if values.get("top_k"):
        made.append(theirs.TopKLogitsWarper(int(values["top_k"])))
    if values.get("top_p", 1.0) < 1:
        made.append(theirs.TopPLogitsWarper(values["top_p"]))
    if values.get("min_p"):
        made.append(theirs.MinPLogitsWarper(values["min_p"]))
    return made


def near_an_edge(logits: torch.Tensor, temperature: float, top_p: float, min_p: float) -> bool:
    """Whether rounding alone may decide about a token."""
    p = (logits.double() / temperature).softmax(-1).sort(descending=True).values
    before = p.cumsum(-1) - p
    edge = (before - top_p * p.sum(-1)).abs().min() < cases.MASS_SLACK
    return bool(edge or (min_p and (p / p[:, :1] / min_p - 1).abs().min() < cases.MASS_SLACK))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(5, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.1, 0.0), (0, 1.0, 0.05), (40, 0.8, 0.02), (1, 0.5, 0.5), (500, 0.999, 0.0)],
)
def test_filters_keep_what_transformers_keeps(temperature, top_k, top_p, min_p):
    rows, vocab = 4, 211
    logits = cases.make_logits(rows, vocab, seed=top_k)
    expected = logits.clone()
    for warper in warpers(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p):
        expected = warper(None, expected)
    params = SampleParams(
        temperature=full(rows, temperature),
        top_k=torch.full((rows,), top_k, dtype=torch.int32),
        top_p=full(rows, top_p),
        min_p=full(rows, min_p),
    )
    found = filtered_logits(logits, params)
    for row in range(rows):
        if top_k or not near_an_edge(logits[row : row + 1], temperature, top_p, min_p):
            assert torch.equal(found[row] > -INF, expected[row] > -INF)
    stays = found > -INF
    assert torch.equal(found[stays], logits[stays])


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3])
def test_repetition_penalty_is_that_of_transformers(penalty):
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    rows, vocab = 3, 100
    logits = cases.make_logits(rows, vocab, seed=2)
    logits[:, :4] = f32(0.0, -0.0, 1e-40, -1e-40)
    ids = torch.randint(0, vocab, (rows, 30))
    ids[:, :4] = torch.arange(4)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    counts = torch.zeros(rows, vocab, dtype=torch.int32).scatter_add_(1, ids, torch.ones_like(ids, dtype=torch.int32))
    by_counts = filtered_logits(logits, SampleParams(repetition_penalty=full(rows, penalty), token_counts=counts))
    by_prompt = filtered_logits(
        logits, SampleParams(repetition_penalty=full(rows, penalty), prompt_mask=pack_mask(counts > 0))
    )
    assert torch.equal(by_counts, expected)
    assert torch.equal(by_prompt, expected)


@pytest.mark.parametrize("seed", range(6))
def test_all_parameters_at_once_against_the_slow_reference(seed):
    rows, vocab = 5, 67
    logits = cases.make_logits(rows, vocab, seed)
    logits[torch.rand(rows, vocab) < 0.1] = -INF
    params = cases.make_params(rows, vocab, seed)
    found = filtered_logits(logits, params)
    prompts, allowed = unpack_mask(params.prompt_mask, vocab), unpack_mask(params.allowed_mask, vocab)
    for row in range(rows):
        scores = reference.processed(
            logits[row].tolist(),
            repetition=params.repetition_penalty[row].item(),
            frequency=params.frequency_penalty[row].item(),
            presence=params.presence_penalty[row].item(),
            counts=params.token_counts[row].tolist(),
            prompt=prompts[row].nonzero()[:, 0].tolist(),
            bias=params.logit_bias[row].tolist(),
            allowed=allowed[row].tolist(),
        )
        keep = reference.kept(
            scores,
            params.temperature[row].item() or 1.0,
            top_k=params.top_k[row].item(),
            top_p=params.top_p[row].item(),
            min_p=params.min_p[row].item(),
        )
        assert set((found[row] > -INF).nonzero()[:, 0].tolist()) == keep
        stays = sorted(keep)
        assert found[row, stays].tolist() == pytest.approx([scores[v] for v in stays], rel=1e-6, abs=1e-6)


def test_equal_scores_stay_or_go_together():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    temperature = full(1, 1.0)
    two = left(logits, SampleParams(temperature=temperature, top_k=torch.tensor([2], dtype=torch.int32)))
    assert two.tolist() == [[False, True, True, True, True, False]]
    # 3.0 has 0.43 of the mass: the next that a nucleus of 0.5 needs has two equals
    nucleus = left(logits, SampleParams(temperature=temperature, top_p=full(1, 0.5)))
    assert nucleus.tolist() == [[False, True, True, True, True, False]]


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.sampled_from(EXTREMES), min_size=1, max_size=9),
    temperature=st.sampled_from([1.2e-38, 0.5, 1.0, 3e38]),
    top_k=st.integers(-1, 10),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.4, 1.0]),
)
def test_extreme_rows_keep_their_maximum_and_nothing_banned(values, temperature, top_k, top_p, min_p):
    logits = torch.tensor([values], dtype=torch.float32)
    params = SampleParams(
        temperature=full(1, temperature),
        top_k=torch.tensor([top_k], dtype=torch.int32),
        top_p=full(1, top_p),
        min_p=full(1, min_p),
    )
    keep = left(logits, params)[0]
    assert not keep[logits[0] == -INF].any()
    if max(values) > -INF:
        assert keep[logits[0] == logits.max()].all()
    if 0 < top_k < len(values):
        distinct_below = logits[0] < logits[0].sort(descending=True).values[top_k - 1]
        assert not keep[distinct_below].any()


def test_top_p_of_one_keeps_what_has_no_mass_of_its_own():
    # 2**-42 of the most likely is where masses end: exp(-29)
    logits = torch.tensor([[0.0, -28.0, -40.0]] * 2)
    params = SampleParams(temperature=full(2, 1.0), top_p=f32(1.0, 0.9999999))
    assert left(logits, params).tolist() == [[True, True, True], [True, False, False]]


def test_filters_off_keep_everything_finite():
    logits = cases.make_logits(2, 50, 0)
    off = SampleParams(
        temperature=full(2, 1.0), top_k=torch.zeros(2, dtype=torch.int32), top_p=full(2, 1.0), min_p=full(2, 0.0)
    )
    assert torch.equal(filtered_logits(logits, off), logits)


def test_what_overflows_stays_at_the_largest_float():
    logits = torch.tensor([[3e38, -3e38, 0.0, -0.0, -INF]])
    counts = torch.ones(1, 5, dtype=torch.int32)
    harsh = SampleParams(repetition_penalty=full(1, 0.1), token_counts=counts)
    assert filtered_logits(logits, harsh)[0].tolist() == pytest.approx([cases.LARGEST, -3e37, 0.0, 0.0, -INF], rel=1e-6)
    mild = SampleParams(repetition_penalty=full(1, 10.0), token_counts=counts)
    assert filtered_logits(logits, mild)[0, 1] == -cases.LARGEST
    pushed = SampleParams(frequency_penalty=full(1, 3e38), token_counts=counts * 1000)
    assert filtered_logits(logits, pushed)[0, :3].tolist() == [-cases.LARGEST] * 3
    biased = SampleParams(logit_bias=torch.tensor([[3e38, 0.0, INF, -INF, INF]]))
    assert filtered_logits(logits, biased).tolist() == [[cases.LARGEST, logits[0, 1].item(), cases.LARGEST, -INF, -INF]]


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
def test_masks_survive_packing(vocab):
    mask = torch.rand(3, vocab) < 0.5
    packed = pack_mask(mask)
    assert packed.shape == (3, -(-vocab // 32))
    assert packed.dtype is torch.int32
    assert torch.equal(unpack_mask(packed, vocab), mask)
