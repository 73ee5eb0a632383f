"""`Engine`: prompts in, tokens out, each request by itself."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any, cast

import torch

from firetower.core.errors import ConfigError
from firetower.core.records import Fire
from firetower.engine.buckets import capture_order
from firetower.engine.build import Parts, build, resolve
from firetower.engine.config import EngineConfig
from firetower.engine.errors import CancelledError, QueueFullError, RequestError
from firetower.engine.graphs import Progress
from firetower.engine.inject import Injector
from firetower.engine.invariants import InvariantRecord
from firetower.engine.request import MAX_SEED, Completion, Delta, FinishReason, Request, Sampling
from firetower.engine.sequence import Sequence, Sink
from firetower.engine.service import Service, deltas
from firetower.engine.status import Status
from firetower.engine.text import TextStream, Tokenizer
from firetower.models.hybrid import HybridModel

Prompt = str | Many[int]
"""Text, for an engine with a tokenizer, or token ids."""


class Engine:
    """Runs requests on one model and one device, with every sensor on.

    Args:
        model: a `HybridModel`, or the folder of a Transformers model.
        config: options; or give them by name: ``Engine(model, max_batch=8, on_fire="heal")``.
        tokenizer: for text prompts, stop strings and text answers; that of the folder where ``model`` is one.
        progress: told of what takes long at the start: (what, done, total).
        device, dtype: of a model that is loaded from a folder.

    Raises:
        ConfigError: options that do not fit the model or the memory.
    """

    def __init__(
        self,
        model: HybridModel | Path | str,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        progress: Progress | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if config is not None and options:
            raise ConfigError(f"{next(iter(options))}: give options by name, or a config, not both")
        config = config if config is not None else EngineConfig.of(**options)
        self.config = config
        self.model, self.tokenizer = resolve(
            model, tokenizer, device=device, dtype=dtype, progress=progress, max_model_len=config.max_model_len
        )
        self._parts: Parts = build(self.model, config)
        self.max_model_len = self._parts.max_model_len
        self.lock = threading.RLock()
        self._numbers = itertools.count()
        self._num_submitted = 0
        self._service: Service | None = None
        self._is_closed = False
        self._capture(progress)

    # requests

    def submit(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        request_id: str | None = None,
        sink: Sink | None = None,
    ) -> Sequence:
        """Queue a request; it runs while someone calls `step`, or `generate` or `stream` runs.

        Args:
            prompt: text or token ids.
            sampling: how to answer; greedy where None.
            request_id: names it in fires; a number where None.
            sink: gets each `Delta`, on the thread that runs the engine.

        Raises:
            RequestError: a prompt that is empty, too long, or of tokens that the model does not have.
            QueueFullError: the queue is full.
        """
        with self.lock:
            if self._is_closed:
                raise RequestError("engine: is closed; make a new one")
            number = next(self._numbers)
            sampling = sampling if sampling is not None else Sampling()
            request = Request(
                id=request_id if request_id is not None else str(number),
                token_ids=tuple(self._token_ids(prompt)),
                sampling=sampling,
            )
            self._check(request)
            seed = sampling.seed if sampling.seed is not None else secrets.randbelow(MAX_SEED + 1)
            sequence = Sequence(request, number=number, seed=seed, sink=sink)
            if self.tokenizer is not None and (sampling.stop or sink is not None):
                sequence.text_stream = TextStream(self.tokenizer, sampling.stop)
            self._parts.loop.scheduler.submit(sequence)
            self._num_submitted += 1
            return sequence

    def generate(
        self, prompts: Many[Prompt] | Prompt, sampling: Sampling | Many[Sampling] | None = None
    ) -> list[Completion]:
        """Answer prompts; returns when all have ended.

        A request that burns, or that is refused while it runs, does not raise: its completion has the error.

        Args:
            prompts: one prompt, or several. More than the queue has room for are fed as it empties.
            sampling: of all of them, or one each.

        Returns:
            Completions in the order of the prompts.

        Raises:
            RequestError: a prompt that cannot run; none of them has then been started.
        """
        given = _as_prompts(prompts)
        samplings = _spread(sampling, len(given))
        token_ids = [tuple(self._token_ids(p)) for p in given]
        for i, (ids, one) in enumerate(zip(token_ids, samplings, strict=True)):
            self._check(Request(id=f"prompts[{i}]", token_ids=ids, sampling=one))
        waiting = deque(zip(token_ids, samplings, strict=True))
        sequences: list[Sequence] = []
        running: deque[Sequence] = deque()
        while waiting or running:
            with self.lock:
                while waiting and (sequence := self._feed(*waiting[0])) is not None:
                    sequences.append(sequence)
                    running.append(sequence)
                    waiting.popleft()
                self.step()
            while running and running[0].is_done:
                running.popleft()
        return [self._completion(s) for s in sequences]

    def stream(
        self, prompt: Prompt, sampling: Sampling | None = None, *, request_id: str | None = None
    ) -> AsyncIterator[Delta]:
        """Answer one prompt as an async iterator of `Delta`; ends after the one with a finish reason.

        A thread of the engine's own runs the steps. Leaving the iterator early cancels the request.

        Raises:
            RequestError, QueueFullError: at the first step of the iterator.
        """
        return deltas(self, prompt, sampling, request_id)

    def cancel(self, sequence: Sequence) -> None:
        """End a request now."""
        with self.lock:
            self._parts.loop.cancel(sequence)

    def step(self) -> bool:
        """Launch or read one step; False where there was nothing to do."""
        with self.lock:
            return self._parts.loop.step()

    # what is known

    @property
    def fires(self) -> tuple[Fire, ...]:
        """The latest fires, oldest first; all of them are in the store."""
        return tuple(self._parts.loop.burns.firelog.fires)

    @property
    def warnings(self) -> tuple[InvariantRecord, ...]:
        """The latest invariants that were broken, oldest first."""
        return tuple(self._parts.loop.invariants.records)

    @property
    def injector(self) -> Injector | None:
        """The fault node, of an engine made with ``inject=True``."""
        return self._parts.loop.runner.injector

    def completion_of(self, sequence: Sequence) -> Completion:
        """The record of a request that has ended."""
        return self._completion(sequence)

    def status(self) -> Status:
        """Counts, pools, breakers."""
        with self.lock:
            return self._parts.status(num_submitted=self._num_submitted)

    def clear_caches(self) -> None:
        """Give up every cached prefix: needed where weights were changed in place."""
        with self.lock:
            for release in self._parts.loop.release_caches:
                release()

    def reset_breakers(self) -> None:
        """Close every breaker, after its cause has been seen to."""
        with self.lock:
            self._parts.loop.burns.recovery.reset()

    def fail_all(self, error: Exception) -> None:
        """The thread of streams met an error of the program: end every request with it."""
        with self.lock:
            loop = self._parts.loop
            loop.flights.clear()
            for sequence in [*loop.scheduler.queue, *loop.scheduler.prefilling, *loop.rows.sequences]:
                loop.cancel(sequence, CancelledError(f"engine: stopped by {type(error).__name__}: {error}"))
            self._is_closed = True

    def service(self) -> Service:
        """The thread that runs the steps of streams; started at the first call."""
        with self.lock:
            if self._service is None:
                self._service = Service(self)
            return self._service

    def close(self) -> None:
        """End what runs, give the store back, and stop the thread of streams."""
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
            loop = self._parts.loop
            # one that was about to start again comes back to the queue as its last step is read
            while not loop.is_idle:
                for sequence in [*loop.scheduler.queue, *loop.scheduler.prefilling, *loop.rows.sequences]:
                    loop.cancel(sequence)
                loop.drain()
            loop.burns.firelog.close()
        if self._service is not None:
            self._service.stop()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # inside

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return self._parts.loop.is_idle

    def _feed(self, token_ids: tuple[int, ...], sampling: Sampling) -> Sequence | None:
        """Submit where the queue has room."""
        try:
            return self.submit(token_ids, sampling)
        except QueueFullError:
            return None

    def _token_ids(self, prompt: Prompt) -> Many[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise RequestError("prompt: is text, and the engine has no tokenizer; pass token ids, or give it one")
        return self.tokenizer.encode(prompt)

    def _check(self, request: Request) -> None:
        ids, sampling = request.token_ids, request.sampling
        vocab, longest = self.model.config.vocab_size, self.max_model_len
        if not ids:
            raise RequestError(f"request {request.id}: the prompt has no tokens; it needs at least one")
        bad = next((t for t in ids if not isinstance(t, int) or not 0 <= t < vocab), None)
        if bad is not None:
            raise RequestError(f"request {request.id}: token {bad!r}: must be a whole number from 0 to {vocab - 1}")
        if len(ids) + sampling.max_tokens > longest:
            raise RequestError(
                f"request {request.id}: {len(ids)} tokens and max_tokens={sampling.max_tokens}: must be at most "
                f"{longest} together; shorten the prompt, or make the engine with a larger max_model_len"
            )
        pages = self._parts.loop.scheduler.pages_for_length(len(ids) + sampling.max_tokens)
        if pages > self._parts.loop.scheduler.pages.size:
            raise RequestError(
                f"request {request.id}: needs {pages} pages, there are {self._parts.loop.scheduler.pages.size}; make "
                "the engine with more num_pages, or ask for fewer tokens"
            )
        if sampling.stop and self.tokenizer is None:
            raise RequestError(f"stop={sampling.stop!r}: stop strings need a tokenizer; use stop_token_ids")
        outside = next((t for t in sampling.logit_bias if not 0 <= t < vocab), None)
        if outside is not None:
            raise RequestError(f"logit_bias[{outside}]: must be a token from 0 to {vocab - 1}")

    def _completion(self, sequence: Sequence) -> Completion:
        if sequence.text_stream is not None:
            sequence.text = sequence.text_stream.text
        elif self.tokenizer is not None:
            is_cut = sequence.finish_reason is FinishReason.STOP and sequence.answer[-1] in sequence.stop_ids
            sequence.text = self.tokenizer.decode(sequence.answer[:-1] if is_cut else sequence.answer)
        return sequence.completion()

    def _capture(self, progress: Progress | None) -> None:
        config, runner = self.config, self._parts.loop.runner
        if not config.graphs or runner.device.type != "cuda":
            return

        def forward_of(shape: Any) -> Callable[[], torch.Tensor]:
            buffers = runner.buffers(shape)
            return lambda: runner.forward(buffers)

        with torch.inference_mode():
            runner.graphs.capture(
                capture_order(config.max_batch, config.max_window, config.max_window_rows), forward_of, progress
            )


def _as_prompts(prompts: Many[Prompt] | Prompt) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast("Many[int]", prompts)]
    return list(cast("Many[Prompt]", prompts))


def _spread(sampling: Sampling | Many[Sampling] | None, count: int) -> list[Sampling]:
    if sampling is None or isinstance(sampling, Sampling):
        return [sampling if sampling is not None else Sampling()] * count
    if len(sampling) != count:
        raise RequestError(f"sampling: {len(sampling)} for {count} prompts; give one, or one each")
    return list(sampling)

