"""The Triton kernels against the path in PyTorch: on the CPU by the interpreter, with small tiles, many to a row."""

from __future__ import annotations

import math

import pytest
import torch

from firetower.ops.sample import Event, SampleParams, cases, exponentials, random_words, torch_path
from firetower.sensors.marks import Mark, new_panel

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402 - after the skip

from firetower.ops.sample import kernels, scores, search  # noqa: E402 - needs Triton

# the interpreter is NumPy, which warns where a NaN or an Inf is computed with; both are planted here
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
INF, NAN = math.inf, math.nan
FIELDS = ("tokens", "events", "logprobs", "top_ids", "top_logprobs")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(torch_path, "TILE", 32)
    monkeypatch.setattr(search, "GROUP", 8)
    monkeypatch.setattr(search, "_LIST_TILE", 16)


def full(rows: int, value: float, device: str) -> torch.Tensor:
    return torch.full((rows,), value, dtype=torch.float32, device=device)


def both(logits, params, seed=0, **more):
    """(kernels, PyTorch), same arguments."""
    given = {"row_ids": None, "num_logprobs": 2, "mark": None, **more}
    seeds, positions = cases.make_keys(len(logits), seed, logits.device)
    ours = kernels.sample(logits, params, seeds, positions, **given)
    return ours, torch_path.sample(logits, params, seeds, positions, **given)


