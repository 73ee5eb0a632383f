"""The end of a window: the kernels (by Triton's interpreter here) against the plain form, over random panels."""

from __future__ import annotations

import pytest
import torch

from firetower.core.words import CLEAN, NOT_RUN
from firetower.engine.buckets import Shape
from firetower.engine.buffers import StepBuffers
from firetower.engine.inject import Injector, Place
from firetower.engine.settle import Chain, dead_rows, follow, settle
from firetower.models.state import new_state
from firetower.ops.sample import Sampled

triton = pytest.importorskip("triton")

SIGNALS = 13
SHAPES = [(1, 1), (3, 1), (4, 2), (5, 8), (16, 1)]


def make(shape, seed, device):
    """Buffers with some bad words, a state, and what was sampled."""
    generator = torch.Generator().manual_seed(seed)
    rows, window = shape
    buffers = StepBuffers(
        Shape(num_rows=rows, window=window), max_pages=2, max_seq_len=128, num_signals=SIGNALS,
        device=torch.device(device),
    )  # fmt: skip
    buffers.panel.fill_(NOT_RUN)
    buffers.panel[:SIGNALS] = CLEAN
    buffers.batch.state_slots.copy_(torch.randperm(rows + 3, generator=generator)[:rows].int() - 1)
    for _ in range(int(torch.randint(0, 3, (), generator=generator))):
        slot, row = (int(torch.randint(0, n, (), generator=generator)) for n in (SIGNALS, rows * window))
        buffers.panel[slot] = 5 << 32 | 0x7FC00000
        if seed % 3:
            word = buffers.panel[2 * SIGNALS + row]
            buffers.panel[2 * SIGNALS + row] = min(int(word), slot << 32 | 2)
    events = (torch.rand(rows * window, generator=generator) < 0.1).int() * 4
    tokens = torch.where(events != 0, -1, torch.arange(rows * window) + 7)
    return buffers, Sampled(tokens=tokens.to(device), events=events.to(device))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture
def state(model, device):
    return lambda: new_state(model.config, num_pages=1, num_slots=20, dtype=torch.float32, device=device)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_ends_a_window_as_the_plain_form_does(shape, device, state):
    from firetower.engine import settle_kernels

    dead_seen = 0
    for seed in range(12):
        buffers, sampled = make(shape, seed, device)
        plain, kernel = (Chain(16, torch.device(device)) for _ in range(2))
        one, two = state(), state()
        before = buffers.out.clone()
        settle_plain(buffers, sampled, one, plain)
        want = buffers.out.clone()
        buffers.out.copy_(before)
        settle_kernels.settle(buffers, sampled, two, kernel if shape[1] == 1 else None)
        assert torch.equal(buffers.out, want)
        assert torch.equal(two.side, one.side)
        assert torch.equal(kernel.tokens, plain.tokens)
        assert torch.equal(kernel.dead, plain.dead)
        dead_seen += int(plain.dead.sum())
    assert dead_seen or shape[1] > 1


