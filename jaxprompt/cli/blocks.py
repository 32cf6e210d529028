"""Puts the block of a named method or head in place, and names what an unknown field may mean."""

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxprompt.cli.configs import PACKAGE, load_module, shipped_root
from jaxprompt.errors import InputError, nearest

# Blocks whose fields are those of what they name: its folder, its class, its part of a config.
_OPEN = {"prompt": ("prompts", "Prompt", "methods"), "head": ("heads", "Head", "heads")}
_CALLED = {"prompt": "method", "head": "head"}


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
                raise InputError(
                    f"unknown {_CALLED[block]} {block}.name={name!r}; {nearest(name, names(block))}"
                )
            own = make_block(block, name, config)
            with config.unlocked():
                config[block] = own


def names(block: str) -> list[str]:
    """Lists the methods or heads by their file names, without importing them."""
    return sorted(path.stem for path in (PACKAGE / _OPEN[block][0]).glob("[!_]*.py"))


def source_of(block: str, name: str) -> Path:
    """Tells the file of a method or head."""
    return PACKAGE / _OPEN[block][0] / f"{name}.py"


def own_fields(block: str, name: str) -> dict[str, Any]:
    """Reads the fields of a method or head with their defaults from its source.

    JAX stays unloaded.
    """
    tree = ast.parse(source_of(block, name).read_text("utf-8"))
    kinds = (node for node in tree.body if isinstance(node, ast.ClassDef))
    body = next(node.body for node in kinds if node.name == _OPEN[block][1])
    own = [node for node in body if isinstance(node, ast.AnnAssign) and node.value is not None]
    own = [node for node in own if "ClassVar" not in ast.unparse(node.annotation)]
    return {node.target.id: ast.literal_eval(node.value) for node in own}


def make_block(block: str, name: str, config: ConfigDict) -> ConfigDict:
    """Makes the block of a method or head: as its part fills it, else with its class's defaults."""
    part = load_module(str(shipped_root() / f"configs/parts/{_OPEN[block][2]}.py"))
    if hasattr(part, name):
        scratch = config.copy_and_resolve_references()
        with scratch.unlocked():
            getattr(part, name)(scratch)
        return scratch[block]
    own = own_fields(block, name)
    return ConfigDict({"name": name} | ({"init": ""} if own and block == "prompt" else {}) | own)


def unknown_field(config: ConfigDict, field: str, known: Sequence[str]) -> InputError:
    """Says what is wrong with a field that a config lacks, and which may have been meant."""
    from jaxprompt.assembly.schema import SYNONYMS

    block, _, last = field.rpartition(".")
    if block in _OPEN:
        owners = [name for name in names(block) if last in own_fields(block, name)]
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
