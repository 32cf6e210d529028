"""Kinds of fields: each declares a field of a dataclass, with its range or words and its help.

Nothing heavy is imported: a config is read and its help is shown with JAX unloaded.
"""

import dataclasses
import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxprompt.errors import InputError, brief, check_kind, choose
from jaxprompt.files import user_path

RANGES = {
    "at least 0": lambda x: x >= 0,
    "at least 1": lambda x: x >= 1,
    "above 0": lambda x: x > 0,
    "in [0, 1)": lambda x: 0 <= x < 1,
    "in (0, 1]": lambda x: 0 < x <= 1,
    "in [0, 2**32)": lambda x: 0 <= x < 2**32,
}
SEED = "in [0, 2**32)"


class Words(NamedTuple):
    """The words that a module knows; it is imported when they are asked for."""

    module: str  # within jaxprompt
    name: str  # of a collection, or of a function that gives one

    def read(self) -> tuple[str, ...]:
        """Imports the module. -> its words"""
        known = getattr(importlib.import_module(f"jaxprompt.{self.module}"), self.name)
        return tuple(known() if callable(known) else known)


class Field(NamedTuple):
    """What a field may hold."""

    kind: type
    default: Any
    note: str
    limit: str | Sequence[str] | Words = ""  # a key of RANGES, or the known words
    optional: bool = False  # None, of a number; "", of a word
    many: bool = False  # a tuple of such values
    is_path: bool = False  # or what may stand in its place: hub:..., pkg:..., a pattern
    is_pattern: bool = False  # regular expressions

    @property
    def words(self) -> tuple[str, ...]:
        """The words that it may hold; () = it is no word."""
        if isinstance(self.limit, Words):
            return self.limit.read()
        return () if isinstance(self.limit, str) else tuple(self.limit)


class Open(NamedTuple):
    """A block whose fields are those of the class that it names."""

    kind: str  # "prompt" or "head"


class Choice(NamedTuple):
    """A block whose fields are those of the option that it names."""

    options: Mapping[str, type]
    note: str


DECLARED = "declared"  # key of a dataclass field's metadata


# -- kinds of fields ------------------------------------------------------------------------------


def _declare(field: Field) -> Any:
    return dataclasses.field(default=field.default, metadata={DECLARED: field})


def block(kind: type) -> Any:
    """Declares a block of fields, at their defaults by default."""
    return dataclasses.field(default_factory=kind, metadata={DECLARED: kind})


def open_block(kind: str) -> Any:
    """Declares a block whose fields are those of the class that it names; it has no default."""
    return dataclasses.field(kw_only=True, metadata={DECLARED: Open(kind)})


def choice(options: Mapping[str, type], note: str) -> Any:
    """Declares a block that is one of several, by default the first, each with its own fields."""
    declared = Choice(options, note)
    return dataclasses.field(
        default_factory=next(iter(options.values())), metadata={DECLARED: declared}
    )


def text(default: str, note: str) -> Any:
    """Declares any text."""
    return _declare(Field(str, default, note))


def texts(default: Sequence[str], note: str, *, is_pattern: bool = False) -> Any:
    """Declares several texts."""
    return _declare(Field(tuple, tuple(default), note, is_pattern=is_pattern))


def path(default: str, note: str) -> Any:
    """Declares a path, or what may stand in its place."""
    return _declare(Field(str, default, note, is_path=True))


def flag(default: bool, note: str) -> Any:
    """Declares yes or no."""
    return _declare(Field(bool, default, note))


def word(default: str, words: Sequence[str] | Words, note: str) -> Any:
    """Declares one of some words; "" is one only where it is the default."""
    return _declare(Field(str, default, note, words, optional=default == ""))


def whole(default: int, note: str, limit: str = "") -> Any:
    """Declares a whole number."""
    return _declare(Field(int, default, note, limit))


def count(default: int, note: str) -> Any:
    """Declares a whole number from 0 on."""
    return whole(default, note, "at least 0")


def size(default: int, note: str) -> Any:
    """Declares a whole number from 1 on."""
    return whole(default, note, "at least 1")


def number(default: float | None, note: str, limit: str = "at least 0") -> Any:
    """Declares a number; None is one only where it is the default."""
    return _declare(Field(float, default, note, limit, optional=default is None))


def share(default: float | None, note: str) -> Any:
    """Declares a number in [0, 1)."""
    return number(default, note, "in [0, 1)")


def option(default: Any, note: str) -> Any:
    """Declares a field of a method or a head, of its default's type; the class checks its range."""
    return _declare(Field(type(default), default, note))


def several(one: Any) -> Any:
    """Declares several such values, by default none."""
    return _declare(one.metadata[DECLARED]._replace(default=(), many=True))


# -- checks ---------------------------------------------------------------------------------------


def check_value(name: str, field: Field, value: Any) -> None:
    """Raises InputError where the value of a field, by its dotted name, is not what it may be."""
    if type(value) is field.kind and value == field.default:
        return  # no module is imported for its words
    if field.optional and value == (None if field.kind is float else ""):
        return
    if field.many:
        if not isinstance(value, tuple | list):
            raise InputError(f"config field {name}={brief(value)} must be a list")
        for part in value:
            check_value(name, field._replace(many=False), part)
        return
    check_kind(name, value, field.kind)
    if field.is_path:
        user_path(value, f"config field {name}:")
    # Whole numbers are int32 on the devices; seeds have a range of their own.
    if field.kind is int and field.limit != SEED and abs(value) >= 2**31:
        raise InputError(f"{name}={brief(value)} must be below 2**31")
    if not isinstance(field.limit, str):
        choose(name, value, field.words)
    elif field.limit and not RANGES[field.limit](value):
        raise InputError(f"{name}={brief(value)} must be {field.limit}")
    for pattern in value if field.is_pattern else ():
        try:
            re.compile(pattern)
        # Python's own parser has the second for a repetition of more than 2**32.
        except (re.error, OverflowError, RecursionError) as error:
            raise InputError(
                f"{name}: {brief(pattern)} is no regular expression ({error})"
            ) from error


def as_declared(field: Field, value: Any) -> Any:
    """Returns a checked value as a dataclass holds it: lists as tuples, whole numbers as floats."""
    value = plain(value)
    if field.many:
        return tuple(as_declared(field._replace(many=False), part) for part in value)
    if field.kind is float and value is not None:
        return float(value)
    return value


def plain(value: Any) -> Any:
    """Returns a value with tuples in the place of lists."""
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value
