"""The verdict on a fire: class of cause, evidence, rivals, and the test that would refute it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from firetower.core.codec import decode, encode
from firetower.core.errors import RecordError

UNDECIDED = "V"
"""Family of a verdict where the evidence stops."""

Retriable = Literal["yes", "no", "unknown"]
"""Whether sending the same request again can help."""

Scope = Literal["request", "slot", "prefix", "engine", "file", "unknown"]
"""What the fault spoils until it is cured: one request, whoever gets the slot, every request with that
prefix, the whole process, or the file for everyone."""

RivalStatus = Literal["open", "excluded"]
"""``open``: nothing that was tested speaks against it. ``excluded``: a test ruled it out."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One observation and what follows from it.

    ``test`` is the discriminating test that made it, ``statement`` what was seen, with figures.
    ``supports`` and ``against`` name causes as ``FAMILY/DETAIL`` (``A/OVERFLOW_ACTIVATION``).
    """

    test: str
    statement: str
    supports: tuple[str, ...] = ()
    against: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.statement} ({self.test})"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Another cause that was considered. ``why`` says what speaks for it, or what excluded it.

    ``test`` is the discriminating test that would decide, or that did.
    """

    family: str
    detail: str
    status: RivalStatus
    why: str
    test: str = ""

    @property
    def key(self) -> str:
        """``FAMILY/DETAIL``."""
        return f"{self.family}/{self.detail}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is to blame for a fire, as far as the evidence goes.

    Attributes:
        family: letter of the family (`core.families`); ``V`` when undecided.
        detail: the cause within the family, in capitals; ``UNDECIDED`` when it is.
        decided: whether the evidence suffices.
        statement: the finding in one or two sentences, with place and figures.
        evidence: observations, in the order in which they were made.
        rivals: other causes that were considered, open ones first.
        refuter: the test whose outcome would overturn the verdict.
        next_test: the discriminating test to run next; for a decided verdict the one that refutes it.
        next_command: a command line, or a line of Python, that does it.
        scope: what the fault spoils until it is cured.
        cure: the cheapest one.
        retriable: whether sending the same request again can help.
        ignition: what made the first bad value, where that is known.
        persistence: what keeps it alive after the request, or that nothing does.
        aftermath: what handled the bad value badly afterwards (a sampler that made a token of it), if anything.
        not_testable: parts of the evidence that could not be had, each ``part: why``.
        undecided_between: ``FAMILY/DETAIL``, or a family alone, of the causes left over; empty when decided.
    """

    family: str
    detail: str
    decided: bool
    statement: str
    evidence: tuple[Evidence, ...] = ()
    rivals: tuple[Rival, ...] = ()
    refuter: str = ""
    next_test: str = ""
    next_command: str = ""
    scope: Scope = "unknown"
    cure: str = ""
    retriable: Retriable = "unknown"
    ignition: str = ""
    persistence: str = ""
    aftermath: str = ""
    not_testable: tuple[str, ...] = ()
    undecided_between: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """``FAMILY/DETAIL``."""
        return f"{self.family}/{self.detail}"

    def to_mapping(self) -> dict[str, Any]:
        """The verdict as plain data, for ``Fire.verdict`` and for JSON."""
        data = encode(self)
        assert isinstance(data, dict)
        return data

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Verdict:
        """Undo `to_mapping`.

        Raises:
            RecordError: a missing or unknown field, or one of the wrong type; names the field.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        _check_keys("verdict", data, known, {"family", "detail", "decided", "statement"})
        fields = {name: _plain(name, decode(value)) for name, value in data.items()}
        for name, record in (("evidence", Evidence), ("rivals", Rival)):
            fields[name] = tuple(_record(record, item, name) for item in fields.get(name, ()))
        return cls(**fields)


_LISTS = ("evidence", "rivals", "not_testable", "undecided_between", "supports", "against")
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "retriable": ("yes", "no", "unknown"),
    "scope": ("request", "slot", "prefix", "engine", "file", "unknown"),
    "status": ("open", "excluded"),
}


def _plain(name: str, value: Any) -> Any:
    if name in _LISTS:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise RecordError(f"verdict.{name}={value!r}: must be a list")
        if name not in ("evidence", "rivals") and not all(isinstance(v, str) for v in value):
            raise RecordError(f"verdict.{name}={value!r}: must be a list of strings")
        return tuple(value)
    wanted = bool if name == "decided" else str
    if not isinstance(value, wanted):
        raise RecordError(f"verdict.{name}={value!r}: must be {wanted.__name__}")
    if name in _CHOICES and value not in _CHOICES[name]:
        raise RecordError(f"verdict.{name}={value!r}: must be one of {', '.join(_CHOICES[name])}")
    return value


def _record(record: type[Evidence] | type[Rival], data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise RecordError(f"verdict.{where}={data!r}: must be a list of objects")
    fields = dataclasses.fields(record)
    required = {f.name for f in fields if f.default is dataclasses.MISSING}
    _check_keys(f"verdict.{where}", data, {f.name for f in fields}, required)
    return record(**{name: _plain(name, value) for name, value in data.items()})


def _check_keys(where: str, data: Mapping[str, Any], known: set[str], required: set[str]) -> None:
    if unknown := sorted(set(data) - known):
        raise RecordError(f"{where}.{unknown[0]}: unknown field; known: {', '.join(sorted(known))}")
    if missing := sorted(required - set(data)):
        raise RecordError(f"{where}.{missing[0]}: missing")
