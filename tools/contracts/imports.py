"""Imports point down only, and rooms that promise to be torch-free are."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from contracts import Sources, parse, room_of

ORDER: tuple[tuple[str, ...], ...] = (
    ("cli",),
    ("serve", "drills"),
    ("lab", "report"),
    ("engine", "attach"),
    ("models", "experts"),
    ("ops",),
    ("sensors",),
    ("detect", "fires", "capture", "scan"),
    ("core",),
)
"""Rooms from top to bottom; rooms on one line do not import each other."""

TORCH_FREE = {"core", "fires", "detect", "capture", "report", "scan", "cli"}
"""Rooms that work without torch."""

LAZY_TORCH = ("firetower/scan/pytorch.py",)
"""Files of torch-free rooms that may import torch inside a function."""

HEAVY = {"torch", "transformers"}
SLOW_AT_START = {"torch", "transformers", "numpy", "gguf", "rich", "sqlite3", "llama_cpp", "safetensors"}
"""What the command line may import only inside functions: ``firetower --help`` must stay quick."""

_FACADE = "the whole package"
"""``import firetower``: reaches up to the room `attach`, so that only rooms above it may write that."""

_LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
_LEVEL[_FACADE] = _LEVEL["attach"]


def upward_imports(sources: Sources) -> list[str]:
    """Imports from a room above or beside, anywhere in a file, type-checking blocks included."""
    breaches = []
    for path, tree in parse(sources):
        room = room_of(path)
        if room is None:
            continue
        if room not in _LEVEL:
            breaches.append(
                f"{path}: room {room} is not in the order of rooms; add it to docs/design/rooms.md"
            )
            continue
        for line, target in _imported_rooms(path, tree, set(_LEVEL)):
            if target != room and _LEVEL.get(target, -1) <= _LEVEL[room]:
                breaches.append(f"{path}:{line}: {room} imports {target}, which is not below it")
    return breaches


def torch_in_torch_free_rooms(sources: Sources) -> list[str]:
    """Imports of torch or transformers where a user without them must get through."""
    breaches = []
    for path, tree in parse(sources):
        room = room_of(path)
        if room not in TORCH_FREE:
            continue
        lazily_allowed = room == "cli" or path in LAZY_TORCH
        for line, package, at_start in _packages(tree):
            if package in HEAVY and (at_start or not lazily_allowed):
                breaches.append(f"{path}:{line}: {room} is torch-free and imports {package}")
    return breaches


def slow_imports_at_start(sources: Sources) -> list[str]:
    """Imports that make every start of the command line slow."""
    return [
        f"{path}:{line}: imports {package} at module level; move it into run()"
        for path, tree in parse(sources)
        if room_of(path) == "cli" or room_of(path) is None
        for line, package, at_start in _packages(tree)
        if at_start and package in SLOW_AT_START
    ]


def _packages(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """(line, top package, whether it runs at module level) of every import but type-checking ones."""
    for node, at_start in _imports(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")[0], at_start
        elif node.level == 0 and node.module:
            yield node.lineno, node.module.split(".")[0], at_start


def _imports(tree: ast.Module) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    pending: list[tuple[ast.AST, bool]] = [(node, True) for node in reversed(tree.body)]
    while pending:
        node, at_start = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, at_start
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            children = list(node.orelse)
        pending += [(child, at_start and not is_function) for child in reversed(children)]


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _imported_rooms(path: str, tree: ast.Module, rooms: set[str]) -> Iterator[tuple[int, str]]:
    """(line, room) of every import of our own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "firetower":
                    yield node.lineno, parts[1] if len(parts) > 1 else _FACADE
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(path, node)
            if module == "firetower":
                for alias in node.names:
                    yield node.lineno, alias.name if alias.name in rooms else _FACADE
            elif module.startswith("firetower."):
                yield node.lineno, module.split(".")[1]


def _absolute(path: str, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    package = path.removesuffix("/__init__.py").removesuffix(".py").split("/")
    depth = node.level - path.endswith("/__init__.py")
    base = package[: len(package) - depth] if depth else package
    return ".".join([*base, *([node.module] if node.module else [])])
