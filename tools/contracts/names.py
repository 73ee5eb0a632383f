"""Names that code and documents must agree on: variables, the public API, rooms, stages; and stray paths."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Mapping

from contracts import Sources, parse

_VARIABLE = re.compile(r"FIRETOWER_[A-Z][A-Z0-9_]*")
_API_HEADING = re.compile(r"^### `([A-Za-z_][A-Za-z0-9_]*)`", re.MULTILINE)

_FOLDERS = "work", "root", "home"
_MACHINE_PATH = re.compile(r"(?<![\w.*~-])/(?:" + "|".join(_FOLDERS) + r")/\w")


def variables_read(sources: Sources) -> set[str]:
    """Every FIRETOWER_* string in the code, but the keys of the table ``ENVIRONMENT`` itself."""
    found = set()
    for _, tree in parse(sources):
        keys = {id(k) for table in _environment_tables(tree) for k in table.keys}
        for node in ast.walk(tree):
            is_string = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_string and id(node) not in keys and _VARIABLE.fullmatch(node.value):
                found.add(node.value)
    return found


def _environment_tables(tree: ast.Module) -> Iterable[ast.Dict]:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(value, ast.Dict) and any(
            isinstance(t, ast.Name) and t.id == "ENVIRONMENT" for t in targets
        ):
            yield value


def variable_breaches(read: Collection[str], table: Collection[str], page: str) -> list[str]:
    """Where code, the table of variables and the page about them disagree."""
    documented = set(re.findall(r"^\| `(FIRETOWER_[A-Z0-9_]+)` \|", page, re.MULTILINE))
    return [
        *(f"{v}: read by the code, not in ENVIRONMENT" for v in sorted(set(read) - set(table))),
        *(f"{v}: in ENVIRONMENT, read nowhere" for v in sorted(set(table) - set(read))),
        *(f"{v}: in ENVIRONMENT, not documented" for v in sorted(set(table) - documented)),
        *(f"{v}: documented, not in ENVIRONMENT" for v in sorted(documented - set(table))),
    ]


def api_breaches(exported: Collection[str], page: str) -> list[str]:
    """Where ``__all__`` and the headings of the API page (``### `attach```) disagree."""
    documented = set(_API_HEADING.findall(page))
    return [
        *(f"{n}: exported, has no heading ### `{n}`" for n in sorted(set(exported) - documented)),
        *(f"{n}: documented, not exported" for n in sorted(documented - set(exported))),
    ]


def machine_paths(texts: Mapping[str, str]) -> list[str]:
    """Paths of one machine that slipped into a file of the project."""
    return [
        f"{path}:{number}: {line.strip()[:100]}"
        for path, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if _MACHINE_PATH.search(line)
    ]


def stages_without_drill(stages: Iterable[str], drilled: Iterable[Collection[str]]) -> list[str]:
    """Signal stages at which no drill lets a fault originate."""
    covered = {stage for stages_of_drill in drilled for stage in stages_of_drill}
    return [
        f"{stage}: declared by landed code, no drill originates there"
        for stage in stages
        if stage not in covered
    ]


def readme_breaches(room: str, text: str | None) -> list[str]:
    """What is wrong with a room's README: it must exist and teach how to add one."""
    if text is None:
        return [f"{room}: has no README.md"]
    if not re.search(r"^#+ Adding one\s*$", text, re.MULTILINE):
        return [f"{room}: README.md has no heading 'Adding one'"]
    return []


OP_FILES = ("__init__.py", "reference.py", "cases.py", "torch_path.py", "kernels.py")
"""What every op's folder holds: the oracle, its inputs and tolerances, the CPU path, the kernels."""


def incomplete_ops(files: Mapping[str, Collection[str]], pages: Collection[str], tested: Collection[str]) -> list[str]:
    """What an op lacks.

    Args:
        files: the names of the files in each op's folder.
        pages: names of the pages of `docs/reference/ops`, without their ending.
        tested: names of the folders of `tests/ops`.
    """
    found = [f"{op}: has no {name}" for op, names in files.items() for name in OP_FILES if name not in names]
    found += [f"{op}: no page docs/reference/ops/{op}.md" for op in files if op not in pages]
    return found + [f"{op}: no folder tests/ops/{op}" for op in files if op not in tested]
