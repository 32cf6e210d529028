"""The blocks whose fields are those of the class that they name: a method, or a head.

A class is one file's in an open package. It is imported, and JAX with it, when its fields are
asked for.
"""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxprompt.config import kinds

PACKAGE = Path(__file__).resolve().parents[1]
OPEN = {"prompt": ("prompts", "Prompt"), "head": ("heads", "Head")}  # package, class
_INIT = kinds.Field(
    str,
    "",
    "an export to start from, of several (a,b) the mean; empty = the method's default start",
)


def names(block: str) -> list[str]:
    """Lists the methods or heads by their file names."""
    return sorted(path.stem for path in (PACKAGE / OPEN[block][0]).glob("[!_]*.py"))


def declared(block: str, name: str) -> dict[str, kinds.Field]:
    """Returns the fields of a method or head as its class declares them.

    A method that learns anything may start from an export, `init`.
    """
    package, kind = OPEN[block]
    own = getattr(importlib.import_module(f"jaxprompt.{package}.{name}"), kind)
    fields = {
        part.name: part.metadata[kinds.DECLARED]
        for part in dataclasses.fields(own)
        if kinds.DECLARED in part.metadata
    }
    return ({"init": _INIT} if fields and block == "prompt" else {}) | fields


def make_block(block: str, name: str, **values: Any) -> ConfigDict:
    """Makes the block of a method or head, with other values than the defaults of some fields."""
    defaults = {field: own.default for field, own in declared(block, name).items()}
    return ConfigDict({"name": name} | defaults | values)
