"""Methods, heads and tasks as `train` takes them: jp.prefix(16), jp.linear(), jp.task("text")."""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from ml_collections import ConfigDict

from jaxprompt.config.blocks import option_fields, part_of
from jaxprompt.config.load import apply, fields, read_config, to_run
from jaxprompt.config.open_blocks import CHOICES, declared, make_block, names
from jaxprompt.config.run import GenerateConfig, RunConfig
from jaxprompt.config.synonyms import SYNONYMS
from jaxprompt.errors import InputError, brief, nearest

if TYPE_CHECKING:  # it loads JAX, which naming a method does not need
    from jaxprompt.build.backbone import LoadedBackbone

_BACKBONES = ("backbone", "mesh")  # blocks that `load_backbone` fills
# Blocks whose fields go by their last names.
_NAMED = ("optim", "train", "data", "task", "generate", "data.protocol", "optim.schedule")
_CUSTOM = {"name": "custom", "fields": ("text",)}
_ROOMS = {"prompt": "METHODS", "head": "HEADS"}  # block -> the table of its part of the configs


@dataclass(frozen=True)
class Choice:
    """A method or a head and its settings. Call it to set more: `jp.prefix(16, lr=0.02)`.

    What is not set has the default of configs/parts, which a method's own learning rate is part
    of. docs/config.md lists the fields of each.
    """

    block: str  # "prompt" or "head"
    name: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, length: int | None = None, **values: Any) -> "Choice":
        """Sets fields. `length` is the number of prompt tokens, of a method that has any.

        Raises InputError for a head's field without its name.
        """
        if self.block == "head" and length is not None:
            raise InputError(
                f"jp.{self.name}({length!r}): a head's fields go by their names; write "
                f"jp.{self.name}(FIELD={length!r})"
            )
        own = {} if length is None else {"length": length}
        return Choice(self.block, self.name, {**self.values, **own, **values})

    def fill(self, config: ConfigDict) -> None:
        """Puts it into a config. Raises InputError for a field that it has not."""
        part = getattr(part_of(self.block), _ROOMS[self.block]).get(self.name)
        known = set(declared(self.block, self.name)) if self.name in names(self.block) else set()
        if part is not None:
            own = inspect.signature(part).parameters.values()
            known |= {p.name for p in list(own)[1:] if p.kind is p.POSITIONAL_OR_KEYWORD}
            if not any(p.kind is p.VAR_KEYWORD for p in own):
                known = {p.name for p in list(own)[1:]}
        elif self.block == "prompt":
            known |= {"lr"}
        values = {name: _plain(value) for name, value in self.values.items()}
        for name in values:
            if name not in known:
                cure = nearest(name, sorted(known)) if known else "it has no fields"
                raise InputError(f"jp.{self.name} has no {name}; {cure}")
        if part is not None:
            part(config, **values)
            return
        if self.block == "prompt":
            config.trainable, config.optim.lr = (), values.pop("lr", config.optim.lr)
        config[self.block] = make_block(self.block, self.name, **values)


def check_choice(argument: str, given: Any) -> None:
    """Raises InputError for what is no method, or no head, as `argument` says which."""
    examples = {"method": ("prompt", "jp.prefix(16)"), "head": ("head", "jp.linear()")}
    block, example = examples[argument]
    if given is None or isinstance(given, Choice) and given.block == block:
        return
    what = f"jp.{given.name}()" if isinstance(given, Choice) else brief(given)
    raise InputError(f"{argument}={what} is no {argument}; give one, as {example}")


def find(name: str) -> Choice | None:
    """Finds a method or a head by its name, None where there is none."""
    for block in _ROOMS:
        if name in known(block):
            return Choice(block, name)
    return None


def known(block: str) -> list[str]:
    """Lists the methods or heads: those of configs/parts, and files without a part of their own."""
    own = [name for name in names(block) if name not in ("constant", "none")]
    return list(dict.fromkeys([*getattr(part_of(block), _ROOMS[block]), *own]))


