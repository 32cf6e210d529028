"""Replaces blocks that overrides name, and suggests fields for unknown ones."""

import difflib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict

from jaxprompt.config import open_blocks
from jaxprompt.config.block import other_option
from jaxprompt.config.files import load_module, shipped_root
from jaxprompt.config.open_blocks import CHOICES, NAMED, OPEN, block_names, declared_fields
from jaxprompt.config.synonyms import SYNONYMS
from jaxprompt.errors import InputError, nearest

# Block -> its module in configs/parts, and what its name selects.
_PARTS = {"prompt": ("methods", "method"), "head": ("heads", "head")}
_TYPO = 0.8  # similarity of a name and its misspelling


def replace_blocks(config: ConfigDict, overrides: Sequence[tuple[str, str]]) -> None:
    """Replaces the blocks for which overrides name another method, head or option.

    The new block has the fields of that option at their defaults; for a method or head the
    defaults are those of configs/parts. The order of the overrides does not matter.

    Raises:
      InputError: for an unknown name.
    """
    values = dict(overrides)  # the last value of a field counts
    for block in NAMED:
        *parents, last = block.split(".")
        owner = config
        for parent in parents:
            owner = owner.get(parent) if isinstance(owner, ConfigDict) else None
        name = values.get(f"{block}.name")
        current = owner.get(last) if isinstance(owner, ConfigDict) else None
        if name is None or not isinstance(current, ConfigDict) or name == current.get("name"):
            continue
        if name not in block_names(block):
            kind = _PARTS.get(block, ("", "option"))[1]
            hint = nearest(name, block_names(block))
            raise InputError(f"unknown {kind} {block}.name={name!r}; {hint}")
        replacement = make_preset_block(block, name, config)
        with config.unlocked():
            owner[last] = replacement


def make_preset_block(block: str, name: str, config: ConfigDict) -> ConfigDict:
    """Makes a block by name, from its preset in configs/parts or the defaults of its class."""
    if block in _PARTS and hasattr(part_of(block), name):
        # On a copy, since a preset may set other fields, too.
        scratch = config.copy_and_resolve_references()
        with scratch.unlocked():
            getattr(part_of(block), name)(scratch)
        return scratch[block]
    return open_blocks.make_block(block, name)


def part_of(block: str) -> ModuleType:
    """Imports the module of configs/parts with the presets of a block."""
    return load_module(str(shipped_root() / f"configs/parts/{_PARTS[block][0]}.py"))


def unknown_field(leaves: Mapping[str, Any], field: str) -> InputError:
    """Returns the error for a field that a config does not have, with the likely alternatives.

    `leaves` are the values of the config by dotted name.
    """
    block, _, last = field.rpartition(".")
    if block in NAMED:
        names = OPEN[block].loadable() if block in OPEN else block_names(block)
        options = {name: declared_fields(block, name) for name in names}
        if any(last in fields for fields in options.values()):
            return other_option(field, leaves[f"{block}.name"], options)
    fields = dict.fromkeys([*leaves, *option_fields()])
    synonym = SYNONYMS.get(field, SYNONYMS.get(last.lower().replace("-", "_")))
    same_name = [name for name in fields if name.rpartition(".")[2] == last]
    block_fields = [name.rpartition(".")[2] for name in fields if name.rpartition(".")[0] == block]
    typos = difflib.get_close_matches(last, block_fields, cutoff=_TYPO)
    likely = [field.removesuffix(last) + name for name in typos]
    candidates = [synonym] if synonym in fields else [*likely, *same_name]
    hint = f"nearest: {', '.join(candidates)}" if candidates else nearest(field, fields)
    return InputError(f"unknown config field {field!r}; {hint}")


def option_fields() -> list[str]:
    """Lists the fields of all options of all choices by dotted name."""
    fields = (
        f"{block}.{field}"
        for block in CHOICES
        for name in block_names(block)
        for field in declared_fields(block, name)
    )
    return list(dict.fromkeys(fields))
