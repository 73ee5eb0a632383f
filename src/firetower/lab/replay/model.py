"""A Transformers model in this process as a target, under `firetower.attach`: a fire is what the guard says."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from firetower.core.errors import MissingExtraError, NonFiniteError, ReplayError
from firetower.core.records import Fire
from firetower.lab.replay.function import result_of_fire
from firetower.lab.replay.judge import Result, lost
from firetower.lab.replay.records import TryEnd
from firetower.lab.replay.request import ReplayRequest
from firetower.lab.replay.targets import TargetSpec

DEFAULT_MAX_TOKENS = 256
"""New tokens where the request has no limit: a server's default would be the whole context."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_SAME_NAME = (
    "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "length_penalty", "num_beams", "early_stopping",
    "min_new_tokens",
)  # fmt: skip


class ModelRunner:
    """Loads a model once and makes tries on it, one at a time.

    Args:
        spec: folder in the format of Transformers, or a GGUF file that Transformers can read.

    Raises:
        MissingExtraError: torch or Transformers is missing.
        ReplayError: it cannot be loaded.
    """

    def __init__(self, spec: TargetSpec) -> None:
        try:
            import torch
            import transformers
        except ImportError:
            raise MissingExtraError("replay on a model", "transformers") from None
        from firetower.attach.watch import attach

        self._torch = torch
        try:
            with _quiet(transformers):
                self._model, self._tokenizer = _load(spec, torch, transformers)
        except Exception as e:  # many libraries may fail on a folder that is no model; the reason is shown
            raise ReplayError(f"target={spec.text}: cannot be loaded: {type(e).__name__}: {e}") from e
        store: Any = False if spec.store == "" else spec.store
        self._watch = attach(self._model, level=spec.level, on_fire="raise", store=store)  # type: ignore[arg-type]

    def run(self, request: ReplayRequest) -> Result:
        """Generate once under the watch.

        Without a seed the random state is set anew from the machine's entropy: a fresh process would else make
        the same choices in every try.
        """
        torch = self._torch
        started = time.monotonic()
        num_prompt, num_failures = 0, self._watch.failures
        if request.seed is None:
            torch.seed()
        else:
            torch.manual_seed(request.seed)
        try:
            inputs = self._inputs(request)
            num_prompt = int(inputs["attention_mask"].sum(dim=1).max())
            length = inputs["input_ids"].shape[1]
            with torch.inference_mode():
                output = self._model.generate(**inputs, **self._arguments(request.body))
        except NonFiniteError as e:
            seconds = time.monotonic() - started
            return result_of_fire(e.fire, seconds=seconds, ignition=_ignition(e.fire, num_prompt))
        except Exception as e:  # noqa: BLE001 - a failing try must not end the campaign; it is counted and shown
            return lost(type(e).__name__, seconds=time.monotonic() - started, message=str(e)[:400])
        if self._watch.failures > num_failures:
            return lost("the watch failed", seconds=time.monotonic() - started, message=self._watch.last_failure or "")
        return Result(end=TryEnd.CLEAN, seconds=time.monotonic() - started, num_tokens=int(output.shape[1]) - length)

    def close(self) -> None:
        """Take the watch off; its fires are written."""
        self._watch.detach()

    def _inputs(self, request: ReplayRequest) -> dict[str, Any]:
        rows = request.prompt_token_ids or self._tokenized(request)
        torch = self._torch
        length = max(len(r) for r in rows)
        pad = self._model.generation_config.pad_token_id or 0
        ids = torch.tensor([[pad] * (length - len(r)) + list(r) for r in rows])
        mask = torch.tensor([[0] * (length - len(r)) + [1] * len(r) for r in rows])
        device = self._model.device
        return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}

    def _tokenized(self, request: ReplayRequest) -> tuple[tuple[int, ...], ...]:
        prompt = request.body.get("prompt")
        if isinstance(prompt, list) and prompt and all(type(t) is int for t in prompt):
            return (tuple(prompt),)
        if self._tokenizer is None:
            if request.is_canary:
                return (tuple(1 + ord(c) % 97 % (self._vocabulary_size() - 1) for c in str(prompt)),)
            raise ReplayError("the model's folder has no tokenizer, and the capture no prompt token ids")
        if isinstance(prompt, str):
            return (tuple(self._tokenizer(prompt)["input_ids"]),)
        if not isinstance(request.body.get("messages"), list):
            raise ReplayError("the request has neither messages, nor a prompt of one text, nor token ids")
        extra = request.body.get("chat_template_kwargs")
        ids = self._tokenizer.apply_chat_template(
            request.body["messages"],
            tools=request.body.get("tools"),
            add_generation_prompt=True,
            return_dict=False,
            **(extra if isinstance(extra, Mapping) else {}),
        )
        return (tuple(ids),)

    def _vocabulary_size(self) -> int:
        return int(self._model.get_input_embeddings().weight.shape[0])

    def _arguments(self, body: Mapping[str, Any]) -> dict[str, Any]:
        limits = (body.get(k) for k in ("max_new_tokens", "max_completion_tokens", "max_tokens"))
        limit = next((n for n in limits if type(n) is int), DEFAULT_MAX_TOKENS)
        arguments: dict[str, Any] = {"max_new_tokens": limit}
        arguments |= {k: body[k] for k in _SAME_NAME if body.get(k) is not None}
        temperature = body.get("temperature")
        if isinstance(body.get("do_sample"), bool):
            arguments["do_sample"] = body["do_sample"]
        elif isinstance(temperature, int | float):
            arguments["do_sample"] = temperature > 0
        if isinstance(temperature, int | float) and temperature > 0:
            arguments["temperature"] = float(temperature)
        if body.get("ignore_eos") is True:
            arguments["min_new_tokens"] = limit
        return arguments


def _ignition(fire: Fire, num_prompt: int) -> int | None:
    """Token of the answer: 0 for one that burns in the prompt or with its last token."""
    position = fire.first.position
    return None if position is None else max(0, position - num_prompt + 1)


def _load(spec: TargetSpec, torch: Any, transformers: Any) -> tuple[Any, Any]:
    path = Path(spec.text)
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(path)}
    if path.is_file():
        source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    dtype = "auto" if spec.dtype == "auto" else getattr(torch, spec.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **source, dtype=dtype, local_files_only=True, trust_remote_code=False
    )
    device = spec.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = None  # token ids of the capture do without
    # Transformers makes an empty tokenizer for a folder that has none, and that gives no ids at all
    if path.is_file() or any((path / name).exists() for name in _TOKENIZER_FILES):
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source, local_files_only=True, trust_remote_code=False)
    return model.to(device).eval(), tokenizer


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        transformers.utils.logging.enable_progress_bar()
