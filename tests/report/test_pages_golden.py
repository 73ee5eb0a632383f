"""Structure and words of every kind of page, held against goldens.

After a wanted change: delete the golden, run this file twice, and read the difference in git.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from firetower.core.records import Signal
from firetower.lab.across import across, across_incident
from firetower.lab.incident import incident_from_dict
from firetower.report import FireView, analysis_html, campaign_html, fire_html, fires_html

MADE_AT = "2026-12-01T08:00:00.000Z"
INCIDENT = Path(__file__).parents[1] / "lab" / "data" / "hybrid-moe-offload.json"


def compare(path: Path, lines: list[str]) -> None:
    text = "\n".join(lines) + "\n"
    if not path.exists():
        path.write_text(text, encoding="utf-8")
        pytest.fail(f"{path.name} did not exist and was written: read it, then run again")
    assert text.splitlines() == path.read_text(encoding="utf-8").splitlines()


def test_one_fire(view, outline, goldens):
    compare(goldens / "fire.txt", outline(fire_html(view, made_at=MADE_AT)).lines)


def test_all_fires(make_fire, outline, goldens):
    fires = [make_fire(), make_fire(origin=Signal(stage="swiglu", layer=3)), make_fire(origin=Signal(stage="logits"))]
    views = [FireView(fire=f) for f in fires]
    page = fires_html(views, analysis=across(fires), store="fires.sqlite", made_at=MADE_AT)
    compare(goldens / "fires.txt", outline(page).lines)


def test_an_incident(outline, goldens):
    analysis = across_incident(incident_from_dict(json.loads(INCIDENT.read_text(encoding="utf-8"))))
    compare(goldens / "incident.txt", outline(analysis_html(analysis, made_at=MADE_AT)).lines)


def test_a_campaign(campaign, outline, goldens):
    compare(goldens / "campaign.txt", outline(campaign_html(campaign, made_at=MADE_AT)).lines)
