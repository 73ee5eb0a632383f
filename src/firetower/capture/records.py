"""What a capture holds: everything needed to run the request again, and nothing that names code to run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from firetower.capture.tensors import RawTensor
from firetower.core.records import Fire

CAPTURE_SCHEMA = 1
"""Version of the capture folder; readers refuse a newer one."""

SAMPLING_KEYS = frozenset({
    "best_of", "do_sample", "early_stopping", "frequency_penalty", "greedy", "ignore_eos", "length_penalty",
    "max_completion_tokens", "max_new_tokens", "max_output_tokens", "max_tokens", "min_new_tokens", "min_p",
    "min_tokens", "n", "num_beams", "presence_penalty", "repetition_penalty", "seed", "temperature",
    "top_a", "top_k", "top_logprobs", "top_p", "typical_p", "use_beam_search",
})  # fmt: skip
"""Keys of a request body that say how tokens are chosen, as numbers or switches."""

KINDS = ("chat.completions", "completions", "responses", "messages", "call", "other")
"""Endpoint kinds; ``call`` is an in-process call of a model."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The request, verbatim but for secrets.

    Attributes:
        kind: one of `KINDS`.
        body: the request's JSON as it came, keys in order; of an in-process call its sampling arguments.
        method: HTTP method; empty for an in-process call.
        path: path of the endpoint without host and query.
        headers: those of the allow-list, names in lower case.
        dropped: where secrets were taken out: ``body.api_key``, ``header authorization``.
    """

    kind: str
    body: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    method: str = ""
    path: str = ""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    dropped: tuple[str, ...] = ()

    @property
    def messages(self) -> list[Any]:
        """The conversation, or nothing for requests without one."""
        value = self.body.get("messages", [])
        return value if isinstance(value, list) else []

    @property
    def tools(self) -> list[Any]:
        """Tool schemas offered to the model."""
        value = self.body.get("tools", [])
        return value if isinstance(value, list) else []

    @property
    def sampling(self) -> dict[str, Any]:
        """The part of the body that says how tokens are chosen."""
        return {k: v for k, v in self.body.items() if k in SAMPLING_KEYS}

    @property
    def extra(self) -> dict[str, Any]:
        """Fields that are neither conversation, tools, model nor sampling."""
        known = SAMPLING_KEYS | {"messages", "tools", "model", "prompt", "input"}
        return {k: v for k, v in self.body.items() if k not in known}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What one choice (or one row of the batch) had given when it was frozen."""

    choice: int = 0
    text: str = ""
    reasoning: str = ""
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileHash:
    """One file of the model: its name without folders, its size and SHA-256 in hexadecimal."""

    name: str
    num_bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Which model it was. ``vocabulary_size`` and ``special_ids`` are what redaction needs of it."""

    name: str = ""
    files: tuple[FileHash, ...] = ()
    vocabulary_size: int | None = None
    special_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where it ran: versions of packages, device, platform, and variables of an allow-list."""

    device: str = ""
    platform: str = ""
    python: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Redaction:
    """How a capture was redacted, and whether it still fires.

    ``still_fires`` is None until somebody measured it. ``num_replaced`` counts replaced token ids,
    ``original_kind`` is the request's kind before.
    """

    seed: int
    vocabulary_size: int
    num_replaced: int
    num_kept_special: int
    original_kind: str
    dropped: tuple[str, ...] = ()
    still_fires: bool | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Everything needed to run a request again.

    Attributes:
        id: the fire's id where there is a fire, else one of the same form.
        created_at: UTC, ISO 8601.
        request: the request as it came.
        prompt_token_ids: one row for each sequence of the batch, pads left out; None where unknown.
        seeds: by what they seed: ``request``, ``torch``, ``python``.
        engine_settings: the runtime's settings, as JSON.
        model, environment: what ran and where.
        fire: the incident; None where only the answer was seen (then `findings` say what it showed).
        findings: what the detectors said, as JSON.
        outputs: what had been produced.
        tensors: named states or intermediates.
        left_out: what does not fit or may not be kept, each with its reason.
        redaction: None for a capture as it was frozen.
        schema: `CAPTURE_SCHEMA`.
    """

    id: str
    created_at: str
    request: Request
    prompt_token_ids: tuple[tuple[int, ...], ...] | None = None
    seeds: Mapping[str, int] = dataclasses.field(default_factory=dict)
    engine_settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    model: ModelInfo = dataclasses.field(default_factory=ModelInfo)
    environment: Environment = dataclasses.field(default_factory=Environment)
    fire: Fire | None = None
    findings: tuple[Mapping[str, Any], ...] = ()
    outputs: tuple[Output, ...] = ()
    tensors: Mapping[str, RawTensor] = dataclasses.field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    redaction: Redaction | None = None
    schema: int = CAPTURE_SCHEMA

    @property
    def merge_key(self) -> str:
        """Captures with the same key are one incident seen again: the fire's key, or what the answer showed."""
        if self.fire is not None:
            return self.fire.merge_key
        shown = sorted({f"{f.get('kind', '')}\x1e{f.get('field', '')}" for f in self.findings})
        return "\x1f".join(("answer", self.model.name, self.request.kind, *shown))

    @property
    def num_prompt_tokens(self) -> int | None:
        """Prompt tokens over all rows; None where unknown."""
        return None if self.prompt_token_ids is None else sum(map(len, self.prompt_token_ids))
