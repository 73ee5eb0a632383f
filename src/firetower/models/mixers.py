"""Token mixers of both kinds, each for windows and for prefill: Gated DeltaNet, and gated attention.

Legend: R rows (N sequences times W tokens, or T tokens of a prefill), H hidden, C channels of the convolution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from firetower.models.batch import PrefillBatch, WindowBatch
from firetower.models.config import HybridConfig
from firetower.models.gates import gates
from firetower.models.signals import Watch
from firetower.models.state import ModelState
from firetower.models.weights import AttentionWeights, DeltaNetWeights
from firetower.ops import attention
from firetower.ops.attention import PagedKV, gather_kv, write_kv
from firetower.ops.causal_conv1d import causal_conv1d, causal_conv1d_window
from firetower.ops.gated_delta_rule import (
    WindowState,
    gated_delta_rule,
    gated_delta_rule_window,
    load_state,
)
from firetower.ops.linear import linear
from firetower.ops.rms_norm import rms_norm
from firetower.ops.rope import RopeTable, rope

Places = Mapping[str, int]
"""Index of each stage of a layer in the model's signals."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowSlots:
    """Where a window's convolution states lie, and whose row words its states have; made once for all layers.

    Attributes:
        conv_in, conv_out: int32 [N], rows of the convolution state that are read and written; negative for a pad.
        row_ids: int32 [N], row word of each sequence.
    """

    conv_in: Tensor
    conv_out: Tensor
    row_ids: Tensor


def window_slots(batch: WindowBatch, state: ModelState) -> WindowSlots:
    """The rows that a window reads and writes; no host sync."""
    slots = batch.state_slots
    side = state.side.index_select(0, slots.clamp_min(0))
    conv_in = torch.where(slots < 0, -1, 2 * slots + side)
    row_ids = batch.row_ids.view(-1, batch.window)[:, 0].contiguous()
    # the other half of a slot differs in the lowest bit; of -1 it is negative too
    return WindowSlots(conv_in=conv_in, conv_out=conv_in ^ 1, row_ids=row_ids)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillSlots:
    """The same for a prefill.

    Attributes:
        conv_rows: int32 [S], rows of the convolution state, read and written.
        has_prefix: bool [S] on the device, or None where no sequence has one.
        all_prefix: whether every sequence has one.
        row_ids: int32 [S], row word of each sequence.
        cu_seqlens: int32 [S + 1], or None for one sequence without pads.
    """

    conv_rows: Tensor
    has_prefix: Tensor | None
    all_prefix: bool
    row_ids: Tensor
    cu_seqlens: Tensor | None


def prefill_slots(batch: PrefillBatch, state: ModelState) -> PrefillSlots:
    """The rows that a prefill reads and writes."""
    slots, device = batch.state_slots, batch.state_slots.device
    has = [n > 0 for n in batch.prefix_lens]
    is_one = batch.num_sequences == 1 and batch.cu_seqlens[-1] == batch.num_tokens
    return PrefillSlots(
        conv_rows=2 * slots + state.side.index_select(0, slots),
        has_prefix=torch.tensor(has, device=device) if any(has) else None,
        all_prefix=all(has),
        row_ids=batch.row_ids.index_select(0, batch.cu_seqlens_device[:-1]),
        cu_seqlens=None if is_one else batch.cu_seqlens_device,
    )


