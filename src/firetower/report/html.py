"""HTML that cannot be injected into: every string is text unless this module made it markup.

`el` escapes its children and attributes; only `Html` passes as it is, and only this room makes it. Text is cut and
its invisible characters are shown first, so a name of a megabyte or a bidirectional override does no harm either.
`fitted` keeps a page small.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from firetower.fires.text import visible
from firetower.report.style import CSS, SCRIPT

MAX_BYTES = 2_000_000
"""A page that people send around: what would make it larger is cut, and the page says what was."""


class Limits(NamedTuple):
    """Characters of one piece of text, points of a list, and rows of a table that are shown."""

    text: int
    items: int
    rows: int


LIMITS = (Limits(2_000, 300, 2_000), Limits(400, 100, 1_000), Limits(120, 40, 400), Limits(40, 15, 100))
"""Tried in turn until the page fits `MAX_BYTES`; only hostile or enormous input gets beyond the first."""

_limits = ContextVar("limits", default=LIMITS[0])

_VOID = {"br", "meta", "link", "circle", "line", "rect", "path", "polyline"}


class Html(str):
    """A string that is markup already."""

    __slots__ = ()


def fitted(build: Callable[[], str]) -> str:
    """The page that ``build`` makes, under the first limits with which it fits `MAX_BYTES`."""
    page = ""
    for limits in LIMITS:
        token = _limits.set(limits)
        try:
            page = build()
        finally:
            _limits.reset(token)
        if len(page.encode()) <= MAX_BYTES:
            break
    return page


def clip(text: str, limit: int | None = None) -> str:
    """At most ``limit`` characters, and how many there were; by default what fits a page."""
    limit = min(limit or LIMITS[0].text, _limits.get().text)
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text):,} characters)"


def text(value: Any, limit: int | None = None) -> Html:
    """Anything as escaped, visible text."""
    return Html(html.escape(visible(clip(str(value), limit)), quote=True))


def el(name: str, /, *children: Any, **attributes: Any) -> Html:
    """One element. Children: text, `Html`, None, or lists of these. ``class_`` is ``class``, ``_`` is ``-``."""
    given = ((k.rstrip("_").replace("_", "-"), v) for k, v in attributes.items() if v is not None and v is not False)
    head = "".join(f" {k}" if v is True else f' {k}="{_attribute(v)}"' for k, v in given)
    if name in _VOID:
        return Html(f"<{name}{head}>" if name in ("br", "meta", "link") else f"<{name}{head}/>")
    return Html(f"<{name}{head}>{join(children)}</{name}>")


def _attribute(value: Any) -> str:
    # whole: a policy or a path that is cut is another one; titles are cut by who makes them
    return html.escape(visible(str(value)), quote=True)


def join(children: Iterable[Any]) -> Html:
    """Children one after the other."""
    parts = []
    for child in children:
        if child is None or child is False:
            continue
        if isinstance(child, Html):
            parts.append(str(child))
        elif isinstance(child, list | tuple):
            parts.append(str(join(child)))
        else:
            parts.append(str(text(child)))
    return Html("".join(parts))


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, wide: Sequence[int] = (), id_: str | None = None
) -> Html:
    """A table in a box that scrolls sideways on narrow screens; columns of prose are ``wide``."""
    rows = list(rows)
    kept = rows[: _limits.get().rows]
    kind = ["wide" if i in wide else None for i in range(len(columns))]
    head = el("thead", el("tr", [el("th", c, scope="col", class_=k) for c, k in zip(columns, kind, strict=True)]))
    body = [el("tr", [el("td", cell, class_=k) for cell, k in zip(row, kind, strict=True)]) for row in kept]
    if len(rows) > len(kept):
        body.append(el("tr", el("td", f"and {len(rows) - len(kept):,} more", colspan=len(columns))))
    return el("div", el("table", head, el("tbody", body), id=id_), class_="scroll", tabindex="0") if body else Html("")


def facts(pairs: Iterable[tuple[str, Any]]) -> Html:
    """Names and values."""
    shown = [el("div", el("dt", name), el("dd", value)) for name, value in pairs if value not in (None, "")]
    shown = _cut(shown, "div")
    return el("dl", shown) if shown else Html("")


def bullets(items: Iterable[Any], *, class_: str | None = None) -> Html:
    """A list of points; nothing where there are none."""
    points = _cut([el("li", item) for item in items], "li")
    return el("ul", points, class_=class_) if points else Html("")


def _cut(items: list[Html], name: str) -> list[Html]:
    limit = _limits.get().items
    if len(items) <= limit:
        return items
    return [*items[:limit], el(name, f"and {len(items) - limit:,} more")]


def section(title: str, *body: Any, id_: str) -> Html:
    """One section of the page; nothing where its body is empty."""
    inner = join(body)
    return el("section", el("h2", title), inner, id=id_) if inner else Html("")


def document(title: str, subtitle: Any, sections: Sequence[tuple[str, str, Html]], footer: Any) -> str:
    """A whole page.

    Args:
        title: heading and name of the page.
        subtitle: one line below it.
        sections: (id, name in the navigation, `section`); empty ones are left out.
        footer: last line.

    Returns:
        HTML that loads nothing: its policy forbids every source but this style and this script, by hash.
    """
    shown = [(i, name, body) for i, name, body in sections if body]
    policy = (
        f"default-src 'none'; style-src {_hash(CSS)}; script-src {_hash(SCRIPT)}; base-uri 'none'; form-action 'none'"
    )
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="referrer", content="no-referrer"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", clip(title, 120)),
        el("style", Html(CSS)),
    )
    nav = el("nav", [el("a", name, href=f"#{i}") for i, name, _ in shown], aria_label="Sections")
    mark = el("p", "firetower", class_="brand")
    header = el("header", mark, el("h1", clip(title, 200)), el("p", subtitle, class_="lead"), nav)
    body = el("body", header, el("main", [b for _, _, b in shown]), el("footer", footer), el("script", Html(SCRIPT)))
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


def _hash(source: str) -> str:
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    return f"'sha256-{digest}'"
