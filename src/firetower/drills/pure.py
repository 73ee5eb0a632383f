"""Tiny modules that drills plant faults in: one mechanism of a language model each, in plain PyTorch.

Shapes: B batch, T tokens, D hidden size, H heads, E experts, K experts per token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firetower.drills.placing import generator


def linear(out_features: int, in_features: int, seed: int, bias: bool = False) -> nn.Linear:
    """A linear layer with seeded normal weights of unit gain, the global random state untouched."""
    layer = nn.Linear(in_features, out_features, bias=bias, device="meta").to_empty(device="cpu")
    layer.weight.data.normal_(0.0, in_features**-0.5, generator=generator(seed))
    if bias:
        layer.bias.data.zero_()
    return layer


class RmsNorm(nn.Module):
    """Root-mean-square norm [..., D], computed in the type of its input; ``eps`` is rounded to that type."""

    def __init__(self, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = nn.Buffer(torch.tensor(eps))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        variance = (x * x).mean(-1, keepdim=True)
        root = torch.rsqrt(variance + self.eps.to(x.dtype))
        return x * root * self.weight.to(x.dtype)


class Swiglu(nn.Module):
    """Gated MLP [T, D] -> [T, D], then a norm."""

    def __init__(self, hidden_size: int, intermediate_size: int, seed: int) -> None:
        super().__init__()
        self.gate_proj = linear(intermediate_size, hidden_size, seed)
        self.up_proj = linear(intermediate_size, hidden_size, seed + 1)
        self.down_proj = linear(hidden_size, intermediate_size, seed + 2)
        self.norm = RmsNorm(hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """The norm is fp32, as those of real models."""
        y: Tensor = self.norm(self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)).float())
        return y


class Channels(nn.Module):
    """Scales each channel by a buffer [D], adds a residual when there is one, then norms in fp32."""

    def __init__(self, scale: Tensor, residual: Tensor | None = None) -> None:
        super().__init__()
        self.scale = nn.Buffer(scale)
        self.residual = None if residual is None else nn.Buffer(residual)
        self.norm = RmsNorm(len(scale))

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        x = x * self.scale
        if self.residual is not None:
            x = x + self.residual
        y: Tensor = self.norm(x.float())
        return y


class Bucket(nn.Module):
    """Quantises a batch padded to a bucket of rows, with one scale for the tensor.

    ``scratch`` [rows, D] is the reused workspace: what lies after the real rows was never written.
    """

    def __init__(self, scratch: Tensor, *, read_pads: bool) -> None:
        super().__init__()
        self.scratch = nn.Buffer(scratch)
        self.read_pads = read_pads

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] -> int8 values as floats, scaled back."""
        self.scratch[: len(x)] = x
        scale = (self.scratch if self.read_pads else self.scratch[: len(x)]).abs().amax() / 127
        return torch.round(x / scale) * scale


class MaskedAttention(nn.Module):
    """One head over [T, D] with a softmax of its own; ``mask`` [T, T] is True where a query may look."""

    def __init__(self, mask: Tensor, hidden_size: int, seed: int, *, fused: bool) -> None:
        super().__init__()
        self.mask = nn.Buffer(mask)
        self.qkv = linear(3 * hidden_size, hidden_size, seed)
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        """Masked scores are -inf, which is legal until a row has nothing else."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = (q @ k.T * q.shape[-1] ** -0.5).masked_fill(~self.mask, float("-inf"))
        out: Tensor
        if self.fused:
            out = torch.softmax(scores, dim=-1) @ v
        else:
            weights = torch.exp(scores - scores.amax(-1, keepdim=True))
            out = weights / weights.sum(-1, keepdim=True) @ v
        return out


class SigmoidRouter(nn.Module):
    """Chooses K of E experts by sigmoid score plus bias, and renormalises the raw scores of the chosen."""

    def __init__(self, weight: Tensor, bias: Tensor, top_k: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Buffer(bias)
        self.top_k = top_k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, D] -> logits [T, E], weights [T, K], ids [T, K]."""
        logits = F.linear(x, self.weight)
        scores = torch.sigmoid(logits)
        ids = torch.topk(scores + self.bias, self.top_k, dim=-1).indices
        chosen = scores.gather(-1, ids)
        return logits, chosen / chosen.sum(-1, keepdim=True), ids


