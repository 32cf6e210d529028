"""The method of a config, and what its numbers start from."""

import os
from typing import Any

from jaxprompt.errors import InputError, brief
from jaxprompt.files import user_path
from jaxprompt.heads import Kind, make_head
from jaxprompt.prompts import Method, make_prompt
from jaxprompt.types import Dims

# Stands for a backbone that is not opened yet: it limits nothing.
_ANY = Dims(*[2**31] * len(Dims._fields))


def method_of(c: Any, dims: Dims = _ANY) -> Method:
    """Makes the method of a config; without `dims` for a backbone that limits nothing.

    Raises InputError for a field that its start does not read; of a grid of starts one of them may.
    """
    method = make_prompt(**c.prompt.to_dict(), dims=dims)
    if c.runs.starts:
        return method
    for own in (method, *(part.method for part in method.components())):
        for field in _unread(own):
            raise InputError(
                f"prompt.{field}={brief(getattr(own, field))} is read by prompt.start={field} "
                f"alone, and prompt.start={own.start}; set that, or leave it out"
            )
    return method


def drop_unread(c: Any) -> None:
    """Empties the fields of a config that the start of its prompt does not read."""
    for field in _unread(make_prompt(**c.prompt.to_dict(), dims=_ANY)):
        c.prompt[field] = ""


def _unread(method: Method) -> list[str]:
    return [x for x in method.READ_BY_START if getattr(method, x) and method.start != x]


def starts_of(c: Any) -> list[str]:
    """Lists what the numbers start from, as `prompt.start` names it; [] for those of an export."""
    return [] if c.prompt.get("init") else method_of(c).starts()


def start_files(c: Any) -> list[str]:
    """Lists the files of soft tokens that numbers start from (prompt.start=file)."""
    if c.prompt.get("init"):
        return []
    method = method_of(c)
    parts = [part.method for part in method.components() if not part.init] or [method]
    return sorted({part.file for part in parts if part.starts() == ["file"]})


def list_paths(init: str) -> list[str]:
    """Lists the exports that prompt.init names, with commas between them, or one that has some."""
    if os.path.exists(user_path(init)):
        return [init]
    return [path for part in init.split(",") if (path := part.strip())]


def inherited(c: Any, dims: Dims = _ANY) -> list[tuple[str, Method]]:
    """Lists the exports that numbers start from, each with the method that takes it.

    Raises InputError for several where a method takes one.
    """
    method = method_of(c, dims)
    own = [(c.prompt.init, method)] if c.prompt.get("init") else method.inherits()
    found = []
    for init, part in own:
        paths = list_paths(init)
        if len(paths) > 1 and part.INIT != "init":
            raise InputError(
                f"prompt.{part.INIT}={init} names {len(paths)} exports and must name one; only "
                "prompt.init starts from the mean of several"
            )
        found += [(path, part) for path in paths]
    return found


def seen_by(method: Method) -> dict[str, str]:
    """Says which words a method has numbers for, where it depends on those of the training text."""
    return {"seen": method.seen} if method.seen else {}


def head_of(c: Any) -> Kind:
    """Makes the kind of answer of a config."""
    return make_head(**c.head.to_dict())
