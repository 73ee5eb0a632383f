"""`sample` on CUDA at the vocabulary of Q36: tokens, events and sensors first, then times beside PyTorch's own ops."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from ops.common import graph_ms, guarded, ratio_line
from torch import Tensor

from firetower.ops.sample import Event, Sampled, SampleParams, cases, kernels, random_words, torch_path
from firetower.sensors.marks import Mark, mark_rows, new_panel

Report = Callable[[str], None]
VOCAB = cases.Q36_VOCAB
FIELDS = ("tokens", "events", "logprobs", "top_ids", "top_logprobs")
REPEATS = 50


def run(report: Report, quick: bool) -> None:
    """Every check and figure; a check that fails is reported and the next one runs.

    Args:
        report: takes a line.
        quick: fewer batch sizes.
    """
    for check in (plain, filtered, rows_alone, repeats, events, sensors, distribution):
        guarded(report, check.__name__, lambda check=check: report(f"{check.__name__} ok {check() or ''}".rstrip()))
    for batch in (1,) if quick else (1, 64):
        guarded(report, f"figures {batch}", lambda batch=batch: figures(report, batch))


def _full(rows: int, value: float) -> Tensor:
    return torch.full((rows,), value, device="cuda")


def _logits(rows: int, seed: int) -> Tensor:
    return cases.make_logits(rows, VOCAB, seed, torch.bfloat16, "cuda")


def _filters(rows: int) -> SampleParams:
    return SampleParams(
        temperature=_full(rows, 0.8),
        top_k=torch.full((rows,), 50, dtype=torch.int32, device="cuda"),
        top_p=_full(rows, 0.9),
    )


def _draw(logits: Tensor, params: SampleParams, mark: Mark | None = None, num_logprobs: int | None = 2) -> Sampled:
    seeds, positions = cases.make_keys(len(logits), 0, "cuda")
    return kernels.sample(logits, params, seeds, positions, None, num_logprobs, mark)


def _by_torch(logits: Tensor, params: SampleParams) -> Sampled:
    seeds, positions = cases.make_keys(len(logits), 0, "cuda")
    return torch_path.sample(logits, params, seeds, positions, None, 2, None)


def _assert_same(a: Sampled, b: Sampled, rows: slice | list[int] = slice(None)) -> None:
    for name in FIELDS:
        assert torch.equal(getattr(a, name), getattr(b, name)[rows]), f"{name} differ"


def _agree(logits: Tensor, params: SampleParams) -> str:
    ours, theirs = _draw(logits, params), _by_torch(logits, params)
    other = int((ours.tokens != theirs.tokens).sum())
    assert other == 0, f"{other} of {len(logits)} tokens are not those of the torch path"
    assert torch.equal(ours.events, theirs.events), "events differ"
    truth = logits.double().log_softmax(-1).gather(1, ours.tokens[:, None])[:, 0]
    error = float((ours.logprobs.double() - truth).abs().max())
    assert error < 10 * cases.LOGPROB_ATOL, f"log-probabilities are off by {error:.3g}"
    return f"rows={len(logits)} logprob_error={error:.2g}"


def plain() -> str:
    """Greedy and plain rows have the tokens of the torch path; so do the random words behind them."""
    logits = _logits(32, 1)
    temperature = torch.linspace(0, 1.5, 32, device="cuda")
    greedy = _draw(logits, SampleParams()).tokens
    assert torch.equal(greedy, torch_path.first_place(logits)), "greedy is not the lowest of the largest"
    return _agree(logits, SampleParams(temperature=temperature))


def filtered() -> str:
    """Every parameter at once, and top-k with top-p alone."""
    logits = _logits(8, 2)
    _agree(logits, cases.make_params(8, VOCAB, 3, "cuda"))
    return _agree(logits, _filters(8))


def rows_alone() -> None:
    """A row alone and in company: the same bits."""
    logits, params = _logits(16, 4), cases.make_params(16, VOCAB, 5, "cuda")
    seeds, positions = cases.make_keys(16, 0, "cuda")
    together = _draw(logits, params)
    for rows in ([0], [15], [7, 2], [1, 3, 5, 7, 9]):
        at = torch.tensor(rows, device="cuda")
        alone = kernels.sample(logits[at], cases.row_of(params, at), seeds[at], positions[at], None, 2, None)
        _assert_same(alone, together, rows)
    words = random_words(seeds[:2], positions[:2], 1000)
    assert torch.equal(words.cpu(), random_words(seeds[:2].cpu(), positions[:2].cpu(), 1000)), "words differ"


@contextlib.contextmanager
def _memory_holds(value: int) -> Iterator[None]:
    empty = torch.empty
    torch.empty = lambda *args, **more: empty(*args, **more).fill_(value)
    try:
        yield
    finally:
        torch.empty = empty


def repeats() -> None:
    """Many runs on memory that held other values: the same bits."""
    logits, params = _logits(3, 6), cases.make_params(3, VOCAB, 7, "cuda")
    first = _draw(logits, params)
    for i in range(REPEATS):
        with _memory_holds((-1, 12345)[i % 2]):
            _assert_same(_draw(logits, params), first)


def events() -> None:
    """Each kind of bad row is its own event and no token."""
    logits = _logits(7, 8)
    logits[1], logits[2, VOCAB - 1], logits[3, 5] = math.nan, math.nan, math.inf
    logits[4], logits[5, 1:] = -math.inf, -math.inf
    expected = [
        Event.OK, Event.ALL_NAN, Event.NAN_BESIDE_FINITE, Event.POS_INF, Event.EMPTY_MASK, Event.OK,
        Event.BAD_PARAMETER,
    ]  # fmt: skip
    temperature = _full(7, 1.0)
    temperature[0], temperature[6] = 1.2e-38, math.nan
    for params in (SampleParams(temperature=temperature), SampleParams(temperature=temperature, top_p=_full(7, 0.9))):
        found = _draw(logits, params)
        assert found.events.tolist() == expected, f"events {found.events.tolist()}"
        assert torch.equal(found.tokens < 0, found.events != Event.OK), f"tokens {found.tokens.tolist()}"
        assert logits[0, found.tokens[0]] == logits[0].max(), "a tiny temperature is not greedy"
        assert found.tokens[5] == 0, "the only token was not taken"


def _mark(rows: int) -> Mark:
    ids = torch.arange(rows, device="cuda", dtype=torch.int32)
    return Mark(panel=new_panel(1, rows, "cuda"), slot=0, num_signals=1, num_rows=rows, row_ids=ids, neg_inf_legal=True)


def sensors() -> None:
    """Words are those of `mark_rows`; on or off, the bits are the same."""
    logits = _logits(6, 9)
    logits[1, 77], logits[3, VOCAB - 1], logits[3, 9], logits[4, 0] = math.nan, math.inf, -math.inf, math.nan
    for params in (SampleParams(), SampleParams(temperature=_full(6, 1.0)), _filters(6)):
        expected, found = _mark(6), _mark(6)
        mark_rows(logits, expected)
        on = _draw(logits, params, found)
        assert torch.equal(expected.panel, found.panel), "panel words differ from mark_rows"
        _assert_same(on, _draw(logits, params))


def distribution() -> str:
    """Chi-square of 2^20 draws over eight tokens, 7 degrees of freedom."""
    rows = 1 << 20
    logits = torch.tensor([1.0, 0.2, -0.3, 1.7, 0.9, -2.0, 0.0, 1.69], device="cuda")
    positions, seeds = torch.arange(rows, device="cuda"), torch.full((rows,), 42, device="cuda")
    params = SampleParams(temperature=_full(rows, 1.0))
    found = kernels.sample(logits.expand(rows, 8), params, seeds, positions, None, None, None)
    expected = logits.double().softmax(-1) * rows
    counts = found.tokens.bincount(minlength=8).double()
    statistic = float(((counts - expected).square() / expected).sum())
    assert statistic < 29.9, f"chi-square {statistic:.1f}: one in ten thousand is over 29.9"
    return f"chi_square={statistic:.1f}"


def figures(report: Report, batch: int) -> None:
    """Greedy, plain and filtered rows, sensors on and off."""
    logits = _logits(batch, 10)
    keys = cases.make_keys(batch, 0, "cuda")
    temperature, mark, filters = _full(batch, 0.8), _mark(batch), _filters(batch)

    def own(params: SampleParams, sensor: Mark | None) -> Sampled:
        return kernels.sample(logits, params, *keys, None, None, sensor)

    def drawn() -> Tensor:
        p = (logits.float() / temperature[:, None]).softmax(-1)
        return p.div_(torch.empty_like(p).exponential_()).argmax(-1)

    def sorted_out() -> Tensor:
        scores, ids = (logits.float() / temperature[:, None]).sort(dim=-1, descending=True)
        scores = scores.masked_fill(scores < scores[:, 49:50], -math.inf)
        p = scores.softmax(-1)
        p = p.masked_fill(p.cumsum(-1) - p >= 0.9, 0.0)
        return ids.gather(1, p.div_(torch.empty_like(p).exponential_()).argmax(-1, keepdim=True))

    kinds = {
        "greedy": (SampleParams(), lambda: logits.argmax(-1)),
        "plain": (SampleParams(temperature=temperature), drawn),
        "top_k_top_p": (filters, sorted_out),
    }
    for name, (params, peer) in kinds.items():
        inner = 5 if batch == 1 else 1
        on = graph_ms(lambda params=params: own(params, mark), inner=inner)
        off = graph_ms(lambda params=params: own(params, None), inner=inner)
        report(f"sample_{name}_{batch} sensors on={on * 1e3:.2f}us off={off * 1e3:.2f}us ratio={on / off:.3f}")
        report(ratio_line(f"sample_{name}_{batch}", on, graph_ms(peer, inner=inner), "torch", 1.0, "half"))
