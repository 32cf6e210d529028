"""Prompt methods, one file each, by name; the class `Prompt` of a file returns an `Injection`."""

import ast
import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from flax import linen as nn

from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.errors import InputError, check_kind, nearest
from jaxprompt.registry import METHODS
from jaxprompt.types import Asks, Batch, Dims, Injection, Objective

# An export -> its method and the numbers of its prompt, with those of exports it depends on.
Take = Callable[[str], tuple["Method", dict[str, Any]]]


class Source(NamedTuple):
    """The sources that a prompt may be initialised from."""

    tokenizer: Tokenizer
    seed: int
    labels: Callable[[], Sequence[Sequence[int]]]  # -> token ids of the label words of each class
    counts: np.ndarray | None  # int64 [ids], how often a token stands in a text; None = no text
    # token ids -> their embeddings as they enter the first layer [ids, E]
    embed: Callable[[Sequence[int]], np.ndarray]
    # token ids -> what rows of classes start from [ids, E]: the output table, by which a language
    # model scores words, or the embeddings where the head writes the classes into the input
    rows: Callable[[Sequence[int]], np.ndarray]
    # a method, and an .npy file, an export or an adapter -> its rows [P, E]
    read: Callable[[Any, str], np.ndarray]
    # exports with commas between, and what was drawn -> the numbers that they hold
    inherit: Callable[[str, dict[str, Any]], dict[str, Any]]
    take: Take
    # token ids -> the k, v [L, P, N, D] that the frozen model gives them in its attention
    # "encoder" (a decoder's alone too), and in an encoder-decoder's "decoder" and "cross"
    keys: Callable[[Sequence[int]], dict[str, tuple[np.ndarray, np.ndarray]]]


BASE = re.compile(r"prompt/(.*/)?base")  # leaves that another export holds, see `with_base`
_GIVEN = ("dims", "asks", "seen", "parent", "name")  # fields of a module that no config has


_HOOKS = (
    "begin", "components", "exported", "inherits", "modules", "objectives", "starts", "with_base",
    "with_vocabulary",
)  # fmt: skip


