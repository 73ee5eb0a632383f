"""One fire reduced to what is compared across fires, whether it came from the store or from an incident file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from firetower.core.errors import RecordError
from firetower.core.records import DTYPE_BITS, Fire, Kind, Phase
from firetower.core.verdict import Verdict
from firetower.fires.handin import UNKNOWN_STEP
from firetower.fires.page import arithmetic_of

LAYER_ORDER = (
    "input", "ple", "attention", "query", "kv", "conv_state", "recurrent_state", "router", "shared", "hit",
    "miss", "gate", "up", "swiglu", "down", "routed", "output",
)  # fmt: skip
"""Signals in the order in which a layer runs them; both sides of the experts before their sum."""

ROUTED = frozenset({"routed", "hit", "miss"})
ATTENTION = frozenset({"attention", "query", "kv", "conv_state", "recurrent_state"})
STATES = frozenset({"kv", "conv_state", "recurrent_state", "ple"})
SIDES = {"hit": "GPU side (hit)", "miss": "CPU side (miss)"}

_GPU_NAMES = ("rtx", "gtx", "geforce", "tesla", "quadro", "h100", "h200", "a100", "b200", "sm_")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """What is known of one fire; None or empty where it is not.

    ``machine`` is whose arithmetic ran at the origin, in the words of `core.bits`. ``inputs_finite`` speaks of
    the origin's inputs, ``states_finite`` of the states that its request started from. ``first_layers`` maps a
    signal to the layer where it was first bad (None: clean throughout). ``slot_is_identical`` and ``slot_differs``
    name an expert slot that was compared with the file. ``audits`` are bad values that audits found. ``ruled_out``
    maps causes to what ruled them out for this fire, as its verdict says.
    """

    id: str
    layer: int | None = None
    stage: str = ""
    side: str = ""
    phase: str = ""
    position: int | None = None
    column: int | None = None
    bits: int | None = None
    dtype: str = ""
    kind: Kind | None = None
    machine: str | None = None
    residency: str = ""
    build: str = ""
    at: str = ""
    try_number: int | None = None
    inputs_finite: bool | None = None
    states_finite: bool | None = None
    bad_weights: tuple[str, ...] = ()
    first_layers: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    clean: tuple[str, ...] = ()
    slot_is_identical: str = ""
    slot_differs: str = ""
    layer_kind: str = ""
    audits: tuple[str, ...] = ()
    verdict: str = ""
    ruled_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    count: int = 1

    @property
    def is_traced(self) -> bool:
        """Whether the first bad signal is known."""
        return bool(self.stage)

    @property
    def bits_hex(self) -> str:
        """The bits in hexadecimal, in the width of the type; of a type that is not known, 32 bits."""
        return "" if self.bits is None else f"{self.bits:0{DTYPE_BITS.get(self.dtype, 32) // 4}x}"

    @property
    def origin(self) -> str:
        """``layer 13 hit``, ``logits``, or nothing."""
        return self.stage if self.layer is None or not self.stage else f"layer {self.layer} {self.stage}"


def machine_of(name: str) -> str | None:
    """Whose arithmetic a device name stands for, ``nvidia``, ``amd`` or ``x86``; None when it does not tell."""
    if any(part in name.lower() for part in _GPU_NAMES):
        return "nvidia"
    return arithmetic_of(name)


def sighting_of(fire: Fire) -> Sighting:
    """Reduce a stored fire."""
    verdict = _verdict(fire)
    states_are_bad = fire.origin.stage in STATES
    stated = fire.extra.get("states_finite")
    side = fire.origin.stage if fire.origin.stage in SIDES else str(fire.extra.get("side", ""))
    return Sighting(
        id=fire.id,
        layer=fire.origin.layer,
        stage=fire.origin.stage,
        side=side,
        phase="" if fire.phase is Phase.UNKNOWN else str(fire.phase),
        position=fire.first.position,
        column=fire.first.column,
        bits=fire.first.bits,
        dtype=fire.first.dtype,
        kind=fire.first.kind,
        machine=machine_of(fire.device),
        residency=str(fire.extra.get("residency", "")),
        build=fire.runtime,
        at="" if fire.step == UNKNOWN_STEP else f"step {fire.step}",
        inputs_finite=all(not t.num_nonfinite for t in fire.inputs) if fire.inputs else None,
        states_finite=False if states_are_bad else stated if isinstance(stated, bool) else None,
        bad_weights=tuple(t.name for t in fire.weights if t.num_nonfinite),
        first_layers=_first_layers(fire),
        verdict=verdict.key if verdict is not None and verdict.decided else "",
        ruled_out={r.key: r.why for r in verdict.rivals if r.status == "excluded"} if verdict else {},
        count=fire.count,
    )


def _verdict(fire: Fire) -> Verdict | None:
    try:
        return Verdict.from_mapping(fire.verdict) if fire.verdict else None
    except RecordError:
        # another engine's verdict has another form: it is shown with the fire, not compared
        return None


def _first_layers(fire: Fire) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for s in fire.bad_signals:
        if s.signal.layer is not None:
            found.setdefault(s.signal.stage, s.signal.layer)
    return found