def _split(conv: Tensor, config: HybridConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys, values [..., heads, dim] as views of the convolution's answer [..., C]."""
    lead, keys = conv.shape[:-1], config.key_dim
    q = conv[..., :keys].view(*lead, config.num_k_heads, config.head_k_dim)
    k = conv[..., keys : 2 * keys].view(*lead, config.num_k_heads, config.head_k_dim)
    v = conv[..., 2 * keys :].view(*lead, config.num_v_heads, config.head_v_dim)
    return q, k, v


def _gates(proj: Tensor, w: DeltaNetWeights, config: HybridConfig, watch: Watch, at: Places) -> tuple[Tensor, Tensor]:
    first, heads = config.conv_dim + config.value_dim, config.num_v_heads
    mark = watch.mark_rows(at["decay"], watch.row_ids, neg_inf_legal=True)
    g, beta = gates(proj[:, first : first + heads], proj[:, first + heads :], w.decay_rate, w.dt_bias, mark=mark)
    watch.keep(at["decay"], g)
    return g, beta


def _gated_norm(out: Tensor, proj: Tensor, w: DeltaNetWeights, config: HybridConfig) -> Tensor:
    """Norm of each value head, times SiLU of z: [R, value_dim]."""
    shape = (proj.shape[0], config.num_v_heads, config.head_v_dim)
    z = proj[:, config.conv_dim : config.conv_dim + config.value_dim].view(shape)
    return rms_norm(out.view(shape), w.norm, eps=config.rms_norm_eps, gate=z).view(shape[0], -1)


def delta_window(
    x: Tensor,
    w: DeltaNetWeights,
    config: HybridConfig,
    batch: WindowBatch,
    slots: WindowSlots,
    recurrent: WindowState,
    conv_state: Tensor,
    watch: Watch,
    at: Places,
) -> Tensor:
    """Gated DeltaNet over a window: [R, H] normed to [R, H]; writes the halves of its states that are not clean."""
    lead = (batch.num_sequences, batch.window)
    proj = linear(x, w.in_proj, mark=watch.mark(at["projection"]))
    watch.keep(at["projection"], proj)
    conv = causal_conv1d_window(
        proj[:, : config.conv_dim].view(*lead, -1), w.conv, conv_state=conv_state, state_ids=slots.conv_in,
        state_ids_out=slots.conv_out, num_accepted=batch.num_accepted, mark=watch.mark(at["conv"]),
        mark_state=watch.mark_rows(at["conv_state"], slots.row_ids),
    )  # fmt: skip
    watch.keep(at["conv"], conv.view(x.shape[0], -1))
    g, beta = _gates(proj, w, config, watch, at)
    q, k, v = _split(conv, config)
    out = gated_delta_rule_window(
        q, k, v, g.view(*lead, -1), beta.view(*lead, -1), recurrent, state_slots=batch.state_slots,
        num_accepted=batch.num_accepted, mark=watch.mark(at["recurrence"]),
        state_mark=watch.mark_rows(at["recurrent_state"], slots.row_ids),
    )  # fmt: skip
    watch.keep(at["recurrence"], out.view(x.shape[0], -1))
    y = linear(_gated_norm(out, proj, w, config), w.out_proj, mark=watch.mark(at["attention"]))
    watch.keep(at["attention"], y)
    return y


def delta_prefill(
    x: Tensor,
    w: DeltaNetWeights,
    config: HybridConfig,
    batch: PrefillBatch,
    slots: PrefillSlots,
    recurrent: WindowState,
    conv_state: Tensor,
    watch: Watch,
    at: Places,
) -> Tensor:
    """Gated DeltaNet over prompts: [R, H] normed to [R, H]; leaves the states after the last tokens in the slots."""
    proj = F.linear(x, w.in_proj)
    watch.keep(at["projection"], proj)
    conv = causal_conv1d(
        proj[:, : config.conv_dim], w.conv, cu_seqlens=batch.cu_seqlens_device, conv_state=conv_state,
        state_ids=slots.conv_rows, has_initial_state=slots.has_prefix, mark=watch.mark(at["conv"]),
        mark_state=watch.mark_rows(at["conv_state"], slots.row_ids),
    )  # fmt: skip
    watch.keep(at["conv"], conv)
    g, beta = _gates(proj, w, config, watch, at)
    q, k, v = (part[None] for part in _split(conv, config))
    out, final = gated_delta_rule(
        q, k, v, g[None], beta[None], initial_state=_initial(recurrent, batch, slots), cu_seqlens=slots.cu_seqlens,
        mark=watch.mark(at["recurrence"]), state_mark=watch.mark_rows(at["recurrent_state"], slots.row_ids),
    )  # fmt: skip
    load_state(recurrent, batch.state_slots, final)
    watch.keep(at["recurrence"], out.view(x.shape[0], -1))
    y = F.linear(_gated_norm(out, proj, w, config), w.out_proj)
    watch.keep(at["attention"], y)
    return y


def _initial(recurrent: WindowState, batch: PrefillBatch, slots: PrefillSlots) -> Tensor | None:
    """States that sequences start from: [S, Hv, Dk, Dv]; a sequence without a prefix does not read its slot."""
    if slots.has_prefix is None:
        return None
    index = batch.state_slots.long()
    states = recurrent.state[recurrent.side[index].long(), index]
    return states if slots.all_prefix else torch.where(slots.has_prefix[:, None, None, None], states, 0.0)


def _heads(
    proj: Tensor, w: AttentionWeights, config: HybridConfig, positions: Tensor, table: RopeTable
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys, normed and turned by their positions, values and output gates: [R, heads, head_dim] each."""
    rows, dim = proj.shape[0], config.head_dim
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    both = proj[:, : 2 * queries].view(rows, config.num_heads, 2 * dim)
    k = proj[:, 2 * queries : 2 * queries + keys].view(rows, config.num_kv_heads, dim)
    v = proj[:, 2 * queries + keys :].view(rows, config.num_kv_heads, dim)
    eps, centred = config.rms_norm_eps, config.is_zero_centred
    q = rms_norm(both[..., :dim], w.q_norm, eps=eps, is_zero_centred=centred)
    k = rms_norm(k, w.k_norm, eps=eps, is_zero_centred=centred)
    rope(q, k, positions, table, q_out=q, k_out=k)
    return q, k, v, both[..., dim:]


def attention_window(
    x: Tensor,
    w: AttentionWeights,
    config: HybridConfig,
    batch: WindowBatch,
    kv: PagedKV,
    table: RopeTable,
    watch: Watch,
    at: Places,
) -> Tensor:
    """Gated attention over a window: [R, H] normed to [R, H]; writes keys and values into their pages."""
    lead = (batch.num_sequences, batch.window)
    proj = linear(x, w.qkv_proj, mark=watch.mark(at["projection"]))
    watch.keep(at["projection"], proj)
    heads = _heads(proj, w, config, batch.positions.view(-1), table)
    q, k, v, gate = (part.view(*lead, *part.shape[1:]) for part in heads)
    write_kv(k, v, kv, batch.slot_mapping, mark=watch.mark(at["kv"]))
    context = attention.window(
        q, kv, batch.block_table, batch.seq_lens, slot_mapping=batch.slot_mapping, gate=gate,
        max_seq_len=batch.max_seq_len, mark=watch.mark(at["context"]),
    )  # fmt: skip
    rows = context.view(x.shape[0], -1)
    watch.keep(at["context"], rows)
    y = linear(rows, w.o_proj, mark=watch.mark(at["attention"]))
    watch.keep(at["attention"], y)
    return y


def attention_prefill(
    x: Tensor,
    w: AttentionWeights,
    config: HybridConfig,
    batch: PrefillBatch,
    kv: PagedKV,
    table: RopeTable,
    watch: Watch,
    at: Places,
) -> Tensor:
    """Gated attention over prompts: [R, H] normed to [R, H]; writes keys and values into their pages."""
    proj = F.linear(x, w.qkv_proj)
    watch.keep(at["projection"], proj)
    q, k, v, gate = _heads(proj, w, config, batch.positions, table)
    write_kv(k, v, kv, batch.slot_mapping, mark=watch.mark(at["kv"]))
    bounds = None
    if kv.is_quantised or any(batch.prefix_lens):
        # from the pages, own keys too: with 8 bits a prompt then reads the same whether it comes whole or in parts
        lengths = [
            prefix + end - begin
            for prefix, begin, end in zip(batch.prefix_lens, batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
        ]
        k, v, bounds = gather_kv(kv, batch.block_table, lengths, q.dtype)
    context = attention.prefill(q, k, v, batch.cu_seqlens, bounds, gate=gate, mark=watch.mark(at["context"]))
    rows = context.view(x.shape[0], -1)
    watch.keep(at["context"], rows)
    y = F.linear(rows, w.o_proj)
    watch.keep(at["attention"], y)
    return y
