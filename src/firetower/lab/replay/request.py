"""From a capture to the request that is sent: verbatim, but for what the user asked to change."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from firetower.capture import Capture
from firetower.core.errors import ReplayError
from firetower.lab.replay.arms import Arm, set_fields
from firetower.lab.replay.plan import fresh_seed
from firetower.lab.replay.records import SeedMode

KINDS = ("chat.completions", "completions", "call")
"""Kinds of request whose answers the detectors can judge."""

FIXED_SEED = 0
"""The fixed seed of a capture that has none."""

_IMAGE_TYPES = frozenset({"image", "image_url", "input_image"})
_LIMITS = ("max_completion_tokens", "max_tokens", "max_new_tokens", "max_output_tokens")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Edits:
    """What the user changes in every try.

    Attributes:
        max_tokens: limit of the answer. model: name to ask for. strip_images: take images out.
        fields: of the body, by dotted path.
    """

    max_tokens: int | None = None
    model: str | None = None
    strip_images: bool = False
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """What a target is asked to do once. It holds content: it is sent, never stored.

    Attributes:
        kind: one of `KINDS`. path: of the endpoint, as captured; may be empty.
        body: JSON.
        prompt_token_ids: rows, where known.
        seed: what to seed the try with; None leaves it to the target.
        timeout_s: for the whole answer. idle_s: without a byte.
        is_canary: one of the fixed short prompts.
    """

    kind: str
    body: Mapping[str, Any]
    path: str = ""
    prompt_token_ids: tuple[tuple[int, ...], ...] | None = None
    seed: int | None = None
    timeout_s: float = 3600.0
    idle_s: float = 600.0
    is_canary: bool = False


class RequestMaker:
    """Makes the request of each try.

    Args:
        capture: what is replayed.
        edits: for every try; arms come on top.
        seed_mode: see `SeedMode`. seed: that fresh seeds are made of.
        timeout_s, idle_s: see `ReplayRequest`.

    Raises:
        ReplayError: a kind of request that cannot be judged, or nothing to send.
    """

    def __init__(
        self,
        capture: Capture,
        edits: Edits,
        *,
        seed_mode: SeedMode = SeedMode.CAPTURED,
        seed: int = 0,
        timeout_s: float = 3600.0,
        idle_s: float = 600.0,
    ) -> None:
        if capture.request.kind not in KINDS:
            raise ReplayError(
                f"kind={capture.request.kind!r}: cannot be replayed, its answers cannot be judged yet; "
                f"must be one of {', '.join(KINDS)}"
            )
        self.num_images = 0
        self._capture = capture
        self._seed_mode, self._seed = seed_mode, seed
        self._timeout_s, self._idle_s = timeout_s, idle_s
        self._body = self._edited(edits)
        has_prompt = "messages" in self._body or "prompt" in self._body or capture.prompt_token_ids
        if not has_prompt:
            raise ReplayError(f"capture={capture.id!r}: has neither messages nor prompt nor token ids; nothing to send")

    @property
    def kind(self) -> str:
        """Kind of the captured request."""
        return self._capture.request.kind

    @property
    def max_tokens(self) -> int | None:
        """Limit of the answer before arms, where the request has one."""
        return next((self._body[k] for k in _LIMITS if type(self._body.get(k)) is int), None)

    def request_for(self, arm: Arm, number: int, attempt: int) -> ReplayRequest:
        """The request of one attempt.

        Raises:
            ReplayError: a setting of the arm that does not fit the request.
        """
        body = set_fields(self._body, arm.fields)
        seed = self._seed_for(number, attempt, body)
        if seed is not None and self._seed_mode is not SeedMode.CAPTURED and "seed" not in arm.fields:
            body["seed"] = seed
        # changed messages are not what the captured ids stand for
        has_same_prompt = not self.num_images and not {"messages", "prompt", "tools"} & set(arm.fields)
        return ReplayRequest(
            kind=self.kind,
            body=body,
            path=self._capture.request.path,
            prompt_token_ids=self._capture.prompt_token_ids if has_same_prompt else None,
            seed=seed,
            timeout_s=self._timeout_s,
            idle_s=self._idle_s,
        )

    def _edited(self, edits: Edits) -> dict[str, Any]:
        body = dict(self._capture.request.body)
        if edits.strip_images:
            body, self.num_images = without_images(body)
        if edits.max_tokens is not None:
            default = "max_new_tokens" if self.kind == "call" else "max_tokens"
            used = [k for k in _LIMITS if k in body] or [default]
            body |= dict.fromkeys(used, edits.max_tokens)
        if edits.model is not None:
            body["model"] = edits.model
        return set_fields(body, edits.fields)

    def _seed_for(self, number: int, attempt: int, body: Mapping[str, Any]) -> int | None:
        captured = body.get("seed")
        if type(captured) is not int:
            captured = next((self._capture.seeds[k] for k in ("request", "torch") if k in self._capture.seeds), None)
        if self._seed_mode is SeedMode.CAPTURED:
            return captured
        if self._seed_mode is SeedMode.FIXED:
            return FIXED_SEED if captured is None else captured
        return fresh_seed(self._seed, number, attempt)


def without_images(body: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """(the body without image parts of its messages, how many there were); an emptied message keeps an empty text."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return dict(body), 0
    count = 0
    kept = []
    for message in messages:
        parts = message.get("content") if isinstance(message, dict) else None
        if isinstance(parts, list):
            rest = [p for p in parts if not _is_image(p)]
            count += len(parts) - len(rest)
            message = message | {"content": rest or ""}
        kept.append(message)
    return dict(body) | {"messages": kept}, count


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and (part.get("type") in _IMAGE_TYPES or "image_url" in part)
