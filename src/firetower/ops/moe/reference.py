"""The MoE block token by token, expert by expert, as one would write it on a board; in fp64 it is the tests' truth."""

from __future__ import annotations

import torch
from torch import Tensor

from firetower.ops.moe.weights import MoeWeights, RoutingRule


def route_reference(router_logits: Tensor, selection_bias: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """Weights and ids of each token's experts.

    Args:
        router_logits: [T, E], fp32 or fp64.
        selection_bias: [E] or None.
        rule: the routing rule.

    Returns:
        (weights [T, K] in the type of the logits, ids int32 [T, K]).
    """
    rows = [_route_token(row, selection_bias, rule) for row in router_logits]
    top_k = rule.top_k
    weights = torch.stack([w for w, _ in rows]) if rows else router_logits.new_empty(0, top_k)
    ids = torch.tensor([i for _, i in rows], dtype=torch.int32, device=router_logits.device).reshape(-1, top_k)
    return weights, ids


def _route_token(logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> tuple[Tensor, list[int]]:
    choice = logits if bias is None else torch.sigmoid(logits) + bias.to(logits.dtype)
    ids = sorted(range(len(logits)), key=lambda e: (-_no_nan(float(choice[e])), e))[: rule.top_k]
    if bool(torch.isnan(choice).any()):
        return logits.new_full((rule.top_k,), float("nan")), ids
    if rule.scoring == "softmax":
        is_empty = float(logits.max()) == float("-inf")
        weights = torch.softmax(torch.zeros_like(logits) if is_empty else logits, -1)[ids]
        weights = weights / weights.sum() if rule.renormalise else weights
    elif rule.renormalise:
        # sigmoid(a) / (sigmoid(a) + sigmoid(b)), written so that no sum can underflow to 0
        logs = torch.nn.functional.logsigmoid(logits[ids])
        weights = torch.softmax(torch.zeros_like(logs) if float(logs.max()) == float("-inf") else logs, -1)
    else:
        weights = torch.sigmoid(logits[ids])
    return weights * rule.routed_scaling_factor, ids


def _no_nan(value: float) -> float:
    return float("-inf") if value != value else value


def moe_reference(
    hidden_states: Tensor, weights: MoeWeights, rule: RoutingRule, row_ids: Tensor | None = None
) -> Tensor:
    """The whole block; everything is computed in the type of ``hidden_states``.

    Args:
        hidden_states: [T, H].
        weights: of any type; cast.
        rule: the routing rule.
        row_ids: [T], negative for a pad token, whose output is 0.

    Returns:
        [T, H].
    """
    dtype = hidden_states.dtype
    topk_weights, topk_ids = route_reference(hidden_states @ weights.router.to(dtype).T, weights.selection_bias, rule)
    return experts_reference(hidden_states, topk_weights, topk_ids, weights, row_ids)


def experts_reference(
    hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, weights: MoeWeights, row_ids: Tensor | None = None
) -> Tensor:
    """The experts and their weighted sum for a given routing; arguments as `firetower.ops.moe.experts`."""
    out = torch.zeros_like(hidden_states)
    for t, x in enumerate(hidden_states):
        if row_ids is not None and int(row_ids[t]) < 0:
            continue
        for weight, expert in zip(topk_weights[t], topk_ids[t].tolist(), strict=True):
            out[t] += weight.to(x.dtype) * _mlp(x, weights.gate_up_proj[expert], weights.down_proj[expert])
        if weights.shared is not None:
            shared = _mlp(x, weights.shared.gate_up_proj, weights.shared.down_proj)
            gate = weights.shared.gate
            out[t] += shared if gate is None else torch.sigmoid(gate.to(x.dtype).reshape(-1) @ x) * shared
    return out


def _mlp(x: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> Tensor:
    gate, up = (gate_up_proj.to(x.dtype) @ x).chunk(2)
    return down_proj.to(x.dtype) @ (torch.nn.functional.silu(gate) * up)
