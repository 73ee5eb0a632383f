"""Which signals a forward pass marks, in which order, and what carries the marks through it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from firetower.core.errors import ConfigError
from firetower.core.records import Legal, Signal
from firetower.models.config import LINEAR, HybridConfig
from firetower.sensors.marks import Mark

STAGES: dict[str, str] = {
    "input": "hidden states as a layer receives them, the sum of all before it",
    "projection": "fused input projection of the mixer",
    "conv_state": "the committed columns of the convolution as a window read them, or as a prefill left them",
    "conv": "answer of the convolution",
    "decay": "logarithm of the decay of each value head; -Inf is legal",
    "recurrent_state": "state before a window's tokens, the accepted ones applied; after a prefill's",
    "recurrence": "answer of the gated delta rule",
    "kv": "keys and values as written to their pages, or their scales where pages have 8 bits",
    "context": "answer of attention, its gate applied",
    "attention": "what the mixer adds to the hidden states",
    "residual": "hidden states with the mixer's part added",
    "router": "router logits, and the shared expert's gate in the last column",
    "gate": "gate half of each expert's projection, before it is rounded; only with inside_experts",
    "up": "up half, likewise",
    "swiglu": "activation product of each token and expert, the shared expert's in the last slot",
    "down": "answer of each token and expert, likewise",
    "routed": "sum over the routed experts, before the shared one is added",
    "output": "what the experts add to the hidden states",
    "hidden": "hidden states after the last layer",
    "logits": "logits",
}
"""Every stage, in the order in which a model runs them; a mixer has those of its kind."""

_LINEAR_ONLY: tuple[str, ...] = ("conv_state", "conv", "decay", "recurrent_state", "recurrence")
_FULL_ONLY: tuple[str, ...] = ("kv", "context")
_INSIDE_EXPERTS = ("gate", "up")
_TAIL = ("hidden", "logits")

WINDOW_ONLY = frozenset({"projection", "attention"})
"""Stages that a prefill does not mark: its dense products are the library's, and a pass over their answers of its own
would cost more than a sensor may. The next stage sees what they hold."""

NOT_KEPT = frozenset({"conv_state", "recurrent_state", "kv", "gate", "up", "routed"})
"""Stages that no tensor of the pass holds as a whole: marked, but never handed to a recorder."""

_MODULES = {
    "input": "", "residual": "post_attention_layernorm", "router": "mlp.gate", "gate": "mlp.experts",
    "up": "mlp.experts", "swiglu": "mlp.experts", "down": "mlp.experts", "routed": "mlp.experts", "output": "mlp",
}  # fmt: skip


class Recorder(Protocol):
    """What a forward pass hands its intermediates to.

    A recorder may have an attribute ``wanted``, a collection of signal indices: it is handed these alone. Where none of
    ``router``, ``swiglu`` and ``down`` is among them, the experts run with fewer launches.
    """

    def keep(self, signal_index: int, tensor: Tensor) -> None:
        """Take a signal's tensor right after it was computed and marked, before anything reads it.

        Called inside a captured graph: copy into a buffer of one's own, without a host sync. What is written into the
        tensor here is what the next op reads; mark it again then (`HybridModel.mark`).

        Args:
            signal_index: into `HybridModel.signals`.
            tensor: the signal as marked, ``[rows, width]``.
        """
        ...


def declare(config: HybridConfig, *, inside_experts: bool) -> tuple[list[Signal], list[Mapping[str, int]]]:
    """Every signal of a model in the order of execution.

    Args:
        config: of the model.
        inside_experts: whether ``gate`` and ``up`` are marked.

    Returns:
        (signals; for each layer, and last for what follows the layers, the index of each stage).
    """
    signals: list[Signal] = []
    places: list[Mapping[str, int]] = []
    for layer, kind in enumerate(config.layer_types):
        absent = _FULL_ONLY if kind == LINEAR else _LINEAR_ONLY
        absent = absent if inside_experts else absent + _INSIDE_EXPERTS
        stages = [stage for stage in STAGES if stage not in absent + _TAIL]
        places.append({stage: len(signals) + i for i, stage in enumerate(stages)})
        mixer = "linear_attn" if kind == LINEAR else "self_attn"
        for stage in stages:
            part = _MODULES.get(stage, mixer)
            module = f"model.layers.{layer}" + (f".{part}" if part else "")
            signals.append(Signal(stage=stage, layer=layer, module=module, legal=_legal(stage)))
    places.append({stage: len(signals) + i for i, stage in enumerate(_TAIL)})
    signals += [Signal(stage="hidden", module="model.norm"), Signal(stage="logits", module="lm_head")]
    return signals, places


def _legal(stage: str) -> Legal:
    return Legal.NEG_INF if stage == "decay" else Legal.FINITE


@dataclasses.dataclass(slots=True, eq=False)
class Watch:
    """Marks and recorder of one pass.

    Attributes:
        num_signals: of the model.
        panel: where marks go, or None for no sensors.
        row_ids: int32 [rows], row word of each token.
        recorder: or None.
    """

    num_signals: int
    panel: Tensor | None
    row_ids: Tensor
    recorder: Recorder | None = None
    _marks: dict[int, Mark | None] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.panel is not None and self.panel.numel() < 3 * self.num_signals + 1:
            raise ConfigError(
                f"panel: {self.panel.numel()} words: must have 3 for each of {self.num_signals} signals, one for each "
                "row, and one; make it with HybridModel.new_panel()"
            )

    def mark(self, slot: int | None) -> Mark | None:
        """Where a signal with one row a token is marked; None without sensors or for a stage that is not declared."""
        if self.panel is None or slot is None:
            return None
        if slot not in self._marks:
            self._marks[slot] = self.mark_rows(slot, self.row_ids)
        return self._marks[slot]

    def mark_rows(self, slot: int | None, row_ids: Tensor | None, *, neg_inf_legal: bool = False) -> Mark | None:
        """Where a signal is marked whose rows have words of their own."""
        if self.panel is None or slot is None:
            return None
        return Mark(
            panel=self.panel,
            slot=slot,
            num_signals=self.num_signals,
            num_rows=self.panel.numel() - 3 * self.num_signals - 1,
            row_ids=row_ids,
            neg_inf_legal=neg_inf_legal,
        )

    def wants(self, slot: int) -> bool:
        """Whether there is a recorder that takes a signal."""
        if self.recorder is None:
            return False
        wanted = getattr(self.recorder, "wanted", None)
        return wanted is None or slot in wanted

    def keep(self, slot: int, x: Tensor) -> None:
        """Hand a signal to the recorder, as [rows, width]."""
        if self.recorder is not None and self.wants(slot):
            self.recorder.keep(slot, x)
