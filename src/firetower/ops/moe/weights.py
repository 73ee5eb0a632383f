"""What a sparse MoE block is made of: expert weights, the routing rule, and where its kernels leave their answers."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from firetower.core.errors import ConfigError
from firetower.sensors.marks import Mark

SCORINGS = ("softmax", "sigmoid")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedExpert:
    """The expert that every token goes through.

    Attributes:
        gate_up_proj: [2 Is, H], rows of the gate first.
        down_proj: [H, Is].
        gate: [1, H] or [H]; the expert's output is multiplied by the sigmoid of ``hidden_states @ gate``. None: by 1.
    """

    gate_up_proj: Tensor
    down_proj: Tensor
    gate: Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MoeWeights:
    """Weights of one block, in the layout of transformers' Qwen3.5-MoE.

    Attributes:
        router: [E, H].
        gate_up_proj: [E, 2 I, H], rows of the gate first.
        down_proj: [E, H, I].
        selection_bias: fp32 [E], added to the scores for the choice alone (DeepSeek, GLM), or None.
        shared: the shared expert, or None.
    """

    router: Tensor
    gate_up_proj: Tensor
    down_proj: Tensor
    selection_bias: Tensor | None = None
    shared: SharedExpert | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """How scores become weights.

    Attributes:
        top_k: experts a token is sent to.
        scoring: ``softmax`` over all experts, or ``sigmoid`` of each logit.
        renormalise: divide the weights of the chosen by their sum.
        routed_scaling_factor: multiplies every weight at the end.
    """

    top_k: int
    scoring: str = "softmax"
    renormalise: bool = True
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k}: must be at least 1")
        if self.scoring not in SCORINGS:
            raise ConfigError(f"scoring={self.scoring!r}: must be one of {', '.join(SCORINGS)}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoeMarks:
    """One `Mark` a stage, in the order of execution; None leaves a stage unwatched. The block sets their ``row_ids``.

    Attributes:
        logits: fp32 [T, E], one column more with a shared gate.
        router: fp32 weights [T, K].
        gate: fp32 accumulators of the gate [T * slots, W], never stored; up likewise.
        swiglu: their product as stored [T * slots, W].
        down: [T * slots, H] as stored.
        routed: fp32 sum over the routed experts [T, H], never stored.
        output: [T, H] as stored.
    """

    logits: Mark | None = None
    router: Mark | None = None
    gate: Mark | None = None
    up: Mark | None = None
    swiglu: Mark | None = None
    down: Mark | None = None
    routed: Mark | None = None
    output: Mark | None = None


def mark_for(mark: Mark | None, row_ids: Tensor | None) -> Mark | None:
    """The mark of a signal whose output has one row for each of ``row_ids``."""
    return None if mark is None else dataclasses.replace(mark, row_ids=row_ids)
