"""The sections of a page on many fires: what is invariant, hypotheses, evidence, single fires, what to look at next."""

from __future__ import annotations

import re
from collections.abc import Iterable

from firetower.core.analysis import Analysis, FireLine, Hypothesis, Observation, Trait
from firetower.report.html import Html, bullets, clip, el, facts, section, table
from firetower.report.signal_map import STAGE_ORDER

SIGNS = {"for": "+", "against": "−", "excludes": "✕"}
BADGES = {"favoured": "badge fire", "open": "badge warn", "weakened": "badge", "excluded": "badge ok"}
MAX_VALUES = 12
MAX_FIRES = 40


def conclusion(a: Analysis) -> Html:
    """What follows and what does not, with what was not seen."""
    first, *others = re.split(r"(?<=\.) (?=[A-Z])", a.conclusion)
    return section(
        "What it comes to",
        el("p", first, class_="headline"),
        [el("p", sentence) for sentence in others],
        el("p", a.survivorship, class_="soft"),
        [el("h3", "Look at next"), el("ol", [el("li", step) for step in a.next_steps])] if a.next_steps else None,
        id_="conclusion",
    )


def traits(a: Analysis) -> Html:
    """Invariant and varying properties."""
    rows = [
        (t.name, _values(t), _agreement(t), el("span", f"{t.num_known} of {t.num_fires}", class_="nowrap"))
        for t in a.traits
    ]
    return section(
        "Invariant and varying",
        table(("property", "values (fires)", "", "known"), rows, wide=(1,)),
        id_="traits",
    )


def _values(t: Trait) -> str:
    listed = [f"{value} ({n})" if n > 1 else value for value, n in t.counts[:MAX_VALUES]]
    more = len(t.counts) - MAX_VALUES
    return "; ".join(listed) + (f"; and {more} more" if more > 0 else "")


def _agreement(t: Trait) -> Html:
    if t.is_invariant:
        return el("span", "invariant", class_="badge ok")
    return el("span", "varies" if len(t.counts) > 1 else "one seen", class_="badge")


def rate(a: Analysis) -> Html:
    """How often, and what would support "fixed"."""
    return section("How often", bullets(a.rate), id_="rate") if a.rate else Html("")


def hypotheses(a: Analysis) -> Html:
    """The table hypothesis x evidence, then each hypothesis in words."""
    heads = [f"E{i}" for i, _ in enumerate(a.observations, start=1)]
    body = [
        el(
            "tr",
            el("th", el("b", h.key), f" {h.title} ", el("span", h.standing, class_=BADGES[h.standing]), scope="row"),
            [_sign(h, o) for o in a.observations],
        )
        for h in a.hypotheses
    ]
    head = el(
        "tr",
        el("th", "hypothesis", scope="col"),
        [el("th", e, scope="col", title=clip(o.statement, 300)) for e, o in zip(heads, a.observations, strict=True)],
    )
    grid = el("table", el("thead", head), el("tbody", body), class_="grid") if a.observations else Html("")
    signs = (("+", "speaks for"), ("−", "speaks against"), ("✕", "excludes it as the one cause"))
    legend = el("p", [el("span", el("b", s), f" {what}") for s, what in signs], class_="legend")
    evidence = table(
        ("", "seen", "what it does not show"),
        [(e, o.statement, o.limit) for e, o in zip(heads, a.observations, strict=True)],
        wide=(1, 2),
    )
    words = table(
        ("hypothesis", "standing", "why", "the test that tells", "met in public"),
        [(f"{h.key} {h.title}", el("span", h.standing, class_=BADGES[h.standing]), h.why, h.test, h.prior)
         for h in a.hypotheses],
        wide=(2, 3),
    )  # fmt: skip
    return section(
        "Hypotheses x evidence",
        el("div", grid, class_="scroll", tabindex="0") if grid else None,
        legend if grid else None,
        [el("h3", "Evidence"), evidence] if evidence else None,
        el("details", el("summary", "Each hypothesis in words"), words),
        id_="hypotheses",
    )


def _sign(h: Hypothesis, o: Observation) -> Html:
    word = o.speaks.get(h.key)
    if word is None:
        return el("td")
    return el(
        "td", SIGNS[word], class_=f"says-{word}", title=f"{o.name} {'speaks ' if word != 'excludes' else ''}{word}"
    )


def bits(a: Analysis) -> Html:
    """Every pattern with what it says."""
    blocks = []
    for line in a.bits[:24]:
        first, *others = line.sentences
        count = f"{line.count} fire{'s' * (line.count != 1)}"
        where = ", ".join(filter(None, (count, line.where)))
        blocks.append(el("div", el("h3", el("code", line.bits_hex), f" ({where})"), el("p", first), bullets(others)))
    return section("Bits", blocks, id_="bits") if blocks else Html("")


def first_bad(a: Analysis) -> Html:
    """Fire x signal: the layer where each signal was first bad, with the origin marked."""
    traced = [f for f in a.fires if f.first_layers][:MAX_FIRES]
    if not traced:
        return Html("")
    seen = list(dict.fromkeys(name for f in traced for name in f.first_layers))
    columns = [s for s in STAGE_ORDER if s in seen] + [s for s in seen if s not in STAGE_ORDER]
    head = el("tr", el("th", "fire", scope="col"), [el("th", clip(c, 24), scope="col") for c in columns])
    rows = [el("tr", el("th", clip(f.id, 32), scope="row"), [_layer(f, c) for c in columns]) for f in traced]
    body = el("table", el("thead", head), el("tbody", rows), class_="map")
    signs = (
        ("★ n", "origin, in layer n"),
        ("n", "first bad in layer n"),
        ("·", "clean throughout"),
        ("?", "not reported"),
    )
    legend = el("p", [el("span", el("b", s), f" {what}") for s, what in signs], class_="legend")
    return section(
        "Fire x signal: layer of the first bad value", el("div", body, class_="scroll", tabindex="0"), legend, id_="map"
    )


def _layer(f: FireLine, column: str) -> Html:
    if column not in f.first_layers:
        return el("td", "?", class_="unknown")
    layer = f.first_layers[column]
    if layer is None:
        return el("td", "·", class_="clean")
    if column == f.origin:
        return el("td", f"★ {layer}", class_="origin")
    return el("td", str(layer), class_="bad")


def fires(a: Analysis) -> Html:
    """Each fire that is known by itself, and what it excludes for itself."""
    rows = [(f.id, f.summary, bullets(f"{key}: {why}" for key, why in f.excludes)) for f in a.fires[:MAX_FIRES]]
    more = f"{len(a.fires) - MAX_FIRES} more fires are not listed" if len(a.fires) > MAX_FIRES else ""
    body = table(("fire", "seen", "excludes for itself"), rows, wide=(1, 2))
    return (
        section("Fire by fire", body, el("p", more, class_="soft") if more else None, id_="fires") if body else Html("")
    )


def reported(a: Analysis) -> Html:
    """What the reporter tested and concluded."""
    return (
        section("As reported", table(("test", "outcome"), a.reported, wide=(1,)), id_="reported")
        if a.reported
        else Html("")
    )


def environment(pairs: Iterable[tuple[str, str]]) -> Html:
    """Engine, device, request."""
    body = facts(pairs)
    return section("Environment", body, id_="environment") if body else Html("")
