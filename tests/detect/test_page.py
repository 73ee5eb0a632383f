"""The page about the detectors names every sign and every limit with its default."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from firetower.detect import DetectConfig, FindingKind

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "detect.md").read_text(encoding="utf-8")


def test_every_sign_has_a_row():
    assert set(re.findall(r"^\| `([a-z ]+)` \| .* \| .*(?:fire|warn|advisory)", PAGE, re.MULTILINE)) == {*FindingKind}


def test_every_limit_has_a_row_with_its_default():
    documented = dict(re.findall(r"^\| `(\w+)` \| (\w+) \| ", PAGE, re.MULTILINE))
    assert documented == {f.name: str(f.default) for f in dataclasses.fields(DetectConfig)}
