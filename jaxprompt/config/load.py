"""Reads a config from files, flags and JSON, and turns it into a `RunConfig`.

Users write ml_collections: a config file makes a `ConfigDict`, and flags change it. All other code
takes the `RunConfig`, or a block of it.
"""

import ast
import os
from collections.abc import Collection, Sequence

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from jaxprompt.config import kinds
from jaxprompt.config.block import OpenBlock, declared_leaves, flatten_config
from jaxprompt.config.blocks import replace_blocks, unknown_field
from jaxprompt.config.files import call_config, load_module
from jaxprompt.config.open_blocks import NAMED, OPEN
from jaxprompt.config.run import GenerateConfig, RunConfig, TaskConfig
from jaxprompt.errors import InputError, brief, check_known
from jaxprompt.files import read_json, user_path

# The length of a run: setting one of these unsets the others.
_TOTALS = ("train.total_steps", "train.total_epochs", "train.total_examples")


def load_config(path: str, overrides: Sequence[tuple[str, str]] = ()) -> RunConfig:
    """Loads a config and applies overrides.

    Raises:
      InputError: for an unreadable file, an unknown field or a value that is not allowed.
    """
    return to_run_config(read_config(path, overrides))


def to_run_config(config: ConfigDict) -> RunConfig:
    """Returns the typed config. Raises InputError for an unknown field or an invalid value."""
    return RunConfig.from_dict(config.to_dict())


def with_overrides(config: RunConfig, overrides: Sequence[tuple[str, object]]) -> RunConfig:
    """Returns a copy of a config with overrides applied, see `apply_overrides`."""
    config_dict = _to_config_dict(config)
    apply_overrides(config_dict, overrides)
    return to_run_config(config_dict)


def override_generation(
    generation: GenerateConfig, overrides: Sequence[tuple[str, object]]
) -> GenerateConfig:
    """Returns a generation config with overrides such as ("generate.n", "4") applied."""
    config = ConfigDict({"generate": _from_json(generation.to_dict())}).lock()
    for field, value in overrides:
        set_field(config, field, _to_text(field, value))
    return GenerateConfig.from_dict(config.generate.to_dict(), "generate.")


def _to_config_dict(config: RunConfig) -> ConfigDict:
    """Returns a config whose fields can be set, without allowing new fields."""
    return ConfigDict(_from_json(config.to_dict())).lock()


def make_defaults() -> ConfigDict:
    """Returns a config with all fields at their defaults, without the open blocks."""
    values = RunConfig(prompt=OpenBlock(""), head=OpenBlock("")).to_dict()
    return ConfigDict(_from_json({name: x for name, x in values.items() if name not in OPEN}))


def read_config(path: str, overrides: Sequence[tuple[str, str]] = ()) -> ConfigDict:
    """Reads a config and applies overrides. The result is locked.

    Raises:
      InputError: for an unreadable file, an unknown field or a value of a wrong type.
    """
    file, colon, argument = path.partition(":") if path[-5:] != ".json" else (path, "", "")
    if file.endswith(".json"):
        config = _from_json(read_json(user_path(file), "a .py file or a saved config.json"))
    else:
        config = call_config(load_module(file), "get_config", file, *([argument] if colon else []))
    if not isinstance(config, ConfigDict):
        raise InputError(
            f"{path}: get_config() must return a ConfigDict, not {type(config).__name__}"
        )
    config = _to_config_dict(to_run_config(config))  # with the fields that it lacks
    apply_overrides(config, overrides)
    return config


def apply_overrides(config: ConfigDict, overrides: Sequence[tuple[str, object]]) -> None:
    """Sets fields, in any order; blocks that are selected by name are replaced first.

    Values are strings, as in flags, or numbers, lists and arrays; None unsets a number. If exactly
    one of the three totals is set, and above 0, the other two are set to 0. The columns of a task
    without a name make it a custom one.
    """
    # A block may be given by its name: optim.schedule=cosine.
    overrides = [(f"{x}.name" if x in NAMED else x, value) for x, value in overrides]
    # Values from Python are converted to strings, so that they are parsed like flags.
    texts = [(field, _to_text(field, value)) for field, value in overrides]
    replace_blocks(config, texts)
    totals = {field: text for field, text in texts if field in _TOTALS}
    if len(totals) == 1 and any(text.strip("0.") for text in totals.values()):  # neither 0 nor 0.0
        texts = [(name, "0") for name in _TOTALS if name not in totals] + texts
    unset = {field for field, value in overrides if value is None}
    for field, text in texts:
        set_field(config, field, text, unset=field in unset)
    fields = {field for field, _ in texts}
    if {"task.fields", "task.messages"} & fields and "task.name" not in fields:
        _name_custom_task(config)


