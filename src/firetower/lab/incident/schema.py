"""The incident file (docs/reference/incident-schema.md): JSON to `Incident`, every wrong field named."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firetower.core.errors import BitsError, RecordError
from firetower.core.formats import find_format, parse_bits
from firetower.lab.incident.hypotheses import keys_of
from firetower.lab.incident.records import Incident, IncidentFire, Place, RuledOut

MAX_BYTES = 16 << 20
"""An incident file is written by hand or by a log import; a larger one is a mistake."""

_ROUNDS = re.compile(r"rounds_of_(\d+)_tries_first_fire_at")
_DTYPE_OF_DIGITS = {8: "float32", 16: "float64"}
_TOP = {
    "what", "engine", "request", "fires_total", "fires_with_layer_trace", "first_poisoned_in_traced_fires",
    "first_poisoned_layers", "positions", "bits", "clean_in_every_fire", "tries", "after_a_fire", "fires",
    "ruled_out_by_its_reporter", "its_reporter_concluded", "what_the_measured_bits_say",
}  # fmt: skip
_FIRE = {
    "id", "build", "try", "position", "phase", "stage", "layer", "first_layer", "layer_kind", "clean",
    "slot_vs_file", "facts",
}  # fmt: skip
_PLACE = {"bits", "dtype", "row", "col", "column", "token", "slot", "expert", "layer", "stage", "flat"}


def read_incident(path: Path | str) -> Incident:
    """Read an incident file.

    Raises:
        RecordError: not readable, too large, no JSON, or a field that is unknown or of the wrong type.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RecordError(
                f"incident={path.name}: over {MAX_BYTES >> 20} MB; an incident file holds facts, not logs"
            )
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise RecordError(f"incident={path.name}: cannot be read ({e}); give a JSON file") from e
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise RecordError(f"incident={path.name}: is no JSON ({e})") from e
    return incident_from_dict(data)


def incident_from_dict(data: Any) -> Incident:
    """Build an incident from its JSON form; ``null`` stands for "not published" everywhere.

    Raises:
        RecordError: an unknown field, or one of the wrong type or range; names the field.
    """
    if not isinstance(data, Mapping):
        raise RecordError("incident: must be an object; see docs/reference/incident-schema.md")
    rounds_key = next((k for k in data if _ROUNDS.fullmatch(str(k))), None)
    _known("incident", data, _TOP | ({rounds_key} if rounds_key else set()))
    fires = tuple(_fire(f, f"fires[{i}]") for i, f in enumerate(_list(data, "fires")))
    total = _natural(data, "fires_total", default=len(fires))
    traced = _natural(data, "fires_with_layer_trace", default=sum(bool(f.first_layers or f.stage) for f in fires))
    if max(traced, len(fires)) > total:
        raise RecordError(
            f"fires_total={total}: must be at least the {max(traced, len(fires))} fires that are described"
        )
    first = {k: _count(v, f"first_poisoned_in_traced_fires.{k}")
             for k, v in _object(data, "first_poisoned_in_traced_fires").items() if v is not None}  # fmt: skip
    if sum(first.values()) > traced:
        raise RecordError(
            f"first_poisoned_in_traced_fires: adds up to {sum(first.values())}, over the {traced} traced fires"
        )
    positions, note = _positions(_object(data, "positions"))
    return Incident(
        what=_text(data, "what"),
        fires_total=total,
        fires_traced=traced,
        engine=dict(_object(data, "engine")),
        request=dict(_object(data, "request")),
        first_poisoned=first,
        first_poisoned_layers=_naturals(data, "first_poisoned_layers"),
        positions=positions,
        position_note=note,
        bits=_bits(_object(data, "bits")),
        clean_in_every_fire=_texts(data, "clean_in_every_fire"),
        round_cap=int(m[1]) if rounds_key and (m := _ROUNDS.fullmatch(rounds_key)) else None,
        rounds=_rounds(data, rounds_key),
        tries=_tries(_object(data, "tries")),
        persistence=_persistence(data.get("after_a_fire")),
        fires=fires,
        ruled_out=_ruled_out(_object(data, "ruled_out_by_its_reporter")),
        concluded=_text(data, "its_reporter_concluded"),
    )  # fmt: skip


