"""Attention kernels of serving engines, in plain PyTorch: pages with a dirty tail, splits, unmasked tails.

Each is a rule ``(query, key, value, scale) -> out`` on [B, H, T, D], keys and values repeated to all heads already. It
stands in the attention of a host, or in `PagedAttention`. Only the last decode step of a request is run by them.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from firetower.drills.arrays import to_array
from firetower.drills.placing import generator, layers_of, replace_forward
from firetower.drills.pure import linear
from firetower.lab.subject import Rows, Split

Rule = Callable[[Tensor, Tensor, Tensor, float], Tensor]


class PagedAttention(nn.Module):
    """One query [1, D] over a context [S, D]: two heads of attention by a rule."""

    def __init__(self, hidden_size: int, seed: int, rule: Rule) -> None:
        super().__init__()
        self.qkv = linear(3 * hidden_size, hidden_size, seed)
        self.o_proj = linear(hidden_size, hidden_size, seed + 1)
        self.rule = rule

    def forward(self, x: Tensor) -> Tensor:
        """Context [S, D] whose last row asks -> [1, D]."""
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(0, 1)[None] for t in self.qkv(x).chunk(3, -1))
        out = self.rule(q[:, :, -1:], k, v, q.shape[-1] ** -0.5)
        y: Tensor = self.o_proj(out.transpose(1, 2).flatten(-2))[0]
        return y


def replace_attention(model: Any, rule: Rule, number: int = 0) -> int:
    """Let the host's ``number``-th attention layer use a rule; the layer's index."""
    model.set_attn_implementation("eager")
    layers = layers_of(model, "attention")
    layer = layers[number % len(layers)]
    mixer = model.model.layers[layer].self_attn
    family = sys.modules[type(mixer).__module__]
    native: Callable[..., Any] = mixer.forward

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        groups = module.num_key_value_groups
        out = rule(query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), scaling)
        return out.transpose(1, 2).contiguous(), None

    def forward(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(family, "eager_attention_forward", attend):
            return native(*args, **kwargs)

    replace_forward(mixer, forward)
    return layer


@dataclasses.dataclass
class Page:
    """A page of values with room for ``capacity`` tokens; what lies after the written ones is ``dirt``.

    The twin (``select``) leaves the unwritten slots out; otherwise they get a weight of exactly 0, which does
    not help against a NaN.
    """

    capacity: int
    dirt: float
    seed: int
    select: bool
    written: int = 0
    memory: Tensor | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[B, H, 1, D] over [B, H, S, D]."""
        self.written = key.shape[2]
        if self.memory is None:
            self.memory = self._dirty(value)
        self.memory[:, :, : self.written] = value
        scores = query @ key.mT * scale
        if self.select:
            return torch.softmax(scores, dim=-1) @ self.memory[:, :, : self.written]
        scores = torch.nn.functional.pad(scores, (0, self.capacity - self.written), value=-1e30)
        return torch.softmax(scores, dim=-1) @ self.memory

    def _dirty(self, value: Tensor) -> Tensor:
        shape = (*value.shape[:2], self.capacity, value.shape[3])
        memory = torch.randn(shape, generator=generator(self.seed)).to(value.dtype)
        memory[:, :, self.capacity - 1] = self.dirt
        return memory

    def filled(self, number: float, run: Callable[[], Any]) -> Any:
        """Run with the unwritten slots holding a number; afterwards they are as dirty as before."""
        if self.memory is None:
            run()
        assert self.memory is not None
        tail = self.memory[:, :, self.written :]
        before = tail.clone()
        tail.fill_(number)
        try:
            return run()
        finally:
            tail.copy_(before)

    def rows(self) -> tuple[Rows, ...]:
        """The slots of the page as the lab asks for them, after a run."""
        valid = tuple(i < self.written for i in range(self.capacity))
        return (
            Rows(
                name="the page of values",
                step=1,
                is_valid=valid,
                written_at=tuple(1 if v else None for v in valid),
                is_read=valid if self.select else (),
            ),
        )


@dataclasses.dataclass
class Splits:
    """A softmax over splits of ``size`` keys, merged; the splits cover ``capacity`` keys, and the last may be empty.

    The twin (``skip``) leaves empty splits out of the merge.
    """

    size: int
    num_splits: int
    skip: bool
    parts: tuple[Split, ...] = ()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[B, H, 1, D] over [B, H, S, D]."""
        scores = query @ key.mT * scale
        maxima, sums, accumulators = [], [], []
        for i in range(self.num_splits):
            part = scores[..., i * self.size : (i + 1) * self.size]
            if not part.shape[-1] and self.skip:
                continue
            if part.shape[-1]:
                m = part.amax(-1, keepdim=True)
                p = torch.exp(part - m)
                sums.append(p.sum(-1, keepdim=True))
                accumulators.append(p @ value[:, :, i * self.size : (i + 1) * self.size])
            else:
                m = part.new_full((*part.shape[:-1], 1), float("-inf"))
                sums.append(torch.zeros_like(m))
                # nobody wrote the accumulator of a split without keys
                accumulators.append(0.0 * torch.exp(m - m) * value[:, :, :1])
            maxima.append(m)
        self.parts = tuple(
            Split(row_max=to_array("m", m), row_sum=to_array("l", s), accumulator=to_array("acc", a))
            for m, s, a in zip(maxima, sums, accumulators, strict=True)
        )
        top = torch.stack(maxima).amax(0)
        weights = [torch.exp(m - top) for m in maxima]
        total = torch.stack([w * s for w, s in zip(weights, sums, strict=True)]).sum(0)
        return torch.stack([w * a for w, a in zip(weights, accumulators, strict=True)]).sum(0) / total


@dataclasses.dataclass
class OpenTail:
    """Scores with a strong bias on real keys; the row maximum is taken over ``tail`` unmasked slots too.

    A softmax does not mind the bias, unless the maximum is taken where it is not. The twin (``inside``) takes
    the maximum over the real keys.
    """

    tail: int
    bias: float
    inside: bool

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[B, H, 1, D] over [B, H, S, D]."""
        scores = query @ key.mT * scale + self.bias
        page = torch.nn.functional.pad(scores, (0, self.tail))  # zeros where there is no key
        top = (scores if self.inside else page).amax(-1, keepdim=True)
        weights = torch.exp(scores - top)
        return weights / weights.sum(-1, keepdim=True) @ value
