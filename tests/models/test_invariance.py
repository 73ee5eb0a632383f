"""In a window a row's bits depend on that row alone; sensors and recorders change none."""

from __future__ import annotations

import random

import pytest
import torch

FAMILIES = ("qwen3_5_moe", "qwen3_next")


def same_bits(a, b):
    assert torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def alone(driver, model, text, windows):
    """Logits of a sequence that nobody stands beside."""
    run, at, out = driver(model, sequences=9), len(text), []
    run.prefill({0: text})
    for window in windows:
        out.append(run.step([(0, window)])[0])
        at += len(window)
    return torch.cat(out)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_rows", [2, 5, 9])
def test_a_row_alone_and_among_others(saved, driver, tokens, family, num_rows):
    model, draw = saved(family).load(), random.Random(num_rows)
    texts = [tokens(draw.randint(1, 150), seed=i) for i in range(num_rows)]
    steps = [[tokens(draw.randint(1, 5), seed=100 * i + s) for s in range(3)] for i in range(num_rows)]
    run, out = driver(model, sequences=9), [[] for _ in texts]
    for i, text in enumerate(texts):
        run.prefill({i: text})
    for s in range(3):
        order = list(range(num_rows))
        draw.shuffle(order)
        rows = [(i, steps[i][s]) for i in order] + [None]
        for i, part in zip(order, run.step(rows, window=5 + s), strict=True):
            out[i].append(part)
    for i, text in enumerate(texts):
        same_bits(alone(driver, model, text, steps[i]), torch.cat(out[i]))


@pytest.mark.parametrize("family", FAMILIES)
def test_one_window_of_eight_and_eight_of_one(saved, driver, tokens, family):
    model, text, new = saved(family).load(), tokens(100), tokens(8, seed=1)
    same_bits(alone(driver, model, text, [new]), alone(driver, model, text, [[t] for t in new]))


def test_what_drafts_held_does_not_matter(saved, driver, tokens):
    model, text, new = saved().load(), tokens(66), tokens(6, seed=1)
    runs = []
    for drafts in (tokens(3, seed=2), tokens(3, seed=3)):
        run = driver(model)
        run.prefill({0: text})
        first = run.step([(0, [*new[:2], *drafts])], accept=[2])[0][:2]
        runs.append(torch.cat([first, run.step([(0, new[2:])])[0]]))
    same_bits(runs[0], runs[1])
    same_bits(runs[0], alone(driver, model, text, [new[:2], new[2:]]))


def test_what_stood_in_pads_pages_and_slots_does_not_matter(saved, driver, tokens):
    model, text, new = saved().load(), tokens(70), tokens(4, seed=1)
    reference = alone(driver, model, text, [new])
    run = driver(model)
    for storage in (run.state.pages, run.state.conv_storage, *run.state.slots.values()):
        if storage.is_floating_point():
            storage.fill_(float("nan"))
    run.state.slots["num_pending"].fill_(7)
    run.prefill({0: text})
    batch = run.batch([None, (0, new), None], 6)
    batch.token_ids[0], batch.token_ids[2] = 159, 3
    batch.token_ids[1, 4:] = 77
    batch.positions[:, 4:] = 3000
    with torch.inference_mode():
        out = model.window(batch, run.state).view(3, 6, -1)
    same_bits(reference, out[1, :4])


class Keeper:
    """Notes what it is handed."""

    def __init__(self, wanted=None):
        self.shapes = {}
        self.wanted = wanted

    def keep(self, signal_index, tensor):
        self.shapes[signal_index] = tuple(tensor.shape)


@pytest.mark.parametrize("family", FAMILIES)
def test_sensors_and_recorders_change_no_bit(saved, driver, tokens, family):
    model = saved(family).load(inside_experts=True)

    few = model.kept_signals[2:9:3]
    keepers = {"all": Keeper(), "few": Keeper(wanted=few)}
    runs = ((None, None), (model.new_panel(256), None), *((model.new_panel(256), k) for k in keepers.values()))
    answers = []
    for panel, keeper in runs:
        run = driver(model)
        parts = [run.prefill({0: tokens(70), 1: tokens(9)}, panel=panel, keep=keeper)]
        parts += run.step([(0, tokens(5)), None, (1, tokens(2))], panel=panel, keep=keeper)
        answers.append(torch.cat(parts))
    for other in answers[1:]:
        same_bits(answers[0], other)
    assert tuple(sorted(keepers["all"].shapes)) == model.kept_signals
    assert tuple(sorted(keepers["few"].shapes)) == few
    assert all(len(shape) == 2 for shape in keepers["all"].shapes.values())
