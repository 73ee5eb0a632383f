"""The token and the event of a row: greedy, drawn, refused; by the backend that the device gets."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from firetower.core.errors import ConfigError
from firetower.core.words import CLEAN, NOT_RUN
from firetower.ops.sample import Event, SampleParams, cases, filtered_logits, pack_mask, reference, sample
from firetower.sensors.marks import Mark, mark_rows, new_panel

INF, NAN = math.inf, math.nan


def full(rows: int, value: float, device: str = "cpu") -> torch.Tensor:
    return torch.full((rows,), value, dtype=torch.float32, device=device)


def ints(rows: int, value: int, device: str = "cpu") -> torch.Tensor:
    return torch.full((rows,), value, dtype=torch.int32, device=device)


def draw(logits, params, seed=0, **more):
    seeds, positions = cases.make_keys(len(logits), seed, logits.device)
    return sample(logits, params, seeds=seeds, positions=positions, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [1, 7, 64, 65, 2048, 2049, 5000])
def test_greedy_takes_the_lowest_of_the_largest(device, dtype, vocab):
    logits = cases.make_logits(6, vocab, vocab, dtype).to(device)
    places = sorted({0, vocab // 2, vocab - 1})
    logits[0, places] = 60.0
    found = sample(logits)
    assert found.tokens[0] == places[0]
    truth = [row.index(max(row)) for row in logits.float().tolist()]
    assert found.tokens.tolist() == truth
    assert found.events.tolist() == [Event.OK] * 6
    zero = draw(logits, SampleParams(temperature=full(6, 0.0, device)))
    tiny = draw(logits, SampleParams(temperature=full(6, 1e-38, device)))
    assert zero.tokens.tolist() == tiny.tokens.tolist() == truth


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_those_of_the_slow_reference(device, seed):
    rows, vocab = 8, 61
    logits = cases.make_logits(rows, vocab, seed, device=device)
    params = cases.make_params(rows, vocab, seed, device)
    seeds, positions = cases.make_keys(rows, seed, device)
    found = sample(logits, params, seeds=seeds, positions=positions)
    scores = filtered_logits(logits, params).cpu()
    for row in range(rows):
        keep = set((scores[row] > -INF).nonzero()[:, 0].tolist())
        temperature = params.temperature[row].item()
        whole = scores[row].tolist()
        token = reference.draw(whole, temperature, seeds[row].item(), positions[row].item(), keep)
        assert found.tokens[row] == token


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.4},
        {"temperature": 3.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.5, "min_p": 0.2},
        {"temperature": 1.0, "bias": True, "mask": True},
    ],
    ids=["plain", "cold", "top-k", "top-p", "min-p", "bias and mask"],
)
def test_draws_follow_the_distribution(device, params):
    draws, logits = 100_000, torch.tensor([1.0, 0.2, -0.3, 1.7, 0.9, -2.0, 0.0, 1.69])
    temperature = params.get("temperature", 1.0)
    bias = torch.tensor([0.5, -INF, 1.0, 0.0, 0.0, 3.0, 0.0, 0.0]) if params.get("bias") else None
    allowed = torch.tensor([1, 1, 1, 0, 1, 1, 1, 1]).bool() if params.get("mask") else None

    def of(rows: int) -> SampleParams:
        return SampleParams(
            temperature=full(rows, temperature, device),
            top_k=ints(rows, params["top_k"], device) if "top_k" in params else None,
            top_p=full(rows, params["top_p"], device) if "top_p" in params else None,
            min_p=full(rows, params["min_p"], device) if "min_p" in params else None,
            logit_bias=None if bias is None else bias.to(device).expand(rows, 8).contiguous(),
            allowed_mask=None if allowed is None else pack_mask(allowed.expand(rows, 8)).to(device),
        )

    found = sample(
        logits.to(device).expand(draws, 8),
        of(draws),
        seeds=torch.full((draws,), 42, device=device),
        positions=torch.arange(draws, device=device),
    )
    truth = (filtered_logits(logits[None].to(device), of(1))[0].double().cpu() / temperature).softmax(-1)
    counts = found.tokens.cpu().bincount(minlength=8).double()
    assert counts[truth == 0].sum() == 0
    possible = truth > 0
    assert stats.chisquare(counts[possible], draws * truth[possible]).pvalue > 1e-4


def test_a_token_depends_on_its_own_row_alone(device):
    rows, vocab = 12, 300
    logits = cases.make_logits(rows, vocab, 3, device=device)
    params = cases.make_params(rows, vocab, 4, device)
    seeds, positions = cases.make_keys(rows, 5, device)

    def run(pick: list[int]):
        at = torch.tensor(pick, device=device)
        return sample(logits[at], cases.row_of(params, at), seeds=seeds[at], positions=positions[at], num_logprobs=3)

    together = run(list(range(rows)))
    for pick in ([0], [7], [7, 7, 1], [11, 3, 5, 2, 9], list(reversed(range(rows)))):
        found = run(pick)
        for name in ("tokens", "events", "logprobs", "top_ids", "top_logprobs"):
            assert torch.equal(getattr(found, name), getattr(together, name)[torch.tensor(pick, device=device)])


def test_a_parameter_of_a_neighbour_changes_nothing(device):
    rows, vocab = 6, 200
    logits = cases.make_logits(rows, vocab, 3, device=device)
    temperature = full(rows, 1.3, device)
    plain = draw(logits, SampleParams(temperature=temperature))
    top_k, top_p, min_p = ints(rows, 0, device), full(rows, 1.0, device), full(rows, 0.0, device)
    top_k[0], top_p[0], min_p[0] = 2, 0.3, 0.5
    penalty, bias = full(rows, 1.0, device), torch.zeros(rows, vocab, device=device)
    penalty[0], bias[0, 5] = 2.0, 9.0
    mixed = SampleParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=penalty,
        frequency_penalty=full(rows, 0.0, device),
        presence_penalty=full(rows, 0.0, device),
        token_counts=torch.randint(0, 3, (rows, vocab), dtype=torch.int32).to(device),
        logit_bias=bias,
        allowed_mask=ints(rows, -1, device)[:, None].expand(rows, -(-vocab // 32)).contiguous(),
    )
    assert torch.equal(draw(logits, mixed).tokens[1:], plain.tokens[1:])


def test_the_same_key_gives_the_same_token_fifty_times(device):
    logits = cases.make_logits(4, 100, 1, device=device)
    params = cases.make_params(4, 100, 2, device)
    first = draw(logits, params).tokens
    assert all(torch.equal(draw(logits, params).tokens, first) for _ in range(50))


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-38, 1.2e-38, 1e-20, 1.0, 3e38])
def test_huge_logits_and_tiny_temperatures_stay_finite(device, temperature):
    logits = torch.tensor([[3e38, -3e38, 2.9e38], [-3e38, -3.1e38, -INF], [0.0, -0.0, 1e-44], [-INF, -INF, -3e38]])
    found = draw(logits.to(device), SampleParams(temperature=full(4, temperature, device)), num_logprobs=3)
    assert found.events.tolist() == [Event.OK] * 4
    assert (found.tokens >= 0).all()
    assert found.tokens[3] == 2
    if temperature <= 1e-20:
        assert found.tokens.tolist()[:2] == [0, 0]
    assert not found.logprobs.isnan().any()
    assert not found.top_logprobs.isnan().any()
    assert (found.logprobs <= 0).all()


def events(logits, params=None, **more):
    found = draw(logits, params or SampleParams(temperature=full(len(logits), 1.0, logits.device)), **more)
    assert torch.equal(found.tokens < 0, found.events != Event.OK)
    return [Event(e) for e in found.events.tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [5, 3000])
def test_each_kind_of_bad_row_is_its_own_event(device, dtype, vocab):
    logits = cases.make_logits(9, vocab, 0, dtype).to(device)
    logits[1] = NAN
    logits[2] = -INF
    logits[2, vocab - 1] = NAN
    logits[3, vocab // 2] = NAN
    logits[4, vocab - 1] = INF
    logits[5] = INF
    logits[6] = -INF
    logits[7], logits[7, 0] = NAN, INF
    logits[8, 1:] = -INF
    expected = [
        Event.OK, Event.ALL_NAN, Event.ALL_NAN, Event.NAN_BESIDE_FINITE, Event.POS_INF, Event.POS_INF, Event.EMPTY_MASK,
        Event.ALL_NAN, Event.OK,
    ]  # fmt: skip
    assert events(logits) == expected
    greedy = sample(logits)
    assert greedy.events.tolist() == expected
    assert greedy.tokens[8] == 0
    filtered = SampleParams(temperature=full(9, 1.0, device), top_k=ints(9, 2, device), top_p=full(9, 0.5, device))
    assert events(logits, filtered) == expected


def test_a_bad_logit_behind_the_mask_is_an_event_all_the_same(device):
    logits = cases.make_logits(2, 40, 0, device=device)
    logits[0, 3], logits[1, 3] = NAN, INF
    allowed = torch.ones(2, 40, dtype=torch.bool)
    allowed[:, 3] = False
    params = SampleParams(allowed_mask=pack_mask(allowed).to(device))
    assert events(logits, params) == [Event.NAN_BESIDE_FINITE, Event.POS_INF]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", NAN), ("temperature", -0.5), ("temperature", INF), ("top_p", NAN), ("top_p", 1.5),
        ("top_p", -0.1), ("min_p", NAN), ("min_p", 2.0), ("repetition_penalty", 0.0), ("repetition_penalty", NAN),
        ("repetition_penalty", INF), ("frequency_penalty", NAN), ("presence_penalty", -INF),
    ],
)  # fmt: skip
def test_a_parameter_out_of_range_is_an_event_of_its_row(device, name, value):
    logits = cases.make_logits(3, 33, 0, device=device)
    good = {"temperature": 1.0, "repetition_penalty": 1.0}
    x = full(3, good.get(name, 0.5), device)
    x[1] = value
    params = SampleParams(
        **{
            "temperature": full(3, 1.0, device),
            "token_counts": torch.ones(3, 33, dtype=torch.int32, device=device),
            name: x,
        }
    )
    assert events(logits, params) == [Event.OK, Event.BAD_PARAMETER, Event.OK]


def test_bias_extremes(device):
    logits = cases.make_logits(5, 40, 0, device=device)
    bias = torch.zeros(5, 40, device=device)
    bias[0] = -INF
    bias[1, 7] = NAN
    bias[2, [9, 30]] = INF
    bias[3, 9], logits[3, 9] = INF, -INF
    bias[4] = -INF
    bias[4, 11] = -1e30
    params = SampleParams(temperature=full(5, 1.0, device), logit_bias=bias)
    assert events(logits, params) == [Event.EMPTY_MASK, Event.BAD_PARAMETER, Event.OK, Event.OK, Event.OK]
    seen = {draw(logits, params, seed).tokens[2].item() for seed in range(20)}
    assert seen == {9, 30}
    found = draw(logits, params)
    assert found.tokens[3] != 9
    assert found.tokens[4] == 11


def test_pads_have_no_token_and_no_event(device):
    logits = cases.make_logits(4, 50, 0, device=device)
    logits[1], logits[2] = NAN, NAN
    ids = torch.tensor([0, -1, 1, -7], device=device)
    found = draw(logits, SampleParams(temperature=full(4, 1.0, device)), row_ids=ids, num_logprobs=2)
    assert found.events.tolist() == [Event.OK, Event.OK, Event.ALL_NAN, Event.OK]
    assert (found.tokens < 0).tolist() == [False, True, True, True]
    assert (found.top_ids < 0).all(-1).tolist() == [False, True, True, True]


@pytest.mark.parametrize("vocab", [40, 2500])
def test_logprobs_are_those_of_the_logits_as_given(device, vocab):
    logits = cases.make_logits(4, vocab, 0, device=device)
    logits[1, : vocab - 2] = -INF
    logits[2, 0] = NAN
    logits[3, [3, 30]] = 50.0
    params = SampleParams(temperature=full(4, 0.7, device), top_k=ints(4, 2, device))
    found = draw(logits, params, num_logprobs=4)
    truth = logits.double().log_softmax(-1)
    for row in (0, 1, 3):
        expected = truth[row, found.tokens[row]]
        assert abs(found.logprobs[row].double() - expected) < cases.LOGPROB_ATOL
        ids = found.top_ids[row]
        chosen = truth[row, ids[ids >= 0]]
        assert torch.allclose(found.top_logprobs[row][ids >= 0].double(), chosen, atol=cases.LOGPROB_ATOL)
        assert torch.equal(chosen, truth[row].sort(descending=True).values[: len(chosen)])
    assert found.top_ids[1, 2:].tolist() == [-1, -1]
    assert found.top_ids[3, :2].tolist() == [3, 30]
    assert found.logprobs[2] == -INF
    assert found.top_ids[2].tolist() == [-1] * 4
    assert (found.top_logprobs[2] == -INF).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_marks_are_those_of_the_logits_and_change_nothing(device, dtype):
    rows, vocab = 6, 2100
    logits = cases.make_logits(rows, vocab, 0, dtype).to(device)
    logits[0, 5] = -INF
    logits[1, 2099], logits[1, 2060] = NAN, INF
    logits[3, 0], logits[4, 17] = NAN, NAN
    ids = torch.tensor([2, 0, -1, 1, -1, 3], dtype=torch.int32, device=device)
    params = SampleParams(temperature=full(rows, 1.0, device))

    def mark() -> Mark:
        return Mark(panel=new_panel(4, 4, device), slot=2, num_signals=4, num_rows=4, row_ids=ids, neg_inf_legal=True)

    expected, found = mark(), mark()
    mark_rows(logits, expected)
    on = draw(logits, params, num_logprobs=2, mark=found, row_ids=ids)
    off = draw(logits, params, num_logprobs=2, row_ids=ids)
    assert torch.equal(found.panel, expected.panel)
    assert found.panel[2] >> 32 == 1 * vocab + 2060
    assert found.panel[2 + 4] >> 32 == 4 * vocab + 17
    for name in ("tokens", "events", "logprobs", "top_ids", "top_logprobs"):
        assert torch.equal(getattr(on, name), getattr(off, name))


def test_minus_inf_is_legal_whatever_the_mark_says(device):
    logits = torch.tensor([[0.0, -INF]], device=device)
    mark = Mark(panel=new_panel(1, 1, device), slot=0, num_signals=1, num_rows=1)
    sample(logits, mark=mark)
    assert mark.panel[0] == CLEAN
    assert mark.panel[2] == NOT_RUN


def test_no_rows(device):
    found = draw(torch.empty(0, 8, device=device), SampleParams(temperature=full(0, 1.0, device)), num_logprobs=2)
    assert found.tokens.shape == found.logprobs.shape == (0,)
    assert found.top_ids.shape == (0, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(8)}, "must be fp32, fp16 or bf16"),
        ({"logits": torch.zeros(2, 8, dtype=torch.float64)}, "must be fp32, fp16 or bf16"),
        ({"logits": torch.zeros(8, 2).T}, "rows contiguous"),
        ({"logits": torch.zeros(2, 0)}, "V=0"),
        ({"temperature": torch.zeros(3)}, r"temperature: torch.float32 \[3\]"),
        ({"top_k": torch.zeros(2)}, "must be torch.int32"),
        ({"allowed_mask": torch.zeros(2, 2, dtype=torch.int32)}, "allowed_mask"),
        ({"frequency_penalty": torch.zeros(2)}, "token_counts=None"),
        ({"repetition_penalty": torch.ones(2)}, "repetition_penalty"),
        ({"seeds": None}, "seeds=None"),
        ({"positions": torch.zeros(2)}, "positions"),
        ({"num_logprobs": 9}, "num_logprobs=9"),
        ({"row_ids": torch.zeros(3)}, "row_ids"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    given = {"logits": torch.zeros(2, 8), "seeds": torch.arange(2), "positions": torch.arange(2), **change}
    fields = {"temperature": full(2, 1.0)}
    for name in SampleParams.__slots__:
        if name in given:
            fields[name] = given.pop(name)
    with pytest.raises(ConfigError, match=message):
        sample(given.pop("logits"), SampleParams(**fields), **given)
