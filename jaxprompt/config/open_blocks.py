"""The blocks whose fields are those of what they name: a method, or a head.

Their fields, defaults and notes are read from the source of its class. JAX stays unloaded.
"""

import ast
import re
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

PACKAGE = Path(__file__).resolve().parents[1]
OPEN = {"prompt": ("prompts", "Prompt"), "head": ("heads", "Head")}  # folder, class
_TYPES = ("int", "float", "str", "bool", "tuple")  # of fields that a config has
_INIT = "an export to start from, of several (a,b) the mean; empty = the method's default start"
_NOTE = re.compile(r"    (\w+): \w+ = .*?  # (.*)")


def names(block: str) -> list[str]:
    """Lists the methods or heads by their file names."""
    return sorted(path.stem for path in (PACKAGE / OPEN[block][0]).glob("[!_]*.py"))


def own_fields(block: str, name: str) -> dict[str, Any]:
    """Reads the fields of a method or head, with their defaults; those that it inherits first."""
    read = {}
    for parent in _lineage(block, name):
        stated = (node for node in _class(block, parent).body if isinstance(node, ast.AnnAssign))
        own = [node for node in stated if node.value and ast.unparse(node.annotation) in _TYPES]
        read |= {node.target.id: ast.literal_eval(node.value) for node in own}
    return read


def own_notes(block: str, name: str) -> dict[str, str]:
    """Reads the comments behind these fields."""
    lines = (line for kind in _lineage(block, name) for line in _source(block, kind).splitlines())
    notes = dict(match.groups() for match in map(_NOTE.match, lines) if match)
    return notes | ({"init": _INIT} if block == "prompt" else {})


def make_block(block: str, name: str, **values: Any) -> ConfigDict:
    """Makes the block of a method or head, with other values than the defaults of some fields.

    A method that learns anything may start from an export, `init`.
    """
    own = own_fields(block, name)
    init = {"init": ""} if own and block == "prompt" else {}
    return ConfigDict({"name": name} | init | own | values)


def _lineage(block: str, name: str) -> list[str]:
    """Lists the files whose classes a method or head is made of: `linear.Head` before its own."""
    bases = [ast.unparse(base).split(".") for base in _class(block, name).bases]
    return [*(file for file, *kind in bases if kind == [OPEN[block][1]]), name]


def _class(block: str, name: str) -> ast.ClassDef:
    body = ast.parse(_source(block, name)).body
    classes = (node for node in body if isinstance(node, ast.ClassDef))
    return next(node for node in classes if node.name == OPEN[block][1])


def _source(block: str, name: str) -> str:
    return (PACKAGE / OPEN[block][0] / f"{name}.py").read_text("utf-8")
