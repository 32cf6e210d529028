"""The kinds of what an export's card holds: it may come from anyone.

What the card takes over from a config is checked as the config is.
"""

import typing
from collections.abc import Callable, Mapping
from typing import Any

from jaxprompt.build.demonstrations import check_demos_card
from jaxprompt.config.kinds import Field, check_value
from jaxprompt.config.run import BackboneConfig, DataConfig, GenerateConfig, TaskConfig
from jaxprompt.data.tasks.task import Task
from jaxprompt.errors import InputError, brief, is_kind
from jaxprompt.heads import Kind, make_head
from jaxprompt.prompts import Method, make_prompt
from jaxprompt.registry import BACKBONES, HEADS, METHODS, is_installed
from jaxprompt.types import Dims

_DATA, _TASK, _BACKBONE = (
    block.declared() for block in (DataConfig, TaskConfig, BackboneConfig)
)  # fmt: skip
_PLACE = Field(int, 0, "a size of the backbone", "at least 0")
BLOCKS = {
    "backbone": {name: _BACKBONE[name] for name in ("revision", "sentinel", "rescale", "quantize")}
    | {
        "id": _BACKBONE["path"],
        "family": Field(str, "", "found"),
        "fingerprint": Field(str, "", "SHA-256"),
    },
    "layout": {name: _DATA[name] for name in ("max_len", "max_target", "multiple", "side")}
    | {name: _TASK[name] for name in ("form", "answer", "eos")}
    | {"choices": Field(int, 1, "of an example", "at least 1")},
    "generate": GenerateConfig.declared(),
}
TOP = {
    "method": str, "hyper": dict, "template": str, "label_words": list | None, "metrics": dict,
    "seed": int, "step": int,
    "versions": dict, "created": str, "sha256": str, "pretrained": dict, "init": dict,
    "plugins": dict,
}  # fmt: skip


def plugins_of(prompt: Method, head: Kind, family: str) -> dict[str, str]:
    """Returns the installed packages that a method, a head and a backbone are from.

    Returns:
      Versions by name of the package, without jaxprompt itself.
    """
    methods = [prompt, *(part.method for part in prompt.components())]
    plugins = [
        *(METHODS.plugin(METHODS.name_of(type(method))) for method in methods),
        HEADS.plugin(head.name),
        BACKBONES.plugin(family),
    ]
    return dict(sorted({plugin for plugin in plugins if plugin is not None}))


def check_card(path: str, card: Mapping[str, Any]) -> None:
    """Raises InputError where a field of a card that is there is of another kind than written."""
    for name, kind in TOP.items():
        if name in card and not isinstance(card[name], kind):
            raise _wrong(path, name, card[name])
    check_plugins(path, card)
    if odd := card["layout"].keys() - BLOCKS["layout"].keys():
        raise InputError(f"{path}: the card's layout has {min(odd)!r}; export the prompt again")
    for block, known in BLOCKS.items():
        for name, field in known.items():
            if name in card[block]:
                _check(path, f"{block}.{name}", field, card[block][name])
    if "demos" in card:
        check_demos_card(path, card["demos"], card["task"])
    dims = _block(path, card["backbone"], "dims")
    for name, value in dims.items():
        _check(path, f"backbone.dims.{name}", _PLACE, value)
    _check_made(path, "head", make_head, card["head"])
    on_backbone = lambda **block: make_prompt(dims=Dims(**dims), **block)
    _check_made(path, "prompt", on_backbone, card["prompt"])
    for name, hint in typing.get_type_hints(Task).items():
        if name in card["task"] and not _fits(card["task"][name], hint):
            raise _wrong(path, f"task.{name}", card["task"][name])


def check_plugins(path: str, card: Mapping[str, Any]) -> None:
    """Raises InputError where a package that an export needs is not installed, see `plugins_of`."""
    for package, version in card.get("plugins", {}).items():
        if not is_installed(package):
            raise InputError(
                f"{path} needs the package {package} {version}, which is not installed; "
                f"pip install {package}"
            )


def _check_made(path: str, name: str, make: Callable[..., Any], block: Mapping[str, Any]) -> None:
    try:
        make(**block)
    except (InputError, TypeError) as error:  # the second for a name that is missing or no text
        raise InputError(f"{path}: the card's {name}: {error}; export the prompt again") from error


def _check(path: str, name: str, field: Field, value: Any) -> None:
    try:
        check_value(name, field, value)
    except InputError as error:
        said = str(error).removeprefix("config field ")
        raise InputError(f"{path}: the card's {said}; export the prompt again") from error


def _block(path: str, card: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if not isinstance(card.get(name), Mapping):
        raise _wrong(path, name, card.get(name))
    return card[name]


def _wrong(path: str, name: str, value: Any) -> InputError:
    return InputError(f"{path}: the card's {name} is {brief(value)}; export the prompt again")


def _fits(value: Any, hint: Any) -> bool:
    """Tells whether JSON is of the type of a field of Task; lists stand for tuples."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and isinstance(value, list):
        if args[-1] is ...:
            return all(_fits(part, args[0]) for part in value)
        return len(value) == len(args) and all(map(_fits, value, args))
    if origin is Mapping and isinstance(value, dict):
        return all(_fits(part, args[1]) for part in value.values())
    return origin is None and is_kind(value, hint)
