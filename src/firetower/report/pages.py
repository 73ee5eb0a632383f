"""Whole HTML pages: one fire, all fires of a store, an analysis, a campaign."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from firetower.core.analysis import Analysis, CampaignCurves
from firetower.core.records import Fire, utc_now
from firetower.fires.page import value_name
from firetower.report import analysis_sections as many
from firetower.report import fire_sections as one
from firetower.report.campaign_sections import arms, comparisons, curves, limits
from firetower.report.html import Html, bullets, document, el, fitted, section, table
from firetower.report.records import FireView
from firetower.report.store_sections import fires_table, origins_map, over_time
from firetower.report.summary import analysis_summary, campaign_summary, fire_summary, fires_summary
from firetower.report.values import environment, headline

MAX_LISTED = 2_000
"""Fires in the list of a store's page; the others are counted."""


def fire_html(view: FireView, *, with_content: bool = False, made_at: str | None = None) -> str:
    """The page of one fire.

    Args:
        view: the fire and what goes with it.
        with_content: show token ids and fields that may hold what somebody wrote.
        made_at: time for the last line; now by default.
    """
    fire = view.fire

    def build() -> str:
        sections = [
            ("what", "What happened", one.overview(view)),
            ("time", "Time line", one.time_line(view)),
            ("map", "Layer x signal", one.map_section(view)),
            ("bits", "Bits", one.bits_section(view)),
            ("verdict", "Verdict", one.verdict_section(view)),
            ("state", "State audit", one.state_section(view)),
            ("tensors", "Tensors", one.tensor_section(view)),
            ("burned", "Burned", one.burned_section(view)),
            ("environment", "Environment", one.environment_section(view, with_content)),
            ("content", "Content", one.content_section(view, with_content)),
            ("summary", "To paste", _summary(fire_summary(view))),
        ]
        return document(headline(fire), lead, sections, _footer(made_at, with_content))

    lead = f"{fire.model}, fire {fire.id}, {fire.created_at}"
    return fitted(build)


def fires_html(
    views: Sequence[FireView], *, analysis: Analysis | None = None, store: str = "", made_at: str | None = None
) -> str:
    """The page of all fires of a store, newest first.

    Args:
        views: the fires; beyond `MAX_LISTED` they are counted, not listed.
        analysis: of the same fires, across them.
        store: its name, for the heading.
        made_at: as for `fire_html`.
    """
    found = [v.fire for v in views]
    counts = Counter(f"{headline(f)} ({f.model})" for f in found)

    def build() -> str:
        sections = [
            ("overview", "Overview", _overview(found, counts)),
            *(_analysis_sections(analysis, single=False) if analysis is not None else []),
            ("time", "Time line", over_time(found)),
            ("map", "Layer x signal", origins_map(found)),
            ("list", "Fires", fires_table(views[:MAX_LISTED], len(views))),
            ("environment", "Environment", many.environment(_environment(found))),
            ("summary", "To paste", _summary(fires_summary(len(found), counts.most_common(), analysis))),
        ]
        return document("Fires", lead, sections, _footer(made_at, False))

    times = sum(f.count for f in found)
    lead = f"{len(found)} fires{f', seen {times} times' if times != len(found) else ''}{f', {store}' if store else ''}"
    return fitted(build)


def analysis_html(analysis: Analysis, *, made_at: str | None = None) -> str:
    """The page of an incident file, or of fires compared."""

    def build() -> str:
        sections = [
            *_analysis_sections(analysis, single=True),
            ("environment", "Environment", many.environment(analysis.environment)),
            ("summary", "To paste", _summary(analysis_summary(analysis))),
        ]
        return document(f"Incident: {analysis.num_fires} fires", analysis.title, sections, _footer(made_at, False))

    return fitted(build)


def campaign_html(campaign: CampaignCurves, *, made_at: str | None = None) -> str:
    """The page of a replay campaign."""

    def build() -> str:
        sections = [
            ("result", "Result", comparisons(campaign)),
            ("curves", "Curves", curves(campaign)),
            ("arms", "Arms", arms(campaign)),
            ("limits", "Limits", limits(campaign)),
            ("environment", "Environment", many.environment(campaign.facts)),
            ("summary", "To paste", _summary(campaign_summary(campaign))),
        ]
        return document(campaign.title, f"{fires} fires in {tries} tries", sections, _footer(made_at, False))

    tries, fires = sum(a.tries for a in campaign.arms), sum(a.fires for a in campaign.arms)
    return fitted(build)


def _analysis_sections(a: Analysis, *, single: bool) -> list[tuple[str, str, Html]]:
    sections = [
        ("conclusion", "What it comes to", many.conclusion(a)),
        ("traits", "Invariant", many.traits(a)),
        ("rate", "How often", many.rate(a)),
        ("hypotheses", "Hypotheses", many.hypotheses(a)),
    ]
    if not single:
        # a store has its own list, map and environment
        return sections
    return [
        *sections,
        ("map", "Fire x signal", many.first_bad(a)),
        ("bits", "Bits", many.bits(a)),
        ("fires", "Fire by fire", many.fires(a)),
        ("reported", "As reported", many.reported(a)),
    ]


def _overview(found: Sequence[Fire], counts: Counter[str]) -> Html:
    if not found:
        return section("Overview", el("p", "No fires in this store."), id_="overview")
    rows = [(n, what) for what, n in counts.most_common(20)]
    more = f"and {len(counts) - 20} more" if len(counts) > 20 else ""
    patterns = Counter(value_name(f.first) for f in found).most_common(12)
    return section(
        "Overview",
        table(("fires", "where first (model)"), rows, wide=(1,)),
        el("p", more, class_="soft") if more else None,
        el("h3", "First bad values"),
        bullets((f"{what}: {n}" for what, n in patterns), class_="columns"),
        id_="overview",
    )


def _environment(found: Sequence[Fire]) -> list[tuple[str, str]]:
    values: dict[str, list[str]] = {}
    for fire in found:
        for name, value in environment(fire):
            if name != "request" and value not in values.setdefault(name, []):
                values[name].append(value)
    return [(name, "; ".join(v[:8]) + (f"; and {len(v) - 8} more" if len(v) > 8 else "")) for name, v in values.items()]


def _summary(text: str) -> Html:
    """Plain text to paste into an issue."""
    button = el("button", "copy", type="button", data_copy="paste", data_js=True)
    # the summary has cut and escaped its lines already; it is text here and nothing else
    body = el("pre", [[line, Html("\n")] for line in text.split("\n")], id="paste")
    return section("To paste into an issue", button, body, id_="summary")


def _footer(made_at: str | None, with_content: bool) -> str:
    private = " Contains private content of a request." if with_content else " Holds no prompt content."
    return f"Made by firetower {made_at or utc_now()}. Loads nothing from anywhere.{private}"
