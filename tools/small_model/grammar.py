"""The synthetic share of the text: conversations with tool calls and thinking, in the chat format of Qwen3.5.

A conversation lists two to five tools, asks for one of them in plain words with its values, and is answered by a
thought and a call that copies the names from the list and the values from the request. Function names are pairs of a
verb and a noun. One pair in five, and one of ten words that values are made of, is held out: no training call names
such a function or holds such a word, and a held-out one no other.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


VERBS = _words(
    "get find list search create add update delete remove send open close start stop check read write copy move "
    "rename book cancel order pay print scan upload download share archive restore sort filter count compare convert "
    "translate validate verify approve reject assign schedule plan track measure record play pause reset enable "
    "disable install build test deploy export import merge split lock unlock publish review rate save load sync watch"
)

NOUNS = _words(
    "weather forecast flight hotel room ticket train route map address contact message mail note task reminder alarm "
    "event meeting calendar invoice payment account balance budget expense receipt order product price discount stock "
    "shipment parcel customer supplier employee team project issue bug branch commit release package module server "
    "database table query index backup snapshot volume disk file folder document report chart image photo video song "
    "album playlist movie book article chapter page comment review recipe meal ingredient workout exercise course "
    "lesson exam student teacher grade patient doctor appointment prescription symptom device sensor camera lamp door "
    "window thermostat printer network router port certificate password user group role policy permission session "
    "token log metric alert dashboard dataset model experiment job queue worker cluster container contract lease "
    "house garden plant animal vehicle engine battery station bridge river city country language currency vote poll"
)

STRINGS = _words(
    "name title city path query message email author topic label country subject comment folder tag color owner host "
    "reason status category source target format description keyword location destination brand street text unit"
)
INTEGERS = _words(
    "count limit days page year port size level priority quantity timeout age width height hours minutes floor seats "
    "retries offset number position depth"
)
NUMBERS = _words("price amount ratio weight latitude longitude temperature rate distance length speed score budget")
BOOLEANS = _words("urgent public recursive dry_run verbose archived active force private overwrite notify paid")
POOLS = {"string": STRINGS, "integer": INTEGERS, "number": NUMBERS, "boolean": BOOLEANS}

SYSTEM_LINES = (
    "You are a helpful assistant.",
    "You are a careful assistant. Use the tools.",
    "Answer in few words.",
    "You help with the tasks of an office.",
)


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a tool: its name, its JSON type and whether a call must give it."""

    name: str
    type: str
    required: bool


@dataclass(frozen=True, kw_only=True)
class Tool:
    """One function the assistant may call."""

    name: str
    parameters: tuple[Parameter, ...]

    def signature(self) -> str:
        """The tool as the chat format lists it."""
        parameters = (f"{p.name}{'' if p.required else '?'}: {p.type}" for p in self.parameters)
        return f"{self.name}({', '.join(parameters)})"

    def schema(self) -> dict[str, Any]:
        """The tool as chat templates take it, in OpenAI's form."""
        properties = {p.name: {"type": p.type} for p in self.parameters}
        required = [p.name for p in self.parameters if p.required]
        parameters = {"type": "object", "properties": properties, "required": required}
        return {"type": "function", "function": {"name": self.name, "parameters": parameters}}


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One synthetic conversation.

    Attributes:
        kind: ``call``, ``answer`` (a call and what follows its result), ``missing`` or ``none``.
        tools: what the system prompt lists.
        messages: as chat templates take them; the last is the assistant's.
        expected: the call's (function name, arguments as text); None where there is none.
        thinking: whether the assistant thinks.
    """

    kind: str
    tools: tuple[Tool, ...]
    messages: tuple[dict[str, Any], ...]
    expected: tuple[str, dict[str, str]] | None
    thinking: bool


def is_held_out(text: str, one_in: int) -> bool:
    """Whether a name or word is on the held-out side: a property of the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % one_in == 0


