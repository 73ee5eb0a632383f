"""Names from models, files and servers are text, whatever they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firetower.core.records import BadValue, Kind, Signal, SignalReading, Status, TensorSummary
from firetower.core.verdict import Evidence, Rival, Verdict
from firetower.lab.across import across, across_incident
from firetower.lab.incident import incident_from_dict
from firetower.report import (
    FireView,
    analysis_html,
    analysis_lines,
    fire_html,
    fire_lines,
    fires_html,
    fires_lines,
)
from firetower.report.html import MAX_BYTES, el, text

INCIDENT = Path(__file__).parents[1] / "lab" / "data" / "evicted-expert.json"
HOSTILE = {
    "script": "<script>document.title='pwned'</script>",
    "attribute": '" onmouseover="alert(1)" x=\'',
    "closing": "</title></style></pre></textarea><img src=x onerror=alert(1)>",
    "comment": "<!-- ]]> <svg/onload=alert(1)>",
    "ansi": "\x1b[2J\x1b]0;pwned\x07red\x1b[31m",
    "rtl": "safe\u202egnp.exe\u2066\u200b",
    "nul": "a\x00b\ud800c",
    "entity": "&lt;script&gt; &amp;#x3c;",
    "newline": "line one\nline two\r\nline three",
}
_ALLOWED = """
html head meta title style body header p h1 h2 h3 nav a main section span strong dl div dt dd ul ol
li table thead tbody tr th td code pre button footer script details summary b input figure
figcaption svg line circle text path g
"""
ALLOWED = set(_ALLOWED.split())


def hostile_view(make_fire: Any, bad: str) -> FireView:
    signal = Signal(stage=bad, layer=2, module=bad, op=bad, source=bad)
    first = BadValue(flat_index=0, row=0, column=0, bits=0x7E00, dtype=bad, kind=Kind.NAN)
    tensor = TensorSummary(
        name=bad,
        shape=(1,),
        dtype=bad,
        num_nan=1,
        num_pos_inf=0,
        num_neg_inf=0,
        absmax=None,
        zero_frac=0.0,
        headroom=None,
    )
    verdict = Verdict(
        family="M",
        detail=bad,
        decided=True,
        statement=bad,
        evidence=(Evidence(test=bad, statement=bad, supports=(bad,)),),
        rivals=(Rival(family=bad, detail=bad, status="open", why=bad, test=bad),),
        refuter=bad,
        next_test=bad,
        next_command=bad,
        cure=bad,
        ignition=bad,
        persistence=bad,
        not_testable=(bad,),
    )
    fire = make_fire(
        origin=signal,
        first=first,
        model=bad,
        runtime=bad,
        device=bad,
        source=bad,
        request=bad,
        notes=(bad,) * 3,
        bad_signals=(SignalReading(signal=signal, status=Status.BAD, first=first),),
        inputs=(tensor,),
        output=tensor,
        weights=(tensor,),
        extra={bad: bad, "x": [bad, {bad: bad}]},
        created_at=bad[:100],
    )
    return FireView(fire=fire, verdict=verdict, verdict_source=bad, resembles=((bad, bad),), last_seen=bad)


def assert_harmless(page: str, outline: Any) -> None:
    parsed = outline(page)
    assert set(parsed.names) <= ALLOWED
    assert parsed.names.count("script") == 1
    assert not [k for _, k, _ in parsed.attributes if k.startswith("on") or k == "src"]
    assert all(c.isprintable() or c == "\n" for c in page)
    assert len(page.encode()) <= MAX_BYTES


@pytest.mark.parametrize("bad", HOSTILE.values(), ids=HOSTILE)
def test_a_fire_of_hostile_names(make_fire, outline, bad):
    view = hostile_view(make_fire, bad)
    for with_content in (False, True):
        assert_harmless(fire_html(view, with_content=with_content), outline)
    fires = [view.fire, make_fire(model=bad)]
    assert_harmless(fires_html([view, FireView(fire=fires[1])], analysis=across(fires), store=bad), outline)


@pytest.mark.parametrize("bad", HOSTILE.values(), ids=HOSTILE)
def test_the_terminal_shows_and_does_not_obey(make_fire, bad):
    view = hostile_view(make_fire, bad)
    lines = [*fire_lines(view, with_content=True), *fires_lines([view, view], across([view.fire, view.fire]))]
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("bad", HOSTILE.values(), ids=HOSTILE)
def test_an_incident_of_hostile_words(outline, bad):
    data = json.loads(INCIDENT.read_text(encoding="utf-8"))
    data |= {"what": bad, "its_reporter_concluded": bad, "clean_in_every_fire": [bad], "request": {bad: bad}}
    data["ruled_out_by_its_reporter"] = {bad: bad}
    data["fires"][0] |= {"id": bad, "build": bad, "clean": [bad]}
    data["fires"][0]["first_layer"][bad] = 3
    analysis = across_incident(incident_from_dict(data))
    assert_harmless(analysis_html(analysis), outline)
    assert all(line.isprintable() for line in analysis_lines(analysis))


def test_a_name_of_a_megabyte_is_cut_and_told(make_fire, outline):
    view = hostile_view(make_fire, "\U0001f525<&" * 350_000)
    page = fire_html(view)
    assert_harmless(page, outline)
    assert "(1,050,000 characters)" in page
    assert max(map(len, fire_lines(view))) < 5_000


def test_ten_thousand_of_everything_still_fit_a_page(make_fire, outline):
    tensor = hostile_view(make_fire, "<&" * 1000).fire.inputs[0]
    fire = make_fire(
        notes=tuple(f"note {i} {'<&' * 200}" for i in range(10_000)),
        extra={f"key {i}": "<&" * 1000 for i in range(10_000)},
        inputs=(tensor,) * 200,
    )
    page = fire_html(FireView(fire=fire))
    assert_harmless(page, outline)
    assert "more" in page


def test_many_fires_with_long_names_still_fit_a_page(make_fire, outline):
    views = [
        FireView(fire=make_fire(model="\u202e" * 3000, origin=Signal(stage=f"{'<' * 500}{i}", layer=i)))
        for i in range(1500)
    ]
    assert_harmless(fires_html(views, analysis=across([v.fire for v in views])), outline)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(st.text())
def test_any_text_comes_back_as_it_was_escaped(outline, value):
    from firetower.fires.text import visible

    parsed = outline(str(el("p", value, title=value)))
    # what a page shows of a text is the text with its hidden characters made visible, and nothing else
    assert "".join(parsed.texts) == visible(value).strip("\x00") if value.strip() else True
    assert parsed.names == ["p"]
    assert "<" not in text(value)
