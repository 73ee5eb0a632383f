"""The documents say what the code does: every field, the example, the short form."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path

import pytest

from firetower.core.records import BadValue, BurnedRow, Fire, Signal, SignalReading, TensorSummary
from firetower.fires.jsonl import read_lines

ROOT = Path(__file__).parents[2]
SCHEMA = (ROOT / "docs" / "reference" / "fire-schema.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("record", [Fire, Signal, BadValue, SignalReading, BurnedRow, TensorSummary])
def test_the_schema_page_has_every_field_of_every_record_in_order(record: type) -> None:
    section = re.search(rf"^## {record.__name__}\n(.*?)(?=^## |\Z)", SCHEMA, re.DOTALL | re.MULTILINE)
    assert section is not None
    documented = re.findall(r"^\| `(\w+)` \|", section[1], re.MULTILINE)
    assert documented == [f.name for f in dataclasses.fields(record)]


def test_the_c_example_on_the_page_is_the_file_that_is_tested() -> None:
    assert f"```c\n{(ROOT / 'examples' / 'handin.c').read_text(encoding='utf-8').rstrip()}\n```" in SCHEMA


def test_the_short_form_on_the_page_is_imported() -> None:
    (example,) = re.findall(r"```json\n(.*?)\n```", SCHEMA, re.DOTALL)
    (fire,) = read_lines(io.BytesIO(example.encode()), "page")
    assert (fire.origin.stage, fire.first.bits_hex, fire.first.flat_index) == ("down", "7e00", 778)


def test_the_command_page_names_every_option() -> None:
    import argparse

    from firetower.cli import fires

    page = (ROOT / "docs" / "reference" / "fires.md").read_text(encoding="utf-8")
    parser = argparse.ArgumentParser()
    fires.configure(parser)
    (verbs,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    for name, verb in verbs.choices.items():
        assert f"firetower fires {name}" in page
        for action in verb._actions:
            option = max(action.option_strings, key=len, default="")
            assert option in page or option in ("--help", "--debug", "--output"), option
