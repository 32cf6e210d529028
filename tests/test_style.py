"""Sizes, docstrings, and names that must not stand in what ships."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted((ROOT / "jaxprompt").rglob("*.py"))
SHIPPED = sorted([*MODULES, *(ROOT / "configs").rglob("*.py")])
LIMITS = {"prompts": 120, "cli": 250}
LIMIT = 400
label = lambda path: str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SHIPPED, ids=label)
def test_modules_stay_small(path):
    limit = LIMITS.get(path.parent.name, LIMIT)
    lines = len(path.read_text().splitlines())
    assert lines <= limit, f"{lines} lines, the limit is {limit}: divide it by what it does"


def public(body, owner=""):
    """Yields the public classes and functions of a body, methods included."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, f"{node.name}.")
            if node.name != "setup":  # flax's hook
                yield owner + node.name, node


@pytest.mark.parametrize("path", MODULES, ids=label)
def test_what_is_public_is_documented(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the module has no docstring"
    bare = [name for name, node in public(tree.body) if not ast.get_docstring(node)]
    assert not bare, f"no docstring: {bare}"


@pytest.mark.parametrize("path", SHIPPED, ids=label)
def test_nothing_points_outside_the_repository(path):
    found = re.findall(r"\.\./shared|/work/|/root/|/home/\w+", path.read_text())
    assert not found


@pytest.mark.parametrize("path", SHIPPED, ids=label)
def test_nothing_is_left_for_later(path):
    assert not re.findall(r"\b(TODO|FIXME|XXX|NotImplementedError)\b", path.read_text())
