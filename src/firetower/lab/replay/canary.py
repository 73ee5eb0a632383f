"""The canary: two fixed short prompts that tell whether a process is well, before tries and after fires."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from firetower.lab.replay.judge import Result
from firetower.lab.replay.records import TryEnd
from firetower.lab.replay.request import ReplayRequest

PROMPTS = ("Name three colours.", "What is the capital of France?")
MAX_TOKENS = 24

Send = Callable[[ReplayRequest], Result]
_ONE_CHARACTER_LENGTH = 12


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CanaryResult:
    """What the two prompts gave. ``persists`` as in `records.Canary`; ``fatal`` as in `judge.Result`."""

    burned: int
    prompts: int
    persists: bool | None
    detail: str = ""
    fatal: str = ""
    message: str = ""


class CanaryProbe:
    """Sends the canary to one target and judges it against what that target answered when it was well.

    Args:
        kind: ``chat.completions`` or ``completions``: the endpoint that the tries use.
        fields: of the body besides the prompt: the model's name, ...
        path: of the endpoint as captured.
        timeout_s: for each answer.
    """

    def __init__(self, *, kind: str, fields: Mapping[str, Any], path: str = "", timeout_s: float = 120.0) -> None:
        self._kind = "completions" if kind == "call" else kind
        self._fields = dict(fields)
        self._path = path if kind != "call" else ""
        self._timeout_s = timeout_s
        self._with_logprobs = True
        self._knows_odd: bool | None = None

    def look(self, send: Send) -> CanaryResult:
        """Send both prompts. The first look that finds all well sets what later answers are held against."""
        results = [send(self._request(p)) for p in PROMPTS]
        refused = all(r.end is TryEnd.LOST and (r.http_status or 0) // 100 == 4 and not r.fatal for r in results)
        if refused and self._with_logprobs:
            # not every server gives logprobs; they only sharpen the look
            self._with_logprobs = False
            results = [send(self._request(p)) for p in PROMPTS]
        return self._judge(results)

    def _judge(self, results: Sequence[Result]) -> CanaryResult:
        answered = [r for r in results if r.end is not TryEnd.LOST]
        if not answered:
            last = results[-1]
            return CanaryResult(
                burned=0, prompts=0, persists=None, detail=last.detail, fatal=last.fatal, message=last.message
            )
        reasons = [why for r in answered if (why := self._burned(r, answered))]
        if not reasons and len(answered) == len(PROMPTS) and self._knows_odd is None:
            self._knows_odd = not any(r.is_odd for r in answered)
        detail = "; ".join(dict.fromkeys(reasons))
        if not reasons and self._knows_odd is False:
            detail = "the healthy answer repeats itself, so that only gross signs show"
        return CanaryResult(burned=len(reasons), prompts=len(answered), persists=bool(reasons), detail=detail)

    def _burned(self, result: Result, all_results: Sequence[Result]) -> str:
        """Why an answer is a burned one; empty for a healthy one."""
        if result.end is TryEnd.FIRE:
            if result.origin is not None:
                return f"non-finite first at {result.origin}"
            return next((s.reason for s in result.signs if s.severity == "fire"), result.detail or "burned")
        if self._knows_odd and result.is_odd:
            return "a repetition that the healthy answer does not have"
        same = len({r.text for r in all_results}) == 1 and len(all_results) == len(PROMPTS)
        if same and len(result.text) >= _ONE_CHARACTER_LENGTH and len(set(result.text)) == 1:
            return "both prompts are answered by one character, repeated"
        return ""

    def _request(self, prompt: str) -> ReplayRequest:
        body: dict[str, Any] = self._fields | {"max_tokens": MAX_TOKENS, "temperature": 0}
        if self._kind == "chat.completions":
            body["messages"] = [{"role": "user", "content": prompt}]
            if self._with_logprobs:
                body["logprobs"] = True
        else:
            body["prompt"] = prompt
            if self._with_logprobs:
                body["logprobs"] = 1
        return ReplayRequest(
            kind=self._kind,
            body=body,
            path=self._path,
            seed=0,
            timeout_s=self._timeout_s,
            idle_s=self._timeout_s,
            is_canary=True,
        )