def settle_plain(buffers, sampled, state, chain):
    """By definition, without either form's shortcuts."""
    rows, window = buffers.shape.num_rows, buffers.shape.window
    buffers.tokens.copy_(sampled.tokens)
    buffers.events.copy_(sampled.events)
    words = buffers.panel.tolist()
    row_words = words[2 * SIGNALS : 2 * SIGNALS + rows * window]
    bad = [slot for slot in range(SIGNALS) if words[slot] < CLEAN]
    named = [word >> 32 for word in row_words if word < CLEAN]
    everyone = bool(bad) and min(bad) < min(named, default=1 << 31)
    for row in range(rows):
        own = range(row * window, (row + 1) * window)
        dead = everyone or any(row_words[i] < CLEAN or int(sampled.events[i]) for i in own)
        slot = int(buffers.batch.state_slots[row])
        if slot >= 0 and not dead:
            state.side[slot] = 1 - state.side[slot]
        if window == 1:
            chain.tokens[row] = sampled.tokens[row]
            chain.dead[row] = int(dead)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_plain_form_is_the_definition(shape, model):
    for seed in range(12):
        buffers, sampled = make(shape, seed, "cpu")
        mine, other = (new_state(model.config, num_pages=1, num_slots=20, dtype=torch.float32) for _ in range(2))
        chain, wanted = Chain(16, torch.device("cpu")), Chain(16, torch.device("cpu"))
        settle(buffers, sampled, mine, chain)
        got = buffers.out.clone()
        settle_plain(buffers, sampled, other, wanted)
        assert torch.equal(got, buffers.out)
        assert torch.equal(mine.side, other.side)
        assert torch.equal(chain.tokens, wanted.tokens)
        assert torch.equal(chain.dead, wanted.dead)
        dead = dead_rows(buffers)
        assert dead is None or dead.dtype is torch.bool


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (8, 1), (4, 2)], ids=str)
def test_a_chained_window_begins_as_in_the_plain_form(shape, device):
    from firetower.engine import settle_kernels

    rows = shape[0]
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        chain = Chain(8, torch.device(device))
        chain.tokens.copy_(torch.arange(8) + 50)
        chain.dead.copy_(torch.rand(8, generator=generator) < 0.4)
        results = []
        for run in (follow_plain, settle_kernels.follow):
            buffers, _ = make(shape, 1, device)
            x = buffers.device.tensors
            x["source"].copy_(torch.randperm(8, generator=torch.Generator().manual_seed(seed))[:rows].int() - 2)
            for name, value in (("token_ids", 9), ("row_ids", 3), ("slot_mapping", 70), ("seq_lens", 12)):
                x[name].fill_(value)
            run(buffers, chain)
            results.append(buffers.device.storage.clone())
        assert torch.equal(*results)


def follow_plain(buffers, chain):
    """Row by row."""
    x = buffers.device.tensors
    for row in range(buffers.shape.num_rows):
        source = int(x["source"][row])
        if source < 0:
            continue
        if not int(chain.dead[source]):
            buffers.batch.token_ids[row, 0] = chain.tokens[source]
            continue
        x["row_ids"].view(-1, buffers.shape.window)[row] = -1
        buffers.batch.slot_mapping[row] = -1
        x["state_slots"][row] = -1
        x["seq_lens"][row] = 0


def test_the_plain_form_of_following_is_the_definition():
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        chain = Chain(8, torch.device("cpu"))
        chain.tokens.copy_(torch.arange(8) + 50)
        chain.dead.copy_(torch.rand(8, generator=generator) < 0.4)
        results = []
        for run in (follow_plain, follow):
            buffers, _ = make((5, 1), 1, "cpu")
            source = torch.randperm(8, generator=torch.Generator().manual_seed(seed))[:5].int() - 2
            buffers.device.tensors["source"].copy_(source)
            run(buffers, chain)
            results.append(buffers.device.storage.clone())
        assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_fault_node_writes_bits_where_it_is_armed(dtype, device, model):
    from firetower.engine import inject_kernel

    node = Injector(model.signals, device)
    bits = 0xFFD6E000 if dtype is torch.float32 else 0xFFD6
    node.arm([Place(signal=2, row=1, column=3, bits=bits), Place(signal=2, row=9, column=0, bits=bits),
              Place(signal=4, row=0, column=0, bits=bits)])  # fmt: skip
    x = torch.zeros(4, 5, dtype=dtype, device=device)
    inject_kernel.write(node.places, 2, x)
    raw = x.view(torch.int32 if dtype is torch.float32 else torch.int16)
    assert (raw != 0).nonzero().tolist() == [[1, 3]]
    assert int(raw[1, 3]) & ((1 << 8 * dtype.itemsize) - 1) == bits
    y = torch.zeros(4, 5, dtype=dtype, device=device)
    if device == "cpu":
        node.keep(2, y)
        assert torch.equal(y.view(raw.dtype), raw)
