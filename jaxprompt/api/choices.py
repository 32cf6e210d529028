"""Methods, heads and tasks for `train`: jp.prefix(16), jp.linear(), jp.task("text")."""

import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from ml_collections import ConfigDict

from jaxprompt.api.signatures import (
    PRESETS,
    choice_fields,
    choice_names,
    find_preset,
    make_help,
    make_signature,
)
from jaxprompt.config.block import flatten_config
from jaxprompt.config.blocks import option_fields
from jaxprompt.config.load import apply_overrides, read_config, to_run_config
from jaxprompt.config.open_blocks import CHOICES, make_block
from jaxprompt.config.run import GenerateConfig, RunConfig
from jaxprompt.config.synonyms import SYNONYMS
from jaxprompt.errors import InputError, brief, check_kind, check_known, nearest

if TYPE_CHECKING:  # it imports JAX, which `jp.prefix` does not need
    from jaxprompt.build.backbone import LoadedBackbone

_BACKBONES = ("backbone", "mesh")  # blocks that `load_backbone` fills
# Blocks whose fields may be given by their last names.
_SHORT_BLOCKS = ("optim", "train", "data", "task", "generate", "data.protocol", "optim.schedule")
_CUSTOM_TASK = {"name": "custom", "fields": ("text",)}
_ARGUMENTS = {"method": ("prompt", "jp.prefix(16)"), "head": ("head", "jp.linear()")}


class _Signature:
    """The parameters of a call, for `help`, `inspect.signature` and notebooks."""

    def __get__(self, choice: "Choice | None", owner: type) -> inspect.Signature:
        if choice is None:
            raise AttributeError("that of the class is its constructor's")
        return make_signature(choice.block, choice.name, Choice)


class _Help:
    """The docstring of a method or head, for `help` and notebooks; the class has another one."""

    def __init__(self, class_text: str | None):
        self._class_text = class_text

    def __get__(self, choice: "Choice | None", owner: type) -> str | None:
        if choice is None:
            return self._class_text
        signature = f"jp.{choice.name}{choice.__signature__}"
        lines = textwrap.wrap(signature.replace(Choice.__module__ + ".", ""), 92)
        return "\n    ".join(lines) + "\n\n" + make_help(choice.block, choice.name)


@dataclass(frozen=True)
class Choice:
    """A method or a head and its settings. Call it to set fields: `jp.prefix(16, lr=0.02)`.

    Other fields have the defaults of configs/parts, which also set the learning rate of a method.
    docs/config.md lists the fields of each method and head.
    """

    __doc__ = _Help(__doc__)
    __signature__ = _Signature()

    block: str  # "prompt" or "head"
    name: str
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __call__(self, length: int | None = None, **values: Any) -> "Choice":
        """Returns a copy with some fields set.

        Args:
          length: the number of prompt tokens, for methods that have them.
          **values: by field.

        Raises:
          InputError: for an unknown field.
        """
        if values:  # without any, JAX is not imported
            self._check_fields(values)
        length_field = {} if length is None else {"length": length}
        return Choice(self.block, self.name, {**self.values, **length_field, **values})

    def fill(self, config: ConfigDict) -> None:
        """Sets its block of a config. Raises InputError for an unknown field, or a wrong `lr`."""
        self._check_fields(self.values)
        if "lr" in self.values:  # other fields are checked when the config is complete
            check_kind("optim.lr", _to_python(self.values["lr"]), float)
        preset = find_preset(self.block, self.name)
        values = {name: _to_python(value) for name, value in self.values.items()}
        if preset is not None:
            preset(config, **values)
            return
        if self.block == "prompt":
            config.trainable, config.optim.lr = (), values.pop("lr", config.optim.lr)
        config[self.block] = make_block(self.block, self.name, **values)

    def _check_fields(self, names: Iterable[str]) -> None:
        """Raises InputError for a field that it does not have."""
        allowed = choice_fields(self.block, self.name)
        for name in names:
            if name not in allowed:
                synonym = SYNONYMS.get(name, "").rpartition(".")[2]
                advice = nearest(name, allowed) if allowed else "it has no fields"
                advice = f"use {synonym}" if synonym in allowed else advice
                raise InputError(f"jp.{self.name} has no field {name}; {advice}")


# A method or head as an argument: jp.prefix(16), jp.prefix, "prefix".
AnyChoice: TypeAlias = Choice | Callable[..., Choice] | str


def as_choice(argument: str, value: Any) -> Choice | None:
    """Returns a method or a head that is given as such, or by its name; `argument` says which.

    Raises:
      InputError: if `value` is neither.
    """
    block, example = _ARGUMENTS[argument]
    if isinstance(value, str):
        return Choice(block, check_known(argument, value, choice_names(block)))
    if value is None or isinstance(value, Choice) and value.block == block:
        return value
    text = f"jp.{value.name}()" if isinstance(value, Choice) else brief(value)
    raise InputError(f"{argument}={text} is not a {argument}; give one, e.g. {example}")


