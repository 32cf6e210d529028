"""Puts the block of a named method in place, and names what an unknown field may have meant."""

import ast
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from jaxprompt.cli.configs import PACKAGE, load_module, shipped_root
from jaxprompt.errors import InputError, nearest

# What each kind of head reads of the block `head`, beside its name.
HEAD_FIELDS = {
    "linear": ("pooler", "dropout"),
    "verbalizer": ("scores", "pieces", "span"),
    "text": (),
}


def replace_blocks(config: ConfigDict, overrides: Sequence[tuple[str, str]]) -> None:
    """Makes room for overrides that name another method, wherever they stand among the others.

    The block `prompt` becomes the method's own, with the defaults of configs/parts/methods.py.
    Raises InputError for a field that the method, or the kind of head, does not have.
    """
    given = dict(overrides)  # of several values the last one counts
    name, block = given.get("prompt.name"), config.get("prompt")
    if name is not None and isinstance(block, ConfigDict) and name != block.get("name"):
        if name not in methods():
            raise InputError(f"unknown method prompt.name={name!r}; {nearest(name, methods())}")
        own = method_block(name, config)
        with config.unlocked():
            config.prompt = own
    head = config.get("head")
    if isinstance(head, ConfigDict):
        _check_head(given.get("head.name", head.get("name")), given)


def methods() -> list[str]:
    """Lists the methods by their file names, without importing them."""
    return sorted(path.stem for path in (PACKAGE / "prompts").glob("[!_]*.py"))


def method_fields(name: str) -> dict[str, Any]:
    """Reads the fields of a method with their defaults from its source: JAX stays unloaded."""
    tree = ast.parse((PACKAGE / "prompts" / f"{name}.py").read_text("utf-8"))
    kinds = (node for node in tree.body if isinstance(node, ast.ClassDef))
    body = next(node.body for node in kinds if node.name == "Prompt")
    own = [node for node in body if isinstance(node, ast.AnnAssign) and node.value is not None]
    own = [node for node in own if "ClassVar" not in ast.unparse(node.annotation)]
    return {node.target.id: ast.literal_eval(node.value) for node in own}


def method_block(name: str, config: ConfigDict) -> ConfigDict:
    """Makes the block of a method: as its part fills it, else with its class's defaults."""
    part = load_module(str(shipped_root() / "configs/parts/methods.py"))
    if hasattr(part, name):
        scratch = config.copy_and_resolve_references()
        with scratch.unlocked():
            getattr(part, name)(scratch)
        return scratch.prompt
    own = method_fields(name)
    return ConfigDict({"name": name} | ({"init": ""} | own if own else {}))


def unknown_field(config: ConfigDict, field: str, known: Sequence[str]) -> InputError:
    """Says what is wrong with a field that a config lacks, and which may have been meant."""
    from jaxprompt.assembly.schema import SYNONYMS

    block, _, last = field.rpartition(".")
    of_others = {other for name in methods() for other in method_fields(name)}
    if block == "prompt" and last in of_others:
        name = config.prompt.get("name")
        own = ", ".join(sorted(config.prompt)) if len(config.prompt) > 1 else "no field but name"
        return InputError(
            f"config field {field!r} is of another method; prompt.name={name} has {own}"
        )
    meant = SYNONYMS.get(last.lower().replace("-", "_"))
    alike = [meant] if meant in known else [x for x in known if x.rpartition(".")[2] == last]
    told = f"nearest: {', '.join(alike)}" if alike else nearest(field, known)
    return InputError(f"unknown config field {field!r}; {told}")


def _check_head(name: str, given: dict[str, str]) -> None:
    for field in given:
        block, _, last = field.partition(".")
        owners = [kind for kind, own in HEAD_FIELDS.items() if last in own]
        if block == "head" and owners and name in HEAD_FIELDS and name not in owners:
            own = ", ".join(("name", *HEAD_FIELDS[name]))
            raise InputError(
                f"config field {field!r} is of head.name={owners[0]}; head.name={name} has {own}"
            )
