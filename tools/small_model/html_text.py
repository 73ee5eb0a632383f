"""The prose of an HTML page, without its menus."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
# HTML lets their end tags go; an open one is closed by the next of its kind or by an outer end
_OPTIONAL_END = {"p", "li", "dt", "dd", "tr", "td", "th", "option", "tbody", "thead"}
_SKIPPED_TAGS = {"script", "style", "nav", "header", "footer", "head", "svg", "form", "button", "table"}
_SKIPPED_CLASSES = {
    "navheader", "navfooter", "menu", "nosearch", "searchmenu", "sphinxsidebar", "related", "headerlink", "toc",
    "sidebar", "nav-wrapper", "nav-wide-wrapper", "fancy_toc", "footer", "logo",
}  # fmt: skip
_BLOCKS = {"p", "div", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "dl", "dd", "dt", "section", "blockquote"}


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.open: list[tuple[str, bool]] = []  # tag, whether its content is skipped
        self.pre = 0

    @property
    def skipping(self) -> bool:
        return bool(self.open) and self.open[-1][1]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _VOID:
            if tag == "br":
                self.handle_data("\n" if self.pre else " ")
            return
        if tag in _OPTIONAL_END and self.open and self.open[-1][0] == tag:
            self.open.pop()
        classes = set((dict(attrs).get("class") or "").split())
        skip = self.skipping or tag in _SKIPPED_TAGS or bool(classes & _SKIPPED_CLASSES)
        self.open.append((tag, skip))
        if skip:
            return
        if tag == "pre":
            self.pre += 1
            self.parts.append("\n\n")
        elif tag == "li":
            self.parts.append("\n\n- ")
        elif tag in _BLOCKS:
            self.parts.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        if not any(name == tag for name, _ in self.open):
            return
        while True:
            name, skip = self.open.pop()
            if name == "pre" and not skip:
                self.pre -= 1
            if name == tag:
                break
        if not skip and (tag in _BLOCKS or tag == "pre"):
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self.skipping:
            self.parts.append(data if self.pre else re.sub(r"\s+", " ", data))


def text_of_html(page: str) -> str:
    """Text of a page: blocks apart by an empty line, ``pre`` as it stands; menus, tables, scripts left out."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    text = "".join(reader.parts)
    text = re.sub(r"\n[ \t]*\n\s*- \s*", "\n\n- ", text)
    return re.sub(r"\n\n[ \t]+(?=\n)", "\n\n", text)
