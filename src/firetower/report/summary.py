"""A plain summary to paste into an issue: Markdown that shows nothing private and says what is not known."""

from __future__ import annotations

from collections.abc import Sequence

from firetower.core.analysis import Analysis, CampaignCurves
from firetower.fires.page import value_name
from firetower.fires.text import visible
from firetower.report.html import clip
from firetower.report.records import FireView
from firetower.report.values import coverage, environment, findings, headline, place, when

MAX_LINES = 40
MAX_LINE = 400


def fire_summary(view: FireView) -> str:
    """One fire."""
    fire, v = view.fire, view.verdict
    where = f" (`{fire.origin.module}`)" if fire.origin.module else ""
    lines = [
        f"**{headline(fire)}**{where}",
        "",
        f"- value: {value_name(fire.first)}, {place(fire)}",
        f"- when: {when(fire)}" + (f"; seen {fire.count} times" if fire.count > 1 else ""),
        *(f"- op: `{fire.origin.op}`, {fire.origin.source or 'source unknown'}" for _ in [0] if fire.origin.op),
        *(f"- {name}: {value}" for name, value in environment(fire) if name != "request"),
        f"- coverage: {coverage(fire) or 'not reported'}",
        *(f"- found: {note}" for note in findings(fire)[:8]),
    ]
    if v is None:
        lines.append("- verdict: none yet")
    else:
        lines.append(f"- verdict{' (undecided)' if not v.decided else ''}: {v.statement}")
        lines += [f"- refuted if: {v.refuter}"] if v.refuter else []
        lines += [f"- next test: {v.next_test}"] if v.next_test else []
    lines += ["", f"fire {fire.id}, {fire.created_at}"]
    return plain(lines)


def fires_summary(num_fires: int, counts: Sequence[tuple[str, int]], analysis: Analysis | None) -> str:
    """All fires of a store."""
    lines = [f"**{num_fires} fires**", "", *(f"- {n} x {what}" for what, n in counts[:12])]
    if len(counts) > 12:
        lines.append(f"- and {len(counts) - 12} more origins")
    if analysis is not None:
        lines += ["", analysis.conclusion, analysis.survivorship]
    return plain(lines)


def analysis_summary(a: Analysis) -> str:
    """Many fires together."""
    lines = [f"**{a.title}**", "", a.survivorship, "", a.conclusion, ""]
    lines += [f"- {sentence}" for sentence in a.rate]
    lines += [f"- seen: {o.statement}" + (f" (limit: {o.limit})" if o.limit else "") for o in a.observations]
    lines += ["", "Next:", *(f"- {step}" for step in a.next_steps)]
    return plain(lines)


def campaign_summary(c: CampaignCurves) -> str:
    """A replay campaign."""
    lines = [f"**{c.title}**", "", *(f"- {a.name}: {a.sentence}" for a in c.arms)]
    lines += [f"- {s}" for s in c.sentences]
    lines += [f"- limit: {n}" for n in c.notes]
    return plain(lines)


def plain(lines: Sequence[str]) -> str:
    """Lines made safe and short: hidden characters shown, long lines and long lists cut."""
    shown = [visible(clip(line, MAX_LINE)) for line in lines[:MAX_LINES]]
    if len(lines) > MAX_LINES:
        shown.append(f"({len(lines) - MAX_LINES} more lines in the report)")
    return "\n".join(shown)