def find_choice(name: str) -> Choice | None:
    """Returns the method or head with a name, None if there is none."""
    for block in PRESETS:
        if name in choice_names(block):
            return Choice(block, name)
    return None


def task(*fields: str, **values: Any) -> dict[str, Any]:
    """Describes a custom task by its input columns, in order, and by its labels or targets.

    Args:
      *fields: the text columns.
      **values: fields of the config block `task`: label="label" (the column), labels, words,
        template, metric, target (a column of texts to generate), messages (columns of
        conversations, instead of fields), tags, answers and so on, see docs/config.md.

    Returns:
      The task, for the argument `task` of `train` and `attach`.
    """
    default = () if "messages" in values else _CUSTOM_TASK["fields"]
    return {**_CUSTOM_TASK, "fields": fields or default, **values}


def _to_python(value: Any) -> Any:
    """Converts scalars of numpy and JAX to Python numbers."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def fill_fields(config: ConfigDict, overrides: Mapping[str, Any]) -> set[str]:
    """Sets fields of a config by their last name, if it is unique, or with their block.

    "optim.lr" is `lr`, or `optim__lr` with its block. Returns their dotted names.
    """
    given_names: dict[str, str] = {}  # field -> the name under which it was given
    known_fields = dict.fromkeys([*flatten_config(config), *CHOICES, *option_fields()])
    for name in overrides:
        given_name = given_names.setdefault(_full_name(name, known_fields), name)
        if given_name != name:
            raise InputError(f"{given_name} and {name} are the same field; give one of them")
    apply_overrides(
        config, [(field, _to_python(overrides[name])) for field, name in given_names.items()]
    )
    return set(given_names)


def _full_name(name: str, known_fields: Mapping[str, Any]) -> str:
    dotted = name.replace("__", ".")
    if dotted in known_fields or "." in dotted:
        return dotted
    if SYNONYMS.get(name) in known_fields:
        return SYNONYMS[name]
    matches = [f"{block}.{name}" for block in _SHORT_BLOCKS if f"{block}.{name}" in known_fields]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        parts = [field.rpartition(".") for field in known_fields]
        short_names = {last for block, _, last in parts if block in ("", *_SHORT_BLOCKS)}
        short_names |= {match for match, field in SYNONYMS.items() if field in known_fields}
        full_names = sorted(
            field.replace(".", "__") for field in known_fields if field.endswith(f".{name}")
        )
        advice = f"nearest: {', '.join(full_names)}" if full_names else nearest(name, short_names)
        raise InputError(f"unknown config field {brief(name)}; {advice}")
    options = ", ".join(match.replace(".", "__") for match in matches)
    raise InputError(f"{name} is a field of several blocks; give one of {options}")


# -- configs from Python values -------------------------------------------------------------------


def make_config(
    backbone: "LoadedBackbone",
    *,
    task: str | Mapping[str, Any] | None,
    choices: Sequence[Choice | None] = (),
    overrides: Mapping[str, Any],
    keep_files: bool = True,
) -> tuple[RunConfig, set[str]]:
    """Returns the config of a run on a loaded backbone, and the fields that `overrides` set.

    Args:
      backbone: the backbone.
      task: the name of a known task, or the result of `task`.
      choices: the method and the head, in this order, because a method may set a head.
      overrides: values of other fields.
      keep_files: whether the run directory is kept; if not, curves and tracker are turned off.

    Raises:
      InputError: for an unknown field, and for a field of the backbone.
    """
    for name in overrides:
        block, _, field = name.replace("__", ".").partition(".")
        if field and block in _BACKBONES:
            raise InputError(f"{name} is a field of the backbone; give it to load_backbone")
    config, mesh_shape = read_config("base"), backbone.placement.mesh.shape
    with config.unlocked():
        # The config records the backbone that is loaded.
        config.backbone.update(backbone.backbone.config.to_dict())
        config.mesh.data, config.mesh.model = mesh_shape["data"], mesh_shape["model"]
        if not isinstance(task, str | Mapping | None):
            raise InputError(
                f"task={brief(task)} is a {type(task).__name__}; give the name of a task, or its "
                "fields as a dict"
            )
        values = {"name": task} if isinstance(task, str) else task or _CUSTOM_TASK
        apply_overrides(config, [(f"task.{name}", value) for name, value in values.items()])
        if not keep_files:
            config.train.tracker, config.train.plot = "none", False
        for choice in choices:
            if choice is not None:
                choice.fill(config)
    set_fields = fill_fields(config, overrides)
    return to_run_config(config), set_fields


def change_generation(generation: GenerateConfig, changes: Mapping[str, Any]) -> GenerateConfig:
    """Returns a copy with some values changed. Raises InputError for unknown fields or values."""

    values = {name: _to_python(value) for name, value in changes.items()}
    stopping = values.get("early_stopping")
    if isinstance(stopping, bool):  # a string in configs, because a word is one of its values
        values["early_stopping"] = str(stopping).lower()
    return GenerateConfig.from_dict({**generation.to_dict(), **values}, "generate.")
