"""What a replay campaign leaves behind: every try, what the tries say together, and how it ended.

Plain values only, and no statistics package is needed to read them: figures are stored as they were computed.
The stored form is documented in docs/reference/replay.md. Nothing here holds content of a prompt or an answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

CAMPAIGN_SCHEMA = 1
"""Version of the campaign file and of its journal; readers refuse a newer one."""

COUNTED_ENDS = ("clean", "fire")
"""How a try may end that counts as one."""


class TryEnd(StrEnum):
    """How one try ended. Only clean tries and fires count; the others say nothing of the rate."""

    CLEAN = "clean"
    FIRE = "fire"
    DEPENDENT = "dependent"
    """It ran in a process that a fire before it had poisoned."""
    LOST = "lost"
    """No answer that can be judged: refused, timed out, cut off, the worker died."""


class Isolation(StrEnum):
    """What separates one try from the next."""

    PROCESS = "process"
    """Every try in a process of its own."""
    RESTART = "restart"
    """The process is started anew after every fire."""
    NONE = "none"
    """The process is left alone."""


class SeedMode(StrEnum):
    """Which seed each try gets."""

    CAPTURED = "as captured"
    FRESH = "fresh"
    FIXED = "fixed"


class CampaignEnd(StrEnum):
    """Why a campaign made no further try."""

    PLANNED = "planned"
    """Every planned try was made (or was lost in every attempt)."""
    EARLY = "early"
    """Stopped while watching, as its rule allows."""
    INTERRUPTED = "interrupted"
    """Stopped by the user; the same command goes on."""
    POISONED = "poisoned"
    """The canary burns and nothing restarts the process."""
    FAILING = "failing"
    """Too many tries in a row were lost."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """One finding of a detector, without what it was found in. Fields as `detect.Finding`."""

    kind: str
    severity: str
    reason: str
    choice: int = 0
    field: str = ""
    position: int = -1
    unit: str = "character"
    count: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One try that ended.

    Attributes:
        number: place in the plan, from 0; a try that was lost or dependent is made again under its number.
        attempt: 1 for the first time that this number was made.
        arm: name of its arm.
        round: block of the plan it belongs to, from 0.
        end: how it ended.
        process: what it ran in: ``server 1`` (after one restart ``server 2``), ``worker 2.1``.
        started_at: UTC. seconds: from sending to the end of the answer.
        seed: what the request or process was seeded with; None where nothing was.
        num_tokens: tokens made, as the server counts them or as they came; None where unknown.
        ignition: token of the answer, from 0, at which the first sign stands; None where unknown or clean.
        signs: what the detectors said, fires first.
        fire: id of the stored fire, where the guard saw one.
        origin: where the guard saw it first: ``layer 12 down``. bits: its pattern in hexadecimal.
        http_status: of the answer, where there was one.
        finish_reason: the server's word.
        detail: why it was lost or set aside, in words.
    """

    number: int
    attempt: int
    arm: str
    round: int
    end: TryEnd
    process: str
    started_at: str
    seconds: float
    seed: int | None = None
    num_tokens: int | None = None
    ignition: int | None = None
    signs: tuple[Sign, ...] = ()
    fire: str | None = None
    origin: str | None = None
    bits: str | None = None
    http_status: int | None = None
    finish_reason: str | None = None
    detail: str = ""

    @property
    def counts(self) -> bool:
        """Whether it is a try in the sense of the rate."""
        return self.end in COUNTED_ENDS

    @property
    def is_warned(self) -> bool:
        """Clean, but with a sign that is no proof."""
        return self.end is TryEnd.CLEAN and any(s.severity == "warn" for s in self.signs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """Two fixed short prompts, sent to a process to see whether it is well.

    Attributes:
        process: as in `Try`.
        after: number of the try whose fire, or loss, put the process in question; None before the first try there.
        at: UTC.
        burned: how many of the prompts burned. prompts: how many were answered.
        persists: True: poisoned, later tries there are dependent; None: no answer, or the canary cannot tell.
        detail: in words.
    """

    process: str
    after: int | None
    at: str
    burned: int
    prompts: int
    persists: bool | None
    detail: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RateRow:
    """A rate with its interval; ``method`` says in words how it was made and which way of stopping it assumes."""

    fires: int
    tries: int
    rate: float
    lower: float
    upper: float
    confidence: float
    method: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CurveRow:
    """One step of an ignition curve; fields as `lab.stats.CurvePoint`."""

    position: int
    at_risk: int
    fires: int
    surviving: float
    lower: float
    upper: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ignition:
    """Share of tries without a fire by token of the answer, clean tries censored at their length.

    ``median`` and its limits are Inf where fewer than half ever fire. ``sentence`` is the result in words.
    """

    points: tuple[CurveRow, ...]
    last: int
    median: float
    median_lower: float
    median_upper: float
    sentence: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """Whether rounds scatter more than independent tries would; figures as `lab.stats.Dispersion`.

    ``what`` says what the rounds are: ``blocks of 4 tries``, ``lives of a process``. ``counts`` are
    (fires, tries) of each round.
    """

    what: str
    counts: tuple[tuple[int, int], ...]
    index: float
    p_value: float
    overdispersed: bool
    sentence: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult:
    """One arm: its settings and what its tries say.

    Attributes:
        settings: as given on the command line, parsed; empty for the request as captured.
        planned: tries to make. num_dependent, num_lost: attempts that do not count.
        num_never: planned tries that were lost in every attempt, or never made.
        num_waiting: tries that ended while an earlier one of the plan had not; of a campaign that was stopped they
            do not count yet, because fires end sooner than clean tries.
        num_warned: clean tries with a sign that is no proof.
        rate: None where no try counted.
        excludes_above: every higher rate is excluded; None where there is a fire or no try.
        more_clean: further clean tries that exclude ``exclude_rate`` of the campaign; None as above.
        ignition: None where no fire has a known position.
        scatter: one entry for every kind of round that can be judged.
    """

    name: str
    settings: Mapping[str, Any]
    planned: int
    num_dependent: int
    num_lost: int
    num_never: int
    num_warned: int
    num_waiting: int = 0
    rate: RateRow | None = None
    excludes_above: float | None = None
    more_clean: int | None = None
    ignition: Ignition | None = None
    scatter: tuple[Scatter, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArmComparison:
    """Arm ``b`` held against arm ``a``.

    Attributes:
        test: ``boschloo`` or ``fisher`` at the planned n; ``anytime`` while watching or after a stop.
        p_value: of "both arms have one rate". differs: whether that is rejected at 1 - confidence.
        difference, difference_lower, difference_upper: rate of ``b`` minus rate of ``a``.
        odds_ratio, odds_ratio_lower, odds_ratio_upper: None for ``anytime``; NaN where neither arm fired.
        e_value: evidence against one rate, for ``anytime`` only.
        confidence: of test and intervals; raised where several arms are compared, so that all hold together.
        sentence: the result in words.
    """

    a: str
    b: str
    test: str
    p_value: float
    differs: bool
    difference: float
    difference_lower: float
    difference_upper: float
    confidence: float
    sentence: str
    odds_ratio: float | None = None
    odds_ratio_lower: float | None = None
    odds_ratio_upper: float | None = None
    e_value: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """A replay campaign: one capture, one or several arms, every try.

    Attributes:
        id: sorts by time. created_at, ended_at: UTC; ``ended_at`` of the last event.
        capture: id of the replayed capture. capture_digest: SHA-256 of its manifest.
        model: as the capture names it. target: as given. target_kind: ``server``, ``model`` or ``callable``.
        planned: tries of each arm. concurrency: tries at once. seed: of order and fresh seeds.
        isolation, seed_mode: see there. watching: whether an early stop was allowed.
        ended: why no further try was made.
        settings: everything else that was set (``max_tokens``, ``model``, ``strip_images``, ``set.KEY``, ...).
        arms, comparisons: comparisons are of each arm with the first.
        tries: every attempt, in the order in which they ended.
        canaries: in order.
        sentences: the whole result in words, most important first.
        exclude_rate: the rate that clean tries are held against, or None.
        environment: versions and machine, as strings.
    """

    id: str
    created_at: str
    ended_at: str
    capture: str
    capture_digest: str
    model: str
    target: str
    target_kind: str
    planned: int
    concurrency: int
    isolation: Isolation
    seed_mode: SeedMode
    seed: int
    watching: bool
    ended: CampaignEnd
    arms: tuple[ArmResult, ...]
    tries: tuple[Try, ...]
    comparisons: tuple[ArmComparison, ...] = ()
    canaries: tuple[Canary, ...] = ()
    sentences: tuple[str, ...] = ()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    exclude_rate: float | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    schema: int = CAMPAIGN_SCHEMA

    @property
    def num_fires(self) -> int:
        """Fires that count, over all arms."""
        return sum(a.rate.fires for a in self.arms if a.rate is not None)

    @property
    def saw_fire(self) -> bool:
        """Whether anything burned: a try, a dependent try, or a canary."""
        return any(t.end is TryEnd.FIRE for t in self.tries) or any(c.burned for c in self.canaries)
