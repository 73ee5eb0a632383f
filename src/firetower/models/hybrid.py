"""`HybridModel`: the forward passes of Qwen3-Next and Qwen3.5-MoE, a window of many sequences or whole prompts.

Both read and write a `ModelState` in place. In a window a row's bits depend on that row alone; nothing waits for the
host, so that a CUDA graph can be captured over a batch. A prefill uses the library's matrix products: the bits of its
rows may depend on how many tokens a call has, so cut prompts at fixed absolute positions, one sequence a call, where
they must not depend on the neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from firetower.core.errors import ConfigError
from firetower.models.batch import PrefillBatch, WindowBatch
from firetower.models.config import LINEAR, HybridConfig
from firetower.models.mixers import (
    attention_prefill,
    attention_window,
    delta_prefill,
    delta_window,
    prefill_slots,
    window_slots,
)
from firetower.models.mixture import mixture
from firetower.models.signals import NOT_KEPT, WINDOW_ONLY, Recorder, Watch, declare
from firetower.models.state import ModelState
from firetower.models.weights import AttentionWeights, DeltaNetWeights, HybridWeights, shapes_of
from firetower.ops.linear import linear
from firetower.ops.moe import RoutingRule
from firetower.ops.rms_norm import add_rms_norm, rms_norm
from firetower.ops.rope import rope_table
from firetower.sensors.marks import Mark, new_panel


class HybridModel:
    """A model that can run.

    Attributes:
        config: of the model.
        weights: its tensors.
        signals: every signal that a pass can mark, in the order of execution; the index is the slot in the panel.
        window_signals: indices of those that a window marks: all of them.
        prefill_signals: indices of those that a prefill marks.
        kept_signals: indices of those that a recorder is handed.
    """

    def __init__(
        self,
        config: HybridConfig,
        weights: HybridWeights,
        *,
        num_positions: int | None = None,
        inside_experts: bool = False,
    ) -> None:
        """Put a model together.

        Args:
            config: of the model.
            weights: of that configuration.
            num_positions: longest sequence that will run; the model's ``max_position_embeddings`` where None.
            inside_experts: whether ``gate`` and ``up`` of the experts are marked too: for an investigation, it costs.

        Raises:
            ConfigError: weights of another configuration; rope parameters that give no table.
        """
        _check_weights(config, weights)
        self.config = config
        self.weights = weights
        self.signals, self._places = declare(config, inside_experts=inside_experts)
        self.window_signals = tuple(range(len(self.signals)))
        self.prefill_signals = tuple(i for i, s in enumerate(self.signals) if s.stage not in WINDOW_ONLY)
        self.kept_signals = tuple(i for i, s in enumerate(self.signals) if s.stage not in NOT_KEPT)
        self.rope_table = rope_table(
            config.rope_parameters,
            head_dim=config.head_dim,
            num_positions=num_positions or config.max_position_embeddings,
            max_position_embeddings=config.max_position_embeddings,
            device=weights.device,
        )
        self._rule = RoutingRule(top_k=config.top_k, scoring=config.scoring, renormalise=config.norm_topk_prob)
        self._state_index = [config.layer_types[:i].count(kind) for i, kind in enumerate(config.layer_types)]
        self._watch: Watch | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations and logits."""
        return self.weights.dtype

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.weights.device

    def new_panel(self, num_rows: int) -> Tensor:
        """An empty panel for passes of up to ``num_rows`` row words, on the model's device."""
        return new_panel(len(self.signals), num_rows, self.device)

    def mark(self, panel: Tensor, signal_index: int, row_ids: Tensor) -> Mark:
        """Where a signal is marked: for a recorder that changes what it was handed, and has to mark it again."""
        legal = self.signals[signal_index].stage == "decay"
        made = Watch(len(self.signals), panel, row_ids).mark_rows(signal_index, row_ids, neg_inf_legal=legal)
        assert made is not None
        return made

    def window(
        self, batch: WindowBatch, state: ModelState, panel: Tensor | None = None, keep: Recorder | None = None
    ) -> Tensor:
        """Run W tokens of each of N sequences.

        Reads the clean halves of the states and writes the others: call `firetower.models.state.commit` once the step
        has been read. Until then the same call has the same bits. No host sync; may be captured.

        Args:
            batch: of the step.
            state: pages and the halves that are not clean are written.
            panel: int64 words from `new_panel`, emptied for the step; None for no sensors. Changes no bit.
            keep: is handed intermediates, in the order of ``signals``.

        Returns:
            Logits [N * W, V] in the model's type; those of pads mean nothing.
        """
        watch = self._watched(panel, batch.row_ids, keep)
        slots = window_slots(batch, state)

        def mix(i: int, normed: Tensor) -> Tensor:
            w, at, place = self.weights.layers[i].mixer, self._places[i], self._state_index[i]
            if isinstance(w, DeltaNetWeights):
                recurrent, conv = state.recurrent[place], state.conv[place]
                return delta_window(normed, w, self.config, batch, slots, recurrent, conv, watch, at)
            kv = state.kv[place]
            return attention_window(normed, w, self.config, batch, kv, self.rope_table, watch, at)

        return self._logits(self._layers(batch.token_ids.view(-1), mix, "window", watch), watch)

    def prefill(
        self,
        batch: PrefillBatch,
        state: ModelState,
        panel: Tensor | None = None,
        keep: Recorder | None = None,
        *,
        all_logits: bool = False,
    ) -> Tensor:
        """Run prompts, or the next parts of them.

        Leaves states after the last token in the clean halves of the slots, with nothing pending: the next window
        has ``num_accepted`` 0, and there is nothing to commit.

        Args:
            batch: the prompts.
            state: pages and clean halves of the slots are written.
            panel, keep: as in `window`; stages in ``WINDOW_ONLY`` are not marked.
            all_logits: whether to return those of every token.

        Returns:
            Logits in the model's type: [S, V] after the last token of each sequence, or [T, V].
        """
        watch = self._watched(panel, batch.row_ids, keep)
        slots = prefill_slots(batch, state)

        def mix(i: int, normed: Tensor) -> Tensor:
            w, at, place = self.weights.layers[i].mixer, self._places[i], self._state_index[i]
            if isinstance(w, DeltaNetWeights):
                recurrent, conv = state.recurrent[place], state.conv[place]
                return delta_prefill(normed, w, self.config, batch, slots, recurrent, conv, watch, at)
            kv = state.kv[place]
            return attention_prefill(normed, w, self.config, batch, kv, self.rope_table, watch, at)

        normed = self._layers(batch.token_ids, mix, "prefill", watch)
        if all_logits:
            return self._logits(normed, watch)
        last = batch.cu_seqlens_device[1:] - 1
        ends = Watch(len(self.signals), panel, batch.row_ids.index_select(0, last), keep)
        return self._logits(normed.index_select(0, last), ends)

    def _watched(self, panel: Tensor | None, row_ids: Tensor, keep: Recorder | None) -> Watch:
        """Marks are made once for a panel and a batch, and used again while both stay."""
        last = self._watch
        if last is None or last.panel is not panel or last.row_ids is not row_ids or last.recorder is not keep:
            last = self._watch = Watch(len(self.signals), panel, row_ids, keep)
        return last

    def _layers(self, token_ids: Tensor, mix: Callable[[int, Tensor], Tensor], phase: str, watch: Watch) -> Tensor:
        """Every layer, from token ids [R] to the normed hidden states [R, H] that logits are made of."""
        layers = self.weights.layers
        x = self._embed(token_ids)
        normed = rms_norm(
            x, layers[0].input_norm, eps=self.config.rms_norm_eps, is_zero_centred=self.config.is_zero_centred,
            mark_input=watch.mark(self._places[0]["input"]),
        )  # fmt: skip
        watch.keep(self._places[0]["input"], x)
        for i, (layer, at) in enumerate(zip(layers, self._places, strict=False)):
            normed = self._add(mix(i, normed), x, layer.post_norm, at["residual"], watch)
            y = mixture(normed, layer.moe, self._rule, phase, watch, at)
            is_last = i + 1 == len(layers)
            weight = self.weights.norm if is_last else layers[i + 1].input_norm
            normed = self._add(y, x, weight, self._places[i + 1]["hidden" if is_last else "input"], watch)
        return normed

    def _embed(self, token_ids: Tensor) -> Tensor:
        """Hidden states [R, H] of tokens; NaN for an id that is no token: nothing outside the table is read."""
        table = self.weights.embedding
        inside = token_ids.clamp(0, table.shape[0] - 1)
        return table.index_select(0, inside).masked_fill_((inside != token_ids)[:, None], math.nan)

    def _add(self, y: Tensor, x: Tensor, weight: Tensor, slot: int, watch: Watch) -> Tensor:
        """``x += y``, in place, and the norm of it."""
        normed, _ = add_rms_norm(
            y, x, weight, eps=self.config.rms_norm_eps, is_zero_centred=self.config.is_zero_centred, residual_out=x,
            mark_residual=watch.mark(slot),
        )  # fmt: skip
        watch.keep(slot, x)
        return normed

    def _logits(self, normed: Tensor, watch: Watch) -> Tensor:
        slot = self._places[-1]["logits"]
        logits = linear(normed, self.weights.lm_head, mark=watch.mark(slot))
        watch.keep(slot, logits)
        return logits


def _check_weights(config: HybridConfig, weights: HybridWeights) -> None:
    kinds = {LINEAR: DeltaNetWeights}
    for i, (kind, layer) in enumerate(zip(config.layer_types, weights.layers, strict=False)):
        if not isinstance(layer.mixer, kinds.get(kind, AttentionWeights)):
            raise ConfigError(f"layers.{i}.mixer: {type(layer.mixer).__name__}: must be that of a {kind} layer")
    have = {name: tuple(x.shape) for name, x in weights.named_tensors()}
    for name, shape in shapes_of(config).items():
        if have.get(name) != shape:
            raise ConfigError(f"{name}: {have.get(name, 'missing')}: must be {shape}, as the configuration says")