class Grammar:
    """Draws conversations.

    Args:
        words: words that values are made of.
        held_out: draw function names and words of the held-out side instead of the training side.
    """

    def __init__(self, words: Sequence[str], *, held_out: bool) -> None:
        self.held_out = held_out
        self.words = [w for w in words if is_held_out(w, 10) == held_out]
        pairs = [f"{v}_{n}" for v in VERBS for n in NOUNS]
        self.names = [p for p in pairs if is_held_out(p, 5) == held_out]

    def conversation(self, rng: random.Random, kind: str | None = None) -> Conversation:
        """One conversation; of ``kind``, or of a kind drawn by its share."""
        if kind is None:
            kind = rng.choices(("call", "answer", "missing", "none"), weights=(78, 14, 4, 4))[0]
        tools = self._tools(rng)
        tool = rng.choice(tools)
        # the request asks for a tool that is then taken off the list
        listed = [t for t in tools if t is not tool] if kind == "none" else tools
        values = {p.name: self._value(rng, p.type) for p in tool.parameters if p.required or rng.random() < 0.5}
        left_out = None
        if kind == "missing":
            left_out = rng.choice([p.name for p in tool.parameters if p.required])
            values.pop(left_out)
        thinking = rng.random() < 0.75
        messages: list[dict[str, Any]] = []
        if rng.random() < 0.2:
            messages.append({"role": "system", "content": rng.choice(SYSTEM_LINES)})
        messages.append({"role": "user", "content": _request(rng, tool, values)})
        messages += _reply(rng, kind, tool, values, left_out, thinking)
        expected = (tool.name, values) if kind in ("call", "answer") else None
        return Conversation(
            kind=kind, tools=tuple(listed), messages=tuple(messages), expected=expected, thinking=thinking
        )

    def _tools(self, rng: random.Random) -> list[Tool]:
        names = {rng.choice(self.names)}
        wanted = rng.choice((2, 2, 3, 3, 4, 5))
        while len(names) < wanted:
            name = rng.choice(self.names)
            if rng.random() < 0.4:
                # a near miss: the verb or the noun of another tool on the list
                verb, noun = rng.choice(sorted(names)).split("_")
                name = f"{verb}_{rng.choice(NOUNS)}" if rng.random() < 0.5 else f"{rng.choice(VERBS)}_{noun}"
                if is_held_out(name, 5) != self.held_out:
                    continue
            names.add(name)
        listed = sorted(names)
        rng.shuffle(listed)
        return [Tool(name=n, parameters=_parameters(rng)) for n in listed]

    def _value(self, rng: random.Random, kind: str) -> str:
        if kind == "integer":
            return str(rng.choice((rng.randint(0, 9), rng.randint(10, 99), rng.randint(100, 9999))))
        if kind == "number":
            return f"{rng.choice(('', '', '', '-'))}{rng.randint(0, 999)}.{rng.randint(0, 99)}"
        if kind == "boolean":
            return rng.choice(("true", "false"))
        return self._string(rng)

    def _string(self, rng: random.Random) -> str:
        word = self._word
        form = rng.random()
        if form < 0.40:
            return word(rng)
        if form < 0.60:
            return word(rng).capitalize()
        if form < 0.75:
            return f"{word(rng)} {word(rng)}"
        if form < 0.83:
            return f"{word(rng).capitalize()} {word(rng).capitalize()}"
        if form < 0.88:
            return f"/{word(rng)}/{word(rng)}"
        if form < 0.92:
            return f"{word(rng)}.{rng.choice(('txt', 'pdf', 'json', 'py', 'csv'))}"
        if form < 0.96:
            return f"{word(rng)}@{word(rng)}.{rng.choice(('com', 'org', 'net'))}"
        return f"{rng.randint(2000, 2039)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"

    def _word(self, rng: random.Random) -> str:
        # invented ones, so that what is copied is the letters and not a known word
        if rng.random() < 0.15:
            return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3)))
        return rng.choice(self.words)