class DecayMatrix(nn.Module):
    """Pairwise decays of a chunk: exp(G_i - G_j) for j <= i, 0 above. ``mask_first`` masks before the exp."""

    def __init__(self, *, mask_first: bool) -> None:
        super().__init__()
        self.mask_first = mask_first

    def forward(self, log_decay: Tensor) -> Tensor:
        """[H, T] steps <= 0 -> [H, T, T]."""
        total = log_decay.cumsum(-1)
        pairs = total.unsqueeze(-1) - total.unsqueeze(-2)
        upper = torch.ones(pairs.shape[-2:], dtype=torch.bool).triu(1)
        if self.mask_first:
            return torch.exp(pairs.masked_fill(upper, float("-inf")))
        return torch.exp(pairs) * ~upper


class DecayGate(nn.Module):
    """Log decay -exp(A_log) * softplus(a + dt_bias) of each head."""

    def __init__(self, a_log: Tensor, dt_bias: Tensor) -> None:
        super().__init__()
        self.A_log = nn.Parameter(a_log)
        self.dt_bias = nn.Parameter(dt_bias)

    def forward(self, a: Tensor) -> Tensor:
        """[T, H] -> [T, H], at most 0."""
        return -self.A_log.exp() * F.softplus(a + self.dt_bias)


class DeltaRule(nn.Module):
    """Recurrent delta rule of one head; ``norm_keys`` gives every key length 1."""

    def __init__(self, *, norm_keys: bool) -> None:
        super().__init__()
        self.norm_keys = norm_keys

    def forward(self, k: Tensor, v: Tensor) -> Tensor:
        """k [T, D], v [T, D] -> state [D, D] after T tokens, beta 1, no decay."""
        if self.norm_keys:
            k = k / torch.linalg.vector_norm(k, dim=-1, keepdim=True)
        state = torch.zeros(k.shape[-1], v.shape[-1], dtype=k.dtype)
        for k_t, v_t in zip(k, v, strict=True):
            state = state + torch.outer(k_t, v_t - k_t @ state)
        return state


class Head(nn.Module):
    """Embedding, head and a sampler that turns logits into token ids."""

    def __init__(self, vocab_size: int, hidden_size: int, seed: int, sampler: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden_size, device="meta").to_empty(device="cpu")
        self.embed.weight.data.normal_(generator=generator(seed))
        self.lm_head = linear(vocab_size, hidden_size, seed + 1)
        self.sampler = sampler

    def forward(self, ids: Tensor) -> Tensor:
        """[T] -> [T] next tokens."""
        next_ids: Tensor = self.sampler(self.lm_head(self.embed(ids)))
        return next_ids


class Argmax(nn.Module):
    """Greedy sampling; of a NaN row it makes an ordinary id."""

    def forward(self, logits: Tensor) -> Tensor:
        """[T, V] -> [T]."""
        return logits.argmax(-1)


class BlockwiseArgmax(nn.Module):
    """Greedy sampling with a greater-than loop, as kernels do: a NaN never wins, yet an ordinary id comes."""

    def forward(self, logits: Tensor) -> Tensor:
        """[T, V] -> [T]."""
        best = torch.full_like(logits[:, 0], float("-inf"))
        ids = torch.full(best.shape, 3)
        for i in range(logits.shape[-1]):
            wins = logits[:, i] > best
            best, ids = torch.where(wins, logits[:, i], best), torch.where(wins, i, ids)
        return ids


