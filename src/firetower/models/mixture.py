"""The sparse block of a layer: the steps of `firetower.ops.moe`, each with its signals."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from firetower.models.signals import Watch
from firetower.ops import moe
from firetower.ops.moe import MoeMarks, MoeWeights, RoutingRule


def mixture(x: Tensor, w: MoeWeights, rule: RoutingRule, phase: str, watch: Watch, at: Mapping[str, int]) -> Tensor:
    """What the experts add: [R, H] normed to [R, H]; zeros for pads.

    Args:
        x: [R, H].
        w: of the block; its shared expert has a gate.
        rule: how logits become weights.
        phase: ``window`` or ``prefill``.
        watch: marks and recorder. at: index of each stage.
    """
    # the block and its steps give each mark the rows of its own signal
    marks = MoeMarks(
        logits=watch.mark(at["router"]), gate=watch.mark(at.get("gate")), up=watch.mark(at.get("up")),
        swiglu=watch.mark(at["swiglu"]), down=watch.mark(at["down"]), routed=watch.mark(at["routed"]),
        output=watch.mark(at["output"]),
    )  # fmt: skip
    if any(watch.wants(at[stage]) for stage in ("router", "swiglu", "down")):
        y = _in_steps(x, w, rule, phase, watch, at, marks)
    else:
        # the same kernels, fewer launches: nothing stands between them
        y = moe.moe(x, w, rule, phase=phase, row_ids=watch.row_ids, marks=marks)
    watch.keep(at["output"], y)
    return y


def _in_steps(
    x: Tensor, w: MoeWeights, rule: RoutingRule, phase: str, watch: Watch, at: Mapping[str, int], marks: MoeMarks
) -> Tensor:
    """The block with a recorder between its steps."""
    assert w.shared is not None
    num_experts, ids = w.router.shape[0], watch.row_ids
    logits = moe.logits(x, w.router, w.shared.gate, phase=phase, mark=marks.logits)
    watch.keep(at["router"], logits)
    topk_weights, topk_ids = moe.route(logits[:, :num_experts], rule)
    block_m = moe.block_rows(x, phase, topk_ids.numel(), num_experts)
    plan = moe.plan(topk_ids, num_experts, block_m=block_m, has_shared=True, row_ids=ids)
    act = moe.gate_up(x, w.gate_up_proj, plan, shared=w.shared, marks=marks)
    watch.keep(at["swiglu"], act)
    rows = moe.down(act, w.down_proj, plan, shared=w.shared, marks=marks)
    watch.keep(at["down"], rows)
    return moe.combine(
        rows, topk_weights, topk_ids, plan, shared_logits=logits[:, num_experts], row_ids=ids, marks=marks
    )
