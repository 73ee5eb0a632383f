"""The same to the terminal: lines of plain text, hidden characters shown."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from firetower.core.analysis import Analysis, CampaignCurves
from firetower.core.verdict import Verdict
from firetower.fires.page import value_name
from firetower.fires.text import visible
from firetower.report.analysis_sections import SIGNS
from firetower.report.html import clip
from firetower.report.records import FireView
from firetower.report.signal_map import Cell, SignalMap, signal_map
from firetower.report.values import (
    bits_sentences,
    coverage,
    environment,
    findings,
    headline,
    not_testable,
    place,
    shape,
    shown,
    tensor_state,
    when,
    without_content,
)

WIDTH = 100
MAX_LINE = 400


def fire_lines(view: FireView, *, with_content: bool = False) -> list[str]:
    """One fire, conclusion first."""
    fire = view.fire
    module = f" ({fire.origin.module})" if fire.origin.module else ""
    lines = [f"{headline(fire)}{module}", f"  {value_name(fire.first)}, {place(fire)}; {when(fire)}"]
    lines += [f"  op {fire.origin.op}, {fire.origin.source}"] if fire.origin.op else []
    lines += [f"  coverage: {coverage(fire) or 'not reported'}"]
    lines += _listed("Findings", findings(fire))
    m = signal_map(fire)
    lines += _titled("Layer x signal", list(_map(m))) if m else []
    lines += _listed("What the bits say", bits_sentences(fire))
    lines += _titled("Verdict", list(_verdict(view.verdict, view.verdict_source))) if view.verdict else []
    if view.verdict is None and fire.verdict:
        lines += _listed("Verdict, in the words of its engine", (f"{k}: {shown(v)}" for k, v in fire.verdict.items()))
    lines += _listed("Resembles (a resemblance is no finding)", (f"{a} {b}" for a, b in view.resembles))
    tensors = [("input", t) for t in fire.inputs] + [("output", t) for t in (fire.output,) if t]
    tensors += [("weight", t) for t in fire.weights]
    lines += _listed(
        "Tensors of the first bad op",
        (f"{role} {t.name} {shape(t.shape)} {t.dtype}: {tensor_state(t)}" for role, t in tensors),
    )
    extra, left_out = without_content(fire.extra, with_content)
    facts = [f"{name}: {value}" for name, value in environment(fire)] + [f"{k}: {shown(v)}" for k, v in extra.items()]
    facts += [f"{left_out} fields that may hold content left out (--with-content)"] if left_out else []
    lines += _listed("Environment", facts)
    if with_content and fire.token_ids is not None:
        lines += _listed("Token ids (private)", [" ".join(map(str, fire.token_ids[:4000]))])
    lines += [
        "",
        f"fire {fire.id}, {fire.created_at}, {fire.outcome}" + (f", {fire.count} times" if fire.count > 1 else ""),
    ]
    return _safe(lines)


def fires_lines(views: Sequence[FireView], analysis: Analysis | None = None) -> list[str]:
    """All fires of a store: where they began, then across them."""
    found = [v.fire for v in views]
    lines = [f"{len(found)} fire{'s' * (len(found) != 1)}"]
    counts = Counter(f"{headline(f)} ({f.model})" for f in found)
    lines += [f"  {n:5}  {what}" for what, n in counts.most_common(20)]
    lines += [f"         and {len(counts) - 20} more"] if len(counts) > 20 else []
    return [*_safe(lines), *(["", *analysis_lines(analysis)] if analysis is not None else [])]


def analysis_lines(a: Analysis) -> list[str]:
    """Many fires together: conclusion, what varies, table hypothesis x evidence, fire by fire, what next."""
    lines = [a.title, "", *_wrapped(a.conclusion), *_wrapped(a.survivorship)]
    lines += _listed("Invariant and varying", _traits(a))
    lines += _listed("How often", a.rate)
    lines += _titled("Hypotheses x evidence (+ for, - against, x excludes as the one cause)", list(_table(a)))
    lines += _listed(
        "Evidence",
        (f"E{i} {o.statement}" + (f" [{o.limit}]" if o.limit else "") for i, o in enumerate(a.observations, start=1)),
    )
    best = [*a.having("favoured"), *a.having("open")][:4]
    lines += _listed("Looks like", (h.looks_like for h in best if h.standing == "favoured"))
    lines += _listed(
        "What the bits say",
        (f"{b.bits_hex} ({b.count}, {b.where or b.dtype}): {' '.join(b.sentences)}" for b in a.bits[:12]),
    )
    lines += _listed(
        "Fire by fire",
        (f"{f.id}: {f.summary}" + "".join(f"; excludes {k} ({why})" for k, why in f.excludes) for f in a.fires[:40]),
    )
    lines += _listed("Look at next", a.next_steps)
    return _safe(lines, limit=4000)


def campaign_lines(c: CampaignCurves) -> list[str]:
    """A replay campaign: result, arms, limits."""
    lines = [c.title]
    lines += _listed("Result", c.sentences)
    lines += _listed("Arms", (f"{a.name} ({a.settings or 'as captured'}): {a.sentence}" for a in c.arms))
    said = " ".join(c.sentences)
    starts = (f"{a.name}: {a.survival_sentence}" for a in c.arms if a.survival_sentence not in said)
    lines += _listed("Where fires start", starts)
    lines += _listed("Limits", c.notes)
    lines += _listed("Environment", (f"{name}: {value}" for name, value in c.facts))
    return _safe(lines, limit=2000)


def _traits(a: Analysis) -> Iterator[str]:
    for t in a.traits:
        listed = "; ".join(f"{value} ({n})" if n > 1 else value for value, n in t.counts[:12])
        more = f"; and {len(t.counts) - 12} more" if len(t.counts) > 12 else ""
        word = "invariant" if t.is_invariant else "varies" if len(t.counts) > 1 else "one seen"
        yield f"{t.name}: {listed}{more} [{word}, known of {t.num_known} of {t.num_fires}]"


def _table(a: Analysis) -> Iterator[str]:
    signs = {word: {"−": "-", "✕": "x"}.get(sign, sign) for word, sign in SIGNS.items()}
    width = max((len(h.key) for h in a.hypotheses), default=4)
    heads = " ".join(f"{f'E{i}':>3}" for i, _ in enumerate(a.observations, start=1))
    yield f"  {'':{width}} {heads}"
    for h in a.hypotheses:
        cells = " ".join(f"{signs.get(o.speaks.get(h.key, ''), '.'):>3}" for o in a.observations)
        yield f"  {h.key:{width}} {cells}  {h.standing}: {h.title}"


def _map(m: SignalMap) -> Iterator[str]:
    marks = {Cell.CLEAN: ".", Cell.NOT_COVERED: "-", Cell.UNKNOWN: "?"}
    widths = [max(len(clip(c, 15)), 4) for c in m.columns]
    yield "  layer  " + " ".join(f"{clip(c, 15):>{w}}" for c, w in zip(m.columns, widths, strict=True))
    for row in m.rows:
        cells = []
        for column, width in zip(m.columns, widths, strict=True):
            cell, order = m.cell(row, column)
            mark = f"*{order}" if cell is Cell.ORIGIN else str(order) if cell is Cell.BAD else marks[cell]
            cells.append(f"{mark:>{width}}")
        yield f"  {row:>5}  " + " ".join(cells)
    yield "  *n origin; n bad, in execution order"
    yield from (f"  {marks[cell]} {meaning}" for cell, meaning in m.legend)


def _verdict(v: Verdict, source: str) -> Iterator[str]:
    yield from _wrapped(v.statement, "  ")
    if source:
        yield f"  ({source})"
    pairs = (("refuted if", v.refuter), ("cure", v.cure), ("ignition", v.ignition), ("persistence", v.persistence))
    yield from (f"  {name}: {value}" for name, value in pairs if value)
    yield from (line for e in v.evidence for line in _wrapped(f"evidence: {e}", "  "))
    yield from (line for r in v.rivals for line in _wrapped(f"rival {r.key}, {r.status}: {r.why}", "  "))
    if v.not_testable:
        yield from (line for part in not_testable(v.not_testable) for line in _wrapped(f"not testable: {part}", "  "))
    if v.next_test:
        yield f"  next: {v.next_test}: {v.next_command}"


def _listed(title: str, items: object) -> list[str]:
    body = [line for item in items for line in _wrapped(str(item), "  - ")]  # type: ignore[attr-defined]
    return ["", title, *body] if body else []


def _titled(title: str, lines: Sequence[str]) -> list[str]:
    return ["", title, *lines] if lines else []


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(clip(text, 3000), WIDTH, initial_indent=indent, subsequent_indent=" " * len(indent)) or [
        indent
    ]


def _safe(lines: Sequence[str], limit: int = MAX_LINE) -> list[str]:
    return [visible(clip(line, limit)) for line in lines]
