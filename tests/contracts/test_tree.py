"""The rules of the house, on the tree as it is; test_checkers_can_fail.py shows what each rule refuses."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
from contracts import imports, names, read_sources, style

import firetower
from firetower.core.config import ENVIRONMENT

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "firetower"
ROOMS = sorted(p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__")


@cache
def sources() -> dict[str, str]:
    return read_sources(ROOT / "src")


def assert_none(breaches: list[str]) -> None:
    """Fail with every breach in full, one a line."""
    assert not breaches, "\n" + "\n".join(breaches)


def page(name: str) -> str:
    return (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "check",
    [
        imports.upward_imports,
        imports.torch_in_torch_free_rooms,
        imports.slow_imports_at_start,
        style.long_files,
        style.long_functions,
        style.missing_docstrings,
        style.forbidden_constructs,
    ],
    ids=lambda check: check.__name__,
)
def test_source(check):
    assert_none(check(sources()))


def test_the_checks_saw_the_whole_package():
    assert {"firetower/__init__.py", "firetower/core/bits.py", "firetower/attach/watch.py"} <= set(sources())


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_teaches_how_to_add_one(room):
    readme = PACKAGE / room / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else None
    assert_none(names.readme_breaches(room, text))


def test_the_order_of_rooms_is_the_documented_one():
    text = (ROOT / "docs" / "design" / "rooms.md").read_text(encoding="utf-8")
    [line] = [x for x in text.splitlines() if x.startswith("`cli` ->")]
    documented = tuple(tuple(r.strip(" `") for r in level.split("|")) for level in line.split("->"))
    assert documented == imports.ORDER


def test_variables_in_code_table_and_page_agree():
    read = names.variables_read(sources())
    assert_none(names.variable_breaches(read, ENVIRONMENT, page("environment.md")))


def test_the_public_api_is_the_documented_one():
    assert_none(names.api_breaches(firetower.__all__, page("api.md")))


@pytest.mark.parametrize("name", firetower.__all__)
def test_every_exported_name_is_there_and_explains_itself(name):
    exported = getattr(firetower, name)
    assert exported.__doc__
    assert name in dir(firetower)


def tracked_texts() -> dict[str, str]:
    """Every text file that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    texts = {}
    for name in listing.splitlines():
        path = ROOT / name
        if not path.is_file():
            continue
        try:
            texts[name] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a binary golden
    return texts


def test_no_machine_path_is_tracked():
    texts = tracked_texts()
    assert "src/firetower/core/bits.py" in texts
    assert_none(names.machine_paths(texts))


def test_the_documents_link_to_files_that_exist():
    broken = []
    for source in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *PACKAGE.rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", source.read_text(encoding="utf-8")):
            path = source.parent / target
            # git keeps no empty folder: a link to one breaks in a clone
            if "://" not in target and not (path.is_file() or (path.is_dir() and any(path.iterdir()))):
                broken.append(f"{source.relative_to(ROOT)}: {target}")
    assert_none(broken)


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = [p.relative_to(ROOT / "docs").as_posix() for p in sorted((ROOT / "docs").rglob("*.md"))]
    assert_none([p for p in pages if p != "README.md" and f"]({p})" not in index])


def test_every_signal_stage_has_a_drill():
    from firetower.attach.discover import STAGES
    from firetower.drills import all_drills

    assert_none(names.stages_without_drill(STAGES, [d.stages for d in all_drills()]))


def test_every_op_has_its_reference_cases_paths_page_and_tests():
    files = {
        p.name: {f.name for f in p.iterdir()}
        for p in (PACKAGE / "ops").iterdir()
        if p.is_dir() and p.name != "__pycache__"
    }
    assert files
    pages = {p.stem for p in (ROOT / "docs" / "reference" / "ops").glob("*.md")}
    tested = {p.name for p in (ROOT / "tests" / "ops").iterdir() if any(p.glob("test_*.py"))}
    assert_none(names.incomplete_ops(files, pages, tested))
