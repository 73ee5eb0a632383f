"""The two parts of the gated delta rule that a compiler makes nothing of, as operators with derivatives of their own.

Left to it, the loop from chunk to chunk is unrolled into a graph that takes longer to compile than the training saves.
As an operator it is three products a chunk forwards and four backwards; the triangular solve is one call forwards and
two products backwards.

Shapes: N chunks, M rows times heads, C tokens a chunk, K and V the head's key and value widths.
"""

from __future__ import annotations

import torch
from torch import Tensor, library


@library.custom_op("small_model::scan", mutates_args=())
def scan(written: Tensor, erased: Tensor, k_out: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """States before each chunk and the values each chunk adds: ``new = written - erased @ state``, then
    ``state = kept * state + k_out @ new``, from a state of zero.

    Args:
        written: [N, M, C, V], float32 and contiguous, as all.
        erased: [N, M, C, K].
        k_out: [N, M, K, C].
        kept: [N, M, 1, 1], what is left of the state after the chunk.

    Returns:
        States [N, M, K, V] and news [N, M, C, V].
    """
    num, batch, _, width = written.shape
    states = written.new_empty(num, batch, erased.shape[-1], width)
    states[0].zero_()
    news = torch.empty_like(written)
    for i in range(num):
        torch.baddbmm(written[i], erased[i], states[i], alpha=-1, out=news[i])
        if i + 1 < num:
            torch.baddbmm(states[i] * kept[i], k_out[i], news[i], out=states[i + 1])
    return states, news


@scan.register_fake
def _(written: Tensor, erased: Tensor, k_out: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    num, batch, _, width = written.shape
    return written.new_empty(num, batch, erased.shape[-1], width), torch.empty_like(written)


@library.custom_op("small_model::scan_backward", mutates_args=())
def scan_backward(
    d_states: Tensor, d_news: Tensor, states: Tensor, news: Tensor, erased: Tensor, k_out: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Derivatives of ``scan`` in its four inputs, from those in its two outputs."""
    totals, carries = torch.empty_like(news), torch.empty_like(states)
    carry = torch.zeros_like(states[0])
    for i in reversed(range(len(states))):
        carries[i] = carry
        torch.baddbmm(d_news[i], k_out[i].mT, carry, out=totals[i])
        carry = torch.baddbmm(torch.addcmul(d_states[i], carry, kept[i]), erased[i].mT, totals[i], alpha=-1)
    d_kept = (carries * states).sum((-1, -2), keepdim=True)
    return totals, -(totals @ states.mT), carries @ news.mT, d_kept


@scan_backward.register_fake
def _(
    d_states: Tensor, d_news: Tensor, states: Tensor, news: Tensor, erased: Tensor, k_out: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    contiguous = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (news, erased, k_out, kept))
    return tuple(contiguous)  # type: ignore[return-value]


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[1:])


def _derive(ctx: torch.autograd.function.FunctionCtx, d_states: Tensor, d_news: Tensor) -> tuple[Tensor, ...]:
    return scan_backward(d_states.contiguous(), d_news.contiguous(), *ctx.saved_tensors)


scan.register_autograd(_derive, setup_context=_keep)


@library.custom_op("small_model::invert_unit_lower", mutates_args=())
def invert_unit_lower(a: Tensor) -> Tensor:
    """Inverse of ``I + a`` for strictly lower triangular ``a`` [..., C, C]; what stands elsewhere is not read.

    By forward substitution in the type of ``a``: products of powers would lose every digit in TF32 where a text repeats
    one token.
    """
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
    return torch.linalg.solve_triangular(a, eye, upper=False, unitriangular=True).contiguous()


@invert_unit_lower.register_fake
def _(a: Tensor) -> Tensor:
    return a.new_empty(a.shape)


def _keep_inverse(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _derive_inverse(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
    [inverse] = ctx.saved_tensors
    return -(inverse.mT @ gradient @ inverse.mT).tril(-1)


invert_unit_lower.register_autograd(_derive_inverse, setup_context=_keep_inverse)
