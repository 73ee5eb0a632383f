"""Known-case matching: what a stored fire looks like among the public reports, and which test would tell.

A match is a resemblance, not a finding: it reads what the fire recorded (place, class, bits, summaries,
notes) and names the families whose reports looked like that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal

from firetower.core.families import FAMILIES, share
from firetower.core.records import Fire, Kind, Phase
from firetower.core.verdict import Verdict
from firetower.lab.diagnose import diagnose
from firetower.lab.discriminate import STEPS
from firetower.lab.subjects.stored import StoredSubject

MAX_MATCHES = 4

Strength = Literal["strong", "weak"]

_DIVISIONS = ("div", "rsqrt", "reciprocal")
_PRODUCTS = ("mul", "mm", "addmm", "matmul", "linear", "bmm", "square", "pow")
_NARROW = ("float16", "float8_e4m3fn", "float8_e5m2")
_STATES = ("recurrent_state", "conv_state", "kv")
_ALL_ONES = {"float32": 0xFFFFFFFF, "float16": 0xFFFF, "bfloat16": 0xFFFF}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """One family that a fire looks like. ``test`` is the discriminating test that tells, ``command`` runs it."""

    family: str
    because: str
    test: str
    command: str
    strength: Strength

    def __str__(self) -> str:
        f = FAMILIES[self.family]
        return f"looks like {self.family} {f.name} because {self.because}; the test that tells is {self.test}"

    @property
    def reports(self) -> str:
        """``17 of 172 public reports``."""
        return share(self.family)


@dataclasses.dataclass(frozen=True, slots=True)
class _Rule:
    family: str
    strength: Strength
    test: str
    looks: Callable[[Fire], str | None]


def match(fire: Fire) -> tuple[Match, ...]:
    """The families that a fire looks like, strong resemblances first, then the more reported; one each."""
    commands = {s.name: s.command for s in STEPS}
    found: dict[str, Match] = {}
    for rule in sorted(_RULES, key=lambda r: (r.strength != "strong", -FAMILIES[r.family].num_reports)):
        because = rule.looks(fire)
        if because is not None:
            m = Match(
                family=rule.family,
                because=because,
                test=rule.test,
                command=commands[rule.test],
                strength=rule.strength,
            )
            found.setdefault(rule.family, m)
    return tuple(found.values())[:MAX_MATCHES]


def diagnose_fire(fire: Fire) -> tuple[Verdict, tuple[Match, ...]]:
    """Verdict and resemblances of a stored fire alone; where nothing else does, these say what to run next."""
    verdict, matches = diagnose(StoredSubject(fire)), match(fire)
    if verdict.decided or not matches:
        return verdict, matches
    alike = [m.family for m in matches]
    names = tuple(dict.fromkeys((*alike, *(key[0] for key in verdict.undecided_between))))
    rest = f"; not ruled out: {', '.join(names[len(alike) :])}" if len(names) > len(alike) else ""
    listed = " or ".join(f"{n} ({FAMILIES[n].name})" for n in alike)
    looks = f"a stored fire alone does not tell. It looks like {listed}{rest}"
    statement = f"Undecided: {looks}. Run {matches[0].test} next"
    changed = dataclasses.replace(
        verdict,
        statement=statement,
        next_test=matches[0].test,
        next_command=matches[0].command,
        undecided_between=names,
    )
    return changed, matches


def _op(fire: Fire) -> str:
    """``mul`` of ``aten.mul.Tensor``; "" where the fire names no op."""
    parts = (fire.origin.op or "").split(".")
    return parts[1].strip("_") if len(parts) > 1 else parts[0]


def _noted(fire: Fire, *words: str) -> str | None:
    return next((n for n in fire.notes if any(w in n for w in words)), None)


def _finite_operands(fire: Fire) -> bool:
    operands = (*fire.inputs, *fire.weights)
    return bool(fire.inputs) and not any(s.num_nan or s.num_pos_inf for s in operands)


def _bad_weight(fire: Fire) -> str | None:
    bad = next((w for w in fire.weights if w.num_nonfinite), None) if not _bad_buffer(fire) else None
    if bad is not None:
        return f"{bad.name} itself has {bad.num_nonfinite:,} non-finite elements"
    return None


def _bad_buffer(fire: Fire) -> str | None:
    return "a buffer that is written at run time was bad already" if _noted(fire, "buffer itself is") else None


def _changed_weight(fire: Fire) -> str | None:
    return "a weight is non-finite, and a fire does not say since when" if _bad_weight(fire) else None


def _overflow(fire: Fire) -> str | None:
    is_product = _op(fire) in _PRODUCTS or fire.origin.stage in ("swiglu", "down", "routed", "output")
    if fire.first.kind is Kind.NAN or not _finite_operands(fire) or not is_product:
        return None
    largest = max((s.absmax or 0.0 for s in fire.inputs), default=0.0)
    return f"the first bad value is an Inf, its operands are finite (absmax up to {largest:.4g}), in {fire.first.dtype}"


def _narrow(fire: Fire) -> str | None:
    if fire.first.dtype in _NARROW and fire.first.kind is not Kind.NAN and not fire.inputs:
        return f"the first bad value is an Inf in {fire.first.dtype}"
    return None


def _norm_of_inf(fire: Fire) -> str | None:
    has_inf = any(s.num_pos_inf or s.num_neg_inf for s in fire.inputs) and not any(s.num_nan for s in fire.inputs)
    if has_inf and "norm" in f"{fire.origin.op} {fire.origin.module}":
        return "a norm was given an Inf"
    return None


def _pads(fire: Fire) -> str | None:
    return "a pad row was bad before any real one" if fire.pad_before_real else None


def _unwritten(fire: Fire) -> str | None:
    noted = _noted(fire, "reads memory nobody wrote", "returned memory nobody wrote")
    return "memory that nobody wrote was read" if noted else None


def _absurd(fire: Fire) -> str | None:
    big = next((s for s in fire.inputs if (s.absmax or 0) >= 1e16), None)
    return f"{big.name} holds {big.absmax:.2g}, absurd for a model" if big else None


def _masked(fire: Fire) -> str | None:
    if fire.first.kind is not Kind.NAN:
        return None
    if _noted(fire, "is all -Inf"):
        return "a row before the first bad op is all -Inf"
    if "softmax" in _op(fire) or any(s.num_neg_inf and not s.num_nan for s in fire.inputs):
        return "the first NaN comes from masked scores, without an Inf before it"
    return None


def _zero_division(fire: Fire) -> str | None:
    if _op(fire) in _DIVISIONS and _finite_operands(fire):
        return f"{_op(fire)} has finite operands and a non-finite result: it divided by 0"
    if fire.origin.stage == "router" and fire.first.kind is Kind.NAN:
        return "the first NaN is in the router"
    return None


def _zero_output(fire: Fire) -> str | None:
    zero = next((s for s in fire.inputs if s.zero_frac == 1.0 and s.shape), None)
    return f"{zero.name} of the first bad op is all zeros: what made it may be to blame" if zero else None


def _exponential(fire: Fire) -> str | None:
    if _op(fire) in ("exp", "exp2") and fire.first.kind is Kind.POS_INF:
        return "exp overflowed: of a value that is masked afterwards, or of a gate's weight"
    return None


def _grown_state(fire: Fire) -> str | None:
    if fire.origin.stage == "recurrent_state" and (fire.first.position or 0) > 0:
        return "the recurrent state itself went bad in the middle of a request"
    return None


def _grown_operand(fire: Fire) -> str | None:
    if fire.first.kind is not Kind.NAN and _finite_operands(fire) and _absurd(fire):
        return "a range as wide as float32's was left: something grew from step to step"
    return None


def _state_at_start(fire: Fire) -> str | None:
    if fire.origin.stage in _STATES and fire.first.position in (0, None) and fire.phase is not Phase.UNKNOWN:
        return f"the first bad value is in {fire.origin.stage} at the start of the request"
    return None


def _clean_again(fire: Fire) -> str | None:
    return "the same call was clean when it was run again" if _noted(fire, "clean second run") else None


def _routed_only(fire: Fire) -> str | None:
    stages = {s.signal.stage for s in fire.bad_signals if s.signal.layer == fire.origin.layer}
    if fire.origin.stage in ("routed", "hit", "miss") and not stages & {"attention", "shared"}:
        return "only routed experts' rows are bad first; attention and shared expert are clean"
    return None


def _verify(fire: Fire) -> str | None:
    return f"it happened in a {fire.phase} step" if fire.phase in (Phase.VERIFY, Phase.DRAFT) else None


def _laundered(fire: Fire) -> str | None:
    return "the bad value was gone at the logits: something made it an ordinary one" if fire.laundered else None


def _all_rows(fire: Fire) -> str | None:
    if not fire.weights and len(fire.burned) > 1 and len({(b.signal.name, b.column) for b in fire.burned}) == 1:
        return f"{len(fire.burned)} sequences burned at the same signal: a shared scale or buffer"
    return None


def _payload(fire: Fire) -> str | None:
    from firetower.core.bits import read_bits

    try:
        reading = read_bits(fire.first.bits, fire.first.dtype)
    except ValueError:
        return None
    if reading.payload and any(w.dtype == "float16" for w in reading.widenings):
        return f"bits {fire.first.bits_hex} are consistent with a float16 field that was read as NaN"
    return None


def _all_ones(fire: Fire) -> str | None:
    if fire.first.bits == _ALL_ONES.get(fire.first.dtype):
        return f"bits {fire.first.bits_hex} are an integer mask read as a float"
    return None


def _rope(fire: Fire) -> str | None:
    if _op(fire) in ("cos", "sin"):
        return "the first bad op is trigonometric"
    if _op(fire) == "to_copy" and not fire.inputs and fire.first.kind is Kind.POS_INF:
        return f"integers were turned into {fire.first.dtype}, which cannot hold them"
    return None


def _kernel(fire: Fire) -> str | None:
    if _op(fire) in ("mm", "addmm", "bmm", "linear") and fire.first.kind is Kind.NAN and _finite_operands(fire):
        return f"{_op(fire)} made a NaN of finite operands"
    return None


def _rules() -> Iterator[_Rule]:
    yield _Rule("M", "strong", "weights-sound", _bad_weight)
    yield _Rule("K", "weak", "weights-vs-load", _changed_weight)
    yield _Rule("A", "strong", "wider-type", _overflow)
    yield _Rule("A", "weak", "wider-type", _narrow)
    yield _Rule("A", "weak", "inf-into-norm", _norm_of_inf)
    yield _Rule("C", "strong", "two-fills", _unwritten)
    yield _Rule("C", "strong", "rows-reduced", _pads)
    yield _Rule("C", "weak", "two-fills", _absurd)
    yield _Rule("G", "strong", "masked-rows", _masked)
    yield _Rule("H", "strong", "division", _zero_division)
    yield _Rule("P", "weak", "zero-output", _zero_output)
    yield _Rule("P", "weak", "other-backend", _kernel)
    yield _Rule("C", "weak", "two-fills", _kernel)
    yield _Rule("I", "strong", "exponential", _exponential)
    yield _Rule("I", "weak", "recurrence", _grown_state)
    yield _Rule("I", "weak", "recurrence", _grown_operand)
    yield _Rule("E", "weak", "state-content", _state_at_start)
    yield _Rule("E", "weak", "state-content", _clean_again)
    yield _Rule("J", "weak", "replays", _clean_again)
    yield _Rule("D", "weak", "rows-written", _clean_again)
    yield _Rule("D", "weak", "rows-written", _all_rows)
    yield _Rule("C", "weak", "two-fills", _bad_buffer)
    yield _Rule("E", "weak", "state-content", _bad_buffer)
    yield _Rule("D", "weak", "rows-written", _bad_buffer)
    yield _Rule("L", "weak", "slot-hash", _routed_only)
    yield _Rule("Q", "weak", "drafts-off", _verify)
    yield _Rule("N", "weak", "sampler-row", _laundered)
    yield _Rule("L", "weak", "slot-hash", _payload)
    yield _Rule("M", "weak", "weights-sound", _payload)
    yield _Rule("B", "weak", "quantised-fields", _payload)
    yield _Rule("O", "weak", "eager", _all_ones)
    yield _Rule("T", "strong", "positions", _rope)


_RULES = tuple(_rules())
