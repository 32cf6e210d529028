"""Puts the block of a named method or head in place, and names what an unknown field may mean."""

from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from jaxprompt.config import open_blocks
from jaxprompt.config.files import load_module, shipped_root
from jaxprompt.config.open_blocks import declared, names
from jaxprompt.errors import InputError, nearest

# The part of a config that fills a block, and what the block names.
_OPEN = {"prompt": ("methods", "method"), "head": ("heads", "head")}


def replace_blocks(config: ConfigDict, overrides: Sequence[tuple[str, str]]) -> None:
    """Makes room for overrides that name another method or head, wherever they stand among others.

    The block becomes the method's or head's own, with the defaults of configs/parts. Raises
    InputError for an unknown name.
    """
    given = dict(overrides)  # of several values the last one counts
    for block in _OPEN:
        name, held = given.get(f"{block}.name"), config.get(block)
        if name is not None and isinstance(held, ConfigDict) and name != held.get("name"):
            if name not in names(block):
                called, known = _OPEN[block][1], nearest(name, names(block))
                raise InputError(f"unknown {called} {block}.name={name!r}; {known}")
            own = make_block(block, name, config)
            with config.unlocked():
                config[block] = own


def make_block(block: str, name: str, config: ConfigDict) -> ConfigDict:
    """Makes the block of a method or head: as its part fills it, else with its class's defaults."""
    part = part_of(block)
    if hasattr(part, name):
        # On a copy, of which only the block is taken: a part may set other fields too.
        scratch = config.copy_and_resolve_references()
        with scratch.unlocked():
            getattr(part, name)(scratch)
        return scratch[block]
    return open_blocks.make_block(block, name)


def part_of(block: str) -> Any:
    """Imports the part of the configs that fills a block: its functions, and a table of them."""
    return load_module(str(shipped_root() / f"configs/parts/{_OPEN[block][0]}.py"))


def unknown_field(config: ConfigDict, field: str, known: Sequence[str]) -> InputError:
    """Says what is wrong with a field that a config lacks, and which may have been meant."""
    from jaxprompt.config.synonyms import SYNONYMS

    block, _, last = field.rpartition(".")
    if block in _OPEN:
        owners = [name for name in names(block) if last in declared(block, name)]
        if owners:
            name, held = config[block].get("name"), config[block]
            own = ", ".join(sorted(held)) if len(held) > 1 else "no field but name"
            return InputError(
                f"config field {field!r} is of {block}.name={' or '.join(owners)}; "
                f"{block}.name={name} has {own}"
            )
    meant = SYNONYMS.get(last.lower().replace("-", "_"))
    alike = [meant] if meant in known else [x for x in known if x.rpartition(".")[2] == last]
    told = f"nearest: {', '.join(alike)}" if alike else nearest(field, known)
    return InputError(f"unknown config field {field!r}; {told}")
