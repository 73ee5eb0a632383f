"""Sparse mixture of experts: route, plan on the device, two grouped products, weighted sum.

`moe` is the whole block, `experts` the part after a routing that the caller has; `logits`, `route`, `plan`, `gate_up`,
`down` and `combine` are its steps. The phase picks the algorithm: ``window`` streams each expert's weights past blocks
of few rows, ``prefill`` multiplies large blocks. In a window a row's bits depend on that row alone.

Shapes: T tokens, H hidden, E experts, K chosen a token, S slots a token (K, and 1 with a shared expert), I and Is the
routed and the shared expert's width, W the larger of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from firetower.core.errors import ConfigError
from firetower.ops.moe import checks
from firetower.ops.moe.planning import (
    Plan,
    PlanAudit,
    audit,
    capacity_in_blocks,
    count_writes,
    new_plan,
    row_map,
)
from firetower.ops.moe.weights import MoeMarks, MoeWeights, RoutingRule, SharedExpert, mark_for
from firetower.ops.registry import REGISTRY, always, kernel, needs_triton, target_of
from firetower.sensors.marks import Mark

__all__ = [
    "MoeMarks",
    "MoeWeights",
    "Plan",
    "PlanAudit",
    "RoutingRule",
    "SharedExpert",
    "audit",
    "block_rows",
    "capacity_in_blocks",
    "combine",
    "count_writes",
    "down",
    "experts",
    "gate_up",
    "logits",
    "moe",
    "plan",
    "route",
    "row_map",
]

_PARTS = {
    "logits": "kernels_route",
    "router": "kernels_route",
    "plan": "kernels_plan",
    "route_plan": "kernels_route",
    "gate_up": "kernels",
    "down": "kernels",
    "combine": "kernels_combine",
}

for _part, _module in _PARTS.items():
    REGISTRY.register(
        f"moe.{_part}",
        "triton",
        f"firetower.ops.moe.{_module}:{_part}",
        supports=needs_triton,
        devices=("cuda",),
    )
    REGISTRY.register(f"moe.{_part}", "torch", f"firetower.ops.moe.torch_path:{_part}", supports=always)

WINDOW_BLOCK, PREFILL_BLOCK, LARGE_PREFILL_BLOCK = 16, 64, 128
"""Rows of a block where a Triton kernel computes it: the least that a matrix instruction takes; one warp group's; two
groups', where every expert has many rows."""

FEW_TOKENS = WINDOW_BLOCK
"""Tokens of a window up to which one kernel routes and plans; the answers have the same bits."""

CPU_WINDOW_BLOCK, CPU_PREFILL_BLOCK = 1, 32
"""The same on the CPU: a matrix-vector product streams a weight once at memory speed; 32 rows share a stream."""


def block_rows(hidden_states: Tensor, phase: str, num_pairs: int, num_experts: int) -> int:
    """Rows of a block for a phase on the device of ``hidden_states``.

    Args:
        hidden_states: of which device and type the block is.
        phase: ``window`` (whatever the number of rows) or ``prefill``.
        num_pairs: tokens times top_k.
        num_experts: E.

    Raises:
        ConfigError: an unknown phase.
    """
    checks.check_phase(phase)
    target = target_of(hidden_states.device.type, hidden_states.dtype)
    backends = [REGISTRY.choice(f"moe.{part}", target).backend for part in ("gate_up", "down")]
    if hidden_states.is_cpu and backends == ["torch", "torch"]:
        return CPU_WINDOW_BLOCK if phase == "window" else CPU_PREFILL_BLOCK
    if phase == "window":
        return WINDOW_BLOCK
    # the large block's tiles take 192 KiB of shared memory, which data-centre devices since Hopper have
    fits = target.capability is None or target.capability[0] in (9, 10)
    return LARGE_PREFILL_BLOCK if fits and num_pairs >= PREFILL_BLOCK * num_experts else PREFILL_BLOCK