def _name_custom_task(config: ConfigDict) -> None:
    """Sets task.name to custom if input columns are set for the default task, which has its own."""
    task = config.task
    if (
        (task.fields or task.messages)
        and task.name == TaskConfig().name
        and task.form in ("cloze", "text")
    ):
        task.name = "custom"


def _to_text(field: str, value: object) -> str:
    """Returns a value in the syntax of a flag."""
    value = _from_array(value)
    if isinstance(value, list | tuple):
        return str(tuple(map(_from_array, value)))
    if value is None or isinstance(value, str | int | float | os.PathLike):
        return str(value)
    raise InputError(
        f"config field {field}={brief(value)} is a {type(value).__name__}; give a string, a number "
        "or a list"
    )


def _from_array(value: object) -> object:
    """Converts an array or scalar of numpy, pandas or JAX to a list or number."""
    return value.tolist() if hasattr(value, "tolist") else value


def set_field(config: ConfigDict, field: str, text: str, *, unset: bool = False) -> None:
    """Sets one field ("optim.lr") from a string, in the field's type; `unset` sets it to None."""
    *parents, last = field.split(".")
    block = config
    for part in [*parents, last]:
        if not isinstance(block, ConfigDict) or part not in block:
            raise unknown_field(flatten_config(config), field)
        owner, block = block, block[part]
    if isinstance(block, ConfigDict):
        inside = ", ".join(f"{field}.{key}" for key in block)
        raise InputError(f"config field {field!r} is a block; set one of {inside}")
    kind = owner.get_type(last)
    if unset and kind is not float:
        raise InputError(f"config field {field}=None must be {_KINDS.get(kind, 'a string')}")
    owner[last] = _parse(field, text, kind)


def _parse(field: str, text: str, kind: type) -> kinds.Value:
    is_numbers = field in _NUMBER_LISTS
    expected = "a list of numbers, e.g. 1,2" if is_numbers else _KINDS.get(kind, kind.__name__)
    error = InputError(f"config field {field}={brief(text)} must be {expected}")
    if kind is str:
        return text
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise error
        return text.lower() == "true"
    if text == "None" and kind is float:
        return None
    if is_numbers and text[:1] not in ("(", "["):
        # Comma-separated numbers, or a single one.
        text = f"({text},)"
    elif kind is tuple and text[:1] not in ("(", "["):
        parts = tuple(part.strip() for part in text.split(",") if part.strip())
        if text and not parts:  # white space counts only in quotes
            raise error
        return parts
    try:
        value = ast.literal_eval(text)
        # In Python, True is an int, and ('a') a string, which would become a list of letters.
        if isinstance(value, bool) or kind is int and not isinstance(value, int):
            raise error
        if kind is tuple and not isinstance(value, list | tuple):
            raise error
        return kind(value)
    except _PARSE_ERRORS as cause:
        raise error from cause


# Errors of Python's parser; the last three are for values that are too deep or too large.
_PARSE_ERRORS = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError, OverflowError)
_NUMBER_LISTS = {
    name for name, field in declared_leaves(RunConfig) if field.many and field.kind in (int, float)
}
_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    tuple: "a list, e.g. a,b or ('a',)",
}


def _from_json(value: object) -> object:
    """Converts JSON to config values: lists become tuples, null an unset number."""
    if isinstance(value, dict):
        for key in value:  # ConfigDict treats dots and the names of its methods specially
            if not key.isidentifier() or hasattr(ConfigDict, key):
                raise InputError(
                    f"unknown config field {brief(key)}; `train --help=all` lists all fields"
                )
        return ConfigDict({key: _from_json(part) for key, part in value.items()})
    if isinstance(value, list | tuple):
        return tuple(part if part is None else _from_json(part) for part in value)
    return placeholder(float) if value is None else value


def read_argument(text: str, **parts: tuple[str, Collection[str]]) -> list[str]:
    """Reads the argument of a config file, such as `rte,prefix,bert-large`.

    Args:
      text: the parts, with a comma between two; those at the end can be left out.
      parts: by the name of a part, in order, its default and the values that it can have.

    Returns:
      the parts, with the default of each one that is left out.

    Raises:
      InputError: there are too many parts, or a part has another value.
    """
    words = text.split(",")
    if len(words) > len(parts):
        raise InputError(
            f"the argument {text!r} of the config has {len(words)} parts; use {','.join(parts)}"
        )
    words += [""] * (len(parts) - len(words))
    return [
        check_known(f"the {name.lower()}", word or default, values)
        for word, (name, (default, values)) in zip(words, parts.items(), strict=True)
    ]
