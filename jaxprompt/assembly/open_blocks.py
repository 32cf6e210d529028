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
_INIT = "an export to start from; empty = draws, or what prompt.start says"
_NOTE = re.compile(r"    (\w+): \w+ = .*?  # (.*)")


def names(block: str) -> list[str]:
    """Lists the methods or heads by their file names."""
    return sorted(path.stem for path in (PACKAGE / OPEN[block][0]).glob("[!_]*.py"))


def own_fields(block: str, name: str) -> dict[str, Any]:
    """Reads the fields of a method or head, with their defaults."""
    tree = ast.parse(_source(block, name))
    kinds = (node for node in tree.body if isinstance(node, ast.ClassDef))
    body = next(node.body for node in kinds if node.name == OPEN[block][1])
    own = [node for node in body if isinstance(node, ast.AnnAssign) and node.value is not None]
    own = [node for node in own if ast.unparse(node.annotation) in _TYPES]
    return {node.target.id: ast.literal_eval(node.value) for node in own}


def own_notes(block: str, name: str) -> dict[str, str]:
    """Reads the comments behind these fields."""
    found = map(_NOTE.match, _source(block, name).splitlines())
    notes = dict(match.groups() for match in found if match)
    return notes | ({"init": _INIT} if block == "prompt" else {})


def make_block(block: str, name: str, **values: Any) -> ConfigDict:
    """Makes the block of a method or head, with other values than the defaults of some fields.

    A method that learns anything may start from an export, `init`.
    """
    own = own_fields(block, name)
    init = {"init": ""} if own and block == "prompt" else {}
    return ConfigDict({"name": name} | init | own | values)


def _source(block: str, name: str) -> str:
    return (PACKAGE / OPEN[block][0] / f"{name}.py").read_text("utf-8")
