"""The prompt method of a config, and how it is initialised."""

import functools
import os
from typing import Any

from jaxprompt.config.block import OpenBlock
from jaxprompt.config.run import RunConfig
from jaxprompt.errors import InputError, brief
from jaxprompt.files import user_path
from jaxprompt.heads import Kind, make_head
from jaxprompt.prompts import Method, make_prompt
from jaxprompt.types import Dims

# A backbone without limits, for checks before the backbone is opened.
_ANY = Dims(*[2**31] * len(Dims._fields))


def get_method(config: RunConfig, dims: Dims = _ANY) -> Method:
    """Returns the method of a config, cached; without `dims`, for an unrestricted backbone.

    Raises:
      InputError: if a field is set that prompt.start does not use; in a grid over starts, one that
        none of them uses.
    """
    method = cached_method(config.prompt, dims)
    if config.runs.prompt_starts:
        return method
    for part in (method, *(part.method for part in method.components())):
        for field in _ignored_fields(part):
            raise InputError(
                f"prompt.{field}={brief(getattr(part, field))} is only used with prompt.start="
                f"{field}, but prompt.start={part.start}; set that, or leave it out"
            )
    return method


def drop_ignored_fields(config: RunConfig) -> RunConfig:
    """Returns a config without the fields that prompt.start does not use."""
    unread = _ignored_fields(cached_method(config.prompt, _ANY))
    return config.replace({f"prompt.{field}": "" for field in unread})


def _ignored_fields(method: Method) -> list[str]:
    return [
        field for field in method.START_FIELDS if getattr(method, field) and method.start != field
    ]


def prompt_starts(config: RunConfig) -> list[str]:
    """Lists the initialisations, as in `prompt.start`; [] if it is initialised from an export."""
    return [] if config.prompt.get("init") else get_method(config).starts()


def prompt_files(config: RunConfig) -> list[str]:
    """Lists the files of soft tokens that a prompt is initialised from (prompt.start=file)."""
    if config.prompt.get("init"):
        return []
    method = get_method(config)
    methods = [part.method for part in method.components() if not part.init] or [method]
    return sorted({part.file for part in methods if part.starts() == ["file"]})


def list_paths(init: str) -> list[str]:
    """Lists the comma-separated exports in prompt.init; a path with commas is kept if it exists."""
    if os.path.exists(user_path(init)):
        return [init]
    return [path for part in init.split(",") if (path := part.strip())]


def inherited_exports(config: RunConfig, dims: Dims = _ANY) -> list[tuple[str, Method]]:
    """Lists the exports that a prompt is initialised from, each with the method that uses it.

    Raises:
      InputError: if several are given and the method uses one.
    """
    method = get_method(config, dims)
    init = config.prompt.get("init", "")
    sources = [(init, method)] if init else method.inherits()
    pairs: list[tuple[str, Method]] = []
    for init, part in sources:
        paths = list_paths(init)
        if len(paths) > 1 and part.INIT != "init":
            raise InputError(
                f"prompt.{part.INIT}={init} names {len(paths)} exports, but must name one; only "
                "prompt.init can be the mean of several"
            )
        pairs += [(path, part) for path in paths]
    return pairs


def get_head(config: RunConfig) -> Kind:
    """Returns the head of a config, cached."""
    return cached_head(config.head)


def cached_method(prompt: OpenBlock, dims: Dims) -> Method:
    """Returns the method that a block names, cached; its fields are checked."""
    return _make_method(prompt, _value_types(prompt), dims)


def cached_head(head: OpenBlock) -> Kind:
    """Returns the head that a block names, cached; its fields are checked."""
    return _make_head(head, _value_types(head))


def _value_types(block: OpenBlock) -> tuple[type, ...]:
    """Returns the types of the values of a block; as a cache key, because 1 == True."""
    return tuple(map(type, block.fields.values()))


@functools.lru_cache(maxsize=256)
def _make_method(prompt: OpenBlock, types: tuple[type, ...], dims: Dims) -> Method:
    fields: dict[str, Any] = prompt.to_dict()  # `make_prompt` checks the types
    return make_prompt(**fields, dims=dims)


@functools.lru_cache(maxsize=256)
def _make_head(head: OpenBlock, types: tuple[type, ...]) -> Kind:
    fields: dict[str, Any] = head.to_dict()  # `make_head` checks the types
    return make_head(**fields)
