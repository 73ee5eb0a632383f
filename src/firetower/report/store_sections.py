"""The sections of a page on all fires of a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime

from firetower.core.records import Fire
from firetower.fires.page import value_name
from firetower.report.html import Html, clip, el, section, table
from firetower.report.records import FireView
from firetower.report.signal_map import STAGE_ORDER
from firetower.report.svg import timeline
from firetower.report.values import headline

MAX_DOTS = 1_500
MAX_ORIGINS = 12
MAX_LAYERS = 100
MAX_CELL = 120


def over_time(found: Sequence[Fire]) -> Html:
    """One dot a fire, one row an origin."""
    moments = sorted(((t, f) for f in found if (t := _seconds(f.created_at)) is not None), key=lambda m: m[0])
    if len(moments) < 2:
        return Html("")
    rows = [name for name, _ in Counter(f.origin.name for f in found).most_common(MAX_ORIGINS)]
    low, high = moments[0][0], moments[-1][0]
    span = (high - low) or 1.0
    dots = [
        ((t - low) / span, rows.index(f.origin.name), f"{f.created_at} {headline(f)}")
        for t, f in moments
        if f.origin.name in rows
    ]
    kept = dots[:: -(-len(dots) // MAX_DOTS)]
    left = len(moments) - len(kept)
    caption = "One dot a fire, by first bad signal." + (f" {left} fires are not drawn." if left else "")
    drawn = timeline(kept, rows, (moments[0][1].created_at, moments[-1][1].created_at), caption)
    return section("Time line", drawn, id_="time")


def _seconds(created_at: str) -> float | None:
    try:
        return datetime.fromisoformat(created_at.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError, OSError):
        # a store may hold any text that another engine called a time
        return None


def origins_map(found: Sequence[Fire]) -> Html:
    """Layer x signal with the number of fires that began there."""
    counts = Counter((f.origin.layer, f.origin.stage) for f in found)
    layers = sorted({layer for layer, _ in counts if layer is not None})
    stages = list(dict.fromkeys(stage for _, stage in counts))
    columns = ([s for s in STAGE_ORDER if s in stages] + [s for s in stages if s not in STAGE_ORDER])[:24]
    rows: list[int | None] = [*layers[:MAX_LAYERS], *([None] if any(layer is None for layer, _ in counts) else [])]
    if not rows:
        return Html("")
    head = el("tr", el("th", "layer", scope="col"), [el("th", clip(c, 24), scope="col") for c in columns])
    body = [
        el(
            "tr",
            el("th", "model" if layer is None else str(layer), scope="row"),
            [_count(counts[layer, stage]) for stage in columns],
        )
        for layer in rows
    ]
    drawn = sum(counts[layer, stage] for layer in rows for stage in columns)
    left = f" {len(found) - drawn} fires lie outside the map." if drawn < len(found) else ""
    note = el(
        "p", "How many fires began at each signal; a signal without a number began none of them.", left, class_="soft"
    )
    grid = el("table", el("thead", head), el("tbody", body), class_="map")
    return section("Layer x signal: where fires began", el("div", grid, class_="scroll", tabindex="0"), note, id_="map")


def _count(number: int) -> Html:
    return el("td", str(number), class_="origin") if number else el("td")


def fires_table(views: Sequence[FireView], num_fires: int) -> Html:
    """The list, newest first, with a filter where scripts run."""
    rows = [
        (
            v.fire.id,
            headline(v.fire) if len(v.fire.origin.name) <= MAX_CELL else clip(headline(v.fire), MAX_CELL),
            value_name(v.fire.first),
            v.fire.count,
            str(v.fire.phase),
            v.verdict.key if v.verdict is not None and v.verdict.decided else "",
            v.fire.created_at,
            clip(v.fire.model, MAX_CELL),
        )
        for v in views
    ]
    more = f"{num_fires - len(views):,} older fires are not listed." if num_fires > len(views) else ""
    box = el(
        "input",
        type="search",
        placeholder="filter",
        data_filter="all-fires",
        data_js=True,
        aria_label="filter the fires",
    )
    columns = ("id", "where first", "value", "times", "phase", "verdict", "created", "model")
    body = table(columns, rows, id_="all-fires")
    return section("Fires", box, body, el("p", more, class_="soft") if more else None, id_="list") if rows else Html("")
