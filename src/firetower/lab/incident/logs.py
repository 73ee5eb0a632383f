"""An incident from an engine's log lines: what the lines say, and nothing that they do not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from firetower.core.errors import BitsError
from firetower.core.formats import find_format, parse_bits
from firetower.lab.incident.patterns import NUMBERS, LinePattern, PatternFile

MAX_LINE = 4096
"""Characters of a line that are looked at: a regex on a line of megabytes may never end."""

MAX_FIRES = 10_000

_PLACE = ("row", "column", "token", "slot", "expert")
_FACTS = ("time", "request", "value", "runtime", "model", "device")
_DTYPE_OF_DIGITS = {32: "float32", 64: "float64"}


class ReadLog(NamedTuple):
    """``incident`` is the JSON form of an incident; ``num_lines`` were read, ``problems`` were left out and why."""

    incident: dict[str, Any]
    num_lines: int
    problems: tuple[str, ...]


def incident_of_log(lines: Iterable[str], patterns: PatternFile, what: str) -> ReadLog:
    """Read log lines into the JSON form of an incident (docs/reference/incident-schema.md).

    The first pattern that matches a line takes it. A fire consists of the line that begins it and of the lines after
    it that other patterns match, until the next one begins.

    Args:
        lines: of the log, oldest first.
        patterns: how to read them.
        what: one sentence for the incident.
    """
    context: dict[str, str] = {}
    groups: list[dict[str, str]] = []
    problems: list[str] = []
    number = 0
    for number, line in enumerate(lines, start=1):
        pattern, found = _match(line[:MAX_LINE].rstrip("\r\n"), patterns)
        if pattern is None:
            continue
        if pattern.context:
            context |= found
        elif pattern.begins:
            if len(groups) == MAX_FIRES:
                problems.append(f"line {number}: more than {MAX_FIRES:,} fires; the rest of the log was not read")
                break
            groups.append({**context, **found, "line": str(number)})
        elif groups:
            groups[-1] |= {k: v for k, v in found.items() if k not in groups[-1]}
    fires = [_fire(group, i, problems) for i, group in enumerate(groups, start=1)]
    traced = sum("stage" in f for f in fires)
    incident = {
        "what": what,
        "engine": dict(patterns.engine) | {k: context[k] for k in ("runtime", "model", "device") if k in context},
        "fires_total": len(fires),
        "fires_with_layer_trace": traced,
        "fires": fires,
    }
    return ReadLog(incident, number, tuple(problems))


def _match(line: str, patterns: PatternFile) -> tuple[LinePattern | None, dict[str, str]]:
    for pattern in patterns.patterns:
        if m := pattern.regex.search(line):
            named = {k: v.strip() for k, v in m.groupdict().items() if v is not None}
            found = {k: pattern.translate.get(k, {}).get(v, v) for k, v in named.items()}
            return pattern, {**pattern.set, **found}
    return None, {}


def _fire(found: Mapping[str, str], number: int, problems: list[str]) -> dict[str, Any]:
    line = found["line"]
    numbers = {}
    for name in NUMBERS & set(found):
        if found[name].isascii() and found[name].isdigit() and len(found[name]) <= 15:
            numbers[name] = int(found[name])
        else:
            problems.append(f"line {line}: {name}={found[name]!r} is no whole number; left out")
    fire: dict[str, Any] = {"id": f"line-{line}" if number else line}
    fire |= {k: found[k] for k in ("stage", "phase") if k in found}
    fire |= {k: numbers[k] for k in ("layer", "position", "try") if k in numbers}
    place = _place(found, numbers, line, problems)
    if place and "stage" in found:
        fire[f"first_{found['stage']}"] = place
    facts = {k: found[k] for k in _FACTS if k in found}
    if facts:
        fire["facts"] = facts
    return fire


def _place(
    found: Mapping[str, str], numbers: Mapping[str, int], line: str, problems: list[str]
) -> dict[str, Any] | None:
    if "bits" not in found:
        return None
    try:
        pattern = parse_bits(found["bits"])
        dtype = find_format(found.get("dtype") or _DTYPE_OF_DIGITS.get(pattern.num_bits, "unknown")).name
        if pattern.bits >= 1 << find_format(dtype).num_bits:
            raise BitsError(f"bits={found['bits']!r}: must fit {dtype}")
    except BitsError as e:
        problems.append(f"line {line}: {e}; bits left out")
        return None
    place = {"bits": found["bits"].lower().removeprefix("0x"), "dtype": dtype}
    return place | {k: numbers[k] for k in _PLACE if k in numbers}
