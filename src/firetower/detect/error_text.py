"""What servers say instead of an answer when their numbers went bad. Looked for in errors only."""

from __future__ import annotations

import re

from firetower.detect.records import Severity

PATTERNS: tuple[tuple[Severity, str, str], ...] = (
    (
        Severity.FIRE,
        r"not JSON compliant",
        "the server could not write a NaN or Inf as JSON: a logprob of its answer is non-finite",
    ),
    (
        Severity.FIRE,
        r"probability tensor contains either `?inf`?, `?nan`? or element ?< ?0",
        "the sampler met NaN, Inf or a negative probability",
    ),
    (
        Severity.FIRE,
        r"(?:logits?|logprobs?|hidden.?states?|activations?|output|tensor|probabilit(?:y|ies))\W+(?:\w+\W+){0,4}"
        r"(?:nan|inf|non-?finite)\b",
        "the server says that its numbers are non-finite",
    ),
    (
        Severity.FIRE,
        r"\b(?:nans?|non-?finite(?: values?)?)\W+(?:\w+\W+){0,4}"
        r"(?:logits?|logprobs?|hidden.?states?|activations?|output|tensor|probabilit(?:y|ies)|detected|found)\b",
        "the server says that its numbers are non-finite",
    ),
    (
        Severity.FIRE,
        r"Unexpected token '?N'?[ ,].{0,40}JSON|invalid (?:literal|character 'N').{0,40}(?:NaN|looking for)",
        "a reader stumbled over a bare NaN in the server's JSON",
    ),
    (
        Severity.WARN,
        r"device-side assert",
        "a device-side assert: often an index or a probability made of NaN, seen late",
    ),
    (
        Severity.WARN,
        r"illegal memory access|misaligned address|Xid\W{1,3}(?:13|31)\b",
        "the device met an illegal address: a wild write or a stale pointer may have preceded it",
    ),
    (
        Severity.WARN,
        r"(?:token|index|id)s?\W+(?:\S+\W+){0,4}out of (?:range|bounds|vocabulary)|"
        r"out of (?:range|bounds)\W+(?:\w+\W+){0,4}(?:token|vocab)",
        "an id outside the vocabulary: an arg-max over NaN gives one",
    ),
)
"""Severity, pattern (upper and lower case alike) and what it means."""

MAX_ERROR_CHARS = 65_536
_COMPILED = tuple((severity, re.compile(p, re.IGNORECASE | re.DOTALL), why) for severity, p, why in PATTERNS)


def judge_error(text: str) -> tuple[Severity, str] | None:
    """Severity and meaning of an error text; None for one that says nothing of numbers.

    Reads at most the first 65,536 characters.
    """
    head = text[:MAX_ERROR_CHARS]
    return next(((severity, why) for severity, pattern, why in _COMPILED if pattern.search(head)), None)
