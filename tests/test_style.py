"""Sizes of functions, attributes of objects, and words that must not ship."""

import ast
import re
from fnmatch import fnmatch
from pathlib import Path

from rules import ROOT, label, report

MODULES = sorted((ROOT / "jaxprompt").rglob("*.py"))
SHIPPED = sorted([*MODULES, *(ROOT / "configs").rglob("*.py")])


def matches(pattern: str, paths: list[Path]) -> list[str]:
    """Lists each match of a pattern in the files, with its place."""
    return [
        f"{label(path, number)}: {match.group()}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in re.finditer(pattern, line)
    ]


assert len(MODULES) > 100 and len(SHIPPED) > len(MODULES)


MOST_LINES = 60


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Counts the lines of a function without its docstring."""
    lines, first = node.end_lineno - node.lineno + 1, node.body[0]
    return lines - (first.end_lineno - first.lineno + 1) * bool(
        ast.get_docstring(node, clean=False)
    )


def test_functions_fit_on_a_screen():
    report([
        f"{label(path, node.lineno)}: {node.name} has {code_lines(node)} lines"
        for path in [*SHIPPED, *sorted((ROOT / "launch").rglob("*.py"))]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if code_lines(node) > MOST_LINES
    ])  # fmt: skip


def attributes_set_by(method: ast.FunctionDef) -> set[str]:
    """Lists the attributes of `self` that a method assigns."""
    return {
        node.attr
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name) and node.value.id == "self"
    }  # fmt: skip


def late_attributes(owner: ast.ClassDef) -> dict[str, set[str]]:
    """Lists, by method, the attributes that neither the class nor its __init__ has."""
    fields = {
        target.id
        for node in owner.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    methods = {node.name: node for node in owner.body if isinstance(node, ast.FunctionDef)}
    init = methods.get("__init__")
    called = (
        {node.attr for node in ast.walk(init) if isinstance(node, ast.Attribute)} if init else set()
    )
    makers = {"__init__", "setup", *called}  # flax's, and what __init__ calls
    fields |= {
        name for maker in makers & methods.keys() for name in attributes_set_by(methods[maker])
    }
    late = {name: attributes_set_by(method) - fields for name, method in methods.items()}
    return {name: attributes for name, attributes in late.items() if attributes}


def test_attributes_are_set_in_init():
    report([
        f"{label(path, owner.lineno)}: {owner.name}.{method} adds {', '.join(sorted(attributes))}"
        for path in MODULES
        for owner in ast.walk(ast.parse(path.read_text()))
        if isinstance(owner, ast.ClassDef)
        for method, attributes in late_attributes(owner).items()
    ])  # fmt: skip


def test_no_paths_outside_the_repository():
    report(matches(r"\.\./shared|/work/|/root/|/home/\w+", SHIPPED))


def test_no_todo():
    report(matches(r"\b(TODO|FIXME|XXX|NotImplementedError)\b", SHIPPED))


def test_every_folder_of_tests_is_collected(pytestconfig):
    """pytest's default list of folders to skip has `build`, `dist` and `venv`."""
    patterns = pytestconfig.getini("norecursedirs")
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    skipped = [
        x
        for x in folders
        if any(fnmatch(part, y) for part in x.relative_to(ROOT).parts for y in patterns)
    ]
    assert not skipped, f"pytest skips {skipped}; change norecursedirs in pyproject.toml"
