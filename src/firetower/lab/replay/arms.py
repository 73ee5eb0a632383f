"""Arms: what ``--arm name:setting=value`` and ``--set key=value`` say, parsed and refused early."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from firetower.capture.secrets import is_secret_name
from firetower.core.errors import ReplayError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+-]{0,39}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
DEFAULT_ARM = "as captured"


class _Removed:
    """Marks a field that a setting without a value takes out of the request."""

    def __repr__(self) -> str:
        return "REMOVED"


REMOVED = _Removed()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to make the same tries.

    Attributes:
        fields: of the request's body, by dotted path; `REMOVED` takes one out.
        url: another server for this arm, or None.
        variables: of the environment of its process; None unsets one.
    """

    name: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    url: str | None = None
    variables: Mapping[str, str | None] = dataclasses.field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """As the campaign's file has them: ``{"temperature": 0, "env.CUDA_LAUNCH_BLOCKING": "1"}``."""
        found = {k: None if v is REMOVED else v for k, v in self.fields.items()}
        if self.url is not None:
            found["url"] = self.url
        return found | {f"env.{k}": v for k, v in self.variables.items()}


def parse_arms(texts: Sequence[str]) -> tuple[Arm, ...]:
    """Arms from the command line, in order; settings of one name are put together.

    A single arm with settings is held against the request as captured, which then comes first.

    Raises:
        ReplayError: a name, setting or value that is none; a setting given twice; something that looks secret.
    """
    settings: dict[str, dict[str, str]] = {}
    for text in texts:
        name, colon, assignment = text.partition(":")
        if not colon or not _NAME.fullmatch(name):
            raise ReplayError(f"arm={text[:80]!r}: must be NAME:SETTING=VALUE, such as cold:temperature=0")
        own = settings.setdefault(name, {})
        if not assignment:
            continue
        key, value = _assignment(assignment, "arm")
        if key in own:
            raise ReplayError(f"arm={name}: sets {key!r} twice; give it once")
        own[key] = value
    arms = [_arm(name, own) for name, own in settings.items()]
    if not arms or (len(arms) == 1 and arms[0].settings):
        arms.insert(0, Arm(name=DEFAULT_ARM))
    seen: dict[str, str] = {}
    for arm in arms:
        same = seen.setdefault(json.dumps(arm.settings, sort_keys=True), arm.name)
        if same != arm.name and arm.settings:
            raise ReplayError(f"arm={arm.name}: has the settings of {same}; arms must differ")
    return tuple(arms)


def parse_fields(texts: Sequence[str]) -> dict[str, Any]:
    """Fields of ``--set KEY=VALUE``, for every try.

    Raises:
        ReplayError: no assignment, or something that looks secret.
    """
    return {key: _value(value) for key, value in (_assignment(t, "set") for t in texts)}


def set_fields(body: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``body`` with fields set; a dotted path goes into objects and makes them where missing.

    Raises:
        ReplayError: a path that leads through something that is no object.
    """
    result = dict(body)
    for path, value in fields.items():
        *parents, last = path.split(".")
        place = result
        for name in parents:
            inner = place.get(name, {})
            if not isinstance(inner, dict):
                raise ReplayError(f"{path}: {name!r} of the request is no object; set it as a whole")
            place[name] = dict(inner)
            place = place[name]
        if value is REMOVED:
            place.pop(last, None)
        else:
            place[last] = value
    return result


def _arm(name: str, settings: Mapping[str, str]) -> Arm:
    fields: dict[str, Any] = {}
    variables: dict[str, str | None] = {}
    url = None
    for key, value in settings.items():
        if key == "url":
            url = value
        elif key.startswith("env."):
            variables[_variable(name, key)] = value or None
        else:
            fields[key] = _value(value)
    return Arm(name=name, fields=fields, url=url, variables=variables)


def _variable(arm: str, key: str) -> str:
    name = key.removeprefix("env.")
    if not _VARIABLE.fullmatch(name):
        raise ReplayError(f"arm={arm}: {key!r} names no environment variable")
    return name


def _assignment(text: str, option: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key or any(not part for part in key.split(".")):
        raise ReplayError(f"{option}={text[:80]!r}: must be SETTING=VALUE; an empty value takes the field out")
    if any(is_secret_name(part) for part in key.split(".")):
        raise ReplayError(
            f"{option}={key!r}: looks like a secret, and everyone sees a command line; "
            "use FIRETOWER_API_KEY, or set it in the environment"
        )
    return key, value


def _value(text: str) -> Any:
    """JSON where it is JSON, else the text itself; nothing at all removes the field."""
    if not text:
        return REMOVED
    try:
        return json.loads(text, parse_constant=_no_constant)
    except ValueError:
        return text


def _no_constant(text: str) -> Any:
    raise ReplayError(f"value={text}: is no JSON number; a request cannot carry it")
