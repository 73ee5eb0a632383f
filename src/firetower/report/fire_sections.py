"""The sections of one fire's page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from firetower.core.families import FAMILIES, share
from firetower.core.records import Fire, TensorSummary
from firetower.core.verdict import Verdict
from firetower.fires.page import value_name
from firetower.report.html import Html, bullets, clip, el, facts, section, table
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

MAX_STEPS = 24
MAX_TOKENS = 4_000
STATES = ("kv", "conv_state", "recurrent_state", "ple")
SYMBOLS = {Cell.CLEAN: "·", Cell.NOT_COVERED: "–", Cell.UNKNOWN: "?"}


def overview(view: FireView) -> Html:
    """The conclusion first: where, what, and the verdict in one line."""
    fire, v = view.fire, view.verdict
    badges = [
        el("span", value_name(fire.first), class_="badge fire"),
        el("span", str(fire.phase), class_="badge"),
        el("span", str(fire.outcome), class_="badge"),
        el("span", f"seen {fire.count} times", class_="badge") if fire.count > 1 else None,
        el("span", "laundered: the answer looks healthy", class_="badge warn") if fire.laundered else None,
    ]
    verdict = el("p", el("strong", "Verdict: "), _verdict_name(v)) if v else None
    where = [
        ("module", fire.origin.module),
        ("op", fire.origin.op),
        ("line", fire.origin.source),
        ("when", when(fire)),
        ("place", place(fire)),
        ("shape", f"{shape(fire.first.shape)} {fire.first.dtype}" if fire.first.shape else ""),
        ("coverage", coverage(fire) or "not reported"),
    ]
    head = el("p", headline(fire), class_="headline")
    return section("What happened", head, el("p", badges), verdict, facts(where), bullets(findings(fire)), id_="what")


def _verdict_name(v: Verdict) -> str:
    if not v.decided:
        between = " and ".join(v.undecided_between) or "all causes"
        return f"undecided between {between}"
    title = FAMILIES[v.family].title if v.family in FAMILIES else ""
    return f"{v.family} {title}, {v.detail}"


def time_line(view: FireView) -> Html:
    """The bad signals in the order in which they ran, and when the fire was seen."""
    fire = view.fire
    names = list(dict.fromkeys(s.signal.name for s in fire.bad_signals)) or [fire.origin.name]
    steps = [el("li", name, class_="fire" if name == fire.origin.name else None) for name in names[:MAX_STEPS]]
    more = len(names) - MAX_STEPS
    seen = [
        ("first seen", fire.created_at),
        ("last seen", view.last_seen if fire.count > 1 else None),
        ("times", f"{fire.count}" if fire.count > 1 else None),
        ("step", when(fire)),
    ]
    return section(
        "Time line",
        el("p", "Bad signals in the order in which they ran; the origin is marked.", class_="soft"),
        el("ol", steps, class_="steps"),
        el("p", f"and {more} more after these", class_="soft") if more > 0 else None,
        facts(seen),
        id_="time",
    )


def map_section(view: FireView) -> Html:
    """Layer x signal."""
    m = signal_map(view.fire)
    if m is None:
        return Html("")
    return section("Layer x signal", map_table(m), map_legend(m), id_="map")


def map_table(m: SignalMap) -> Html:
    """The map as a table; each cell says in text what its colour says."""
    head = el("tr", el("th", "layer", scope="col"), [el("th", clip(c, 24), scope="col") for c in m.columns])
    rows = [
        el("tr", el("th", row, scope="row"), [_cell(*m.cell(row, column)) for column in m.columns]) for row in m.rows
    ]
    inner = el("table", el("thead", head), el("tbody", rows), class_="map")
    more = el("p", f"{m.num_left_out} more bad signals do not fit the map", class_="soft") if m.num_left_out else None
    return el("div", el("div", inner, class_="scroll", tabindex="0"), more)


def _cell(cell: Cell, order: int | None) -> Html:
    if cell in (Cell.ORIGIN, Cell.BAD):
        mark = f"★ {order}" if cell is Cell.ORIGIN else str(order)
        return el("td", mark, class_=cell.value, title=f"{cell.value}, number {order} in execution order")
    name = "clean" if cell is Cell.CLEAN else "unknown"
    return el("td", SYMBOLS[cell], class_=name, title=cell.value)


def map_legend(m: SignalMap) -> Html:
    """What the signs mean, those of signals that are not bad in full."""
    signs = [("★ n", "origin"), ("n", "bad, number n in execution order")]
    signs += [(SYMBOLS[cell], meaning) for cell, meaning in m.legend]
    return el("p", [el("span", el("b", sign), f" {what}") for sign, what in signs], class_="legend")


def bits_section(view: FireView) -> Html:
    """What the pattern says and what it cannot prove."""
    first, *others = bits_sentences(view.fire)
    return section("Bits", el("p", first), bullets(others), id_="bits")


def verdict_section(view: FireView) -> Html:
    """Verdict, evidence, rivals, refuter and the next test."""
    v = view.verdict
    if v is None:
        stored = view.fire.verdict
        if not stored:
            return Html("")
        pairs = [(name, shown(value)) for name, value in stored.items()]
        note = el("p", "In the words of the engine that handed it in.", class_="soft")
        return section("Verdict", note, facts(pairs), id_="verdict")
    parts = [
        el("p", _verdict_name(v), class_="headline"),
        el("p", v.statement),
        el("p", view.verdict_source, class_="soft") if view.verdict_source else None,
        facts(_verdict_facts(v)),
        el("p", el("strong", "Next: "), v.next_test, ": ", el("code", v.next_command)) if v.next_test else None,
    ]
    evidence = table(
        ("test", "seen", "speaks for", "speaks against"),
        [(e.test, e.statement, ", ".join(e.supports), ", ".join(e.against)) for e in v.evidence],
        wide=(1,),
    )
    rivals = table(
        ("rival", "status", "why", "test that decides"),
        [(r.key, _badge(r.status), r.why, r.test) for r in v.rivals],
        wide=(2,),
    )
    return section(
        "Verdict",
        parts,
        [el("h3", "Evidence"), evidence] if evidence else None,
        [el("h3", "Rivals"), rivals] if rivals else None,
        [el("h3", "Not testable here"), bullets(not_testable(v.not_testable))] if v.not_testable else None,
        _resembles(view.resembles),
        id_="verdict",
    )


def _verdict_facts(v: Verdict) -> list[tuple[str, str]]:
    known = v.family in FAMILIES and v.decided
    return [
        ("refuted if", v.refuter),
        ("cheapest cure", v.cure),
        ("scope", v.scope if v.decided else ""),
        ("retriable", v.retriable if v.decided else ""),
        ("ignition", v.ignition),
        ("persistence", v.persistence),
        ("met in public", share(v.family) if known else ""),
    ]


def _badge(status: str) -> Html:
    return el("span", status, class_="badge warn" if status == "open" else "badge")


def _resembles(cases: Sequence[tuple[str, str]]) -> Html | None:
    if not cases:
        return None
    rows = [el("li", el("strong", looks), " ", tells) for looks, tells in cases]
    return el("div", el("h3", "Resembles (a resemblance is no finding)"), el("ul", rows))


def state_section(view: FireView) -> Html:
    """What is known of states: bad state signals, an audit that came with the fire, tests of states."""
    fire = view.fire
    rows: list[tuple[object, ...]] = list(_bad_states(fire))
    audit, _ = without_content({k: v for k, v in fire.extra.items() if "state" in k or "audit" in k}, False)
    rows += [(name, "audit", shown(value)) for name, value in audit.items()]
    if view.verdict is not None:
        said = [e for e in view.verdict.evidence if "state" in e.test or "state" in e.statement.lower()]
        rows += [(e.test, "test", e.statement) for e in said]
    body = table(("what", "kind", "seen"), rows, wide=(2,))
    return section("State audit", body, id_="state") if body else Html("")


def _bad_states(fire: Fire) -> Iterator[tuple[str, str, str]]:
    for stage in STATES:
        bad = [s.signal.layer for s in fire.bad_signals if s.signal.stage == stage]
        if bad:
            layers = ", ".join(str(n) for n in bad if n is not None)
            what = "the origin" if fire.origin.stage == stage else "after the origin, in the same step"
            yield stage, "signal", f"bad in layer{'s' * (len(bad) > 1)} {layers}: {what}"


def tensor_section(view: FireView) -> Html:
    """Inputs, output and weights of the first bad op, as summaries."""
    rows = list(_tensor_rows(view.fire))
    body = table(("role", "tensor", "shape", "type", "values", "absmax", "headroom", "zeros"), rows)
    return section("Tensors of the first bad op", body, id_="tensors") if body else Html("")


def _tensor_rows(fire: Fire) -> Iterator[tuple[object, ...]]:
    groups = (("input", fire.inputs), ("output", (fire.output,) if fire.output else ()), ("weight", fire.weights))
    for role, tensors in groups:
        for t in tensors[:64]:
            yield (role, t.name, shape(t.shape), t.dtype, _state(t), *_range(t))


def _state(t: TensorSummary) -> Html:
    return el("span", tensor_state(t), class_="badge fire" if t.num_nonfinite else "badge ok")


def _range(t: TensorSummary) -> tuple[str, str, str]:
    absmax = "none finite" if t.absmax is None else f"{t.absmax:.4g}"
    headroom = "" if t.headroom is None else f"{t.headroom:.3g}x"
    return absmax, headroom, f"{t.zero_frac:.1%}" if t.zero_frac else ""


def burned_section(view: FireView) -> Html:
    """Each burned sequence with its own first bad signal."""
    rows = [
        (b.sequence, b.signal.name, "" if b.token is None else b.token, "" if b.column is None else b.column,
         value_name(b.first) if b.first else "")
        for b in view.fire.burned[:256]
    ]  # fmt: skip
    if len(rows) < 2:
        return Html("")
    return section(
        "Burned requests", table(("sequence", "first bad signal", "token", "column", "value"), rows), id_="burned"
    )


def environment_section(view: FireView, with_content: bool) -> Html:
    """Where it ran, and what else the engine said."""
    extra, left_out = without_content(view.fire.extra, with_content)
    hidden = f"{left_out} fields that may hold content are left out; --with-content shows them" if left_out else ""
    more = [(name, shown(value)) for name, value in extra.items()]
    return section(
        "Environment",
        facts(environment(view.fire)),
        [el("h3", "Further facts"), facts(more)] if more else None,
        el("p", hidden, class_="soft") if hidden else None,
        id_="environment",
    )


def content_section(view: FireView, with_content: bool) -> Html:
    """Token ids, only where they were asked for."""
    ids = view.fire.token_ids
    if ids is None:
        return Html("")
    if not with_content:
        said = f"{len(ids):,} token ids are kept with the fire and left out here; --with-content shows them."
        return section("Content", el("p", said, class_="soft"), id_="content")
    text = " ".join(map(str, ids[:MAX_TOKENS]))
    more = f"{len(ids) - MAX_TOKENS:,} more are not shown" if len(ids) > MAX_TOKENS else ""
    head = el("p", f"Private: {len(ids):,} token ids of the request.", class_="soft")
    body = el("pre", Html(text))
    return section("Content", head, body, el("p", more, class_="soft") if more else None, id_="content")
