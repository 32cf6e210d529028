"""Reads a config from files, flags and JSON, and turns it into a `RunConfig`.

Users write ml_collections: a config file makes a `ConfigDict`, and flags change it. All other code
takes the `RunConfig`, or a block of it.
"""

import ast
import os
from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from jaxprompt.config import kinds
from jaxprompt.config.block import Block, Choice, Open, declared_leaves
from jaxprompt.config.blocks import replace_blocks, unknown_field
from jaxprompt.config.files import call, load_module
from jaxprompt.config.open_blocks import NAMED
from jaxprompt.config.run import RunConfig
from jaxprompt.errors import InputError, brief
from jaxprompt.files import read_json, user_path

# The length of a run: setting one of these unsets the others.
_TOTALS = ("train.total_steps", "train.total_epochs", "train.total_examples")


def load_config(path: str, overrides: Sequence[tuple[str, str]] = ()) -> RunConfig:
    """Loads a config and applies overrides.

    Raises:
      InputError: for an unreadable file, an unknown field or a value that is not allowed.
    """
    return to_run(read_config(path, overrides))


def to_run(config: ConfigDict) -> RunConfig:
    """Returns the typed config. Raises InputError for an unknown field or an invalid value."""
    return RunConfig.from_dict(config.to_dict())


def with_overrides(config: RunConfig, overrides: Sequence[tuple[str, object]]) -> RunConfig:
    """Returns a copy of a config with overrides applied, see `apply`."""
    values = ConfigDict(_from_json(config.to_dict()))
    values.lock()
    apply(values, overrides)
    return to_run(values)


def make_defaults() -> ConfigDict:
    """Returns a config with all fields at their defaults, without the open blocks."""
    return _defaults(RunConfig)


def _defaults(block: type[Block]) -> ConfigDict:
    values = ConfigDict()
    _complete(values, block)
    return values


def _complete(config: ConfigDict, block: type[Block]) -> None:
    """Adds the fields that a config lacks, e.g. one of an earlier version."""
    for name, declared in block.declared().items():
        if isinstance(declared, kinds.Field):
            if name not in config:
                default = declared.default
                config[name] = placeholder(declared.kind) if default is None else default
        elif isinstance(declared, Choice):
            if isinstance(config.get(name), str | None):
                option_name = config.get(name) or next(iter(declared.options))
                with config.ignore_type():
                    config[name] = ConfigDict({"name": option_name})
            if isinstance(config[name], ConfigDict):
                option_name = config[name].get("name")
                if isinstance(option_name, str) and option_name in declared.options:
                    _complete(config[name], declared.options[option_name])
        elif not isinstance(declared, Open):
            if name not in config:
                config[name] = ConfigDict()
            if isinstance(config[name], ConfigDict):
                _complete(config[name], declared)


def read_config(path: str, overrides: Sequence[tuple[str, str]] = ()) -> ConfigDict:
    """Reads a config and applies overrides. The result is locked.

    Raises:
      InputError: for an unreadable file, an unknown field or a value of a wrong type.
    """
    file, colon, argument = path.partition(":") if path[-5:] != ".json" else (path, "", "")
    if file.endswith(".json"):
        config = _from_json(read_json(user_path(file), "a .py file or a saved config.json"))
    else:
        config = call(load_module(file), "get_config", file, *([argument] if colon else []))
    if not isinstance(config, ConfigDict):
        raise InputError(
            f"{path}: get_config() must return a ConfigDict, not {type(config).__name__}"
        )
    with config.unlocked():
        _complete(config, RunConfig)
    config.lock()
    apply(config, overrides)
    return config


def apply(config: ConfigDict, overrides: Sequence[tuple[str, object]]) -> None:
    """Sets fields, in any order; blocks that are selected by name are replaced first.

    Values are strings, as in flags, or numbers, lists and arrays; None unsets a number. If exactly
    one of the three totals is set, and above 0, the other two are set to 0.
    """
    # A block that is chosen by name may be given by its name alone.
    overrides = [(f"{x}.name" if x in NAMED else x, value) for x, value in overrides]
    # As text in any case, so that a flag and a call from Python are read alike.
    texts = [(field, _written(field, value)) for field, value in overrides]
    replace_blocks(config, texts)
    totals = {field: text for field, text in texts if field in _TOTALS}
    if len(totals) == 1 and any(text.strip("0.") for text in totals.values()):  # nor 0 nor 0.0
        texts = [(name, "0") for name in _TOTALS if name not in totals] + texts
    unset = {field for field, value in overrides if value is None}
    for field, text in texts:
        override(config, field, text, unset=field in unset)


