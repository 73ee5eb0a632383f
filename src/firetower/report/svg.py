"""Inline charts: steps with a band, one colour and one dash an arm, axes with round numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from firetower.report.html import Html, clip, el

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 44
NUM_COLOURS, NUM_DASHES = 6, 4
MAX_POINTS = 400
"""Points of one line that are drawn: more do not show at this size, and each costs bytes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of steps: ``points`` are (x, y, lower, upper) with x ascending; each y holds up to the next x.

    ``end`` is how far right the last step goes.
    """

    name: str
    points: Sequence[tuple[float, float, float, float]]
    end: float


def chart(series: Sequence[Series], *, x_name: str, y_name: str, caption: str, y_max: float | None = None) -> Html:
    """A figure with all series on one pair of axes, and what it shows in words."""
    right = max([s.end for s in series] + [p[0] for s in series for p in s.points] + [1.0])
    top = y_max or max([p[3] for s in series for p in s.points] + [1.0])
    scale = _Scale(right, top)
    parts = [*_axes(scale, x_name, y_name)]
    for i, s in enumerate(series):
        parts += _series(scale, s, i)
    image = el("svg", parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=caption)
    keys = [_key(s.name, i) for i, s in enumerate(series)] if len(series) > 1 else []
    return el("figure", image, el("div", keys, class_="legend"), el("figcaption", caption))


def timeline(
    moments: Sequence[tuple[float, int, str]], rows: Sequence[str], ends: tuple[str, str], caption: str
) -> Html:
    """Dots along time: (place from 0 to 1, row, title), with the two ends of the axis in words."""
    height = TOP + 24 * max(1, len(rows)) + BOTTOM
    label = 170
    left, right = label + 8, WIDTH + 200
    parts = []
    for i, name in enumerate(rows):
        y = TOP + 24 * i + 12
        parts.append(el("line", x1=left, y1=y, x2=right, y2=y, class_="axis"))
        parts.append(el("text", clip(name, 26), x=label, y=y + 4, text_anchor="end"))
    for place, row, title in moments:
        x, y = left + place * (right - left), TOP + 24 * row + 12
        dot = el("circle", cx=f"{x:.1f}", cy=y, r=4.5, class_="dot c0", fill_opacity=0.65)
        parts.append(el("g", el("title", title), dot))
    base = height - BOTTOM + 18
    parts.append(el("text", ends[0], x=left, y=base))
    parts.append(el("text", ends[1], x=right, y=base, text_anchor="end"))
    image = el("svg", parts, viewBox=f"0 0 {right + 14} {height - 16}", role="img", aria_label=caption)
    return el("figure", image, el("figcaption", caption))


@dataclasses.dataclass(frozen=True, slots=True)
class _Scale:
    right: float
    top: float

    def x(self, value: float) -> float:
        return round(LEFT + value / self.right * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        inside = min(max(value / self.top, 0.0), 1.0)
        return round(HEIGHT - BOTTOM - inside * (HEIGHT - TOP - BOTTOM), 1)


def ticks(top: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to at most ``top``, about ``count`` of them."""
    raw = top / count
    size = 10 ** math.floor(math.log10(raw))
    step = next(m * size for m in (1, 2, 5, 10) if m * size >= raw * 0.999)
    return [i * step for i in range(int(top / step * 1.0001) + 1)]


def _axes(scale: _Scale, x_name: str, y_name: str) -> list[Html]:
    low, high = scale.y(0), scale.y(scale.top)
    parts = [
        el("line", x1=LEFT, y1=low, x2=WIDTH - RIGHT, y2=low, class_="axis"),
        el("line", x1=LEFT, y1=low, x2=LEFT, y2=high, class_="axis"),
        el("text", x_name, x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 8, text_anchor="middle"),
        el("text", y_name, x=-(low + high) / 2, y=14, transform="rotate(-90)", text_anchor="middle"),
    ]
    for value in ticks(scale.right):
        if scale.right < 5 and value != int(value):
            continue
        parts.append(el("text", _number(value), x=scale.x(value), y=low + 16, text_anchor="middle"))
    for value in ticks(scale.top):
        y = scale.y(value)
        parts.append(el("line", x1=LEFT - 4, y1=y, x2=WIDTH - RIGHT, y2=y, class_="axis", stroke_opacity=0.5))
        parts.append(el("text", _number(value), x=LEFT - 8, y=y + 4, text_anchor="end"))
    return parts


def _series(scale: _Scale, s: Series, number: int) -> list[Html]:
    points = _thinned(s.points)
    if not points:
        return []
    colour, dash = f"c{number % NUM_COLOURS}", f"d{number % NUM_DASHES}"
    ends = [*(p[0] for p in points[1:]), max(s.end, points[-1][0])]
    line, upper, lower = [], [], []
    for (x, y, low, high), end in zip(points, ends, strict=True):
        line += [(x, y), (end, y)]
        upper += [(x, high), (end, high)]
        lower += [(x, low), (end, low)]
    band = [*upper, *reversed(lower)]
    return [
        el("path", d=_path(scale, band) + "Z", class_=f"band {colour}"),
        el("path", d=_path(scale, line), class_=f"line {colour} {dash}"),
    ]


def _thinned(points: Sequence[tuple[float, float, float, float]]) -> list[tuple[float, float, float, float]]:
    if len(points) <= MAX_POINTS:
        return list(points)
    step = (len(points) - 1) / (MAX_POINTS - 1)
    return [points[round(i * step)] for i in range(MAX_POINTS)]


def _path(scale: _Scale, points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{scale.x(x):g} {scale.y(y):g}" for x, y in points)


def _key(name: str, number: int) -> Html:
    line = el(
        "line", x1=0, y1=6, x2=30, y2=6, class_=f"c{number % NUM_COLOURS} d{number % NUM_DASHES}", stroke_width=2.5
    )
    return el("span", el("svg", line, viewBox="0 0 30 12", width=30, height=12, class_="key"), " ", clip(name, 80))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"
