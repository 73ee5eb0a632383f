"""The small model as a training module: the arithmetic of Transformers' ``Qwen3_5MoeForCausalLM``, laid out for speed.

Parameter names and shapes are those of the class, so that a state dict of one loads into the other as it is. Different
are two layouts, equal in value: every expert is computed for every token and weighted by zero where it was not picked
(16 experts of width 32 are one dense layer of width 512), and of the gated delta rule the inverse of each chunk's
triangular system is kept, whose derivative is two products.

Shapes: B rows, T tokens, D model width, H heads, N chunks, C tokens a chunk, E experts, M an expert's width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from small_model.scan import invert_unit_lower, scan

CHUNK = 64

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 4096,
    "hidden_size": 192,
    "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 128,
    "router_aux_loss_coef": 0.01,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": True,
    "use_cache": True,
    "dtype": "bfloat16",
}


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight^T`` in the type of ``x``; weights are kept in float32."""
    return F.linear(x, weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight around zero; float32 in, ``dtype`` out."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x [..., dim] -> [..., dim]."""
        x = x.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"])
        return (x * (1.0 + self.weight)).to(dtype)


class GatedNorm(nn.Module):
    """Root-mean-square norm with a plain weight, times silu of a gate."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [..., dim] -> [..., dim] in the type of the gate."""
        x = x.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"])
        return (self.weight * x * F.silu(gate.float())).to(gate.dtype)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule over whole rows, chunk by chunk, in float32.

    Args:
        q: queries [B, T, H, Dk], normalised and scaled; T a multiple of 64.
        k: keys [B, T, H, Dk], normalised.
        v: values [B, T, H, Dv].
        g: logs of the decays [B, T, H], at most 0.
        beta: write strengths [B, T, H].

    Returns:
        Outputs [B, T, H, Dv], float32.
    """
    batch, length, heads, _ = q.shape
    num = length // CHUNK

    def chunks(x: Tensor) -> Tensor:  # [B, T, H, ...] -> [N, B * H, C, ...]
        x = x.float().reshape(batch, num, CHUNK, heads, -1).permute(1, 0, 3, 2, 4)
        return x.reshape(num, batch * heads, CHUNK, -1)

    q, k, v, g, beta = chunks(q), chunks(k), chunks(v), chunks(g), chunks(beta)
    decay = g.cumsum(-2)  # [N, B * H, C, 1]
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    between = (decay - decay.mT).masked_fill(~lower, float("-inf")).exp()
    k_beta = k * beta
    inverse = invert_unit_lower((k_beta @ k.mT * between).tril(-1))
    last = decay[..., -1:, :]
    states, news = scan(
        inverse @ (v * beta),
        inverse @ (k_beta * decay.exp()),
        (k * (last - decay).exp()).mT.contiguous(),
        last.exp(),
    )
    out = (q * decay.exp()) @ states + (q @ k.mT * between) @ news
    return out.view(num, batch, heads, CHUNK, -1).permute(1, 0, 3, 2, 4).reshape(batch, length, heads, -1)


def l2norm(x: Tensor) -> Tensor:
    """Vectors of length one along the last axis, float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class Conv1d(nn.Module):
    """Holder of a depthwise kernel [channels, 1, width]."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width).uniform_(-(width**-0.5), width**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Causal convolution and silu; x [B, T, channels] -> the same, in the type of x."""
        width = self.weight.shape[-1]
        padded = F.pad(x, (0, 0, width - 1, 0))
        weight = self.weight.to(x.dtype)
        # a sum of shifted products fuses with what is around it; a grouped convolution does not
        taps = [padded[:, i : i + x.shape[1]].float() * weight[:, 0, i].float() for i in range(width)]
        return F.silu(sum(taps[1:], taps[0])).to(x.dtype)


class GatedDeltaNet(nn.Module):
    """The linear-attention mixer."""

    def __init__(self) -> None:
        super().__init__()
        dim, self.k_heads = CONFIG["hidden_size"], CONFIG["linear_num_key_heads"]
        self.v_heads, self.head_dim = CONFIG["linear_num_value_heads"], CONFIG["linear_key_head_dim"]
        self.key_dim = self.k_heads * self.head_dim
        value_dim = self.v_heads * CONFIG["linear_value_head_dim"]
        self.in_proj_qkv = nn.Linear(dim, 2 * self.key_dim + value_dim, bias=False)
        self.in_proj_z = nn.Linear(dim, value_dim, bias=False)
        self.in_proj_b = nn.Linear(dim, self.v_heads, bias=False)
        self.in_proj_a = nn.Linear(dim, self.v_heads, bias=False)
        self.conv1d = Conv1d(2 * self.key_dim + value_dim, CONFIG["linear_conv_kernel_dim"])
        # decays of a step from exp(-0.001) to exp(-1.6): half-lives from one token to a whole row
        step = torch.exp(torch.empty(self.v_heads).uniform_(math.log(1e-3), math.log(0.1)))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.A_log = nn.Parameter(torch.empty(self.v_heads).uniform_(1, 16).log())
        self.norm = GatedNorm(CONFIG["linear_value_head_dim"])
        self.out_proj = nn.Linear(value_dim, dim, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]; ``rope`` is not used."""
        batch, length, _ = x.shape
        mixed = self.conv1d(linear(x, self.in_proj_qkv.weight))
        q, k, v = mixed.split((self.key_dim, self.key_dim, mixed.shape[-1] - 2 * self.key_dim), -1)
        repeat = self.v_heads // self.k_heads
        q = l2norm(q.reshape(batch, length, self.k_heads, -1)).repeat_interleave(repeat, 2) * self.head_dim**-0.5
        k = l2norm(k.reshape(batch, length, self.k_heads, -1)).repeat_interleave(repeat, 2)
        v = v.reshape(batch, length, self.v_heads, -1)
        beta = linear(x, self.in_proj_b.weight).float().sigmoid()
        g = -self.A_log.exp() * F.softplus(linear(x, self.in_proj_a.weight).float() + self.dt_bias)
        out = gated_delta_rule(q, k, v, g, beta)
        gate = linear(x, self.in_proj_z.weight).reshape(batch, length, self.v_heads, -1)
        return linear(self.norm(out, gate).reshape(batch, length, -1), self.out_proj.weight)


class Attention(nn.Module):
    """The softmax-attention mixer, with a gate on its output."""

    def __init__(self) -> None:
        super().__init__()
        dim, self.head_dim = CONFIG["hidden_size"], CONFIG["head_dim"]
        self.heads, self.kv_heads = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
        self.q_proj = nn.Linear(dim, 2 * self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(dim, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, dim, bias=False)
        self.q_norm, self.k_norm = RMSNorm(self.head_dim), RMSNorm(self.head_dim)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """x [B, T, D], rope [2, T, rotary] (cosines, sines) -> [B, T, D]."""
        batch, length, _ = x.shape
        both = linear(x, self.q_proj.weight).view(batch, length, self.heads, 2 * self.head_dim)
        q, gate = both.chunk(2, -1)
        k = linear(x, self.k_proj.weight).view(batch, length, self.kv_heads, self.head_dim)
        v = linear(x, self.v_proj.weight).view(batch, length, self.kv_heads, self.head_dim)
        q, k = rotate(self.q_norm(q, x.dtype), rope), rotate(self.k_norm(k, x.dtype), rope)
        repeat = self.heads // self.kv_heads
        q, k, v = (y.transpose(1, 2) for y in (q, k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return linear((out * gate.sigmoid()).reshape(batch, length, -1), self.o_proj.weight)


def rotary_table(length: int, device: torch.device) -> Tensor:
    """Cosines and sines [2, T, rotary] of the positions 0 to T - 1, float32."""
    rope = CONFIG["rope_parameters"]
    dim = int(CONFIG["head_dim"] * rope["partial_rotary_factor"])
    frequencies = rope["rope_theta"] ** -(torch.arange(0, dim, 2, device=device).float() / dim)
    angles = torch.arange(length, device=device).float()[:, None] * frequencies
    angles = torch.cat((angles, angles), -1)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """x [B, T, H, head_dim] with its first ``rotary`` columns turned by ``rope`` [2, T, rotary]."""
    cos, sin = rope.to(x.dtype)[:, :, None].unbind(0)
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-second, first), -1) * sin, rest), -1)


class Router(nn.Module):
    """Holder of the router's weight [E, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(CONFIG["num_experts"], CONFIG["hidden_size"]))


class Experts(nn.Module):
    """Holder of the experts' weights: gate_up_proj [E, 2 M, D], down_proj [E, D, M]."""

    def __init__(self) -> None:
        super().__init__()
        num, dim, width = CONFIG["num_experts"], CONFIG["hidden_size"], CONFIG["moe_intermediate_size"]
        self.gate_up_proj = nn.Parameter(torch.empty(num, 2 * width, dim))
        self.down_proj = nn.Parameter(torch.empty(num, dim, width))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """x [B, T, D], weights [B, T, E], zero where an expert was not picked -> [B, T, D]."""
        num, dim, width = self.down_proj.shape
        gate, up = self.gate_up_proj.split(width, 1)
        hidden = F.silu(linear(x, gate.reshape(-1, dim))) * linear(x, up.reshape(-1, dim))
        hidden = hidden.view(*x.shape[:-1], num, width) * weights.to(x.dtype).unsqueeze(-1)
        return linear(hidden.flatten(-2), self.down_proj.permute(1, 0, 2).reshape(dim, -1))


class MLP(nn.Module):
    """The shared expert."""

    def __init__(self) -> None:
        super().__init__()
        dim, width = CONFIG["hidden_size"], CONFIG["shared_expert_intermediate_size"]
        self.gate_proj = nn.Linear(dim, width, bias=False)
        self.up_proj = nn.Linear(dim, width, bias=False)
        self.down_proj = nn.Linear(width, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        return linear(F.silu(linear(x, self.gate_proj.weight)) * linear(x, self.up_proj.weight), self.down_proj.weight)


class MoE(nn.Module):
    """Router, experts, shared expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts, self.shared_expert = Router(), Experts(), MLP()
        self.shared_expert_gate = nn.Linear(CONFIG["hidden_size"], 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, D] -> ([B, T, D], tokens' share of each expert times its mean probability, summed, times E)."""
        num = CONFIG["num_experts"]
        probs = linear(x, self.gate.weight).float().softmax(-1)
        top, ids = probs.topk(CONFIG["num_experts_per_tok"], dim=-1)
        weights = torch.zeros_like(probs).scatter(-1, ids, top / top.sum(-1, keepdim=True))
        picked = (weights.detach() > 0).float().flatten(0, 1).mean(0) / CONFIG["num_experts_per_tok"]
        balance = num * (picked * probs.flatten(0, 1).mean(0)).sum()
        shared = linear(x, self.shared_expert_gate.weight).sigmoid() * self.shared_expert(x)
        return self.experts(x, weights) + shared, balance


class Layer(nn.Module):
    """Mixer and MoE, each behind a norm and beside a residual in float32."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "linear_attention":
            self.linear_attn: nn.Module = GatedDeltaNet()
            self.mixer_name = "linear_attn"
        else:
            self.self_attn: nn.Module = Attention()
            self.mixer_name = "self_attn"
        self.mlp = MoE()
        self.input_layernorm = RMSNorm(CONFIG["hidden_size"])
        self.post_attention_layernorm = RMSNorm(CONFIG["hidden_size"])

    def forward(self, x: Tensor, rope: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """x [B, T, D] float32 -> ([B, T, D] float32, balance loss of its router)."""
        mixer = self.linear_attn if self.mixer_name == "linear_attn" else self.self_attn
        x = x + mixer(self.input_layernorm(x, dtype), rope)
        out, balance = self.mlp(self.post_attention_layernorm(x, dtype))
        return x + out, balance


class Body(nn.Module):
    """Embedding, layers, last norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(CONFIG["vocab_size"], CONFIG["hidden_size"])
        self.layers = nn.ModuleList(Layer(kind) for kind in CONFIG["layer_types"])
        self.norm = RMSNorm(CONFIG["hidden_size"])


class SmallModel(nn.Module):
    """The whole model; the head is the embedding.

    Args:
        dtype: type that products are made in. Weights and the residual are float32.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.model = Body()
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Draw the matrices anew: 1 / sqrt(inputs), those that write to the residual smaller by sqrt(2 x layers)."""
        shrink = (2 * CONFIG["num_hidden_layers"]) ** -0.5
        for name, p in self.named_parameters():
            if name.endswith("embed_tokens.weight"):
                p.normal_(0, CONFIG["initializer_range"])
            elif p.ndim >= 2 and "conv1d" not in name:
                writes = any(part in name for part in ("out_proj", "o_proj", "down_proj"))
                p.normal_(0, p.shape[-1] ** -0.5 * (shrink if writes else 1.0))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states behind the last norm, and the mean balance loss.

        Args:
            tokens: [B, T] integers; T is filled up to a multiple of 64 inside.

        Returns:
            [B, T, D] in ``dtype``, and a scalar, 1 where every expert gets the same share.
        """
        length = tokens.shape[1]
        # causal throughout: what stands behind changes nothing before it
        x = self.model.embed_tokens(F.pad(tokens, (0, -length % CHUNK)))
        rope = rotary_table(x.shape[1], x.device)
        balances = []
        for layer in self.model.layers:
            x, balance = layer(x, rope, self.dtype)
            balances.append(balance)
        return self.model.norm(x[:, :length], self.dtype), torch.stack(balances).mean()

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, vocab] of tokens [B, T]."""
        return linear(self(tokens)[0], self.model.embed_tokens.weight)
