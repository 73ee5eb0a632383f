"""The pages about captures and detectors say what the code does."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from firetower.capture import Capture, Environment, ModelInfo, Output, Redaction, Request
from firetower.capture.folder import FILE_NAMES, Seen
from firetower.capture.records import KINDS
from firetower.capture.schema import to_documents
from firetower.capture.secrets import ALLOWED_HEADERS

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "capture-schema.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """Text under a heading, up to the next one."""
    match = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert match is not None, title
    return match[1]


def rows(title: str) -> set[str]:
    return set(re.findall(r"^\| `([^`]+)` \|", section(title), re.MULTILINE))


@pytest.mark.parametrize(
    ("title", "record", "elsewhere"),
    [
        ("request", Request, {"body"}),
        ("model", ModelInfo, set()),
        ("environment", Environment, set()),
        ("redaction", Redaction, set()),
        ("seen.json", Seen, set()),
    ],
)
def test_every_field_of_a_record_has_its_row(title, record, elsewhere):
    assert rows(title) == {f.name for f in dataclasses.fields(record)} - elsewhere


def test_documents_hold_exactly_the_documented_fields(capture):
    documents = to_documents(capture)
    assert rows("capture.json") == set(documents["capture.json"])
    assert rows("content.json") == set(documents["content.json"])
    fields = {f.name for f in dataclasses.fields(Capture)}
    assert fields - {"prompt_token_ids", "outputs", "findings", "fire", "tensors"} == rows("capture.json")
    assert all(f"`{f.name}`" in section("content.json") for f in dataclasses.fields(Output))


def test_files_kinds_and_headers_are_the_documented_ones():
    assert set(re.findall(r"^\| `(\w+\.\w+)` \|", PAGE, re.MULTILINE)) == set(FILE_NAMES)
    assert all(f"`{name}`" in section("request") for name in (*KINDS, *ALLOWED_HEADERS))
