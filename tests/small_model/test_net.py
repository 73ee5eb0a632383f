from __future__ import annotations

import pytest
import torch
from small_model.net import CONFIG, SmallModel, gated_delta_rule, l2norm
from small_model.scan import invert_unit_lower, scan
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig


def test_logits_are_those_of_the_transformers_class():
    net = SmallModel(torch.float32)
    config = Qwen3_5MoeTextConfig(**{k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type")})
    model = Qwen3_5MoeForCausalLM(config).float().eval()
    with torch.no_grad():
        for p in net.parameters():
            if p.ndim == 1:  # weights of norms start alike: a swap of two would not show
                p.add_(0.1 * torch.randn_like(p))
    result = model.load_state_dict(net.state_dict(), strict=False)
    assert result.missing_keys == ["lm_head.weight"]
    assert result.unexpected_keys == []
    model.tie_weights()
    tokens = torch.randint(CONFIG["vocab_size"], (2, 150))
    with torch.no_grad():
        torch.testing.assert_close(net.logits(tokens), model(tokens).logits, rtol=1e-4, atol=1e-4)


def test_the_size_is_within_its_limits():
    count = sum(p.numel() for p in SmallModel(torch.float32).parameters())
    assert 4_000_000 <= count <= 6_000_000
    # bfloat16, with half a megabyte left for the tokenizer and the notes
    assert 2 * count <= 11_500_000


@pytest.mark.parametrize("alike", [False, True], ids=["random", "the same token again and again"])
def test_the_triangular_inverse(alike):
    k = l2norm(torch.randn(3, 1 if alike else 64, 8).expand(3, 64, 8))
    a = (0.9 * k @ k.mT).tril(-1)
    product = invert_unit_lower(a) @ (a + torch.eye(64))
    torch.testing.assert_close(product, torch.eye(64).expand(3, 64, 64), rtol=0, atol=1e-4)


def test_chunks_are_the_recurrence():
    batch, length, heads, dim = 2, 128, 3, 8
    q, k = (l2norm(torch.randn(batch, length, heads, dim)) for _ in range(2))
    v, beta = torch.randn(batch, length, heads, dim), torch.rand(batch, length, heads)
    g = -torch.rand(batch, length, heads) * torch.tensor([0.01, 1.0, 30.0])
    state, rows = torch.zeros(batch, heads, dim, dim), []
    for t in range(length):
        state = state * g[:, t, :, None, None].exp()
        delta = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], delta)
        rows.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    torch.testing.assert_close(gated_delta_rule(q, k, v, g, beta), torch.stack(rows, 1), rtol=1e-4, atol=1e-5)


def test_the_derivative_of_the_scan():
    shapes = ((3, 2, 4, 5), (3, 2, 4, 3), (3, 2, 3, 4), (3, 2, 1, 1))
    inputs = tuple(torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    assert torch.autograd.gradcheck(scan, inputs)


def test_the_derivative_of_the_inverse():
    a = torch.randn(2, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(invert_unit_lower, (a,))


@pytest.mark.parametrize("length", [1, 63, 65])
def test_odd_lengths_are_the_beginning_of_longer_ones(length):
    net = SmallModel(torch.float32)
    tokens = torch.randint(CONFIG["vocab_size"], (1, 130))
    with torch.no_grad():
        torch.testing.assert_close(net.logits(tokens)[:, :length], net.logits(tokens[:, :length]), rtol=1e-4, atol=1e-5)


def test_the_balance_is_one_for_equal_shares_and_grows_as_one_expert_takes_all():
    moe, x = SmallModel(torch.float32).model.layers[0].mlp, torch.randn(1, 1, CONFIG["hidden_size"])
    with torch.no_grad():
        moe.gate.weight.zero_()
        assert float(moe(x)[1]) == pytest.approx(1.0)
        moe.gate.weight[3] = x[0, 0]
        # every token to expert 3 with probability one: a quarter of the picks, times 16
        assert float(moe(x.expand(1, 64, -1))[1]) == pytest.approx(
            CONFIG["num_experts"] / CONFIG["num_experts_per_tok"]
        )
