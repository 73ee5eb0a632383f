"""HTML that cannot be injected into: every string is text unless this module made it markup.

`el` escapes its children and attributes; only `Html` passes as it is, and only this room makes it. Text is cut and
its invisible characters are shown first, so a name of a megabyte or a bidirectional override does no harm either.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from typing import Any

from firetower.fires.text import visible
from firetower.report.style import CSS, SCRIPT

MAX_TEXT = 600
"""Characters of one piece of text that are shown; the number of the others is told."""

_VOID = {"br", "meta", "link", "circle", "line", "rect", "path", "polyline"}


class Html(str):
    """A string that is markup already."""

    __slots__ = ()


def clip(text: str, limit: int = MAX_TEXT) -> str:
    """At most ``limit`` characters, and how many there were."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text):,} characters)"


def text(value: Any, limit: int = MAX_TEXT) -> Html:
    """Anything as escaped, visible text."""
    return Html(html.escape(visible(clip(str(value), limit)), quote=True))


def el(name: str, *children: Any, **attributes: Any) -> Html:
    """One element. Children: text, `Html`, None, or lists of these. ``class_`` is ``class``, ``_`` in names is ``-``."""
    given = ((k.rstrip("_").replace("_", "-"), v) for k, v in attributes.items() if v is not None and v is not False)
    head = "".join(f" {k}" if v is True else f' {k}="{text(v, 4000)}"' for k, v in given)
    if name in _VOID:
        return Html(f"<{name}{head}>" if name in ("br", "meta", "link") else f"<{name}{head}/>")
    return Html(f"<{name}{head}>{join(children)}</{name}>")


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
    kind = ["wide" if i in wide else None for i in range(len(columns))]
    head = el("thead", el("tr", [el("th", c, scope="col", class_=k) for c, k in zip(columns, kind, strict=True)]))
    body = [el("tr", [el("td", cell, class_=k) for cell, k in zip(row, kind, strict=True)]) for row in rows]
    return el("div", el("table", head, el("tbody", body), id=id_), class_="scroll", tabindex="0") if body else Html("")


def facts(pairs: Iterable[tuple[str, Any]]) -> Html:
    """Names and values."""
    shown = [el("div", el("dt", name), el("dd", value)) for name, value in pairs if value not in (None, "")]
    return el("dl", shown) if shown else Html("")


def bullets(items: Iterable[Any], *, class_: str | None = None) -> Html:
    """A list of points; nothing where there are none."""
    points = [el("li", item) for item in items]
    return el("ul", points, class_=class_) if points else Html("")


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
    body = el(
        "body", header, el("main", [b for _, _, b in shown]), el("footer", footer), el("script", Html(SCRIPT))
    )
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


def _hash(source: str) -> str:
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    return f"'sha256-{digest}'"