def logits(
    hidden_states: Tensor,
    router: Tensor,
    shared_gate: Tensor | None = None,
    *,
    phase: str = "window",
    mark: Mark | None = None,
    out: Tensor | None = None,
    ahead: Sequence[Tensor] = (),
) -> Tensor:
    """Router logits, and the shared expert's gate in one column more, in one pass over ``hidden_states``.

    Args:
        hidden_states: [T, H], contiguous.
        router: [E, H], type of ``hidden_states``.
        shared_gate: [1, H] or [H], or None.
        phase: ``window`` or ``prefill``.
        mark: where bad values are marked.
        out: fp32 [T, E (+ 1)] to write to, contiguous.
        ahead: two tensors that kernels after this one will read, asked into the cache of a device that idles; a hint.

    Returns:
        fp32 [T, E], or [T, E + 1] with a shared gate.

    Raises:
        ConfigError: shapes, types or a phase that do not fit.

    Numerics: fp32 accumulation (fp64 for fp64 inputs), not rounded to the input's type. A NaN in a row of
    ``hidden_states`` makes that row NaN, one in a row of ``router`` that column.
    """
    checks.check_phase(phase)
    checks.check_rows("hidden_states", hidden_states, (None, None))
    hidden = hidden_states.shape[1]
    checks.check_like("router", router, hidden_states, (None, hidden))
    gate = None if shared_gate is None else shared_gate.reshape(1, -1)
    if gate is not None:
        checks.check_like("shared_gate", gate, hidden_states, (1, hidden))
    columns = router.shape[0] + (gate is not None)
    out = _out("out", out, hidden_states, (hidden_states.shape[0], columns), _accumulator(hidden_states))
    block_m = block_rows(hidden_states, phase, 0, 1) if phase == "window" else _prefill_rows(hidden_states)
    kernel("moe.logits", hidden_states)(hidden_states, router, gate, out=out, block_m=block_m, mark=mark, ahead=ahead)
    return out


