"""Keeping secrets out: headers by an allow-list, fields by name, values by the forms that keys have.

What a person typed into a prompt stays, word for word: it may be what makes the model fire. `redact` removes it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

ALLOWED_HEADERS = frozenset({"accept", "content-type", "user-agent", "x-request-id", "x-stainless-lang"})
"""Request headers that a capture keeps; all others are dropped by name."""

MAX_HEADER_CHARS = 512

_SECRET_NAMES = frozenset({
    "accesskey", "accesstoken", "apikey", "apikeys", "apitoken", "auth", "authorization", "authtoken",
    "awsaccesskeyid", "bearer", "bearertoken", "clientsecret", "cookie", "cookies", "credential",
    "credentials", "hftoken", "idtoken", "jwt", "passphrase", "passwd", "password", "privatekey",
    "proxyauthorization", "pwd", "refreshtoken", "secret", "secretkey", "secrets", "sessionid",
    "sessiontoken", "setcookie", "sig", "signature", "token", "xamzsignature", "xamzcredential",
    "xamzsecuritytoken", "xapikey",
})  # fmt: skip
_SECRET_ENDINGS = ("accesskey", "accesstoken", "apikey", "authtoken", "password", "privatekey", "secret", "secretkey")
_URL_SECRET_NAMES = _SECRET_NAMES | {"key", "code", "sv"}

_SECRET_VALUE = re.compile(
    r"\b(?:sk|pk|rk)-[\w-]{16,}|\bhf_[A-Za-z0-9]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[\w-]{30,}|\bxox[abprs]-[\w-]{10,}|\bnvapi-[\w-]{16,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+|\b(?:Bearer|Basic)\s+[\w.~+/=-]{8,}|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
_CONTENT_KEYS = frozenset({"content", "text", "prompt", "input", "arguments", "description", "instructions", "suffix"})
_SCHEMA_KEYS = frozenset({"parameters", "input_schema", "schema", "json_schema", "properties", "guided_json"})
_HEADER_KEYS = frozenset({"headers", "extraheaders", "httpheaders", "defaultheaders", "metadataheaders"})
_MAX_DEPTH = 200


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scrubbed:
    """A JSON value without its secrets, and where they were: ``api_key``, ``tools[0].headers.x-key``."""

    value: Any
    dropped: tuple[str, ...] = ()


def allowed_headers(headers: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """(headers of the allow-list, names of the dropped ones); values that look like keys are dropped as well."""
    kept, dropped = {}, []
    for name, value in sorted((str(k).lower(), str(v)) for k, v in headers.items()):
        is_fine = name in ALLOWED_HEADERS and len(value) <= MAX_HEADER_CHARS and not _SECRET_VALUE.search(value)
        if is_fine:
            kept[name] = value
        else:
            dropped.append(f"header {name[:80]}")
    return kept, tuple(dropped)


def scrub(value: Any, where: str = "") -> Scrubbed:
    """Take secrets out of a JSON value: whole fields by name, values by form, credentials out of URLs.

    Text of messages and prompts is left alone, and so are tool schemas: a parameter *called* password is none.
    A field nested deeper than 200 is dropped, for it cannot be looked through.
    """
    dropped: list[str] = []
    return Scrubbed(value=_scrub(value, where, dropped, depth=0), dropped=tuple(dropped))


def is_secret_name(name: str) -> bool:
    """Whether a field of this name holds a secret, however it is spelt: ``API-Key``, ``openai_api_key``."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return plain in _SECRET_NAMES or plain.endswith(_SECRET_ENDINGS)


_GONE = object()


def _scrub(value: Any, where: str, dropped: list[str], *, depth: int, in_schema: bool = False) -> Any:
    if depth > _MAX_DEPTH:
        dropped.append(f"{where} (nested too deep)")
        return _GONE
    if isinstance(value, Mapping):
        return _scrub_mapping(value, where, dropped, depth=depth, in_schema=in_schema)
    if isinstance(value, list | tuple):
        return _scrub_list(value, where, dropped, depth=depth, in_schema=in_schema)
    if isinstance(value, str):
        return _scrub_text(value, where, dropped)
    return value


def _scrub_mapping(
    value: Mapping[str, Any], where: str, dropped: list[str], *, depth: int, in_schema: bool
) -> dict[str, Any]:
    result = {}
    for name, item in value.items():
        place = f"{where}.{name}" if where else str(name)
        if _is_header_map(name, item) and not in_schema:
            result[name], gone = allowed_headers(item)
            dropped += [f"{place}: {g}" for g in gone]
            continue
        if is_secret_name(name) and not _is_harmless(item, in_schema=in_schema):
            dropped.append(place)
            continue
        if name in _CONTENT_KEYS and _is_text(item):
            result[name] = item
            continue
        inner = _scrub(item, place, dropped, depth=depth + 1, in_schema=in_schema or name in _SCHEMA_KEYS)
        if inner is not _GONE:
            result[name] = inner
    return result


def _scrub_list(value: Sequence[Any], where: str, dropped: list[str], *, depth: int, in_schema: bool) -> list[Any]:
    result = []
    option: str | None = None
    for i, item in enumerate(value):
        place = f"{where}[{i}]"
        if option is not None or _is_secret_option(item, with_value=True):
            # a command line: --api-key KEY, --api-key=KEY
            dropped.append(place)
            option = None
            continue
        option = item if _is_secret_option(item, with_value=False) else None
        inner = _scrub(item, place, dropped, depth=depth + 1, in_schema=in_schema)
        if inner is not _GONE:
            result.append(inner)
    return result


def _is_secret_option(item: Any, *, with_value: bool) -> bool:
    if not isinstance(item, str) or not item.startswith("-"):
        return False
    name, has_value, _ = item.partition("=")
    return is_secret_name(name) and bool(has_value) is with_value


def _is_header_map(name: str, item: Any) -> bool:
    return re.sub(r"[^a-z]", "", name.lower()) in _HEADER_KEYS and isinstance(item, Mapping)


def _is_text(item: Any) -> bool:
    return isinstance(item, str) or (isinstance(item, list) and all(isinstance(v, str) for v in item))


def _is_harmless(item: Any, *, in_schema: bool) -> bool:
    """A switch, nothing, or the schema of a parameter that is merely called so."""
    return item is None or isinstance(item, bool) or item in ("", [], {}) or (in_schema and isinstance(item, Mapping))


def _scrub_text(text: str, where: str, dropped: list[str]) -> Any:
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]{1,20}://", text):
        clean = _clean_url(text)
        if clean != text:
            dropped.append(f"{where} (credentials in a URL)")
        text = clean
    if not text.startswith("data:") and _SECRET_VALUE.search(text):
        dropped.append(f"{where} (looks like a key)")
        return _GONE
    return text


def _clean_url(url: str) -> str:
    """The URL without user information and without secret parameters of its query."""
    try:
        parts = urlsplit(url)
        pairs = parse_qsl(parts.query, keep_blank_values=True)
    except ValueError:
        return url.split("?", 1)[0].rsplit("@", 1)[-1]
    kept = [(k, v) for k, v in pairs if not _is_url_secret(k)]
    host = parts.netloc.rpartition("@")[2]
    if len(kept) == len(pairs) and host == parts.netloc:
        return url
    return urlunsplit((parts.scheme, host, parts.path, urlencode(kept), parts.fragment))


def _is_url_secret(name: str) -> bool:
    return is_secret_name(name) or re.sub(r"[^a-z0-9]", "", name.lower()) in _URL_SECRET_NAMES
