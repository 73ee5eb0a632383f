"""Sizes, docstrings and the constructs that the house does not allow."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from contracts import Sources, parse

MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 80
LONG_FUNCTION_LINES = 45
MAX_LONG_FUNCTION_FRAC = 0.03
"""Functions are rarely over 45 lines: at most this share of them."""

_PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}


def long_files(sources: Sources) -> list[str]:
    """Files over 800 lines."""
    sizes = {path: text.count("\n") for path, text in sources.items()}
    return [f"{p}: {n} lines, at most {MAX_FILE_LINES}" for p, n in sizes.items() if n > MAX_FILE_LINES]


def function_sizes(sources: Sources) -> dict[str, int]:
    """Lines of every function but kernels, docstring not counted, by ``path:line name``."""
    return {
        f"{path}:{node.lineno} {node.name}": _num_lines(node)
        for path, tree in parse(sources)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.endswith("_kernel")
    }


def _num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    total = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node) is None:
        return total
    doc = node.body[0]
    return total - ((doc.end_lineno or doc.lineno) - doc.lineno + 1)


def long_functions(sources: Sources) -> list[str]:
    """Functions over 80 lines, and all over 45 once they are no longer rare."""
    sizes = function_sizes(sources)
    breaches = [
        f"{f}: {n} lines, at most {MAX_FUNCTION_LINES}" for f, n in sizes.items() if n > MAX_FUNCTION_LINES
    ]
    long = [f"{f}: {n} lines" for f, n in sizes.items() if n > LONG_FUNCTION_LINES]
    if len(long) > max(1, MAX_LONG_FUNCTION_FRAC * len(sizes)):
        breaches.append(
            f"{len(long)} of {len(sizes)} functions are over {LONG_FUNCTION_LINES} lines: {'; '.join(long)}"
        )
    return breaches


def missing_docstrings(sources: Sources) -> list[str]:
    """Modules, and exported functions, classes and methods, that do not say what they do.

    Methods count when their class is exported, unless they override a special name or a base class has them.
    """
    breaches = []
    for path, tree in parse(sources):
        if not ast.get_docstring(tree):
            breaches.append(f"{path}: the module has no docstring")
        breaches += [
            f"{path}:{node.lineno}: {name} has no docstring"
            for name, node in _exported(tree)
            if not ast.get_docstring(node)
        ]
    return breaches


_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _exported(tree: ast.Module) -> Iterator[tuple[str, _Definition]]:
    for node in tree.body:
        if not isinstance(node, _Definition) or node.name.startswith("_"):
            continue
        yield node.name, node
        # a class with bases of another kind overrides what the base documents
        if isinstance(node, ast.ClassDef) and not node.bases:
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and not inner.name.startswith(
                    "_"
                ):
                    yield f"{node.name}.{inner.name}", inner


def forbidden_constructs(sources: Sources) -> list[str]:
    """Pickle in any form, and errors swallowed."""
    return [f"{path}:{line}: {what}" for path, tree in parse(sources) for line, what in _forbidden(tree)]


def _forbidden(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in names:
                if name.split(".")[0] in _PICKLES:
                    yield node.lineno, f"imports {name}: runs what a file says"
        elif isinstance(node, ast.Call):
            yield from _forbidden_call(node)
        elif isinstance(node, ast.ExceptHandler):
            yield from _forbidden_handler(node)


def _forbidden_call(node: ast.Call) -> Iterator[tuple[int, str]]:
    name = ast.unparse(node.func)
    keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
    if name == "torch.load" and keywords.get("weights_only") != "True":
        yield node.lineno, "torch.load without weights_only=True: runs what a file says"
    if keywords.get("allow_pickle", "False") != "False":
        yield node.lineno, f"{name} with allow_pickle: runs what a file says"


def _forbidden_handler(node: ast.ExceptHandler) -> Iterator[tuple[int, str]]:
    if node.type is None:
        yield node.lineno, "bare except: name what can go wrong"
        return
    caught = {ast.unparse(t) for t in (node.type.elts if isinstance(node.type, ast.Tuple) else [node.type])}
    swallows = all(isinstance(s, ast.Pass | ast.Continue) or _is_ellipsis(s) for s in node.body)
    if swallows and caught & {"Exception", "BaseException"}:
        yield node.lineno, "swallows every error: name what can go wrong, and say so when it does"


def _is_ellipsis(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and ast.unparse(statement) == "..."
