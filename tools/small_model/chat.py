"""The chat format of the small model: Qwen3.5's, with the list of tools as signatures instead of JSON schemas.

A signature such as ``get_weather(city: string, days?: integer)`` says what a call needs in a fifth of the tokens that
its schema takes; a question mark stands behind a parameter that may be left out. Calls, thoughts and tool responses
are written as Qwen3.5 writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
MARKUP_TOKENS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>",
    "<function=", "</function>", "<parameter=", "</parameter>",
)  # fmt: skip
"""Each one token, so that a call is short; none is special, so that they stay in decoded text."""

CHAT_TEMPLATE = r"""
{%- macro signature(tool) %}
    {%- set f = tool.function if tool.function is defined else tool %}
    {%- set schema = f.parameters if f.parameters is defined else {} %}
    {%- set required = schema.required if schema.required is defined else [] %}
    {{- f.name ~ '(' }}
    {%- for name, property in (schema.properties if schema.properties is defined else {})|items %}
        {%- set type = property.type if property.type is string else 'string' %}
        {{- name ~ ('' if name in required else '?') ~ ': ' ~ type }}
        {{- '' if loop.last else ', ' }}
    {%- endfor %}
    {{- ')' }}
{%- endmacro %}
{%- set has_system = messages and messages[0].role == 'system' %}
{%- if tools %}
    {{- '<|im_start|>system\n' ~ (messages[0].content ~ '\n\n' if has_system else '') ~ '# Tools\n\n<tools>\n' }}
    {%- for tool in tools %}
        {{- signature(tool) ~ '\n' }}
    {%- endfor %}
    {{- '</tools><|im_end|>\n' }}
{%- elif has_system %}
    {{- '<|im_start|>system\n' ~ messages[0].content ~ '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.last_query = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\n' ~ message.content ~ '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- set content = message.content or '' %}
        {%- set reasoning = message.reasoning_content or '' %}
        {%- if not reasoning and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query %}
            {{- '<think>\n' ~ reasoning ~ '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in (message.tool_calls or []) %}
            {%- set f = call.function if call.function is defined else call %}
            {{- '\n' if not loop.first else ('\n\n' if content else '') }}
            {{- '<tool_call>\n<function=' ~ f.name ~ '>\n' }}
            {%- for name, value in (f.arguments or {})|items %}
                {{- '<parameter=' ~ name ~ '>\n' ~ (value if value is string else value|tojson) ~ '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' else '' }}
        {{- '\n<tool_response>\n' ~ message.content ~ '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' }}
    {%- elif message.role != 'system' or not loop.first %}
        {{- raise_exception('role ' ~ message.role ~ ': must be user, assistant, tool, or system in the first place') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' ~ ('<think>\n\n</think>\n\n' if enable_thinking is false else '<think>\n') }}
{%- endif %}
""".strip()


def segments(messages: Sequence[Mapping[str, Any]], signatures: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Pieces of a conversation with one user message and whether the assistant is to learn each.

    The pieces together are what ``CHAT_TEMPLATE`` gives; a test holds the two to each other. It is written a second
    time because training draws a million conversations, and because a template marks no pieces.

    Args:
        messages: as chat templates take them.
        signatures: the list of tools, one a line; may be empty.
    """
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    listed = "# Tools\n\n<tools>\n" + "".join(f"{s}\n" for s in signatures) + "</tools>" if signatures else ""
    if system or listed:
        yield f"{IM_START}system\n" + "\n\n".join(x for x in (system, listed) if x) + f"{IM_END}\n", False
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "user":
            yield f"{IM_START}user\n{content}{IM_END}\n", False
        elif role == "tool":
            yield f"{IM_START}user\n<tool_response>\n{content}\n</tool_response>{IM_END}\n", False
        elif role == "assistant":
            thought = message.get("reasoning_content", "")
            # as far as the generation prompt goes there is nothing to learn
            yield f"{IM_START}assistant\n<think>\n" + ("" if thought else "\n</think>\n\n"), False
            calls = "\n".join(map(_call, message.get("tool_calls", ())))
            yield (f"{thought}\n</think>\n\n" if thought else "") + content + calls + IM_END, True
            yield "\n", False


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in function["arguments"].items())
    return f"<tool_call>\n<function={function['name']}>\n{parameters}</function>\n</tool_call>"


_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>\n", re.S)
_CALL = re.compile(
    rf"<tool_call>\n<function=([^>\n]+)>\n((?:{_PARAMETER.pattern.replace('(', '(?:')})*)</function>\n</tool_call>",
    re.S,
)


def parse_call(reply: str) -> tuple[str, dict[str, str]]:
    """Function name and arguments (as text) of the one tool call of a reply.

    Args:
        reply: what follows the generation prompt, up to and without ``<|im_end|>``. A thought may come first.

    Raises:
        ValueError: anything but one well-formed call stands behind the thought; says what.
    """
    body = reply.rpartition("</think>")[2].strip()
    match = _CALL.fullmatch(body)
    if match is None:
        raise ValueError(f"reply {body[:80]!r}: must be one tool call and nothing else")
    arguments: dict[str, str] = {}
    for name, value in _PARAMETER.findall(match[2]):
        if name in arguments:
            raise ValueError(f"parameter {name}: given twice")
        arguments[name] = value
    return match[1], arguments


_PATTERNS = {"integer": r"-?\d+", "number": r"-?\d+(\.\d+)?", "boolean": "true|false", "string": r"(?s).+"}


def check_call(name: str, arguments: Mapping[str, str], tools: Sequence[Mapping[str, Any]]) -> None:
    """Hold a parsed call to the list of tools: known function, known parameters, all required ones, right types.

    Args:
        name: function called.
        arguments: its arguments as text.
        tools: schemas in OpenAI's form.

    Raises:
        ValueError: which rule the call breaks.
    """
    functions = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    if name not in functions:
        raise ValueError(f"function {name}: not on the list {sorted(functions)}")
    schema = functions[name]
    for required in schema["required"]:
        if required not in arguments:
            raise ValueError(f"parameter {required}: required and not given")
    for parameter, value in arguments.items():
        if parameter not in schema["properties"]:
            raise ValueError(f"parameter {parameter}: {name} has none of this name")
        kind = schema["properties"][parameter]["type"]
        if not re.fullmatch(_PATTERNS[kind], value):
            raise ValueError(f"parameter {parameter}: {value!r} is no {kind}")
