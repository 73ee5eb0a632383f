"""One pass over a sequence: the prompt in chunks of the ubatch size, then one token a step."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable

from firetower.attach.llama.runtime import LlamaContext, LlamaSession
from firetower.attach.llama.sensor import EvalSensor, Step
from firetower.core.records import Phase


class LlamaRun:
    """Generates, or replays, one sequence under a sensor.

    Args:
        session: the loaded model.
        sensor: the callback; None for a run without any.
        prompt_ids: tokens to start with.

    Attributes:
        plan: the steps so far: phase and tokens fed.
        token_ids: tokens generated so far; ``text`` is their text.
        prefill_s: seconds spent on the prompt; ``decode_s`` on the ``num_decoded`` steps after it.
    """

    def __init__(self, session: LlamaSession, sensor: EvalSensor | None, prompt_ids: tuple[int, ...]) -> None:
        self._session, self._sensor = session, sensor
        self.prompt_ids = prompt_ids
        self.plan: list[tuple[Phase, tuple[int, ...]]] = []
        self.token_ids: list[int] = []
        self.text = ""
        self.prefill_s = self.decode_s = 0.0
        self.num_decoded = 0
        self._position = 0

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Decode speed, or None when nothing was decoded."""
        return self.num_decoded / self.decode_s if self.num_decoded else None

    def generate(
        self, max_tokens: int, ubatch_size: int, on_piece: Callable[[str], None] | None = None
    ) -> None:
        """Generate greedily until the model ends, ``max_tokens`` are there, or the sensor burns."""
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        callback = None if self._sensor is None else self._sensor.callback
        with self._session.context(len(self.prompt_ids) + max_tokens, callback) as context:
            for start in range(0, len(self.prompt_ids), ubatch_size):
                if not self._step(context, Phase.PREFILL, self.prompt_ids[start : start + ubatch_size]):
                    return
            for index in range(max_tokens):
                token = context.greedy(self._session.num_vocab)
                if self._session.is_end(token):
                    break
                self.token_ids.append(token)
                self._say(utf8.decode(self._session.piece(token)), on_piece)
                if index + 1 < max_tokens and not self._step(context, Phase.DECODE, (token,)):
                    break
            self._say(utf8.decode(b"", final=True), on_piece)

    def replay(self, plan: list[tuple[Phase, tuple[int, ...]]], *, full_from: int) -> None:
        """Feed the steps of ``plan`` again; all tensors watched from step ``full_from`` on, none before."""
        assert self._sensor is not None
        with self._session.context(sum(len(t) for _, t in plan), self._sensor.callback) as context:
            for index, (phase, tokens) in enumerate(plan):
                self._sensor.level = "full" if index >= full_from else "off"
                if not self._step(context, phase, tokens):
                    return

    def _say(self, piece: str, on_piece: Callable[[str], None] | None) -> None:
        self.text += piece
        if piece and on_piece is not None:
            on_piece(piece)

    def _step(self, context: LlamaContext, phase: Phase, tokens: tuple[int, ...]) -> bool:
        """Compute one step; False when the sensor burned in it."""
        if self._sensor is not None:
            self._sensor.begin_step(
                Step(index=len(self.plan), phase=phase, first_position=self._position, num_tokens=len(tokens))
            )
        self.plan.append((phase, tokens))
        self._position += len(tokens)
        started = time.perf_counter()
        context.decode(tokens)
        elapsed = time.perf_counter() - started
        if phase is Phase.PREFILL:
            self.prefill_s += elapsed
        else:
            self.decode_s += elapsed
            self.num_decoded += 1
        if self._sensor is None:
            return True
        if self._sensor.interrupt is not None:
            raise self._sensor.interrupt
        return self._sensor.burn is None
