"""The sections of a replay campaign's page: what it says, cumulative fires, where in the request they start."""

from __future__ import annotations

from firetower.core.analysis import ArmCurve, CampaignCurves
from firetower.report.html import Html, bullets, el, section, table
from firetower.report.svg import Series, chart


def comparisons(c: CampaignCurves) -> Html:
    """The result in sentences, most important first."""
    first, *others = c.sentences or ("No comparison: one arm.",)
    return section("Result", el("p", first, class_="headline"), bullets(others), id_="result")


def curves(c: CampaignCurves) -> Html:
    """Cumulative fires with the anytime interval, and the share of tries still clean by position."""
    counted = [_cumulative(a) for a in c.arms if a.points]
    alive = [_survival(a) for a in c.arms if a.survival]
    figures = []
    if counted:
        figures.append(
            chart(
                counted,
                x_name="tries",
                y_name="fires so far",
                caption="Fires so far. Band: the anytime-valid interval of the rate, times the tries.",
            )
        )
    if alive:
        figures.append(
            chart(
                alive,
                x_name="token of the answer",
                y_name="share of tries still clean",
                caption="Where fires start: share of tries without a fire so far, clean tries censored where they end. "
                "Band: interval at each position.",
                y_max=1.0,
            )
        )
    said = " ".join(c.sentences)
    notes = bullets(f"{a.name}: {a.survival_sentence}" for a in c.arms if a.survival_sentence not in said)
    return section("Curves", el("div", figures, class_="plots"), notes, id_="curves") if figures else Html("")


def _cumulative(a: ArmCurve) -> Series:
    points = [(0.0, 0.0, 0.0, 0.0)]
    points += [(float(p.tries), float(p.fires), p.lower * p.tries, p.upper * p.tries) for p in a.points]
    return Series(name=a.name, points=points, end=float(a.tries))


def _survival(a: ArmCurve) -> Series:
    points = [(0.0, 1.0, 1.0, 1.0)]
    points += [(float(p.position), p.surviving, p.lower, p.upper) for p in a.survival]
    return Series(name=a.name, points=points, end=float(a.last))


def arms(c: CampaignCurves) -> Html:
    """Each arm with its settings and its rate in words."""
    rows = [(a.name, a.settings or "as captured", f"{a.fires} of {a.tries}", a.sentence) for a in c.arms]
    return section("Arms", table(("arm", "settings", "fires", "rate"), rows, wide=(3,)), id_="arms")


def limits(c: CampaignCurves) -> Html:
    """What the figures do not show."""
    return section("Limits", bullets(c.notes), id_="limits") if c.notes else Html("")