def route(
    router_logits: Tensor,
    rule: RoutingRule,
    *,
    selection_bias: Tensor | None = None,
    mark: Mark | None = None,
    weights_out: Tensor | None = None,
    ids_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Each token's experts and their weights.

    Args:
        router_logits: [T, E] of any float type; the last dimension contiguous.
        rule: scoring, top_k, renormalisation, factor.
        selection_bias: fp32 [E], added to the sigmoid scores for the choice alone, or None.
        mark: where bad weights are marked.
        weights_out: fp32 [T, K] to write to (fp64 for fp64 logits). ids_out: int32 [T, K].

    Returns:
        (topk_weights fp32 [T, K], topk_ids int32 [T, K]), the best first, of equals the lowest index first.

    Raises:
        ConfigError: shapes that do not fit, more experts a token than there are, a bias with softmax scoring.

    Numerics: fp32. Renormalised weights are computed from logarithms, so that no sum of scores can underflow to 0:
    logits of -110 give the same weights as logits of -10. Where every chosen score is exactly 0 (logits of -Inf) the
    chosen share equally: 1 / K, or 1 / E each for a softmax that is not renormalised. A NaN in a row's logits, or +Inf
    under softmax, makes that row's weights NaN; its ids stay valid and distinct, and no other row changes.
    Source: Qwen3.5-MoE and GLM-4 MoE in transformers.
    """
    checks.check_routing(router_logits, rule, selection_bias)
    num_tokens = router_logits.shape[0]
    shape = (num_tokens, rule.top_k)
    weights = _out("weights_out", weights_out, router_logits, shape, _accumulator(router_logits))
    ids = _out("ids_out", ids_out, router_logits, shape, torch.int32)
    kernel("moe.router", router_logits)(
        router_logits, selection_bias, **_rule_arguments(rule), weights=weights, ids=ids, mark=mark
    )
    return weights, ids


def plan(
    topk_ids: Tensor,
    num_experts: int,
    *,
    block_m: int,
    has_shared: bool = False,
    row_ids: Tensor | None = None,
    into: Plan | None = None,
) -> Plan:
    """Sort (token, slot) pairs by expert into blocks of one expert, on the device and without a host sync.

    Args:
        topk_ids: int32 or int64 [T, K]; an id outside 0 .. E - 1 is routed nowhere and later adds nothing.
        num_experts: E.
        block_m: rows of a block, from `block_rows`.
        has_shared: whether every token gets a further slot for the shared expert.
        row_ids: int32 or int64 [T], row word of each token; a negative one is a pad, which is not planned at all.
        into: a plan made for the same numbers, to fill again.

    Returns:
        The plan; pairs of an expert in ascending order, experts in ascending order, the shared one last.

    Raises:
        ConfigError: ids or row ids that are no integers, or of another shape; ``into`` made for other numbers.
    """
    checks.check_shape("topk_ids", topk_ids, (None, None))
    checks.check_top_k(topk_ids.shape[1], num_experts)
    checks.check_row_ids(row_ids, topk_ids.shape[0])
    if topk_ids.dtype not in checks.INTEGERS or not topk_ids.is_contiguous():
        raise ConfigError(f"topk_ids: {topk_ids.dtype}: must be contiguous int32 or int64; cast it")
    if block_m < 1 or block_m & (block_m - 1):
        raise ConfigError(f"block_m={block_m}: must be a power of two; take it from block_rows()")
    if into is None:
        has_rows = row_ids is not None
        into = new_plan(topk_ids, num_experts, has_shared=has_shared, block_m=block_m, has_rows=has_rows)
    checks.check_plan(into, topk_ids, num_experts, block_m, has_shared=has_shared, has_rows=row_ids is not None)
    # chosen by device alone: ids have no float type to choose by
    target = target_of(topk_ids.device.type, torch.float32)
    REGISTRY.choice("moe.plan", target).run(topk_ids, row_ids, into=into)
    return into


def gate_up(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    plan: Plan,
    *,
    shared: SharedExpert | None = None,
    marks: MoeMarks | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``silu(x @ gate) * (x @ up)`` of every planned row, each written to its pair.

    Args:
        hidden_states: [T, H], contiguous.
        gate_up_proj: [E, 2 I, H].
        plan: of the routing.
        shared: the shared expert, where the plan has one.
        marks: ``gate``, ``up`` (fp32 accumulators) and ``swiglu`` (as stored) are used.
        out: [T * S, W] to write to.

    Returns:
        [T * S, W] in the type of ``hidden_states``; rows of pad tokens are not written. Where I and Is differ, the
        narrower expert's further columns are 0.

    Raises:
        ConfigError: shapes or types that do not fit.

    Numerics: fp32 accumulation, SwiGLU in fp32, rounded once to the input's type: in fp16 a product over 65504 is
    stored as Inf and marked at ``swiglu``. A NaN in a token makes that token's rows NaN, no others.
    """
    checks.check_rows("hidden_states", hidden_states, (plan.num_tokens, None))
    checks.check_like("gate_up_proj", gate_up_proj, hidden_states, (plan.num_experts, None, hidden_states.shape[1]))
    _check_plan_shared(plan, shared, hidden_states)
    width = max(gate_up_proj.shape[1], 0 if shared is None else shared.gate_up_proj.shape[0]) // 2
    out = _out("out", out, hidden_states, (plan.num_pairs, width), hidden_states.dtype)
    marks = marks or MoeMarks()
    kernel("moe.gate_up", hidden_states)(
        hidden_states,
        gate_up_proj,
        None if shared is None else shared.gate_up_proj,
        plan,
        out=out,
        gate_mark=mark_for(marks.gate, plan.row_ids),
        up_mark=mark_for(marks.up, plan.row_ids),
        mark=mark_for(marks.swiglu, plan.row_ids),
    )
    return out


def down(
    act: Tensor,
    down_proj: Tensor,
    plan: Plan,
    *,
    shared: SharedExpert | None = None,
    marks: MoeMarks | None = None,
    out: Tensor | None = None,
    is_chained: bool = False,
) -> Tensor:
    """``act @ down`` of every planned row, each written to its pair.

    Args:
        act: [T * S, W] from `gate_up`.
        down_proj: [E, H, I].
        plan: of the routing.
        shared: the shared expert, where the plan has one.
        marks: ``down`` is used.
        out: [T * S, H] to write to.
        is_chained: whether the kernel just before this one is `gate_up`, so that plan and weights were complete before
            it: they are then read while it still runs.

    Returns:
        [T * S, H] in the type of ``act``; rows of pad tokens are not written.

    Raises:
        ConfigError: shapes or types that do not fit.

    Numerics: fp32 accumulation, rounded once. A NaN in a row makes that row NaN, no others.
    """
    checks.check_rows("act", act, (plan.num_pairs, None))
    checks.check_like("down_proj", down_proj, act, (plan.num_experts, None, None))
    if (shared is not None) != plan.has_shared:
        raise ConfigError(f"shared: plan.has_shared={plan.has_shared}: pass the shared expert to both or to neither")
    out = _out("out", out, act, (plan.num_pairs, down_proj.shape[1]), act.dtype)
    kernel("moe.down", act)(
        act,
        down_proj,
        None if shared is None else shared.down_proj,
        plan,
        out=out,
        mark=mark_for((marks or MoeMarks()).down, plan.row_ids),
        is_chained=is_chained,
    )
    return out


def combine(
    down_out: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    plan: Plan,
    *,
    shared_logits: Tensor | None = None,
    row_ids: Tensor | None = None,
    act: Tensor | None = None,
    marks: MoeMarks | None = None,
    out: Tensor | None = None,
    is_chained: bool = False,
) -> Tensor:
    """Weighted sum over each token's experts, slot 0 first, then the shared expert's output times its sigmoid gate.

    Args:
        down_out: [T * S, H] from `down`.
        topk_weights: fp32 [T, K]. topk_ids: [T, K], as planned.
        plan: of the routing.
        shared_logits: [T], the shared gate before its sigmoid, any stride; None where the shared expert has no gate.
        row_ids: [T] as given to `plan`; a pad token's output is 0.
        act: [T * S, W] from `gate_up`, where ``router``, ``swiglu`` and ``down`` are to be marked here as well.
        marks: ``routed`` (the fp32 sum over routed experts) and ``output`` (as stored) are used; with ``act`` also
            ``router``, ``swiglu`` and ``down``: what these check is read again where the sum is not finite, and a
            clean step pays nothing for them.
        out: [T, H] to write to.
        is_chained: whether the kernel just before this one is `down`, so that weights, ids, gates and row ids were
            complete before it.

    Returns:
        [T, H] in the type of ``down_out``.

    Raises:
        ConfigError: shapes that do not fit.

    Numerics: fp32 sum in a fixed order, rounded once. A NaN weight, or a NaN in an expert's row, makes that token NaN,
    also where the weight is 0.
    """
    checks.check_rows("down_out", down_out, (plan.num_pairs, None))
    checks.check_rows("topk_weights", topk_weights, (plan.num_tokens, plan.top_k))
    checks.check_shape("topk_ids", topk_ids, (plan.num_tokens, plan.top_k))
    checks.check_row_ids(row_ids, plan.num_tokens)
    if shared_logits is not None:
        checks.check_shape("shared_logits", shared_logits, (plan.num_tokens,))
    if act is not None:
        checks.check_like("act", act, down_out, (plan.num_pairs, None))
    out = _out("out", out, down_out, (plan.num_tokens, down_out.shape[1]), down_out.dtype)
    marks = marks or MoeMarks()
    late = (None, None, None) if act is None else (marks.router, marks.swiglu, marks.down)
    kernel("moe.combine", down_out)(
        down_out,
        topk_weights,
        topk_ids,
        shared_logits,
        row_ids,
        plan,
        out=out,
        act=act,
        late_marks=tuple(mark_for(mark, row_ids) for mark in late),
        routed_mark=mark_for(marks.routed, row_ids),
        mark=mark_for(marks.output, row_ids),
        is_chained=is_chained,
    )
    return out


def experts(
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    weights: MoeWeights,
    *,
    phase: str = "window",
    shared_logits: Tensor | None = None,
    row_ids: Tensor | None = None,
    marks: MoeMarks | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The block after a routing: plan, gate_up, down, combine.

    Args:
        hidden_states: [T, H], contiguous.
        topk_weights: fp32 [T, K]. topk_ids: int32 or int64 [T, K].
        weights: of the block; the router is not used.
        phase: ``window`` (row-invariant) or ``prefill``.
        shared_logits: [T], the shared gate before its sigmoid, where there is one.
        row_ids: [T], row word of each token, negative for a pad: not routed, its output is 0.
        marks: where each stage is marked; ``logits`` and ``router`` are not used, whose stages came before.
        out: [T, H] to write to.

    Returns:
        [T, H] in the type of ``hidden_states``.

    Raises:
        ConfigError: shapes, types or a phase that do not fit.

    Numerics: those of `gate_up`, `down` and `combine`.
    """
    _check_block(hidden_states, topk_ids, weights, shared_logits)
    layout = _plan(hidden_states, topk_ids, weights, phase, row_ids)
    marks = dataclasses.replace(marks or MoeMarks(), router=None)
    return _after_plan(hidden_states, topk_weights, topk_ids, weights, layout, shared_logits, row_ids, marks, out)


def _plan(hidden_states: Tensor, topk_ids: Tensor, weights: MoeWeights, phase: str, row_ids: Tensor | None) -> Plan:
    num_experts = weights.gate_up_proj.shape[0]
    block_m = block_rows(hidden_states, phase, topk_ids.numel(), num_experts)
    return plan(topk_ids, num_experts, block_m=block_m, has_shared=weights.shared is not None, row_ids=row_ids)


def _check_block(hidden_states: Tensor, topk_ids: Tensor, weights: MoeWeights, shared_logits: Tensor | None) -> None:
    checks.check_rows("hidden_states", hidden_states, (None, None))
    checks.check_weights(weights, hidden_states)
    checks.check_shape("topk_ids", topk_ids, (hidden_states.shape[0], None))
    if weights.shared is not None and (weights.shared.gate is None) != (shared_logits is None):
        raise ConfigError("shared_logits: must be given exactly where the shared expert has a gate; see logits()")


def _after_plan(
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    weights: MoeWeights,
    layout: Plan,
    shared_logits: Tensor | None,
    row_ids: Tensor | None,
    marks: MoeMarks,
    out: Tensor | None,
) -> Tensor:
    """The two products and the sum, each chained to the one before; the sum marks what they stored."""
    early = MoeMarks(gate=marks.gate, up=marks.up)
    act = gate_up(hidden_states, weights.gate_up_proj, layout, shared=weights.shared, marks=early)
    rows = down(act, weights.down_proj, layout, shared=weights.shared, is_chained=True)
    return combine(
        rows,
        topk_weights,
        topk_ids,
        layout,
        shared_logits=shared_logits,
        row_ids=row_ids,
        act=act,
        marks=marks,
        out=out,
        is_chained=True,
    )


def moe(
    hidden_states: Tensor,
    weights: MoeWeights,
    rule: RoutingRule,
    *,
    phase: str = "window",
    row_ids: Tensor | None = None,
    marks: MoeMarks | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The whole sparse block, shared expert included.

    Args:
        hidden_states: [T, H], contiguous.
        weights: of the block, types and device of ``hidden_states`` (``selection_bias`` any float).
        rule: how scores become weights.
        phase: ``window``: a row's bits depend on that row alone. ``prefill``: for many rows.
        row_ids: [T], row word of each token, negative for a pad: not routed, its output is 0.
        marks: where each stage is marked; their ``row_ids`` are set here.
        out: [T, H] to write to.

    Returns:
        [T, H] in the type of ``hidden_states``.

    Raises:
        ConfigError: shapes, types or a phase that do not fit.

    Numerics: those of the steps. A NaN in a token makes that token's output NaN and touches no other.
    Source: Qwen3_5MoeSparseMoeBlock of transformers 5.
    """
    marks = marks or MoeMarks()
    num_experts, shared = weights.router.shape[0], weights.shared
    gate = None if shared is None else shared.gate
    all_logits = logits(
        hidden_states,
        weights.router,
        gate,
        phase=phase,
        mark=mark_for(marks.logits, row_ids),
        ahead=() if shared is None else (shared.gate_up_proj, shared.down_proj),
    )
    router_logits, bias = all_logits[:, :num_experts], weights.selection_bias
    shared_logits = None if gate is None else all_logits[:, num_experts]
    if phase == "window" and _routes_and_plans_in_one(router_logits):
        topk_weights, topk_ids, layout = _route_plan(hidden_states, router_logits, weights, rule, row_ids)
        _check_block(hidden_states, topk_ids, weights, shared_logits)
    else:
        topk_weights, topk_ids = route(router_logits, rule, selection_bias=bias)
        _check_block(hidden_states, topk_ids, weights, shared_logits)
        layout = _plan(hidden_states, topk_ids, weights, phase, row_ids)
    return _after_plan(hidden_states, topk_weights, topk_ids, weights, layout, shared_logits, row_ids, marks, out)


def _routes_and_plans_in_one(router_logits: Tensor) -> bool:
    """Whether few tokens have one kernel for both; where either is pinned or missing, each runs by itself."""
    if not 0 < router_logits.shape[0] <= FEW_TOKENS:
        return False
    target = target_of(router_logits.device.type, router_logits.dtype)
    # the plan is chosen by device alone, as ids have no float type
    by_device = target_of(router_logits.device.type, torch.float32)
    chosen = [REGISTRY.choice(f"moe.{part}", target).backend for part in ("route_plan", "router")]
    return {*chosen, REGISTRY.choice("moe.plan", by_device).backend} == {"triton"}


def _route_plan(
    hidden_states: Tensor,
    router_logits: Tensor,
    weights: MoeWeights,
    rule: RoutingRule,
    row_ids: Tensor | None,
) -> tuple[Tensor, Tensor, Plan]:
    """`route` and `plan` of few tokens."""
    checks.check_routing(router_logits, rule, weights.selection_bias)
    num_tokens, num_experts = router_logits.shape
    checks.check_row_ids(row_ids, num_tokens)
    shape = (num_tokens, rule.top_k)
    topk_weights = _out("weights", None, router_logits, shape, _accumulator(router_logits))
    topk_ids = _out("ids", None, router_logits, shape, torch.int32)
    layout = new_plan(
        topk_ids,
        num_experts,
        has_shared=weights.shared is not None,
        block_m=block_rows(hidden_states, "window", topk_ids.numel(), num_experts),
        has_rows=row_ids is not None,
    )
    kernel("moe.route_plan", router_logits)(
        router_logits,
        weights.selection_bias,
        row_ids,
        **_rule_arguments(rule),
        weights=topk_weights,
        ids=topk_ids,
        into=layout,
    )
    return topk_weights, topk_ids, layout


def _rule_arguments(rule: RoutingRule) -> dict[str, Any]:
    return {
        "top_k": rule.top_k,
        "is_sigmoid": rule.scoring == "sigmoid",
        "renormalise": rule.renormalise,
        "scale": rule.routed_scaling_factor,
    }


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _prefill_rows(x: Tensor) -> int:
    return CPU_PREFILL_BLOCK if x.is_cpu else PREFILL_BLOCK


def _check_plan_shared(plan: Plan, shared: SharedExpert | None, like: Tensor) -> None:
    if (shared is not None) != plan.has_shared:
        raise ConfigError(f"shared: plan.has_shared={plan.has_shared}: pass the shared expert to both or to neither")
    checks.check_shared(shared, like)


def _out(name: str, out: Tensor | None, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if out is None:
        return torch.empty(shape, dtype=dtype, device=like.device)
    checks.check_shape(name, out, shape)
    if out.dtype != dtype or not out.is_contiguous():
        raise ConfigError(f"{name}: {out.dtype}, strides {out.stride()}: must be contiguous {dtype}")
    return out
