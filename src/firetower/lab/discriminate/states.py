"""States at request start: content, tags, owner, and whether a fresh one cures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

import numpy as np

from firetower.lab.discriminate.look import WRONG_ERROR, Look
from firetower.lab.discriminate.step import Cost, Fact, Step, fact
from firetower.lab.discriminate.values import kinds, num_nonfinite, relative_error, rows_of
from firetower.lab.subject import Rows, State, Switch, Window

MAX_ROWS = 5
"""Most rows whose states are tried in every order (120 orders)."""

_TRANSFERS = ("restore", "transfer")


def _content(look: Look) -> Iterator[Fact]:
    states: Sequence[State] = look.part("states")
    fresh = [s for s in states if s.is_fresh_expected]
    poisoned = [s for s in fresh if s.value is not None and num_nonfinite(s.value)]
    if poisoned:
        yield fact("state_nonfinite_at_start", True, f"a new request starts on {_poison(poisoned[0])}")
    elif all(s.value is not None for s in fresh):
        text = f"{len(fresh)} states of new requests are finite" if fresh else "no state of a new request"
        yield fact("state_nonfinite_at_start", False, text)
    differing = [(s, d) for s in states if (d := _differs(s)) is not None]
    left = [s for s, d in differing if d and s.is_fresh_expected and s not in poisoned]
    if left:
        text = f"a new request starts on {_name(left[0])}, whose hash is not that of a fresh state"
        yield fact("state_left_over", True, text)
    elif len({id(s) for s, _ in differing} & {id(s) for s in fresh}) == len(fresh):
        yield fact("state_left_over", False, "the states of new requests are fresh")
    altered = [s for s, d in differing if d and not s.is_fresh_expected]
    if altered:
        yield fact("state_altered", True, f"{_name(altered[0])}: hash is not the one noted when it was stored")
    elif len(differing) == len(states):
        yield fact("state_altered", False, "every carried state hashes as noted")


def _differs(s: State) -> bool | None:
    if s.is_fresh_expected and s.value is not None and not s.value.values.any():
        return False  # zeros of either sign
    if s.hash_now is None or s.expected_hash is None:
        return None
    return s.hash_now != s.expected_hash


def _poison(s: State) -> str:
    assert s.value is not None
    columns = np.unique(np.argwhere(~np.isfinite(rows_of(s.value.values)))[:, 1])
    at = f"column {columns[0]}" if len(columns) == 1 else f"columns {columns[0]} to {columns[-1]}"
    return f"{_name(s)} with {kinds(s.value)} ({at} of {rows_of(s.value.values).shape[1]})"


def _name(s: State) -> str:
    return s.name if s.layer is None else f"layer {s.layer} {s.name}"


def _tags(look: Look) -> Iterator[Fact]:
    # what a fresh state should be is judged by its content: its old tags prove nothing more
    states: Sequence[State] = look.part("states")
    carried = [s for s in states if not s.is_fresh_expected]
    tagged = [s for s in carried if s.position is not None and s.expected_position is not None]
    wrong = [s for s in tagged if s.position != s.expected_position]
    if wrong:
        s = wrong[0]
        text = f"{_name(s)} is tagged {s.position} tokens, the request says {s.expected_position}"
        yield fact("state_position_wrong", True, text)
    elif len(tagged) == len(carried):
        yield fact("state_position_wrong", False, "the position tags agree with the requests")
    owned = [s for s in carried if s.owner is not None and s.expected_owner is not None]
    foreign = [s for s in owned if s.owner != s.expected_owner]
    if foreign:
        s = foreign[0]
        text = f"{_name(s)} is tagged as the state of {s.owner}, the row is {s.expected_owner}"
        yield fact("rows_swapped", True, text)
    elif len(owned) == len(carried):
        yield fact("rows_swapped", False, "every state is tagged with its row's request")


def _writer(look: Look) -> Iterator[Fact]:
    states: Sequence[State] = look.part("states")
    carried = [s for s in states if not s.is_fresh_expected]
    # the state that is off tells; where none is, all of them
    off = [s for s in carried if s.position != s.expected_position or _differs(s)] or carried
    if any(s.written_by is None for s in off):
        return
    verified = next((s for s in off if s.written_by == "verify"), None)
    text = f"{_name(verified)} was written by a verify step" if verified else "no state comes from a verify step"
    yield fact("after_verify", verified is not None, text)
    moved = next((s for s in off if s.written_by in _TRANSFERS), None)
    text = f"{_name(moved)} came by a {moved.written_by}" if moved else "no state came by a transfer or restore"
    yield fact("after_transfer", moved is not None, text)
    gaps = [g for s in off if (g := _gap(s)) is not None]
    if gaps:
        yield fact("gap_is_one", gaps[0] == 1, f"it has {gaps[0]:+d} token{'s' * (abs(gaps[0]) != 1)}")
    if verified is not None and verified.window is not None:
        yield _window(verified, verified.window)


def _gap(s: State) -> int | None:
    """Tokens in the state beyond those that the request says are in."""
    if s.position is None or s.expected_position is None:
        return None
    return s.position - s.expected_position


def _window(s: State, w: Window) -> Fact:
    kept = s.position == w.start + w.num_tokens and w.num_accepted < w.num_tokens
    text = f"a window of {w.num_tokens} from {w.start}, {w.num_accepted} accepted, left it at {s.position}"
    return fact("whole_window_kept", kept, text)


def _pads(look: Look) -> Iterator[Fact]:
    states: Sequence[State] = look.part("states")
    buffers: Sequence[Rows] = look.part("valid_rows")
    pads = {sum(not v for v in b.is_valid) for b in buffers} - {0}
    gaps = [(s, g) for s in states if not s.is_fresh_expected and (g := _gap(s)) is not None]
    hit = next(((s, g) for s, g in gaps if g in pads), None)
    text = (
        f"{_name(hit[0])} has {hit[1]} tokens too many, as many as there are pads"
        if hit
        else "no state is off by the number of pads"
    )
    yield fact("gap_is_pads", hit is not None, text)


def _permuted(look: Look) -> Iterator[Fact]:
    states: Sequence[State] = look.part("states")
    served = look.outcome()
    if served is None or not served.outputs or not 1 < len(states) <= MAX_ROWS:
        return
    own = tuple(range(len(states)))
    errors = {}
    for order in permutations(own):
        answer = look.part("recompute_rows", order)
        if answer is None:
            return
        errors[order] = relative_error(served.outputs[0], answer)
    best = min(errors, key=lambda o: (errors[o], o))
    swapped = best != own and errors[best] <= WRONG_ERROR < errors[own]
    figures = f"error {errors[best]:.2g}; own order {errors[own]:.2g}"
    text = f"of {len(errors)} orders of the states, {list(best)} matches best ({figures})"
    yield fact("rows_swapped", swapped, text)


def _fresh(look: Look) -> Iterator[Fact]:
    cured = look.cures(Switch.FRESH_STATE)
    if cured is not None:
        text = f"with the right state assigned, the same request is {'clean' if cured else 'still wrong'}"
        yield fact("fresh_state_cures", cured, text)


STEPS = (
    Step(
        name="state-content",
        title="is the state at request start a fresh one, or the one that was stored?",
        cost=Cost.READ,
        needs=("states",),
        facts=("state_nonfinite_at_start", "state_left_over", "state_altered"),
        command="hash every state at request start and compare it with a fresh one",
        run=_content,
    ),
    Step(
        name="state-tags",
        title="do position and owner of the state agree with the request?",
        cost=Cost.READ,
        needs=("states",),
        facts=("state_position_wrong", "rows_swapped"),
        command="tag every state with owner and position, compare at request start",
        run=_tags,
    ),
    Step(
        name="state-writer",
        title="what wrote the state last?",
        cost=Cost.READ,
        needs=("states",),
        facts=("after_verify", "after_transfer", "gap_is_one", "whole_window_kept"),
        command="note with every state whether prefill, decode, verify or a transfer wrote it",
        run=_writer,
    ),
    Step(
        name="state-pads",
        title="is the state off by the number of pads?",
        cost=Cost.READ,
        needs=("states", "valid_rows"),
        facts=("gap_is_pads",),
        command="run the request alone, without padding",
        run=_pads,
    ),
    Step(
        name="state-order",
        title="does another order of the rows' states explain the outputs?",
        cost=Cost.RECOMPUTE,
        needs=("states", "recompute_rows", "run"),
        facts=("rows_swapped",),
        command="recompute the rows with every order of their states",
        run=_permuted,
    ),
    Step(
        name="fresh-state",
        title="does assigning the right state cure it?",
        cost=Cost.RUN,
        needs=("run", "switches"),
        facts=("fresh_state_cures",),
        command="assign zeros to the state and send the same request",
        run=_fresh,
    ),
)
