"""The tutorial's programs, as printed there, do what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tutorial" / "first-fire.md"
pytestmark = pytest.mark.slow


def program(docstring: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    [found] = [b for b in blocks if b.startswith(f'"""{docstring}')]
    return found


def test_the_story_up_to_the_verdict(tmp_path):
    pytest.importorskip("transformers")
    for name, docstring in (
        ("make_model.py", "A small Llama"),
        ("serve_one.py", "One request"),
        ("why.py", "The burning tokens"),
    ):
        (tmp_path / name).write_text(program(docstring), encoding="utf-8")
    environment = os.environ | {"FIRETOWER_DATA": "data", "OMP_NUM_THREADS": "1"}

    def run(*argv: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, *argv], cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    assert run("make_model.py")[0] == 0
    assert run("serve_one.py", "0")[0] == 0
    code, said = run("serve_one.py", "3")
    assert code == 1
    assert "+Inf first at layer 5, model.layers.5.mlp.down_proj [swiglu]: row 0, column 40, bits 7c00" in said
    code, listed = run("-m", "firetower.cli.main", "fires", "list", "--json")
    [fire] = json.loads(listed[: listed.rindex("]") + 1])
    code, said = run("why.py", fire["id"])
    assert code == 0, said
    assert "OVERFLOW_ACTIVATION (family A)" in said
    assert "101,124 > 65,504" in said