def _fire(data: Any, where: str) -> IncidentFire:
    if not isinstance(data, Mapping):
        raise RecordError(f"{where}: must be an object")
    places = {k: v for k, v in data.items() if _is_place_key(k) and v is not None}
    counts = {k for k in data if re.fullmatch(r"mapped_\w+_(values|nonfinite)", k)}
    _known(where, data, _FIRE | set(places) | counts | {k for k in data if _is_place_key(k)})
    first_layers = {}
    for name, layer in _object(data, "first_layer", where).items():
        first_layers[name] = None if layer is None else _count(layer, f"{where}.first_layer.{name}")
    return IncidentFire(
        id=_text(data, "id", where) or where,
        build=_text(data, "build", where),
        try_number=_maybe(data, "try", where),
        position=_maybe(data, "position", where),
        phase=_text(data, "phase", where),
        stage=_text(data, "stage", where),
        layer=_maybe(data, "layer", where),
        first_layers=first_layers,
        layer_kinds={str(k): str(v) for k, v in _object(data, "layer_kind", where).items()},
        first={
            k.removeprefix("first_"): _place(v, f"{where}.{k}") for k, v in places.items() if k.startswith("first_")
        },
        audits={k: _place(v, f"{where}.{k}") for k, v in places.items() if k.endswith("_audit")},
        mapped=_mapped(data, where),
        clean=_texts(data, "clean", where),
        slot=dict(_object(data, "slot_vs_file", where)),
        facts=dict(_object(data, "facts", where)),
    )


def _is_place_key(key: str) -> bool:
    return key != "first_layer" and (key.startswith("first_") or key.endswith("_audit"))


def _mapped(data: Mapping[str, Any], where: str) -> dict[str, tuple[int, int]]:
    names = {k.removeprefix("mapped_").removesuffix("_values") for k in data if k.endswith("_values")}
    found = {}
    for name in sorted(names):
        values, bad = _maybe(data, f"mapped_{name}_values", where), _maybe(data, f"mapped_{name}_nonfinite", where)
        if values is not None and bad is not None:
            found[name] = (values, bad)
    return found


def _place(data: Any, where: str) -> Place:
    if not isinstance(data, Mapping):
        raise RecordError(f"{where}: must be an object with bits")
    _known(where, data, _PLACE)
    bits, dtype = _pattern(data.get("bits"), data.get("dtype"), where)
    return Place(
        bits=bits,
        dtype=dtype,
        row=_maybe(data, "row", where),
        column=_maybe(data, "col" if "col" in data else "column", where),
        token=_maybe(data, "token", where),
        slot=_maybe(data, "slot", where),
        expert=_maybe(data, "expert", where),
        layer=_maybe(data, "layer", where),
        stage=_text(data, "stage", where),
    )