class Rope(nn.Module):
    """Rotary angles of positions, computed in the type ``dtype``."""

    def __init__(self, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.inv_freq = nn.Buffer(10000.0 ** -(torch.arange(0, dim, 2).float() / dim))
        self.dtype = dtype

    def forward(self, positions: Tensor) -> Tensor:
        """[T] int64 -> cosines [T, dim / 2]."""
        angles = positions.to(self.dtype)[:, None] * self.inv_freq.to(self.dtype)
        return angles.cos()


class Shares(nn.Module):
    """Each element's share of its row."""

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        return x / x.sum(-1, keepdim=True)


class Guarded(nn.Module):
    """Shares of a row, passed through a guard that hides what went wrong."""

    def __init__(self, guard: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.shares = Shares()
        self.guard = guard

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        return self.guard(self.shares(x))


@dataclasses.dataclass
class TinyStates:
    """The one layer of a `TinyCache`, named as those of Transformers are."""

    recurrent_states: dict[int, Tensor]


@dataclasses.dataclass
class TinyCache:
    """State of a `TinyRecurrent`: one delta-rule state [B, D, D]."""

    layers: list[TinyStates]


@dataclasses.dataclass
class TinyOutput:
    """What a `TinyRecurrent` returns: logits [B, T, V] and the cache, which was written in place."""

    logits: Tensor
    past_key_values: TinyCache


class TinyRecurrent(nn.Module):
    """A language model of one delta-rule layer with normalised keys, beta 1/2 and a fixed decay."""

    def __init__(self, seed: int, vocab_size: int = 96, hidden_size: int = 32, head_dim: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden_size, device="meta").to_empty(device="cpu")
        self.embed.weight.data.normal_(generator=generator(seed))
        self.qkv = linear(3 * head_dim, hidden_size, seed + 1)
        self.out = linear(hidden_size, head_dim, seed + 2)
        self.lm_head = linear(vocab_size, hidden_size, seed + 3)
        self.head_dim, self.vocab_size = head_dim, vocab_size

    def fresh(self, batch: int = 1) -> TinyCache:
        """A cache of a request that has not begun."""
        state = self.embed.weight.new_zeros(batch, self.head_dim, self.head_dim)
        return TinyCache([TinyStates({0: state})])

    def forward(self, ids: Tensor, cache: TinyCache) -> TinyOutput:
        """[B, T] -> logits [B, T, V]."""
        x = self.embed(ids)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        k = F.normalize(k, dim=-1)
        states = cache.layers[0].recurrent_states
        state, read = states[0], []
        for t in range(ids.shape[1]):
            state = 0.97 * state
            recalled = torch.einsum("bk,bkv->bv", k[:, t], state)
            state = state + 0.5 * torch.einsum("bk,bv->bkv", k[:, t], v[:, t] - recalled)
            read.append(torch.einsum("bk,bkv->bv", q[:, t], state))
        states[0] = state
        return TinyOutput(self.lm_head(x + self.out(torch.stack(read, 1))), cache)


class ChunkDecays(nn.Module):
    """Pairwise decays [H, C, C] of the second of two chunks of log steps [H, 2 C].

    ``stale``: the column totals are still those of the first chunk. ``totals`` keeps what each chunk wrote.
    """

    def __init__(self, chunk: int, *, stale: bool) -> None:
        super().__init__()
        self.chunk, self.stale = chunk, stale
        self.totals: tuple[Tensor, ...] = ()

    def forward(self, steps: Tensor) -> Tensor:
        """exp(row total - column total) for columns up to the row, 0 above."""
        self.totals = tuple(x.cumsum(-1).detach() for x in (steps[:, : self.chunk], steps[:, -self.chunk :]))
        return self.matrix(rows=1, columns=0 if self.stale else 1)

    def matrix(self, *, rows: int, columns: int) -> Tensor:
        """The matrix with row totals of one chunk and column totals of one."""
        pairs = self.totals[rows][:, :, None] - self.totals[columns][:, None, :]
        upper = torch.ones(self.chunk, self.chunk, dtype=torch.bool).triu(1)
        return torch.exp(pairs.masked_fill(upper, float("-inf")))


def delta_rule(q: Tensor, k: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The gated delta rule token by token: decay, correct what the key recalls, read.

    Args:
        q, k: [B, T, H, K]; ``q`` is scaled by K**-0.5 here.
        value: [B, T, H, V].
        g: [B, T, H], log decay.
        beta: [B, T, H].

    Returns:
        (outputs [B, T, H, V], last state [B, H, K, V]), in the type of the inputs.
    """
    state = value.new_zeros(value.shape[0], value.shape[2], k.shape[-1], value.shape[-1])
    outputs = []
    for t in range(value.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        recalled = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        delta = (value[:, t] - recalled) * beta[:, t].unsqueeze(-1)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], delta)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * k.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), state