def _parameters(rng: random.Random) -> tuple[Parameter, ...]:
    chosen: dict[str, Parameter] = {}
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        kind = rng.choices(("string", "integer", "number", "boolean"), weights=(50, 24, 13, 13))[0]
        name = rng.choice(POOLS[kind])
        # the type stands in the list and not in the name
        declared = rng.choice(tuple(POOLS)) if rng.random() < 0.1 else kind
        chosen.setdefault(name, Parameter(name=name, type=declared, required=not chosen or rng.random() < 0.7))
    return tuple(chosen.values())


def _spoken(rng: random.Random, tool: Tool, name: str, value: str) -> str:
    kind = next(p.type for p in tool.parameters if p.name == name)
    if kind != "string":
        return value
    # a single word needs no quotes to be seen as one value
    if value.isalpha() and rng.random() < 0.3:
        return value
    return f'"{value}"'


_OPENINGS = (
    "Please {verb} {a} {noun}", "{Verb} {a} {noun}", "Can you {verb} {a} {noun}", "I want to {verb} {a} {noun}",
    "I need to {verb} {a} {noun}", "{Verb} the {noun}", "Could you please {verb} the {noun}",
    "Help me {verb} {a} {noun}",
)  # fmt: skip
_PAIRS: tuple[tuple[str, Callable[[str, str], str]], ...] = (
    (" with ", lambda name, value: f"{name} {value}"),
    (", ", lambda name, value: f"{name} {value}"),
    (" where ", lambda name, value: f"the {name} is {value}"),
    (": ", lambda name, value: f"{name} = {value}"),
    (" with ", lambda name, value: f"{name} set to {value}"),
    (". Use ", lambda name, value: f"{value} as the {name}"),
    (" and take ", lambda name, value: f"{value} for {name}"),
)


def _request(rng: random.Random, tool: Tool, values: dict[str, str]) -> str:
    verb, noun = tool.name.split("_")
    opening = rng.choice(_OPENINGS).format(
        verb=verb, Verb=verb.capitalize(), noun=noun, a="an" if noun[0] in "aeiou" else "a"
    )
    link, form = rng.choice(_PAIRS)
    names = list(values)
    rng.shuffle(names)
    parts = [form(name.replace("_", " "), _spoken(rng, tool, name, values[name])) for name in names]
    listed = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1] if parts else ""
    end = "?" if opening.startswith(("Can", "Could")) and ". " not in link else "."
    return opening + (link + listed if parts else "") + end


_FITS = (
    "The request fits {name}. It gives {given}.",
    "{name} does this. Given: {given}.",
    "I call {name} with {given}.",
)


def _reply(
    rng: random.Random, kind: str, tool: Tool, values: dict[str, str], left_out: str | None, thinking: bool
) -> list[dict[str, Any]]:
    def message(thought: str, **rest: Any) -> dict[str, Any]:
        return {"role": "assistant", "reasoning_content": thought if thinking else "", **rest}

    if kind == "none":
        verb, noun = tool.name.split("_")
        return [message("No tool on the list fits.", content=f"I have no tool to {verb} the {noun}.")]
    if kind == "missing":
        thought = f"The request fits {tool.name}. The {left_out} is missing."
        return [message(thought, content=f"Which {(left_out or '').replace('_', ' ')} should I use?")]
    # in the order of the list: one way to write a call, so that there is nothing to guess
    arguments = {p.name: values[p.name] for p in tool.parameters if p.name in values}
    thought = rng.choice(_FITS).format(name=tool.name, given=" and ".join(arguments))
    call = message(
        thought, content="", tool_calls=[{"type": "function", "function": {"name": tool.name, "arguments": arguments}}]
    )
    if kind == "call":
        return [call]
    field, result = rng.choice(STRINGS + INTEGERS), rng.choice((str(rng.randint(0, 999)), rng.choice(NOUNS)))
    if rng.random() < 0.2:
        response, answer = {"error": f"{result} not found"}, f"The call failed: {result} not found."
    else:
        response, answer = {field: result}, f"The {field} is {result}."
    return [call, {"role": "tool", "content": json.dumps(response)}, message("The tool has answered.", content=answer)]
