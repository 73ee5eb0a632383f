"""The rows of the table hypothesis x evidence: families of causes as they look across fires, and what tells each."""

from __future__ import annotations

import dataclasses

from firetower.core.families import DETAILS, FAMILIES, share


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One hypothesis before any evidence. ``test`` is the cheapest one that tells it from the others."""

    key: str
    title: str
    test: str

    @property
    def prior(self) -> str:
        """How often its family was met in public reports."""
        return share(self.key[0])


def _family(letter: str, test: str) -> Candidate:
    return Candidate(key=letter, title=FAMILIES[letter].title, test=test)


def _detail(key: str, test: str) -> Candidate:
    return Candidate(key=key, title=DETAILS[key].title, test=test)


GPU_KERNEL, CPU_KERNEL = "P/GPU_KERNEL", "P/CPU_KERNEL"
"""Family P told apart by side, where fires were seen on both sides of a split model."""

SLOT_MISMATCH, EVICTED, UNWRITTEN = "L/EXPERT_SLOT_MISMATCH", "L/EVICTED_IN_USE", "L/UNWRITTEN_DST_ROW"

CANDIDATES: tuple[Candidate, ...] = (
    _family("A", "recompute the first bad op in a wider type: finite, and above the narrow type's maximum"),
    _detail("B/SCALE_OVERFLOW", "recompute the same block with a float32 scale: finite"),
    _detail("B/SCALE_MISCALIBRATED", "hold the real values against the range of the scale"),
    _family("C", "fill every unread place with two different finite values in turn: the output changes"),
    _family("D", "run eagerly, or in the exact bucket: clean"),
    _detail("E/STATE_NOT_CLEARED", "assign zeros to the states and send the same request again"),
    _detail("E/STALE_STATE_FINITE", "hash the states at request start against those of a fresh one"),
    _family("F", "compare the position tag of each state with the request's count of tokens"),
    _family("G", "count the keys that each bad row may look at"),
    _family("H", "sum the chosen routing weights of the bad row, look at the divisor of the first bad op"),
    _family("I", "recompute the chunk step by step in float64; look for an Inf above the diagonal"),
    _family("J", "serialise kernels, copies and the CPU pool (one at a time, each awaited), and count tries"),
    _family("K", "hash every weight and slot at load and again at the fire"),
    _detail(SLOT_MISMATCH, "hash the slots of the bad rows against the file at the moment of the fire"),
    _detail(EVICTED, "log evictions with the step: one inside the forward that needed the expert; pin and count tries"),
    _detail(UNWRITTEN, "poison every destination row before the kernel runs; look for the poison in the output"),
    _family("M", "firetower scan on the file; the op with zero inputs is still bad"),
    _family("N", "look at the logits of the row before the sampler"),
    _family("O", "run the same graph eagerly on the same inputs"),
    _family("P", "recompute the first bad op on its saved inputs with another backend"),
    Candidate(
        key=GPU_KERNEL,
        title="a kernel on the GPU side",
        test="save the inputs of the first bad hit row and recompute it with another backend",
    ),
    Candidate(
        key=CPU_KERNEL,
        title="a kernel on the CPU side",
        test="save the inputs of the first bad miss row and recompute it with the reference kernel",
    ),
    _family("Q", "turn drafts off and count tries"),
    _family("R", "compute from the prompt, without prefix cache and transferred state, and count tries"),
    _family("S", "world size 1"),
    _family("T", "compare the positions as used with the exact ones"),
    _family("U", "the same request on another device"),
)  # fmt: skip
"""Every hypothesis, in the order of the families."""

KEYS = tuple(c.key for c in CANDIDATES)

STATE_NOT_CLEARED, SCALE_OVERFLOW = "E/STATE_NOT_CLEARED", "B/SCALE_OVERFLOW"

DETERMINISTIC = ("A", "B", "G", "H", "I", "M", "T")
"""Causes that act alike on equal tokens: an intermittent fire speaks against them."""

TIMING = ("C", "D", "J", EVICTED)
"""Causes that depend on timing, memory or history: an intermittent fire speaks for them."""


def keys_of(name: str) -> tuple[str, ...]:
    """The hypotheses that a family's letter or ``FAMILY/DETAIL`` stands for: ``L`` is all three of its rows."""
    if name in KEYS and name != "P":
        return (name,)
    return tuple(k for k in KEYS if k[0] == name[0] and (len(name) == 1 or k == name))
