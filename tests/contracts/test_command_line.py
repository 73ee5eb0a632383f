"""What every command promises, and what the command line must not load before it knows what to do."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import pytest
from contracts.imports import SLOW_AT_START

from firetower.cli.main import command_names, load_command

DOCS = Path(__file__).parents[2] / "docs" / "reference"
HELP_BUDGET_S = 0.3


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout


@pytest.mark.parametrize("name", command_names())
def test_each_command_explains_itself_and_takes_json(name):
    module = load_command(name)
    assert (module.__doc__ or "").strip(), "the docstring is the help"
    parser = argparse.ArgumentParser()
    module.configure(parser)
    assert takes_json(parser), f"firetower {name} has no --json"
    assert callable(module.run)


def takes_json(parser: argparse.ArgumentParser) -> bool:
    """Whether the command, or every one of its subcommands, takes ``--json``."""
    if any("--json" in action.option_strings for action in parser._actions):
        return True
    children = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return bool(children) and all(takes_json(sub) for a in children for sub in a.choices.values())


def test_a_command_without_json_is_noticed():
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    commands.add_parser("list").add_argument("--json")
    assert takes_json(parser)
    commands.add_parser("show")
    assert not takes_json(parser)
    assert not takes_json(argparse.ArgumentParser())


@pytest.mark.parametrize("name", command_names())
def test_each_command_has_a_page_that_teaches_reading_it(name):
    page = DOCS / f"{name}.md"
    assert page.exists(), f"docs/reference/{name}.md is missing"
    text = page.read_text(encoding="utf-8")
    assert f"firetower {name}" in text
    assert "exit code" in text.lower()


def test_the_parser_is_built_without_any_heavy_import():
    code = (
        "import sys, firetower, firetower.cli.main as m; m.build_parser(); "
        "print(*sorted({n.split('.')[0] for n in sys.modules}))"
    )
    loaded = set(run_python(code).split())
    assert "firetower" in loaded
    assert loaded & SLOW_AT_START == set()


def test_torch_free_rooms_can_be_imported_without_torch():
    code = """
import importlib, pkgutil, sys
for name in ("torch", "transformers", "accelerate", "safetensors", "llama_cpp"):
    sys.modules[name] = None  # makes every import of it fail, as where it is not installed
import firetower, firetower.cli.main
firetower.cli.main.build_parser()
count = 0
for room in ("core", "fires", "scan", "cli", "detect", "capture", "report"):
    try:
        package = importlib.import_module(f"firetower.{room}")
    except ModuleNotFoundError as e:
        if e.name != f"firetower.{room}":
            raise
        continue
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
        count += 1
print(count)
"""
    assert int(run_python(code)) > 10


def test_help_answers_quickly():
    command = [sys.executable, "-m", "firetower.cli.main", "--help"]
    times: list[float] = []
    # the best of five; a busy machine gets as many again before it is called slow
    while len(times) < 5 or (min(times) >= HELP_BUDGET_S and len(times) < 10):
        start = time.perf_counter()
        subprocess.run(command, capture_output=True, check=True)
        times.append(time.perf_counter() - start)
    assert min(times) < HELP_BUDGET_S, f"best of {len(times)}: {min(times):.3f} s"