def assert_same(ours, theirs):
    for name in ("tokens", "events", "top_ids"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    for name in ("logprobs", "top_logprobs"):
        assert torch.allclose(getattr(ours, name), getattr(theirs, name), atol=cases.LOGPROB_ATOL), name


@triton.jit
def words_kernel(p_words, p_leads, p_seeds, p_positions, num_tiles, TILE: tl.constexpr):  # noqa: N803 - as in kernels
    row = tl.program_id(0)
    for i in range(num_tiles):
        at = (row * num_tiles + i) * TILE + tl.arange(0, TILE)
        seed, position = tl.load(p_seeds + row), tl.load(p_positions + row)
        tl.store(p_words + at, scores.random_words(seed, position, i, TILE).to(tl.int64))
        tl.store(p_leads + at, scores.leads(seed, position, i, TILE))


@pytest.mark.parametrize("tile", [16, 64])
def test_the_kernel_draws_the_words_of_the_torch_path(device, tile):
    rows, num_tiles = 3, 4
    seeds, positions = cases.make_keys(rows, 7, device)
    words = torch.empty(rows, num_tiles * tile, dtype=torch.int64, device=device)
    leads = torch.empty(rows, num_tiles * tile, device=device)
    words_kernel[(rows,)](words, leads, seeds, positions, num_tiles, TILE=tile)
    assert torch.equal(words, random_words(seeds, positions, num_tiles * tile))
    expected = -exponentials(seeds, positions, num_tiles * tile).log()
    assert (leads - expected).abs().max() < 4 * cases.LEAD_ATOL


@pytest.mark.parametrize("vocab", [1, 2, 17, 33, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_greedy_and_plain_rows(device, vocab, dtype):
    logits = cases.make_logits(4, vocab, vocab, dtype).to(device)
    logits[0, [vocab // 2, vocab - 1]] = 50.0
    logits[1, : vocab // 2] = -INF
    temperature = torch.tensor([1.0, 0.7, 0.0, 3.0], device=device)
    for params in (SampleParams(), SampleParams(temperature=temperature)):
        assert_same(*both(logits, params, num_logprobs=min(2, vocab)))


@pytest.mark.parametrize("seed", range(2))
def test_all_parameters_at_once(device, seed):
    rows, vocab = 2, 90
    logits = cases.make_logits(rows, vocab, seed, device=device)
    logits[torch.rand(rows, vocab) < 0.1] = -INF
    assert_same(*both(logits, cases.make_params(rows, vocab, seed, device), seed))


@pytest.mark.parametrize("field", ["top_k", "top_p", "min_p"])
def test_each_filter_alone_with_rows_where_it_is_off(device, field):
    rows, vocab = 4, 70
    logits = cases.make_logits(rows, vocab, 5, device=device).mul(2).round().div(2)  # many equal scores
    values = {"top_k": [0, 1, 7, 500], "top_p": [1.0, 0.0, 0.5, 0.97], "min_p": [0.0, 1.0, 0.1, 0.4]}[field]
    x = torch.tensor(values, dtype=torch.int32 if field == "top_k" else torch.float32, device=device)
    assert_same(*both(logits, SampleParams(temperature=full(rows, 1.5, device), **{field: x})))


def test_both_zeros_are_equal_to_a_filter(device):
    rows = 8
    logits = torch.tensor([1.0, -0.0, 0.0, -1.0], device=device).expand(rows, 4)
    params = SampleParams(
        temperature=full(rows, 50.0, device), top_k=torch.full((rows,), 2, dtype=torch.int32, device=device)
    )
    ours, theirs = both(logits, params, seed=1)
    assert_same(ours, theirs)
    assert set(ours.tokens.tolist()) == {0, 1, 2}


def place_of(x: torch.Tensor) -> torch.Tensor:
    bits = x.view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def scanned(logits, params):
    """What a scan would leave, by PyTorch: maxima of tiles, of groups, shares of the mass."""
    tiles = torch_path.in_tiles(logits, -INF)
    tops = tiles.amax(-1)
    groups = tiles.unflatten(-1, (-1, search.GROUP)).amax(-1).flatten(1).contiguous()
    base = torch.where(tops > -INF, tops, 0.0)
    shares = ((tiles - base[..., None]) / params.temperature[:, None, None]).exp().sum(-1)
    return torch.stack([tops] * 4, 1).contiguous(), groups, shares


def thresholds(logits, params):
    return search.thresholds(logits, params, *scanned(logits, params), torch_path.TILE)


def rows_of_every_kind(vocab, device):
    """Normal, tied, nearly all banned, huge, flat and steep rows."""
    logits = cases.make_logits(6, vocab, 0, device=device)
    logits[0] = logits[0].round()
    logits[1, 5:] = -INF
    logits[2] *= 1e37
    logits[3] = 2.5
    logits[4] *= 1e-6
    logits[5] *= 8
    return torch.where(logits == 0, 0.0, logits)


@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [
        ([5, 40, 1, 74, 3, 2], None),
        ([60, 3, 73, 1, 30, 9], None),
        (None, [0.6, 0.9, 0.3, 0.2, 0.99, 0.9]),
        (None, [0.0, 1e-6, 0.999, 0.5, 0.05, 0.9999]),
        ([9, 0, 75, 20, 50, 3], [0.6, 0.9, 0.3, 1.0, 0.97, 0.999]),
    ],
    ids=["few", "many", "share", "shares at the ends", "both"],
)
def test_thresholds_are_exact(device, top_k, top_p):
    vocab = 75
    logits = rows_of_every_kind(vocab, device)
    params = SampleParams(
        temperature=full(6, 0.8, device),
        top_k=None if top_k is None else torch.tensor(top_k, dtype=torch.int32, device=device),
        top_p=None if top_p is None else torch.tensor(top_p, device=device),
    )
    found = thresholds(logits, params)
    ordered = logits.sort(descending=True).values
    for row in range(6):
        k = 0 if top_k is None else top_k[row]
        if 0 < k < vocab and ordered[row, k - 1] > -INF:
            assert found[row, 0] == place_of(ordered[row, k - 1 : k])[0]
    keep = place_of(logits) >= found.amax(-1, keepdim=True)
    assert torch.equal(keep & (logits > -INF), torch_path.kept(logits, params, logits))


@pytest.mark.parametrize("share", [0.3, 0.9, 0.999])
def test_mass_is_exact_at_any_temperature(device, share):
    logits = cases.make_logits(4, 75, 1, torch.bfloat16, device).float()
    temperature = torch.tensor([0.05, 0.7, 3.0, 3e38], device=device)
    params = SampleParams(temperature=temperature, top_p=full(4, share, device))
    keep = place_of(logits) >= thresholds(logits, params)[:, 1:]
    assert torch.equal(keep, torch_path.kept(logits, params, logits))


def test_bounds_leave_few_scores(device):
    """Else the search would be right and slow."""
    rows, vocab = 3, 90
    logits = cases.make_logits(rows, vocab, 2, device=device)
    logits[2] *= 4
    top_k, top_p = torch.tensor([4, 8, 0], dtype=torch.int32, device=device), full(rows, 0.8, device)
    params = SampleParams(temperature=full(rows, 0.7, device), top_k=top_k, top_p=top_p)
    bound, num = search.bounds(params, *scanned(logits, params), vocab)
    above = (place_of(logits) >= bound[:, None]).sum(-1)
    kept = torch_path.kept(logits, SampleParams(temperature=params.temperature, top_p=top_p), logits).sum(-1)
    assert num.tolist() == [0] * rows
    assert 4 <= above[0] <= 12
    assert 8 <= above[1] <= 24
    assert kept[2] <= above[2] <= 12


def test_events_pads_and_huge_values(device):
    vocab = 70
    logits = cases.make_logits(11, vocab, 0, device=device)
    logits[1] = NAN
    logits[2, 69] = NAN
    logits[3, 40] = INF
    logits[4] = -INF
    logits[5], logits[5, 3] = NAN, INF
    logits[6] = NAN
    logits[7, 0], logits[7, 1:] = 3e38, -3e38
    logits[8, :69], logits[8, 69] = -INF, -3e38
    ids = torch.tensor([0, 1, 2, 3, 4, 5, -1, 6, 7, 8, 9], device=device)
    temperature = full(11, 1.0, device)
    temperature[7], temperature[8], temperature[9], temperature[10] = 1.2e-38, 1.2e-38, NAN, 1e-40
    expected = [
        Event.OK, Event.ALL_NAN, Event.NAN_BESIDE_FINITE, Event.POS_INF, Event.EMPTY_MASK, Event.ALL_NAN, Event.OK,
        Event.OK, Event.OK, Event.BAD_PARAMETER, Event.OK,
    ]  # fmt: skip
    ours, theirs = both(logits, SampleParams(temperature=temperature), row_ids=ids)
    assert ours.events.tolist() == expected
    assert_same(ours, theirs)
    assert ours.tokens[[1, 2, 3, 4, 5, 6, 9]].tolist() == [-1] * 7
    assert ours.tokens[[7, 8]].tolist() == [0, 69]
    few = torch.tensor([2, 4, 7, 8], device=device)
    filtered = SampleParams(temperature=temperature[few], top_p=full(4, 0.9, device))
    ours, theirs = both(logits[few], filtered)
    assert ours.events.tolist() == [expected[i] for i in few]
    assert_same(ours, theirs)


@pytest.mark.parametrize(
    ("dtype", "filtered"), [(torch.float32, False), (torch.float16, False), (torch.float16, True)], ids=str
)
def test_marks_equal_those_of_the_torch_path_and_change_nothing(device, dtype, filtered):
    rows, vocab = 5, 70
    logits = cases.make_logits(rows, vocab, 0, dtype).to(device)
    logits[0, 3] = -INF
    logits[1, 69], logits[1, 40] = NAN, INF
    logits[2, 33] = NAN
    logits[4, 0] = NAN
    ids = torch.tensor([3, 0, -1, 1, 2], dtype=torch.int32, device=device)
    params = SampleParams(
        temperature=full(rows, 1.0, device),
        min_p=full(rows, 0.1, device) if filtered else None,
    )
    marks = [
        Mark(panel=new_panel(3, 4, device), slot=1, num_signals=3, num_rows=4, row_ids=ids, neg_inf_legal=True)
        for _ in range(2)
    ]
    seeds, positions = cases.make_keys(rows, 0, device)
    on = kernels.sample(logits, params, seeds, positions, ids, 2, marks[0])
    torch_path.sample(logits, params, seeds, positions, ids, 2, marks[1])
    off = kernels.sample(logits, params, seeds, positions, ids, 2, None)
    assert torch.equal(marks[0].panel, marks[1].panel)
    for name in FIELDS:
        assert torch.equal(getattr(on, name), getattr(off, name)), name


def test_what_memory_held_before_does_not_matter(device, monkeypatch):
    rows, vocab = 1, 70
    logits = cases.make_logits(rows, vocab, 1, device=device)
    params = cases.make_params(rows, vocab, 1, device)
    empty, answers = torch.empty, []
    for fill in (0, 77):

        def filled(*args, fill=fill, **more):
            return empty(*args, **more).fill_(fill)

        monkeypatch.setattr(torch, "empty", filled)
        answers.append(both(logits, params)[0])
    for name in FIELDS:
        assert all(torch.equal(getattr(a, name), getattr(answers[0], name)) for a in answers)


def test_rows_alone_have_the_bits_they_have_in_company(device):
    rows, vocab = 2, 70
    logits = cases.make_logits(rows, vocab, 3, device=device)
    params = cases.make_params(rows, vocab, 3, device)
    seeds, positions = cases.make_keys(rows, 3, device)
    together = kernels.sample(logits, params, seeds, positions, None, 2, None)
    for row in range(rows):
        at = torch.tensor([row], device=device)
        alone = kernels.sample(logits[at], cases.row_of(params, at), seeds[at], positions[at], None, 2, None)
        for name in FIELDS:
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[row])


@pytest.mark.gpu
@pytest.mark.parametrize("filtered", [False, True], ids=["plain", "filtered"])
def test_runs_inside_a_graph(filtered):
    logits = cases.make_logits(4, 1000, 0, device="cuda")
    params = cases.make_params(4, 1000, 0, "cuda") if filtered else SampleParams(temperature=full(4, 1.0, "cuda"))
    seeds, positions = cases.make_keys(4, 0, "cuda")
    expected = kernels.sample(logits, params, seeds, positions, None, 2, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernels.sample(logits, params, seeds, positions, None, 2, None)
    graph.replay()
    assert torch.equal(found.tokens, expected.tokens)