class Method(nn.Module):
    """The base of all methods. Hyperparameters are fields, so a misspelt one is an error.

    A method that depends on the task also has the field `asks: Asks = Asks()`, which is set for it.
    """

    dims: Dims
    length: int = 0
    seen: str = ""  # packed ids of the words of the training text, of a method that asks for them
    TRAINABLE: ClassVar[tuple[str, ...]] = (r"prompt/.*", r"head/.*")
    LEARNS: ClassVar[bool] = True  # it has numbers of its own
    PLAIN: ClassVar[str] = ""  # the field, and its value, with which nothing is computed
    LASTING: ClassVar[tuple[str, ...]] = ()  # of `scale` and the like: acts after the start too
    INIT: ClassVar[str] = "init"  # the field that names an export to start from
    READ_BY_START: ClassVar[tuple[str, ...]] = ()  # fields that the `start` of their name reads
    READ_WITH: ClassVar[Mapping[str, str]] = {}  # see `idle_fields`
    # Fields of a Batch that what it adds depends on. None: it folds to constants, which an export
    # holds. Some: an export holds the method and its numbers, and nobody folds it.
    reads: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **more: Any) -> None:
        """Keeps flax from taking the modules that these hooks make for parts of the method."""
        for name in _HOOKS:
            if name in vars(cls):
                nn.nowrap(vars(cls)[name])
        super().__init_subclass__(**more)

    def block(self) -> dict[str, Any]:
        """Returns the config block of this method."""
        fields = (f.name for f in dataclasses.fields(self) if f.name not in _GIVEN)
        name = METHODS.name_of(type(self))
        own = {"name": name} | {field: getattr(self, field) for field in fields}
        return own | ({"seen": self.seen} if self.seen else {})

    def num_slots(self) -> int:
        """Returns the number of soft tokens that the template places in the input."""
        return sum(part.method.num_slots() for part in self.components())

    def num_decoder_slots(self) -> int:
        """Returns the number of soft tokens in the decoder's input."""
        return sum(part.method.num_decoder_slots() for part in self.components())

    def num_rows(self) -> int:
        """Returns the number of trained class vectors, which a head uses."""
        return sum(part.method.num_rows() for part in self.components())

    def position_shift(self) -> int:
        """Returns the shift of the text's positions by a prompt that is not in the input."""
        return sum(part.method.position_shift() for part in self.components())

    def decoder_shift(self) -> int:
        """Returns the shift of the positions of the decoder's input."""
        return sum(part.method.decoder_shift() for part in self.components())

    def is_computed(self) -> bool:
        """Returns whether folding saves work: the injection is computed from parameters."""
        return False

    def folds(self) -> bool:
        """Returns whether to fold before use: it saves work and is exact."""
        return self.is_computed() and not self.reads

    def components(self) -> Sequence["OnePart"]:
        """Lists the methods that it consists of."""
        return ()

    def starts(self) -> list[str]:
        """Lists its initialisations, as named by `prompt.start`."""
        return [self.start] if hasattr(self, "start") else []

    def inherits(self) -> list[tuple[str, "Method"]]:
        """Lists the exports that it or its components are initialised from, with these."""
        return []

    def must_match(self) -> Sequence[str] | None:
        """Lists the fields that must equal those of the export in init; None = nearly all."""
        return None

    def acts_by(self) -> tuple[Any, ...]:
        """Returns the values of LASTING: runs that differ in them are different programs."""
        own = tuple(getattr(self, field) for field in self.LASTING)
        return sum((part.method.acts_by() for part in self.components()), own)

    def with_vocabulary(self, ids: np.ndarray) -> "Method":
        """Receives the ids of the words in the training text, if it depends on them."""
        del ids
        return self

    def needs_start(self) -> None:
        """Raises InputError if prompt.start names a field that is empty."""
        if self.start in self.READ_BY_START and not getattr(self, self.start).strip():
            raise InputError(f"prompt.start={self.start} needs prompt.{self.start}; set it")

    def needs_decoder(self, *fields: str) -> None:
        """Raises InputError if one of these fields needs a decoder that the backbone lacks."""
        for field in fields:
            value = getattr(self, field)
            if value and not self.dims.decoder_layers:
                raise InputError(
                    f"prompt.{field}={value!r} needs an encoder-decoder, which this backbone is "
                    "not; leave it out or use a T5"
                )

    def check(self) -> None:
        """Raises InputError if a hyperparameter is out of range."""

    def objectives(self) -> list[Objective]:
        """Returns its additional terms of the loss, besides those of the head."""
        return []

    def modules(self) -> dict[str, nn.Module]:
        """Returns the modules for its objectives, by `Objective.head`.

        They are called like a head, and their parameters are under head/<name>/.
        """
        return {}

    def begin(self, params: dict[str, Any], source: Source) -> dict[str, Any]:
        """Replaces randomly initialised parameters by those of the source. -> params"""
        del source
        return params

    def with_base(self, params: dict[str, Any], take: Take) -> dict[str, Any]:
        """Adds the leaves `base` from another export, which are in no checkpoint and no export.

        They never train, whatever the patterns say. -> params
        """
        del take
        return params

    @nn.nowrap  # as `__init_subclass__` does for others
    def exported(self, params: dict[str, Any]) -> dict[str, Any]:
        """Removes what an export need not contain because `with_base` restores it. -> params"""
        own = (part for part in self.components() if part.name in params)
        return params | {part.name: part.method.exported(params[part.name]) for part in own}

    def __call__(self, batch: Batch, embed, *, deterministic: bool) -> Injection:
        """Returns the injection for the backbone; `embed` are its word embeddings [V, E]."""
        raise TypeError(f"{type(self).__name__} must define __call__")


def idle_fields(part: Any) -> list[tuple[str, str]]:
    """Lists the fields of a method or head that have no effect, each with the field that says so.

    READ_WITH says what fields need: {"start=normal": "scale"} means that `start` has this value, or
    one of several comma-separated ones; {"cross": "cross_layers"} that `cross` is neither 0 nor
    empty. Fields at their default are not listed.
    """
    default, found = {field.name: field.default for field in dataclasses.fields(part)}, []
    for need, names in part.READ_WITH.items():
        other, _, values = need.partition("=")
        value = getattr(part, other)
        if not (str(value) in values.split(",") if values else value):
            given = [name for name in names.split() if getattr(part, name) != default[name]]
            found += [(name, other) for name in given]
    return found


PARTS_FORM = "use methods and their fields, as in soft(length=5,start=labels)+prefix(length=8)"


