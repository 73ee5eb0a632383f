"""The 200 tool prompts that no training row resembles, and the file that keeps them for the tests of the checkpoint."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from small_model.grammar import Parameter, Tool
from small_model.mixture import read_mixture

NUM_PROMPTS, PROMPT_SEED = 200, 5


@dataclass(frozen=True, kw_only=True)
class ToolPrompt:
    """One prompt.

    Attributes:
        text: rendered, up to and with the generation prompt.
        expected: the call that is asked for, (function name, arguments as text).
    """

    text: str
    expected: tuple[str, dict[str, str]]

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Schemas of the tools that the text lists, in OpenAI's form."""
        listed = self.text.partition("<tools>\n")[2].partition("</tools>")[0]
        return [_tool_of(signature).schema() for signature in listed.splitlines()]


def _tool_of(signature: str) -> Tool:
    name, _, rest = signature.removesuffix(")").partition("(")
    parameters = []
    for part in rest.split(", "):
        label, _, kind = part.partition(": ")
        parameters.append(Parameter(name=label.removesuffix("?"), type=kind, required=not label.endswith("?")))
    return Tool(name=name, parameters=tuple(parameters))


def draw_prompts(data: Path, tokenizer: Any) -> list[ToolPrompt]:
    """Prompts of the held-out side of the grammar, each complete; every other one asks for a thought.

    Args:
        data: work folder of ``prepare``.
        tokenizer: of Transformers, for its chat template.
    """
    grammar, rng = read_mixture(data, held_out=True).grammar, random.Random(PROMPT_SEED)
    found = []
    for index in range(NUM_PROMPTS):
        drawn = grammar.conversation(rng, "call")
        assert drawn.expected is not None
        text = tokenizer.apply_chat_template(
            list(drawn.messages[:-1]), tools=[t.schema() for t in drawn.tools], tokenize=False,
            add_generation_prompt=True, enable_thinking=index % 2 == 0,
        )  # fmt: skip
        found.append(ToolPrompt(text=text, expected=drawn.expected))
    return found


def write_prompts(prompts: Sequence[ToolPrompt], file: Path) -> None:
    """One prompt a line, JSON."""
    lines = (json.dumps({"text": p.text, "expected": p.expected}) + "\n" for p in prompts)
    file.write_text("".join(lines), encoding="utf-8")


def read_prompts(file: Path) -> list[ToolPrompt]:
    """What `write_prompts` wrote."""
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [ToolPrompt(text=r["text"], expected=(r["expected"][0], r["expected"][1])) for r in records]
