"""The pattern file: how an engine's log lines are read, as TOML with named regex groups."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firetower.core.errors import ConfigError

FIELDS: dict[str, str] = {
    "stage": "signal that is bad: down, routed, hit, logits, ...",
    "layer": "decoder layer, whole number",
    "dtype": "type of the value: float32, bf16, ...",
    "bits": "its raw pattern in hexadecimal",
    "value": "nan, inf or -inf as printed; kept as a fact, no bits are made of it",
    "row": "row of the first bad value",
    "column": "its column",
    "token": "token of the step",
    "position": "token position in the request",
    "slot": "slot of an expert cache, or of a sequence",
    "expert": "expert id",
    "phase": "prefill, decode, verify or draft",
    "request": "id of the request",
    "time": "time as the log writes it",
    "runtime": "engine and version",
    "model": "name of the model",
    "device": "name of the device",
    "try": "number of the try within its round",
}
"""Every name that a regex group may have."""

NUMBERS = frozenset({"layer", "row", "column", "token", "position", "slot", "expert", "try"})
MAX_PATTERNS = 200


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinePattern:
    """One kind of line.

    Attributes:
        name: for messages.
        regex: searched in each line; its named groups are `FIELDS`.
        begins: each match begins a new fire; other patterns add to the last one, or are context for the next.
        context: what it finds holds for every later fire (a model name at start), not for one.
        set: fields with a fixed value.
        translate: field to (word in the log to the word that firetower knows).
    """

    name: str
    regex: re.Pattern[str]
    begins: bool = False
    context: bool = False
    set: Mapping[str, str] = dataclasses.field(default_factory=dict)
    translate: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PatternFile:
    """``engine`` are facts for the incident (``runtime``, ``device``, ``cpu``, ``hidden_size``)."""

    engine: Mapping[str, Any]
    patterns: tuple[LinePattern, ...]


def read_patterns(path: Path | str) -> PatternFile:
    """Read a pattern file.

    Raises:
        ConfigError: not readable, no TOML, an unknown key or group, a bad regex, no pattern that begins a fire.
    """
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"patterns={path.name}: {e.strerror or e}; give a TOML file") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"patterns={path.name}: is no TOML ({e})") from e
    _known(path.name, data, {"engine", "pattern"})
    entries = data.get("pattern")
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"patterns={path.name}: holds no [[pattern]]")
    if len(entries) > MAX_PATTERNS:
        raise ConfigError(f"patterns={path.name}: {len(entries)} patterns, at most {MAX_PATTERNS}")
    patterns = tuple(_pattern(e, f"{path.name} pattern {i}") for i, e in enumerate(entries, start=1))
    if not any(p.begins for p in patterns):
        raise ConfigError(f"patterns={path.name}: no pattern has begins = true, so no line begins a fire")
    engine = data.get("engine", {})
    if not isinstance(engine, dict):
        raise ConfigError(f"patterns={path.name} engine: must be a table")
    return PatternFile(engine=engine, patterns=patterns)


def _pattern(entry: Any, where: str) -> LinePattern:
    if not isinstance(entry, dict):
        raise ConfigError(f"patterns={where}: must be a table")
    _known(where, entry, {"name", "regex", "begins", "context", "set", "map"})
    name = str(entry.get("name", where))
    try:
        regex = re.compile(entry["regex"])
    except KeyError:
        raise ConfigError(f"patterns={where}: has no regex") from None
    except (re.error, TypeError) as e:
        raise ConfigError(f"patterns={where} regex={entry['regex']!r}: cannot be compiled ({e})") from e
    fixed, translate = entry.get("set", {}), entry.get("map", {})
    if not isinstance(fixed, dict) or not isinstance(translate, dict):
        raise ConfigError(f"patterns={where}: set and map must be tables")
    for field in (*regex.groupindex, *fixed, *translate):
        if field not in FIELDS:
            raise ConfigError(f"patterns={where} field={field!r}: unknown; known: {', '.join(FIELDS)}")
    if wrong := [f for f, words in translate.items() if not isinstance(words, dict)]:
        raise ConfigError(f"patterns={where} map.{wrong[0]}: must be a table of words")
    return LinePattern(
        name=name,
        regex=regex,
        begins=_switch(entry, "begins", where),
        context=_switch(entry, "context", where),
        set={k: str(v) for k, v in fixed.items()},
        translate={f: {str(k): str(v) for k, v in words.items()} for f, words in translate.items()},
    )


def _switch(entry: Mapping[str, Any], name: str, where: str) -> bool:
    value = entry.get(name, False)
    if not isinstance(value, bool):
        raise ConfigError(f"patterns={where} {name}={value!r}: must be true or false")
    return value


def _known(where: str, data: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(set(data) - known):
        raise ConfigError(f"patterns={where} {unknown[0]}: unknown key; known: {', '.join(sorted(known))}")