def _pattern(bits: Any, dtype: Any, where: str) -> tuple[int, str]:
    try:
        pattern = parse_bits(bits) if isinstance(bits, str) else None
        if pattern is None:
            raise RecordError(f'{where}.bits={bits!r}: must be hexadecimal digits such as "7fd6e000"')
        if dtype is None:
            dtype = _DTYPE_OF_DIGITS.get(pattern.num_bits // 4)
        if not isinstance(dtype, str):
            raise RecordError(f"{where}.dtype: missing; {pattern.num_bits // 4} digits fit several types, name one")
        form = find_format(dtype)
    except BitsError as e:
        raise RecordError(f"{where}.{e}") from e
    if pattern.bits >= 1 << form.num_bits:
        raise RecordError(f"{where}.bits={bits!r}: must fit the {form.num_bits} bits of {form.name}")
    return pattern.bits, form.name


def pattern_of(text: str) -> tuple[int, str]:
    """(bits, type) of a key of ``bits``: ``7fd6e000``, or with its type where the digits do not tell: ``7e00 float16``.

    Raises:
        RecordError: no pattern, or one that does not fit its type.
    """
    digits, _, dtype = text.partition(" ")
    return _pattern(digits, dtype or None, "bits")


def _bits(data: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for side, patterns in data.items():
        if patterns is None:
            continue
        if not isinstance(patterns, Mapping):
            raise RecordError(f"bits.{side}: must be an object of pattern to number of fires")
        for text, number in patterns.items():
            pattern_of(str(text))
            found.setdefault(str(side), {})[str(text)] = _count(number, f"bits.{side}.{text}")
    return found


def _positions(data: Mapping[str, Any]) -> tuple[tuple[int, ...], str]:
    known = {"long_context_min", "long_context_max", "short_context", "max_decoded_after_prefill", "values"}
    _known("positions", data, known)
    ends = [_maybe(data, k, "positions") for k in ("long_context_min", "long_context_max")]
    short, values = _naturals(data, "short_context", "positions"), _naturals(data, "values", "positions")
    parts = [f"long context {ends[0]:,} to {ends[1]:,}"] if ends[0] is not None and ends[1] is not None else []
    parts += [f"short context {', '.join(f'{p:,}' for p in short)}"] if short else []
    decoded = _maybe(data, "max_decoded_after_prefill", "positions")
    parts += [f"at most {decoded:,} tokens after the prompt"] if decoded is not None else []
    return (*short, *values, *(e for e in ends if e is not None)), "; ".join(parts)


def _rounds(data: Mapping[str, Any], key: str | None) -> tuple[int | None, ...]:
    if key is None:
        return ()
    cap = int(key.split("_")[2])
    rounds = tuple(None if r is None else _count(r, f"{key}[{i}]", least=1) for i, r in enumerate(_list(data, key)))
    if any(r is not None and r > cap for r in rounds):
        raise RecordError(f"{key}={list(rounds)}: no round is longer than its {cap} tries")
    return rounds


def _tries(data: Mapping[str, Any]) -> tuple[int, int] | None:
    if not data:
        return None
    _known("tries", data, {"fires", "tries"})
    fires, tries = _count(data.get("fires"), "tries.fires"), _count(data.get("tries"), "tries.tries", least=1)
    if fires > tries:
        raise RecordError(f"tries.fires={fires}: must not exceed the {tries} tries")
    return fires, tries


def _persistence(value: Any) -> Any:
    if value not in (None, "clean", "bad"):
        raise RecordError(f'after_a_fire={value!r}: must be "clean" or "bad" (the next requests), or left out')
    return value


def _ruled_out(data: Mapping[str, Any]) -> tuple[RuledOut, ...]:
    found = []
    for what, how in data.items():
        if isinstance(how, str):
            found.append(RuledOut(what=what, how=how))
            continue
        where = f"ruled_out_by_its_reporter.{what}"
        if not isinstance(how, Mapping):
            raise RecordError(f"{where}: must be a sentence, or an object with how and against")
        _known(where, how, {"how", "against"})
        against = _texts(how, "against", where)
        if wrong := [k for k in against if not keys_of(k)]:
            raise RecordError(f"{where}.against={wrong[0]!r}: must be a family A to U or FAMILY/DETAIL")
        found.append(RuledOut(what=what, how=_text(how, "how", where), against=against))
    return tuple(found)


def _known(where: str, data: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(str(k) for k in data if k not in known):
        raise RecordError(f"{where}.{unknown[0]}: unknown field; known: {', '.join(sorted(known))}")


def _object(data: Mapping[str, Any], name: str, where: str = "incident") -> Mapping[str, Any]:
    value = data.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RecordError(f"{where}.{name}: must be an object")
    return value


def _list(data: Mapping[str, Any], name: str, where: str = "incident") -> list[Any]:
    value = data.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise RecordError(f"{where}.{name}: must be a list")
    return value


def _text(data: Mapping[str, Any], name: str, where: str = "incident") -> str:
    value = data.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RecordError(f"{where}.{name}={value!r}: must be a string")
    return value


def _texts(data: Mapping[str, Any], name: str, where: str = "incident") -> tuple[str, ...]:
    values = _list(data, name, where)
    if wrong := [v for v in values if not isinstance(v, str)]:
        raise RecordError(f"{where}.{name}={wrong[0]!r}: must be a list of strings")
    return tuple(values)


def _naturals(data: Mapping[str, Any], name: str, where: str = "incident") -> tuple[int, ...]:
    return tuple(_count(v, f"{where}.{name}[{i}]") for i, v in enumerate(_list(data, name, where)))


def _natural(data: Mapping[str, Any], name: str, *, default: int) -> int:
    return default if data.get(name) is None else _count(data[name], name)


def _maybe(data: Mapping[str, Any], name: str, where: str) -> int | None:
    value = data.get(name)
    return None if value is None else _count(value, f"{where}.{name}")


def _count(value: Any, where: str, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 63:
        raise RecordError(f"{where}={value!r}: must be a whole number, {least} or more")
    return value
