"""Docstrings, and names that must not stand in what ships."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from long import LONG
from rules import ROOT, label, report

MODULES = sorted((ROOT / "jaxprompt").rglob("*.py"))
SHIPPED = sorted([*MODULES, *(ROOT / "configs").rglob("*.py")])


def found(pattern: str, paths: list[Path]) -> list[str]:
    """Lists each match of a pattern in the files, with its place."""
    return [
        f"{label(path, number)}: {match.group()}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in re.finditer(pattern, line)
    ]


def test_there_are_modules_and_configs():
    assert len(MODULES) > 100 and len(SHIPPED) > len(MODULES)


def public(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Yields the public classes and functions of a body, methods included."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, f"{node.name}.")
            hints = [ast.unparse(own) for own in node.decorator_list]
            if node.name != "setup" and "overload" not in hints:  # flax's hook, a type
                yield owner + node.name, node


def undocumented(path: Path) -> list[str]:
    """Lists what is public in a module, or the module itself, and has no docstring."""
    tree = ast.parse(path.read_text())
    lines = [] if ast.get_docstring(tree) else [f"{label(path)}: the module has no docstring"]
    bare = [(name, node) for name, node in public(tree.body) if not ast.get_docstring(node)]
    return lines + [f"{label(path, node.lineno)}: {name} has no docstring" for name, node in bare]


def test_what_is_public_is_documented():
    report([line for path in MODULES for line in undocumented(path)])


MAIN_LOOPS = {"jaxprompt/training/loop.py:run"}


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Counts the lines of a function without its docstring."""
    lines, first = node.end_lineno - node.lineno + 1, node.body[0]
    return lines - (first.end_lineno - first.lineno + 1) * bool(
        ast.get_docstring(node, clean=False)
    )


def test_functions_fit_on_a_screen():
    report([
        f"{label(path, node.lineno)}: {node.name} has {code_lines(node)} lines; at most {limit}"
        for path in [*SHIPPED, *sorted((ROOT / "launch").rglob("*.py"))]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for limit in [120 if f"{path.relative_to(ROOT)}:{node.name}" in MAIN_LOOPS else 60]
        if code_lines(node) > limit
    ])  # fmt: skip


def test_nothing_points_outside_the_repository():
    report(found(r"\.\./shared|/work/|/root/|/home/\w+", SHIPPED))


def test_nothing_is_left_for_later():
    report(found(r"\b(TODO|FIXME|XXX|NotImplementedError)\b", SHIPPED))


def test_what_takes_long_is_there():
    """A name in tests/long.txt that no test has any more would leave nothing out."""
    assert sorted(LONG) == (ROOT / "tests/long.txt").read_text().splitlines()
    named = [name.partition("[")[0].split("::") for name in sorted(LONG)]
    sources = {file: (ROOT / "tests" / file).read_text() for file in {file for file, _ in named}}
    report([
        f"tests/long.txt: {file} has no {name}"
        for file, name in named
        if f"def {name}(" not in sources[file]
    ])  # fmt: skip