def _written(field: str, value: object) -> str:
    """Returns a value as a flag writes it."""
    plain = lambda x: x.tolist() if hasattr(x, "tolist") else x  # of numpy, pandas, JAX
    value = plain(value)
    if isinstance(value, list | tuple):
        return str(tuple(map(plain, value)))
    if value is None or isinstance(value, str | int | float | os.PathLike):
        return str(value)
    raise InputError(
        f"config field {field}={brief(value)} is a {type(value).__name__}; give a string, a number "
        "or a list"
    )


def override(config: ConfigDict, field: str, text: str, *, unset: bool = False) -> None:
    """Sets one field ("optim.lr") from a string, in the field's type; `unset` sets it to None."""
    *parents, last = field.split(".")
    block = config
    for part in [*parents, last]:
        if not isinstance(block, ConfigDict) or part not in block:
            raise unknown_field(config, field, list(fields(config)))
        owner, block = block, block[part]
    if isinstance(block, ConfigDict):
        inside = ", ".join(f"{field}.{key}" for key in block)
        raise InputError(f"config field {field!r} is a block; set one of {inside}")
    kind = owner.get_type(last)
    if unset and kind is not float:
        raise InputError(f"config field {field}=None must be {_KINDS.get(kind, 'a string')}")
    owner[last] = _parse(field, text, kind)


def fields(config: ConfigDict, prefix: str = "") -> dict[str, kinds.Value]:
    """Lists the leaves of a config by dotted name."""
    leaves: dict[str, kinds.Value] = {}
    for key in config:
        value, name = config[key], f"{prefix}{key}"
        leaves |= (
            fields(value, f"{name}.") if isinstance(value, Mapping | ConfigDict) else {name: value}
        )
    return leaves


def _parse(field: str, text: str, kind: type) -> kinds.Value:
    numbers = "a list of numbers, e.g. 1,2"
    wanted = numbers if field in _NUMBERS else _KINDS.get(kind, kind.__name__)
    wrong = InputError(f"config field {field}={brief(text)} must be {wanted}")
    if kind is str:
        return text
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise wrong
        return text.lower() == "true"
    if text == "None" and kind is float:
        return None
    if field in _NUMBERS and text[:1] not in ("(", "["):
        # Numbers with commas between, as a command line has them; one alone is a list too.
        text = f"({text},)"
    elif kind is tuple and text[:1] not in ("(", "["):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        value = ast.literal_eval(text)
        # To Python, True is a whole number, and ('a') a text: a list of its letters.
        if isinstance(value, bool) or kind is int and not isinstance(value, int):
            raise wrong
        if kind is tuple and not isinstance(value, list | tuple):
            raise wrong
        return kind(value)
    except _NO_VALUE as error:
        raise wrong from error


# What Python's parser raises; the last three for what is nested too deeply or is too large.
_NO_VALUE = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError, OverflowError)
_NUMBERS = {
    name for name, field in declared_leaves(RunConfig) if field.many and field.kind in (int, float)
}
_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    tuple: "a list, e.g. a,b or ('a',)",
}


def _from_json(value: object) -> object:
    """Turns JSON back into config values: lists become tuples, null is a number that is unset."""
    if isinstance(value, dict):
        for key in value:  # a dotted one, or the name of a method, makes ConfigDict another thing
            if not key.isidentifier() or hasattr(ConfigDict, key):
                raise InputError(
                    f"unknown config field {brief(key)}; `train --help` lists all fields"
                )
        return ConfigDict({key: _from_json(part) for key, part in value.items()})
    if isinstance(value, list | tuple):
        return tuple(part if part is None else _from_json(part) for part in value)
    return placeholder(float) if value is None else value
