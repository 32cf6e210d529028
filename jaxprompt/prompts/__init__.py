"""Methods, one file each, found by file name; each file's class `Prompt` makes an `Injection`."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from flax import linen as nn

from jaxprompt.errors import InputError, check_kind, nearest
from jaxprompt.types import Asks, Batch, Dims, Injection, Objective


class Source(NamedTuple):
    """What the numbers of a prompt may start from."""

    tokenizer: Any
    seed: int
    words: Sequence[Sequence[str]]  # label words of each class
    counts: np.ndarray | None  # int64 [ids], how often a token stands in a text; None = no text
    embed: Callable[[Sequence[int]], np.ndarray]  # token ids -> their embeddings [ids, E]
    read: Callable[[str], np.ndarray]  # an .npy file, an export or an adapter -> its rows [P, E]
    # token ids -> the k, v [L, P, N, D] that the frozen model gives them in its attention
    # "encoder" (a decoder's alone too), and in an encoder-decoder's "decoder" and "cross"
    keys: Callable[[Sequence[int]], dict[str, tuple[np.ndarray, np.ndarray]]]


_GIVEN = ("dims", "asks", "parent", "name")  # fields of a module that no config has


class Method(nn.Module):
    """What every method shares. Hyper-parameters are fields, so a misspelt one is an error.

    One that depends on the task has the field `asks: Asks = Asks()` besides, and is given it.
    """

    dims: Dims
    length: int = 0
    TRAINABLE: ClassVar[tuple[str, ...]] = (r"prompt/.*", r"head/.*")
    LEARNS: ClassVar[bool] = True  # it has numbers of its own
    PLAIN: ClassVar[str] = ""  # the field, and its value, with which nothing is computed
    # Fields of a Batch that what it adds depends on. None: it folds to constants, which an export
    # holds. Some: an export holds the method and its numbers, and nobody folds it.
    reads: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **more: Any) -> None:
        """Keeps flax from taking the modules that these hooks make for parts of the method."""
        for name in ("begin", "modules", "objectives"):
            if name in vars(cls):
                nn.nowrap(vars(cls)[name])
        super().__init_subclass__(**more)

    def block(self) -> dict[str, Any]:
        """Gives the block of a config that makes it."""
        fields = (f.name for f in dataclasses.fields(self) if f.name not in _GIVEN)
        name = type(self).__module__.rpartition(".")[2]
        return {"name": name} | {field: getattr(self, field) for field in fields}

    def num_slots(self) -> int:
        """Tells how many soft tokens stand in the input: those that the template places."""
        return 0

    def num_decoder_slots(self) -> int:
        """Tells how many soft tokens stand in what the decoder is fed."""
        return 0

    def position_shift(self) -> int:
        """Tells by how much the text's positions move, where the prompt takes none in the input."""
        return 0

    def decoder_shift(self) -> int:
        """Tells by how much the positions of what the decoder is fed move."""
        return 0

    def is_computed(self) -> bool:
        """Tells whether folding spares work: what is added is computed from other numbers."""
        return False

    def folds(self) -> bool:
        """Tells whether it is to be folded before it is used: that spares work, and is right."""
        return self.is_computed() and not self.reads

    def needs_decoder(self, *fields: str) -> None:
        """Raises InputError where one of these fields asks for a decoder that is not there."""
        for field in fields:
            value = getattr(self, field)
            if value and not self.dims.decoder_layers:
                raise InputError(
                    f"prompt.{field}={value!r} needs an encoder-decoder, which this backbone is "
                    "not; leave it out or take a T5"
                )

    def check(self) -> None:
        """Raises InputError for a hyper-parameter out of its range."""

    def objectives(self) -> list[Objective]:
        """Makes the terms of the loss that are its own, beside those of the head."""
        return []

    def modules(self) -> dict[str, nn.Module]:
        """Makes the modules that its objectives score with, by `Objective.head`.

        They are called as a head is, and their numbers are those of a head: head/<name>/.
        """
        return {}

    def begin(self, params: dict[str, Any], source: Source) -> dict[str, Any]:
        """Puts values to start from in the place of those that were drawn. -> params"""
        del source
        return params

    def __call__(self, batch: Batch, embed, *, deterministic: bool) -> Injection:
        """Makes what the backbone takes in; `embed` is its word table [V, E]."""
        raise TypeError(f"{type(self).__name__} must define __call__")


def methods() -> list[str]:
    """Lists the methods by their file names."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


_NO_TASK = Asks()


def make_prompt(
    name: str, dims: Dims, asks: Asks = _NO_TASK, init: str = "", **fields: Any
) -> Method:
    """Makes a method by name.

    `init`, the export that its numbers are read from, is none of its hyper-parameters. Raises
    InputError for an unknown name, and a hyper-parameter that is unknown, of another type or out of
    its range.
    """
    if name not in methods():
        raise InputError(f"unknown method prompt.name={name!r}; {nearest(name, methods())}")
    cls = importlib.import_module(f"{__name__}.{name}").Prompt
    own = {f.name: f.type for f in dataclasses.fields(cls)}
    known = {field: own[field] for field in own if field not in _GIVEN}
    for field, value in fields.items():
        if field not in known:
            raise InputError(f"method {name!r} has no field {field!r}; {nearest(field, known)}")
        check_kind(f"prompt.{field}", value, known[field])
    check_kind("prompt.init", init, str)
    prompt = cls(dims=dims, parent=None, **fields)  # none of a module whose method calls this
    prompt.check()
    return with_task(prompt, asks)


def with_task(prompt: Method, asks: Asks) -> Method:
    """Tells a method of the task, where it depends on one."""
    return prompt.clone(asks=asks) if hasattr(prompt, "asks") else prompt