def task(*fields: str, **values: Any) -> dict[str, Any]:
    """Describes a task of your own: the columns that are read, in order, and what they answer.

    `values` are fields of the config's block `task`: label="label" (the column), labels, words,
    template, metric, target (a column of texts to be written), tags, answers and so on, as
    docs/config.md lists them.
    """
    return {**_CUSTOM, "fields": fields or _CUSTOM["fields"], **values}


def _plain(value: Any) -> Any:
    """Makes a number of numpy one of Python."""
    return value.item() if isinstance(value, np.generic) else value


def fill_fields(config: ConfigDict, overrides: Mapping[str, Any]) -> None:
    """Sets other fields of a config, by their last name where one field alone has it.

    "optim.lr" is `lr`, and `optim__lr` where the block is to be told.
    """
    named: dict[str, str] = {}  # field -> how it was given
    held = dict.fromkeys([*fields(config), *CHOICES, *option_fields()])
    for name in overrides:
        other = named.setdefault(_field(name, held), name)
        if other != name:
            raise InputError(f"{other} and {name} are the same field; give one of them")
    apply(config, [(field, _plain(overrides[name])) for field, name in named.items()])


def _field(name: str, held: Mapping[str, Any]) -> str:
    dotted = name.replace("__", ".")
    if dotted in held or "." in dotted:
        return dotted
    if SYNONYMS.get(name) in held:
        return SYNONYMS[name]
    found = [f"{block}.{name}" for block in _NAMED if f"{block}.{name}" in held]
    if len(found) == 1:
        return found[0]
    if not found:
        own = [field.rpartition(".") for field in held]
        short = {last for block, _, last in own if block in ("", *_NAMED)}
        short |= {other for other, field in SYNONYMS.items() if field in held}
        whole = sorted(field.replace(".", "__") for field in held if field.endswith(f".{name}"))
        cure = f"nearest: {', '.join(whole)}" if whole else nearest(name, short)
        raise InputError(f"unknown config field {brief(name)}; {cure}")
    shown = ", ".join(other.replace(".", "__") for other in found)
    raise InputError(f"{name} is a field of several blocks; say which: {shown}")


# -- configs from Python values -------------------------------------------------------------------


def make_config(
    backbone: "LoadedBackbone", *, task: str | Mapping[str, Any] | None,
    choices: Sequence[Choice | None] = (), overrides: Mapping[str, Any], keeps: bool = True,
) -> RunConfig:  # fmt: skip
    """Makes the config of a run on a backbone that is loaded.

    `task` is a known one's name or what `task` gives. `choices` are the method and the head, in
    this order, for a method may bring a head. `keeps` says whether the run's folder stays, so that
    curves in it are worth drawing. Raises InputError for an unknown field, and for one that is the
    backbone's.
    """
    for name in overrides:
        block, _, field = name.replace("__", ".").partition(".")
        if field and block in _BACKBONES:
            raise InputError(f"{name} is of the backbone; give it to load_backbone")
    config, shape = read_config("base"), backbone.placement.mesh.shape
    with config.unlocked():
        # What is loaded decides, and the run's record says so.
        config.backbone.update(backbone.backbone.config.to_dict())
        config.mesh.data, config.mesh.model = shape["data"], shape["model"]
        if not isinstance(task, str | Mapping | None):
            raise InputError(
                f"task={brief(task)} is a {type(task).__name__}; give the name of a task, or its "
                "fields as a dict"
            )
        values = {"name": task} if isinstance(task, str) else task or _CUSTOM
        apply(config, [(f"task.{name}", value) for name, value in values.items()])
        if not keeps:
            config.train.tracker, config.train.plot = "none", False
        for choice in choices:
            if choice is not None:
                choice.fill(config)
    fill_fields(config, overrides)
    return to_run(config)


def change_generation(generation: GenerateConfig, changes: Mapping[str, Any]) -> GenerateConfig:
    """Returns it with other values. Raises InputError for an unknown field, or its value."""
    config = read_config("base")
    # Fields of a config are texts where a word is one of their values.
    word = lambda value: str(value).lower() if isinstance(value, bool) else value
    fill_fields(config, {f"generate__{name}": word(value) for name, value in changes.items()})
    checked = to_run(config).generate
    return dataclasses.replace(generation, **{name: getattr(checked, name) for name in changes})
