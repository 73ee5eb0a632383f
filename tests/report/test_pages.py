"""What a page must show, and must not."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
import time

import pytest

from firetower.core.records import Kind, Phase, Signal, SignalReading, Status
from firetower.lab.across import across
from firetower.report import FireView, campaign_html, fire_html, fires_html
from firetower.report.html import MAX_BYTES
from firetower.report.signal_map import FULL_LIST, Cell, signal_map
from firetower.report.style import CSS, SCRIPT


def text_of(page: str, outline) -> str:
    return " ".join(outline(page).texts)


def test_a_page_loads_nothing_and_its_policy_names_its_own_style_and_script_only(view, campaign, outline):
    for page in (fire_html(view), campaign_html(campaign), fires_html([view])):
        parsed = outline(page)
        assert not {"img", "iframe", "object", "embed", "form", "base", "audio", "video"} & set(parsed.names)
        assert parsed.names.count("script") == parsed.names.count("style") == 1
        assert [
            v for _, k, v in parsed.attributes if k in ("src", "srcset", "action", "style") or k.startswith("on")
        ] == []
        assert all(v.startswith("#") for _, k, v in parsed.attributes if k == "href")
        [policy] = [v for _, k, v in parsed.attributes if k == "content" and "default-src" in v]
        hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in (CSS, SCRIPT)]
        assert policy == (
            f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
            "base-uri 'none'; form-action 'none'"
        )
        assert f"<style>{CSS}</style>" in page
        assert f"<script>{SCRIPT}</script>" in page


def test_style_and_script_survive_being_written_as_ascii():
    assert CSS.isascii()
    assert SCRIPT.isascii()
    assert "</" not in CSS + SCRIPT
    assert "url(" not in CSS
    assert "@import" not in CSS


def test_a_fire_shows_every_part(view, outline):
    text = text_of(fire_html(view), outline)
    for wanted in (
        "NaN first at layer 12 down",
        "position 311",
        "213 of 213 declared signals ran",
        "M bad weight, BAD_WEIGHT",
        "stored with the fire",
        "3 of 8,192 elements are NaN",
        "K/WEIGHT_MUTATED",
        "nobody hashed the weight at load",
        "the weight is finite, or its op is finite for zero inputs",
        "5 of 172 public reports",
        "slots, laws",
        "down_proj.weight",
        "hash equal",
        "2026-12-01T07:00:00.000Z",
        "laundered",
        "SmolLM2-135M-Instruct",
    ):
        assert wanted in text, wanted


def test_content_is_shown_only_when_asked_for(view, outline):
    page = fire_html(view)
    assert "777001" not in page
    assert "secret prompt" not in page
    assert "3 token ids are kept with the fire" in text_of(page, outline)
    assert "1 fields that may hold content are left out" in text_of(page, outline)
    private = fire_html(view, with_content=True)
    assert "777001 777002 777003" in private
    assert "a secret prompt" in private
    assert "Contains private content" in private


def test_content_deep_inside_a_field_is_left_out_too(make_fire):
    fire = make_fire(extra={"engine": {"last": [{"Messages": "deep secret"}], "slot": 5}})
    page = fire_html(FireView(fire=fire))
    assert "deep secret" not in page
    assert "slot" in page


def test_the_summary_to_paste_holds_no_content(view, outline):
    page = outline(fire_html(view, with_content=True))
    start = next(i for i, line in enumerate(page.lines) if "id=paste" in line)
    summary = " ".join(line.strip(" |") for line in page.lines[start:])
    assert "NaN first at layer 12 down" in summary
    assert "777001" not in summary
    assert "secret" not in summary


def test_a_verdict_of_another_engine_is_shown_in_its_words(make_fire, outline):
    fire = make_fire(verdict={"cause": "gremlins", "retriable": False})
    text = text_of(fire_html(FireView(fire=fire)), outline)
    assert "gremlins" in text
    assert "In the words of the engine" in text


def test_a_fire_without_anything_is_still_a_page(make_fire, outline):
    fire = make_fire(
        bad_signals=(), coverage=(0, 0), phase=Phase.UNKNOWN, step=-1, token_ids=None, origin=Signal(stage="logits")
    )
    text = text_of(fire_html(FireView(fire=fire)), outline)
    assert "NaN first at logits" in text
    assert "not reported" in text
    assert "Layer x signal" not in text


def test_an_empty_store_is_a_page(outline):
    assert "No fires in this store" in text_of(fires_html([]), outline)


def test_a_thousand_fires_take_less_than_five_seconds_and_two_megabytes(make_fire, outline):
    fires = [make_fire(origin=Signal(stage="down", layer=n % 40)) for n in range(1000)]
    start = time.perf_counter()
    page = fires_html([FireView(fire=f) for f in fires], analysis=across(fires))
    assert time.perf_counter() - start < 5
    assert len(page.encode()) <= MAX_BYTES
    parsed = outline(page)
    assert sum(f.id in parsed.texts for f in fires) == 1000
    assert parsed.names.count("circle") == 1000 - sum(f.origin.layer not in range(12) for f in fires)


def test_more_fires_than_the_list_holds_are_counted(make_fire, outline):
    fires = [make_fire() for _ in range(2100)]
    text = text_of(fires_html([FireView(fire=f) for f in fires]), outline)
    assert "100 older fires are not listed" in text


def test_the_map_marks_origin_order_and_clean(make_fire):
    m = signal_map(make_fire())
    assert m is not None
    assert m.rows == ("11", "12", "13", "model")
    assert m.columns == ("input", "attention", "kv", "down", "output", "logits")
    assert m.cell("12", "down") == (Cell.ORIGIN, 1)
    assert m.cell("13", "kv") == (Cell.BAD, 4)
    assert m.cell("model", "logits") == (Cell.BAD, 6)
    assert m.cell("11", "down") == (Cell.CLEAN, None)
    assert "all 213 declared signals ran" in m.legend[0][1]


@pytest.mark.parametrize(
    ("coverage", "legend"),
    [((0, 0), "not reported"), ((210, 213), "one of the 3 of 213 declared signals that were not covered")],
)
def test_a_signal_is_never_called_clean_without_coverage(make_fire, coverage, legend):
    m = signal_map(make_fire(coverage=coverage))
    assert m is not None
    assert m.cell("11", "down") == (Cell.UNKNOWN, None)
    assert legend in m.legend[0][1]
    assert all(cell is not Cell.CLEAN for cell, _ in m.cells.values())


def test_readings_of_another_engine_keep_their_status(make_fire):
    readings = (
        SignalReading(signal=Signal(stage="down", layer=12), status=Status.BAD),
        SignalReading(signal=Signal(stage="up", layer=12), status=Status.CLEAN),
        SignalReading(signal=Signal(stage="gate", layer=12), status=Status.NOT_COVERED),
    )
    m = signal_map(make_fire(bad_signals=readings, coverage=(0, 0)))
    assert m is not None
    assert m.cell("12", "up")[0] is Cell.CLEAN
    assert m.cell("12", "gate")[0] is Cell.NOT_COVERED
    assert (Cell.NOT_COVERED, "not covered") in m.legend


def test_beyond_a_full_list_nothing_is_called_clean(make_fire):
    stages = ("input", "attention", "gate", "up", "swiglu", "down", "output", "kv")
    many = [SignalReading(signal=Signal(stage=s, layer=12 + i), status=Status.BAD) for i in range(8) for s in stages]
    assert len(many) == FULL_LIST
    m = signal_map(make_fire(bad_signals=tuple(many), origin=Signal(stage="input", layer=12)))
    assert m is not None
    assert m.cell("11", "kv")[0] is Cell.CLEAN, "it ran before the origin"
    extra = signal_map(
        make_fire(bad_signals=(*many[:-1], dataclasses.replace(many[-1], signal=Signal(stage="ple", layer=19))))
    )
    assert extra is not None
    assert extra.cell("19", "kv")[0] is Cell.UNKNOWN


def test_bits_that_contradict_the_record_are_told(make_fire, outline):
    fire = make_fire()
    fire = dataclasses.replace(fire, first=dataclasses.replace(fire.first, kind=Kind.POS_INF))
    assert "one of the two is wrong" in text_of(fire_html(FireView(fire=fire)), outline)


def test_a_campaign_draws_both_curves_with_bands(campaign, outline):
    page = outline(campaign_html(campaign))
    paths = [v for _, k, v in page.attributes if k == "class" and v.startswith(("line", "band"))]
    assert sorted(paths) == ["band c0", "band c0", "band c1", "line c0 d0", "line c0 d0", "line c1 d1"]
    text = " ".join(page.texts)
    assert "The arms differ (p=.026)." in text
    assert "share of tries still clean" in text
    assert "they may depend on each other" in text


def test_chart_points_lie_inside_the_frame(campaign):
    page = campaign_html(campaign)
    for d in re.findall(r'<path d="M([^"]*)"', page):
        for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", d):
            assert 0 <= float(x) <= 520
            assert 0 <= float(y) <= 300
