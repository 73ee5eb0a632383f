"""What callers of the MoE ops can get wrong, said with the way out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from firetower.core.errors import ConfigError
from firetower.ops.moe.planning import Plan
from firetower.ops.moe.weights import MoeWeights, RoutingRule, SharedExpert

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.int32, torch.int64)
PHASES = ("window", "prefill")


def check_shape(name: str, x: Tensor, shape: Sequence[int | None]) -> None:
    """Refuse a tensor of another rank or size; None stands for any size."""
    if x.ndim != len(shape) or any(want not in (None, have) for want, have in zip(shape, x.shape, strict=False)):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ConfigError(f"{name}: shape {tuple(x.shape)}: must be [{wanted}]; reshape it")


def check_rows(name: str, x: Tensor, shape: Sequence[int | None]) -> None:
    """Refuse what kernels cannot read as rows: another shape, a type that is no float, rows with gaps inside."""
    check_shape(name, x, shape)
    if x.dtype not in FLOATS:
        raise ConfigError(f"{name}: dtype {x.dtype}: must be one of {', '.join(map(str, FLOATS))}; cast it")
    if not x.is_contiguous():
        raise ConfigError(f"{name}: strides {x.stride()}: must be contiguous; call .contiguous() once, at load")


def check_like(name: str, x: Tensor, like: Tensor, shape: Sequence[int | None]) -> None:
    """As `check_rows`, and of the type and device of ``like``."""
    check_rows(name, x, shape)
    if x.dtype != like.dtype or x.device != like.device:
        raise ConfigError(
            f"{name}: {x.dtype} on {x.device}: must be {like.dtype} on {like.device}, as hidden_states; cast it at load"
        )


def check_row_ids(row_ids: Tensor | None, num_tokens: int) -> None:
    """Refuse row ids that are no integers, or not one a token."""
    if row_ids is None:
        return
    check_shape("row_ids", row_ids, (num_tokens,))
    if row_ids.dtype not in INTEGERS or not row_ids.is_contiguous():
        raise ConfigError(f"row_ids: dtype {row_ids.dtype}: must be contiguous int32 or int64; cast it")


def check_phase(phase: str) -> None:
    """Refuse a phase that has no algorithm."""
    if phase not in PHASES:
        raise ConfigError(f"phase={phase!r}: must be one of {', '.join(PHASES)}")


def check_top_k(top_k: int, num_experts: int) -> None:
    """Refuse more experts a token than there are."""
    if not 1 <= top_k <= num_experts:
        raise ConfigError(f"top_k={top_k}: must be from 1 to num_experts={num_experts}")


def check_routing(router_logits: Tensor, rule: RoutingRule, selection_bias: Tensor | None) -> None:
    """Refuse logits that are no float rows, more experts than there are, a bias that its scoring cannot have."""
    check_shape("router_logits", router_logits, (None, None))
    num_tokens, num_experts = router_logits.shape
    check_top_k(rule.top_k, num_experts)
    if router_logits.dtype not in FLOATS or (num_tokens and router_logits.stride(1) != 1):
        raise ConfigError(f"router_logits: {router_logits.dtype}, strides {router_logits.stride()}: must be float rows")
    if selection_bias is not None:
        check_rows("selection_bias", selection_bias, (num_experts,))
        if rule.scoring != "sigmoid":
            raise ConfigError(f"selection_bias with scoring={rule.scoring!r}: needs scoring='sigmoid'; leave it out")


def check_plan(
    plan: Plan, topk_ids: Tensor, num_experts: int, block_m: int, *, has_shared: bool, has_rows: bool
) -> None:
    """Refuse to fill a plan that was made for other numbers."""
    made = (plan.num_tokens, plan.top_k, plan.num_experts, plan.block_m, plan.has_shared, plan.row_ids is not None)
    asked = (*topk_ids.shape, num_experts, block_m, has_shared, has_rows)
    if made != asked:
        raise ConfigError(
            f"into: made for (tokens, top_k, experts, block_m, shared, row ids) {made}: must be {asked}; "
            "leave it out, or make it with the same arguments"
        )


def check_shared(shared: SharedExpert | None, like: Tensor) -> None:
    """Refuse a shared expert whose projections do not fit each other or ``like`` [T, H]."""
    if shared is None:
        return
    hidden = like.shape[1]
    check_like("shared.gate_up_proj", shared.gate_up_proj, like, (None, hidden))
    half, odd = divmod(shared.gate_up_proj.shape[0], 2)
    if odd:
        raise ConfigError(f"shared.gate_up_proj: {2 * half + 1} rows: must be an even number, gate and up halves")
    check_like("shared.down_proj", shared.down_proj, like, (hidden, half))
    if shared.gate is not None:
        check_like("shared.gate", shared.gate.reshape(1, -1), like, (1, hidden))


def check_weights(weights: MoeWeights, like: Tensor) -> None:
    """Refuse weights that do not fit each other or ``like`` [T, H]."""
    hidden = like.shape[1]
    check_like("gate_up_proj", weights.gate_up_proj, like, (None, None, hidden))
    num_experts, rows = weights.gate_up_proj.shape[:2]
    if rows % 2:
        raise ConfigError(f"gate_up_proj: {rows} rows an expert: must be an even number, gate and up halves")
    check_like("down_proj", weights.down_proj, like, (num_experts, hidden, rows // 2))
    check_shared(weights.shared, like)
