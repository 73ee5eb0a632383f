"""The words every room shares: signals, bad values, readings and fires.

Records are frozen, hold plain Python values and turn into JSON without losing a bit: a non-finite float is
written as its class and bits, never as JSON ``NaN`` or ``null``.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

SCHEMA_VERSION = 1
"""Version of the Fire JSON; the store and the importers refuse a newer one."""


class Kind(StrEnum):
    """Class of a non-finite value: NaN and Inf are different events."""

    NAN = "nan"
    POS_INF = "+inf"
    NEG_INF = "-inf"


class Phase(StrEnum):
    """What the step that produced a row was doing."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"
    DRAFT = "draft"
    UNKNOWN = "unknown"


class Legal(StrEnum):
    """What a signal may hold: only finite values, or -Inf as well (masks, banned logits, gates)."""

    FINITE = "finite"
    NEG_INF = "finite or -inf"


class Status(StrEnum):
    """What a reading says of one signal; a signal that did not run is never called clean."""

    CLEAN = "clean"
    BAD = "bad"
    NOT_COVERED = "not covered"


class Outcome(StrEnum):
    """What was done about a fire."""

    RAISED = "raised"
    RECORDED = "recorded"
    ISOLATED = "isolated"
    IMPORTED = "imported"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """One tensor worth watching, named by (layer, stage).

    ``layer`` is None outside the decoder layers (``logits``). ``module`` is the dotted module path, ``op`` and
    ``source`` are filled at op level only (``aten.mul.Tensor``, ``file.py:120 in forward``).
    """

    stage: str
    layer: int | None = None
    module: str = ""
    legal: Legal = Legal.FINITE
    op: str | None = None
    source: str | None = None

    @property
    def name(self) -> str:
        """Short name for people: ``layer 12 down``, ``logits``."""
        return self.stage if self.layer is None else f"layer {self.layer} {self.stage}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BadValue:
    """The first bad element of one signal.

    ``flat_index`` is the row-major index into the tensor as stored, ``column`` the index along its last
    dimension, ``row`` the flattened index of all others. ``bits`` is the raw pattern in the width of ``dtype``
    (``float16`` has 16 bits). ``sequence`` is the index in the batch, ``token`` the index in this step's tokens
    of that sequence, ``position`` the absolute position with left pads not counted; each None where unknown.
    """

    flat_index: int
    row: int
    column: int
    bits: int
    dtype: str
    kind: Kind
    shape: tuple[int, ...] = ()
    sequence: int | None = None
    token: int | None = None
    position: int | None = None
    is_pad: bool | None = None

    @property
    def bits_hex(self) -> str:
        """The raw bits in hexadecimal, padded to the width of the type: ``7fd6e000``, ``7e00``."""
        return f"{self.bits:0{DTYPE_BITS.get(self.dtype, 32) // 4}x}"


DTYPE_BITS: dict[str, int] = {
    "float64": 64,
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "float8_e4m3fnuz": 8,
    "float8_e5m2fnuz": 8,
    "float8_e8m0fnu": 8,
}
"""Width in bits of every float type that a record may name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SignalReading:
    """What one step said of one signal. ``first`` is set if and only if ``status`` is bad.

    ``reason`` says why a signal is not covered; ``first_pad`` is a bad value seen in a pad row only.
    """

    signal: Signal
    status: Status
    first: BadValue | None = None
    first_pad: BadValue | None = None
    reason: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BurnedRow:
    """The first bad signal of one sequence of the batch, so that several burned requests are told apart.

    ``token`` and ``column`` place its first bad element; ``first`` has the bits too, where they are known (a
    device panel keeps bits for the first bad row of a signal only).
    """

    sequence: int
    signal: Signal
    token: int | None = None
    column: int | None = None
    first: BadValue | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One step's panel on the host, signals in execution order.

    ``num_unlisted`` counts signals that ran, were clean and are too many to list (ops).
    """

    step: int
    phase: Phase
    num_tokens: int
    signals: tuple[SignalReading, ...]
    burned: tuple[BurnedRow, ...] = ()
    pad_before_real: bool = False
    num_unlisted: int = 0

    @property
    def bad(self) -> tuple[SignalReading, ...]:
        """The bad signals, first executed first; pads alone never make a signal bad."""
        return tuple(s for s in self.signals if s.status is Status.BAD)

    @property
    def is_clean(self) -> bool:
        """True when no signal is bad; says nothing of signals that were not covered."""
        return not any(s.status is Status.BAD for s in self.signals)

    @property
    def origin(self) -> SignalReading | None:
        """The first signal that is bad, or None."""
        return next((s for s in self.signals if s.status is Status.BAD), None)

    @property
    def not_covered(self) -> tuple[SignalReading, ...]:
        """The signals that did not run in this step, each with its reason."""
        return tuple(s for s in self.signals if s.status is Status.NOT_COVERED)

    @property
    def coverage(self) -> tuple[int, int]:
        """(signals that ran, signals declared)."""
        declared = len(self.signals) + self.num_unlisted
        return declared - len(self.not_covered), declared


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorSummary:
    """Shape, type and range of a tensor, without its content.

    ``absmax`` is over finite elements only; ``headroom`` is the type's maximum divided by ``absmax``;
    ``zero_frac`` is the share of exact zeros.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_nan: int
    num_pos_inf: int
    num_neg_inf: int
    absmax: float | None
    zero_frac: float
    headroom: float | None

    @property
    def num_nonfinite(self) -> int:
        """NaN and infinities together."""
        return self.num_nan + self.num_pos_inf + self.num_neg_inf


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fire:
    """A stored incident: who, when, where first, bits, outcome.

    ``origin`` and ``first`` are the first bad signal and its first bad element. ``bad_signals`` lists the
    signals that were bad, first executed first, each with its first value. ``notes`` are findings in words
    ("the weight itself is non-finite"). ``inputs``, ``output`` and ``weights`` are summaries where known.
    ``token_ids`` are private content: exported only on request. ``count`` is how many fires of the same origin
    were merged into this one.
    """

    id: str
    created_at: str
    source: str
    runtime: str
    model: str
    device: str
    phase: Phase
    step: int
    origin: Signal
    first: BadValue
    outcome: Outcome
    request: str | None = None
    bad_signals: tuple[SignalReading, ...] = ()
    burned: tuple[BurnedRow, ...] = ()
    coverage: tuple[int, int] = (0, 0)
    pad_before_real: bool = False
    laundered: bool | None = None
    inputs: tuple[TensorSummary, ...] = ()
    output: TensorSummary | None = None
    weights: tuple[TensorSummary, ...] = ()
    notes: tuple[str, ...] = ()
    verdict: Mapping[str, Any] | None = None
    token_ids: tuple[int, ...] | None = None
    count: int = 1
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    schema: int = SCHEMA_VERSION

    @property
    def merge_key(self) -> str:
        """Fires with the same key are one incident seen again: same model, origin and class of value."""
        o = self.origin
        where = "" if o.layer is None else str(o.layer)
        return "\x1f".join((self.source, self.model, where, o.stage, o.module, o.op or "", self.first.kind))


def new_fire_id(now: float | None = None) -> str:
    """Make a fire id that sorts by time: ``20261130-214415-3f9a2c41d7`` (UTC, then 40 random bits)."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(time.time() if now is None else now))
    return f"{stamp}-{secrets.token_hex(5)}"


def utc_now(now: float | None = None) -> str:
    """The time in UTC, ISO 8601 with milliseconds: ``2026-11-30T21:44:15.123Z``."""
    t = time.time() if now is None else now
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(t)) + f".{int(t * 1000) % 1000:03d}Z"
