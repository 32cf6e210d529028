"""The blocks that are selected by name: a method, a head, a protocol, a schedule, an objective.

Methods and heads are classes in files of this package or of others, see registry.py. They are
imported, and JAX with them, only when their fields are needed. The options of other blocks are
listed in config/run.py.
"""

import dataclasses

from ml_collections import ConfigDict

from jaxprompt.config import kinds
from jaxprompt.config.block import Block, Choice
from jaxprompt.config.run import RunConfig
from jaxprompt.registry import HEADS, METHODS

OPEN = {"prompt": METHODS, "head": HEADS}
_INIT = kinds.Field(
    str,
    "",
    "an export to initialise from, or several (a,b) for their mean; empty = the method's default "
    "initialisation",
)


def choices(block: type[Block], prefix: str = "") -> dict[str, Choice]:
    """Returns the choices of a block and of its nested blocks, except open ones, by dotted name."""
    choices_by_name: dict[str, Choice] = {}
    for name, declared in block.declared().items():
        if isinstance(declared, Choice):
            choices_by_name[prefix + name] = declared
        elif isinstance(declared, type):
            choices_by_name |= choices(declared, f"{prefix}{name}.")
    return choices_by_name


CHOICES = choices(RunConfig)
NAMED = (*OPEN, *CHOICES)


def block_names(block: str) -> list[str]:
    """Lists the names that a block may have: the methods, the heads, or its options."""
    if block in CHOICES:
        return list(CHOICES[block].options)
    return OPEN[block].names()


def declared_fields(block: str, name: str) -> dict[str, kinds.Field]:
    """Returns the fields of a block with a given name, as its class declares them.

    A method with trainable parameters also has `init`, an export to initialise from.
    """
    if block in CHOICES:
        option = CHOICES[block].options[name]
        return {x: kind for x, kind in option.declared().items() if isinstance(kind, kinds.Field)}
    fields = {
        part.name: part.metadata[kinds.DECLARED]
        for part in dataclasses.fields(OPEN[block].load(name))
        if kinds.DECLARED in part.metadata
    }
    return ({"init": _INIT} if fields and block == "prompt" else {}) | fields


def make_block(block: str, name: str, **values: kinds.Value) -> ConfigDict:
    """Makes a block by name, with some fields set to other values than their defaults.

    Args:
      block: "prompt", "head", "data.protocol", "optim.schedule" or "objective".
      name: one of `block_names(block)`.
      **values: by field.
    """
    defaults = {
        field: declaration.default for field, declaration in declared_fields(block, name).items()
    }
    return ConfigDict({"name": name} | defaults | values)
