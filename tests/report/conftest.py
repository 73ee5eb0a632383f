"""Fires, an analysis and a campaign to show, and a way to read pages."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from firetower.core.analysis import ArmCurve, CampaignCurves, RatePoint, SurvivalPoint
from firetower.core.records import (
    BadValue,
    BurnedRow,
    Fire,
    Kind,
    Outcome,
    Phase,
    Signal,
    SignalReading,
    Status,
    TensorSummary,
)
from firetower.core.verdict import Evidence, Rival, Verdict
from firetower.report import FireView

MADE_AT = "2026-12-01T08:00:00.000Z"
NAN = BadValue(
    flat_index=1034,
    row=1,
    column=10,
    bits=0x7E00,
    dtype="float16",
    kind=Kind.NAN,
    shape=(1, 5, 1024),
    sequence=0,
    token=1,
    position=311,
    is_pad=False,
)


def tensor(name: str, num_nan: int = 0) -> TensorSummary:
    return TensorSummary(
        name=name,
        shape=(64, 128),
        dtype="float16",
        num_nan=num_nan,
        num_pos_inf=0,
        num_neg_inf=0,
        absmax=3.25,
        zero_frac=0.125,
        headroom=20155.0,
    )


def signals(*named: tuple[str, int | None]) -> tuple[SignalReading, ...]:
    return tuple(SignalReading(signal=Signal(stage=s, layer=n), status=Status.BAD, first=NAN) for s, n in named)


@pytest.fixture
def make_fire() -> Callable[..., Fire]:
    """Fires that differ by id and time."""
    numbers = itertools.count()

    def make(**fields: Any) -> Fire:
        n = next(numbers)
        defaults: dict[str, Any] = {
            "id": f"20261130-2144{n % 60:02d}-{n:010x}",
            "created_at": f"2026-11-30T{21 + n // 3600:02d}:{n // 60 % 60:02d}:{n % 60:02d}.000Z",
            "source": "attach",
            "runtime": "torch 2.13.0, transformers 5.24.0",
            "model": "SmolLM2-135M-Instruct",
            "device": "x86_64",
            "phase": Phase.DECODE,
            "step": 3,
            "origin": Signal(stage="down", layer=12, module="model.layers.12.mlp.down_proj"),
            "first": NAN,
            "outcome": Outcome.RAISED,
            "bad_signals": signals(
                ("down", 12), ("output", 12), ("input", 13), ("kv", 13), ("attention", 13), ("logits", None)
            ),
            "coverage": (213, 213),
            "token_ids": (777001, 777002, 777003),
        }
        return Fire(**(defaults | fields))

    return make


VERDICT = Verdict(
    family="M",
    detail="BAD_WEIGHT",
    decided=True,
    statement="A weight is non-finite as loaded (layer 12 down): down_proj.weight has 3 NaN at row 10.",
    evidence=(
        Evidence(test="weights-sound", statement="3 of 8,192 elements are NaN", supports=("M/BAD_WEIGHT",)),
        Evidence(
            test="state-at-start", statement="the state is zero at request start", against=("E/STATE_NOT_CLEARED",)
        ),
    ),
    rivals=(
        Rival(
            family="K",
            detail="WEIGHT_MUTATED",
            status="open",
            why="nobody hashed the weight at load",
            test="weights-vs-load",
        ),
        Rival(
            family="A",
            detail="OVERFLOW_ACTIVATION",
            status="excluded",
            why="the first bad value is a NaN",
            test="first-value",
        ),
    ),
    refuter="the weight is finite, or its op is finite for zero inputs",
    next_test="zero-inputs",
    next_command="firetower.investigate(model, zeros)",
    scope="file",
    cure="download or convert the file again",
    retriable="no",
    ignition="M/BAD_WEIGHT: a weight is non-finite as loaded",
    persistence="the file: every process that loads it",
    not_testable=("slots: the subject has no such part", "laws: the subject has no such part"),
)


@pytest.fixture
def view(make_fire: Callable[..., Fire]) -> FireView:
    """One fire with everything that a page shows."""
    row = BurnedRow(sequence=1, signal=Signal(stage="output", layer=12), token=0, column=4)
    fire = make_fire(
        inputs=(tensor("x"),),
        output=tensor("y", 9),
        weights=(tensor("down_proj.weight", 3),),
        notes=("the weight itself is non-finite: down_proj.weight [64, 128] at row 10",),
        burned=(BurnedRow(sequence=0, signal=Signal(stage="down", layer=12), first=NAN), row),
        count=3,
        laundered=True,
        request="chat-1",
        extra={"slot": 4, "prompt": "a secret prompt", "state_audit": {"recurrent_state": "hash equal"}},
    )
    return FireView(
        fire=fire,
        verdict=VERDICT,
        verdict_source="stored with the fire",
        resembles=(
            ("looks like M bad-weight because a weight is bad", "5 of 172 public reports; firetower scan PATH"),
        ),
        last_seen="2026-12-01T07:00:00.000Z",
    )


@pytest.fixture
def campaign() -> CampaignCurves:
    """Two arms: one that fires, one that stays clean."""
    points = tuple(
        RatePoint(tries=n, fires=n // 6, lower=max(0.0, n // 6 / n - 0.3), upper=min(1.0, n // 6 / n + 0.4))
        for n in range(1, 41)
    )
    clean = tuple(RatePoint(tries=n, fires=0, lower=0.0, upper=min(1.0, 5 / n)) for n in range(1, 41))
    survival = (
        SurvivalPoint(position=12, surviving=0.9, lower=0.7, upper=0.97),
        SurvivalPoint(position=80, surviving=0.8, lower=0.55, upper=0.92),
    )
    return CampaignCurves(
        title="Campaign 20261201-080000-ab: tiny",
        arms=(
            ArmCurve(
                name="base",
                settings="",
                points=points,
                sentence="6 fires in 40 tries: rate .150",
                survival=survival,
                last=128,
                survival_sentence="6 fires in 40 tries; fewer than half had fired by the furthest position, 128",
            ),
            ArmCurve(name="eager", settings="eager=true", points=clean, sentence="0 fires in 40 tries"),
        ),
        sentences=("The arms differ (p=.026).", "Rate of eager minus rate of base: -.150."),
        notes=("tries ran in one process that was never started anew: they may depend on each other",),
        facts=(("capture", "cap-1"), ("target", "http://127.0.0.1:8000 (server)")),
    )


@pytest.fixture
def goldens() -> Path:
    return Path(__file__).parent / "goldens"


VOID = {"br", "meta", "link"}
SHOWN = ("class", "id", "href", "scope", "title", "data-copy", "data-filter", "role", "colspan")


class Outline(HTMLParser):
    """A page as an indented outline: structure and words, without style and script.

    Collects ``lines``; ``names`` are all elements, ``attributes`` all (element, name, value)."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.lines: list[str] = []
        self.names: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.attributes += [(tag, k, v or "") for k, v in attrs]
        named = " ".join(f"{k}={v}" if v else k for k, v in attrs if k in SHOWN)
        self.lines.append(f"{'  ' * len(self._open)}{tag} {named}".rstrip())
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self._open.pop()

    def handle_endtag(self, tag):
        assert self._open, f"</{tag}> closes nothing"
        assert self._open[-1] == tag, f"</{tag}> closes <{self._open[-1]}>"
        self._open.pop()

    def handle_data(self, data):
        if self._open and self._open[-1] in ("style", "script"):
            return
        if data.strip():
            self.texts.append(data)
            self.lines.append(f"{'  ' * len(self._open)}| {data.strip()}")

    def close(self):
        super().close()
        assert not self._open, f"never closed: {self._open}"


@pytest.fixture
def outline() -> Callable[[str], Outline]:
    """Parses a page; refuses unbalanced tags."""

    def parse(page: str) -> Outline:
        parser = Outline()
        parser.feed(page)
        parser.close()
        return parser

    return parse
