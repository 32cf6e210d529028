"""Kinds of fields: each declares a dataclass field with its range or allowed words and its help.

Imports nothing heavy: configs are read and their help is shown without loading JAX.
"""

import dataclasses
import importlib
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast, overload

from jaxprompt.errors import InputError, brief, check_kind, check_known, nearest
from jaxprompt.files import user_path

Value: TypeAlias = bool | int | float | str | tuple["Value", ...] | None  # of a field
T = TypeVar("T")

RANGES = {
    "at least -1": lambda x: x >= -1,
    "at least 0": lambda x: x >= 0,
    "at least 1": lambda x: x >= 1,
    "above 0": lambda x: x > 0,
    "in [0, 1)": lambda x: 0 <= x < 1,
    "in (0, 1)": lambda x: 0 < x < 1,
    "in (0, 1]": lambda x: 0 < x <= 1,
    "in [0, 2**32)": lambda x: 0 <= x < 2**32,
}
SEED = "in [0, 2**32)"


class ImportedWords(NamedTuple):
    """Allowed words that a module defines; the module is imported only when they are needed."""

    module: str  # within jaxprompt
    name: str  # of a collection, or of a function that returns one

    def read(self) -> tuple[str, ...]:
        """Imports the module and returns its words."""
        words = getattr(importlib.import_module(f"jaxprompt.{self.module}"), self.name)
        return tuple(words() if callable(words) else words)


class Field(NamedTuple):
    """Declaration of a field: its type, default, help and allowed values."""

    kind: type
    default: Value
    note: str
    limit: str | Sequence[str] | ImportedWords = ""  # a key of RANGES, or the allowed words
    optional: bool = False  # also allows None for a number, "" for a word
    many: bool = False  # a tuple of such values
    is_path: bool = False  # or something in place of a path: hub:..., pkg:..., a pattern
    is_pattern: bool = False  # regular expressions

    @property
    def words(self) -> tuple[str, ...]:
        """The allowed words; () = the field is not a word."""
        if isinstance(self.limit, ImportedWords):
            return self.limit.read()
        return () if isinstance(self.limit, str) else tuple(self.limit)


DECLARED = "declared"  # key of a dataclass field's metadata


# -- kinds of fields ------------------------------------------------------------------------------


def _declare(field: Field, default: T) -> T:
    declared = dataclasses.field(default=field.default, metadata={DECLARED: field})
    return cast(T, declared)  # as in the type of dataclasses.field


def text(default: str, note: str) -> str:
    """Declares a string."""
    return _declare(Field(str, default, note), default)


def texts(default: Sequence[str], note: str, *, is_pattern: bool = False) -> tuple[str, ...]:
    """Declares a list of strings."""
    default = tuple(default)
    return _declare(Field(tuple, default, note, is_pattern=is_pattern), default)


def path(default: str, note: str) -> str:
    """Declares a path, or something in its place: hub:..., pkg:..., a pattern."""
    return _declare(Field(str, default, note, is_path=True), default)


def flag(default: bool, note: str) -> bool:
    """Declares a bool."""
    return _declare(Field(bool, default, note), default)


def word(default: str, words: Sequence[str] | ImportedWords, note: str) -> str:
    """Declares one of several words; "" is allowed only if it is the default."""
    return _declare(Field(str, default, note, words, optional=default == ""), default)


def whole(default: int, note: str, limit: str = "") -> int:
    """Declares an integer."""
    return _declare(Field(int, default, note, limit), default)


def count(default: int, note: str) -> int:
    """Declares an integer of at least 0."""
    return whole(default, note, "at least 0")


def size(default: int, note: str) -> int:
    """Declares an integer of at least 1."""
    return whole(default, note, "at least 1")


@overload
def number(default: float, note: str, limit: str = "at least 0") -> float: ...
@overload
def number(default: None, note: str, limit: str = "at least 0") -> float | None: ...
def number(default: float | None, note: str, limit: str = "at least 0") -> float | None:
    """Declares a float; None is allowed only if it is the default."""
    return _declare(Field(float, default, note, limit, optional=default is None), default)


@overload
def share(default: float, note: str) -> float: ...
@overload
def share(default: None, note: str) -> float | None: ...
def share(default: float | None, note: str) -> float | None:
    """Declares a float in [0, 1)."""
    return number(default, note, "in [0, 1)")


def option(default: T, note: str, limit: str | Sequence[str] = "") -> T:
    """Declares a field of a method or head, of the type of its default; `limit` as in `Field`."""
    return _declare(Field(type(default), cast(Value, default), note, limit), default)


def several(one: T | None) -> tuple[T, ...]:
    """Declares a list of such values, by default empty."""
    declared = cast(dataclasses.Field[T], one).metadata[DECLARED]
    return _declare(declared._replace(default=(), many=True), ())


# -- checks ---------------------------------------------------------------------------------------


def check_value(name: str, field: Field, value: object) -> None:
    """Raises InputError if the value of a field, given by its dotted name, is not allowed."""
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
        user_path(str(value), f"config field {name}:")
    # Integers are int32 on the devices; seeds have a separate range.
    if isinstance(value, int) and field.limit != SEED and abs(value) >= 2**31:
        raise InputError(f"{name}={brief(value)} must be below 2**31")
    if not isinstance(field.limit, str):
        check_known(name, value, field.words)
    elif field.limit and not RANGES[field.limit](value):
        raise InputError(f"{name}={brief(value)} must be {field.limit}")
    if field.is_pattern and isinstance(value, tuple | list):
        for pattern in value:
            try:
                re.compile(pattern)
            # The last two are raised for patterns that are too large or nested too deeply.
            except (re.error, OverflowError, RecursionError) as error:
                raise InputError(
                    f"{name}: {brief(pattern)} is not a valid regular expression ({error}); "
                    "correct it"
                ) from error


def check_fields(
    block: str, name: str, owner: Any, values: Mapping[str, object], hidden: Collection[str] = ()
) -> None:
    """Checks the fields of a method or head, by the limits that its class declares.

    Args:
      block: "prompt" or "head", for messages.
      name: of the method or head.
      owner: its class. A field that is not declared only has its type hint.
      values: by field.
      hidden: fields of the class that are no fields of the config.

    Raises:
      InputError: if the class lacks a field, or a value is not allowed.
    """
    fields = {x.name: x.metadata for x in dataclasses.fields(owner) if x.name not in hidden}
    hints = typing.get_type_hints(owner)  # works with `from __future__ import annotations`
    for field, value in values.items():
        if field not in fields:
            raise InputError(
                f"{block}.name={name} has no field {field!r}; {nearest(field, fields)}"
            )
        declared = fields[field].get(DECLARED) or Field(hints[field], None, "")
        check_value(f"{block}.{field}", declared, value)


def as_declared(field: Field, value: object) -> Value:
    """Returns a checked value in the type of its field: lists as tuples, integers as floats."""
    if isinstance(value, list | tuple):
        one = field._replace(many=False) if field.many else field._replace(kind=str)
        return tuple(as_declared(one, part) for part in value)
    if field.kind is float and isinstance(value, int | float):
        return float(value)
    return cast(Value, value)


def plain(value: object) -> Value:
    """Returns a value with its lists converted to tuples."""
    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    return cast(Value, value)


def holds_block(value: object) -> bool:
    """Returns whether a value is a block of fields, or a list that contains one."""
    if isinstance(value, list | tuple):
        return any(map(holds_block, value))
    return hasattr(value, "items")  # a ConfigDict is not a Mapping
