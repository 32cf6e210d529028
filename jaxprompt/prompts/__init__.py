"""Methods, one file each, found by file name; each file's class `Prompt` makes an `Injection`."""

import dataclasses
import importlib
import pkgutil
from typing import Any, ClassVar

from flax import linen as nn

from jaxprompt.errors import InputError, check_kind, nearest
from jaxprompt.types import Batch, Dims, Injection


class Method(nn.Module):
    """What every method shares. Hyper-parameters are fields, so a misspelt one is an error."""

    dims: Dims
    length: int = 0
    TRAINABLE: ClassVar[tuple[str, ...]] = (r"prompt/.*", r"head/.*")

    def num_slots(self) -> int:
        """Tells how many soft tokens stand in the input."""
        return 0

    def position_shift(self) -> int:
        """Tells by how much the text's positions move, where the prompt takes none in the input."""
        return 0

    def check(self) -> None:
        """Raises InputError for a hyper-parameter out of its range."""

    def __call__(self, batch: Batch, embed, *, deterministic: bool) -> Injection:
        """Makes what the backbone takes in; `embed` is its word table [V, E]."""
        raise TypeError(f"{type(self).__name__} must define __call__")


def methods() -> list[str]:
    """Lists the methods by their file names."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def make_prompt(name: str, dims: Dims, **fields: Any) -> Method:
    """Makes a method by name.

    Raises InputError for an unknown name, and a hyper-parameter that is unknown, of another type or
    out of its range.
    """
    if name not in methods():
        raise InputError(f"unknown method prompt.name={name!r}; {nearest(name, methods())}")
    cls = importlib.import_module(f"{__name__}.{name}").Prompt
    own = {f.name: f.type for f in dataclasses.fields(cls)}
    known = {field: own[field] for field in own if field not in ("dims", "parent", "name")}
    for field, value in fields.items():
        if field not in known:
            raise InputError(f"method {name!r} has no field {field!r}; {nearest(field, known)}")
        check_kind(f"prompt.{field}", value, known[field])
    prompt = cls(dims=dims, **fields)
    prompt.check()
    return prompt