def read_parts(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Parses methods and their fields: "soft(length=5,start=labels)+prefix". -> names, fields

    A string without quotes must be one word.

    Raises:
      InputError: if the string cannot be parsed.
    """
    try:
        # Parsed and never evaluated: the text may come from someone else's export.
        left, calls = ast.parse(text.strip(), mode="eval").body, []
        # a + b + c is (a + b) + c: the last part is outermost.
        while isinstance(left, ast.BinOp) and isinstance(left.op, ast.Add):
            calls.append(left.right)
            left = left.left
        return [_read_part(call) for call in [left, *reversed(calls)]]
    except (SyntaxError, ValueError, TypeError) as error:
        raise InputError(f"prompt.parts={text!r} cannot be read; {PARTS_FORM}") from error


def write_parts(parts: Sequence[Method]) -> str:
    """Formats methods and their fields for `read_parts`."""
    shown = []
    for part in parts:
        # `seen` is of all parts together, and stands beside this text.
        fields = {k: v for k, v in part.block().items() if k not in ("name", "seen")}
        own = ",".join(f"{field}={value!r}" for field, value in fields.items())
        shown.append(f"{part.block()['name']}({own})")
    return "+".join(shown)


def _read_part(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if isinstance(node, ast.Name):
        return node.id, {}
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise ValueError
    # A bare word is a text: start=labels needs no quotes.
    value = lambda x: x.id if isinstance(x, ast.Name) else ast.literal_eval(x)
    fields: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError
        fields[keyword.arg] = value(keyword.value)
    return node.func.id, fields


_NO_TASK = Asks()


def make_prompt(
    name: str, dims: Dims, asks: Asks = _NO_TASK, init: str = "", seen: str = "", **fields: Any
) -> Method:
    """Creates a method by name.

    `init`, the export that its parameters are read from, is not a hyperparameter.

    Raises:
      InputError: if the name is unknown, or a hyperparameter is unknown, of another type or out of
        range.
    """
    if name not in METHODS.names():
        raise InputError(f"unknown method prompt.name={name!r}; {nearest(name, METHODS.names())}")
    cls = METHODS.load(name)
    types = typing.get_type_hints(cls)  # strings, in a module with `annotations` of __future__
    own = {f.name: types[f.name] for f in dataclasses.fields(cls)}
    known = {field: own[field] for field in own if field not in _GIVEN}
    for field, value in fields.items():
        if field not in known:
            raise InputError(f"method {name!r} has no field {field!r}; {nearest(field, known)}")
        check_kind(f"prompt.{field}", value, known[field])
    check_kind("prompt.init", init, str)
    check_kind("prompt.seen", seen, str)
    if init and cls.INIT != "init":
        raise InputError(
            f"prompt.init={init}: the method {name!r} is initialised from an export with "
            f"prompt.{cls.INIT}; set that instead"
        )
    # None of a module whose method calls this.
    prompt = cls(dims=dims, seen=seen, parent=None, **fields)
    prompt.check()
    return with_task(prompt, asks)


class OnePart(NamedTuple):
    """One of several methods that are combined."""

    name: str  # its method's, "soft-2" where that is there again: its numbers are prompt/<name>/
    method: Method
    init: str  # the export that it starts from; "" = what its fields say


# Kept, since nearly every hook asks for the parts anew.
@functools.cache
def make_parts(text: str, dims: Dims, asks: Asks, seen: str = "") -> tuple[OnePart, ...]:
    """Creates the methods of a string for `read_parts`.

    Raises:
      InputError: names the component, for invalid fields.
    """
    found: list[OnePart] = []
    for kind, fields in read_parts(text):
        known = sum(part.name.partition("-")[0] == kind for part in found)
        name, init = f"{kind}-{known + 1}" if known else kind, str(fields.pop("init", ""))
        if kind == "compose":
            raise InputError(f"prompt.parts={text!r} contains compose itself; {PARTS_FORM}")
        try:
            part = make_prompt(kind, dims, asks, init, seen, **fields)
            found.append(OnePart(name, part, init))
        except InputError as error:
            raise InputError(f"prompt.parts, {name}: {error}") from error
    return tuple(found)


def with_task(prompt: Method, asks: Asks) -> Method:
    """Passes the task to a method that depends on it."""
    return prompt.clone(asks=asks) if hasattr(prompt, "asks") else prompt
