"""The fields of methods and heads as parameters: of jp.prefix(16, layers="1-12") and its help."""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any, Literal

from jaxprompt.config.block import declared_leaves
from jaxprompt.config.blocks import part_of
from jaxprompt.config.kinds import Field
from jaxprompt.config.open_blocks import OPEN, block_names, declared_fields
from jaxprompt.config.run import RunConfig

PRESETS = {"prompt": "METHODS", "head": "HEADS"}  # block -> its table in configs/parts
_LEARNING_RATE = dict(declared_leaves(RunConfig))["optim.lr"]


def choice_names(block: str) -> list[str]:
    """Lists the methods or heads: those of configs/parts, and those without a preset there."""
    built_in = [name for name in block_names(block) if name not in ("constant", "none")]
    return list(dict.fromkeys([*getattr(part_of(block), PRESETS[block]), *built_in]))


def find_preset(block: str, name: str) -> Callable[..., None] | None:
    """Returns the function of a method or head in configs/parts, None if it has none there."""
    return getattr(part_of(block), PRESETS[block]).get(name)


def choice_fields(block: str, name: str) -> dict[str, Field]:
    """Returns the fields that jp.NAME accepts, with their defaults.

    They are the parameters of its preset, and the fields of the block to which the preset passes
    all others: its own, or that of the method or head after which the preset names them.
    """
    declared = _declared(block, name)
    preset = find_preset(block, name)
    if preset is None:
        return declared | ({"lr": _LEARNING_RATE} if block == "prompt" else {})
    fields: dict[str, Field] = {}
    others: dict[str, Field] = {}
    _, *parameters = inspect.signature(preset).parameters.values()  # the first one is the config
    for parameter in parameters:
        key, default = parameter.name, parameter.default
        if parameter.kind is parameter.VAR_KEYWORD:
            others = _declared("prompt", key) or _declared("head", key) or declared
        else:
            field = _LEARNING_RATE if key == "lr" else declared.get(key)
            fields[key] = (field or Field(type(default), default, ""))._replace(default=default)
    return others | fields


def _declared(block: str, name: str) -> dict[str, Field]:
    """Returns the fields of a block with a given name, none if there is no such block."""
    return declared_fields(block, name) if name in block_names(block) else {}


def make_signature(block: str, name: str, returns: Any) -> inspect.Signature:
    """Returns the signature of jp.NAME: `length` is its first parameter, the others need names."""
    parameters = [
        inspect.Parameter(
            key,
            inspect.Parameter.POSITIONAL_OR_KEYWORD
            if key == "length"
            else inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=_annotation(field),
        )
        for key, field in choice_fields(block, name).items()
    ]
    parameters.sort(key=lambda parameter: parameter.kind)
    return inspect.Signature(parameters, return_annotation=returns)


def _annotation(field: Field) -> Any:
    """Returns the type of a field."""
    if field.kind is tuple:
        return tuple[str, ...]
    return Literal[field.words] if field.words else field.kind


def make_help(block: str, name: str) -> str:
    """Returns the docstring of jp.NAME."""
    documented = find_preset(block, name) or OPEN[block].load(name)
    summary, *_ = (documented.__doc__ or "").splitlines() or [""]
    notes = {key: field.note for key, field in choice_fields(block, name).items() if field.note}
    indent = " " * 6
    lines = [
        textwrap.fill(f"  {key}: {note}.", 96, subsequent_indent=indent, break_on_hyphens=False)
        for key, note in notes.items()
    ]
    return "\n".join([summary, "", "Args:", *lines, ""]) if lines else summary
