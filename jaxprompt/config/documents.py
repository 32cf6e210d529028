"""JSON documents of the project: frozen dataclasses that are checked when they are read."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self, TypeVar, cast

from jaxprompt.config import kinds
from jaxprompt.config.block import Block, OpenBlock
from jaxprompt.errors import InputError, brief, is_kind, nearest

T = TypeVar("T")

_NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # floats that `files.dumps` writes as strings
_SHOWN = {str: "text", bool: "true or false", int: "a whole number below 2**63", float: "a number"}


class Document:
    """Base class of frozen dataclasses that are stored as JSON objects, with fields in order.

    A field may hold strings, numbers, tuples, mappings with string keys, dataclasses, named
    tuples, config blocks, `object` for any JSON, and None as an alternative to one of these. A
    field that is declared like a config field is checked like one. Fields at their defaults are
    left out of the JSON.
    """

    FIX: ClassVar[str] = "write it again"  # how to fix a file that was changed or damaged
    OPEN: ClassVar[bool] = False  # unknown fields are ignored, not refused

    @classmethod
    def from_json(cls, values: Mapping[str, object], path: str | Path) -> Self:
        """Makes a document from a JSON object; missing fields have their defaults.

        Args:
          values: by field.
          path: the file that the object comes from, for messages.

        Raises:
          InputError: for a field that is unknown, missing, or of another type.
        """
        try:
            return _read_object("", cls, values)
        except ValueError as error:
            message = str(error).removeprefix("config field ")
            raise InputError(f"{path}: {message}; {cls.FIX}") from error

    def to_json(self) -> dict[str, object]:
        """Returns the values by field as JSON types; non-finite floats stay floats."""
        assert dataclasses.is_dataclass(self)
        return {
            field.name: to_plain(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if _is_required(field) or getattr(self, field.name) != _default(field)
        }


def to_plain(value: object) -> object:
    """Returns a value with documents and dataclasses as dicts, and tuples as lists."""
    if isinstance(value, Document):
        return value.to_json()
    if isinstance(value, Block | OpenBlock):
        return to_plain(value.to_dict())
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return to_plain(value._asdict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {x.name: to_plain(getattr(value, x.name)) for x in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: to_plain(part) for name, part in value.items()}
    return [to_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _is_required(field: dataclasses.Field[object]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _default(field: dataclasses.Field[object]) -> object:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def _read_object(prefix: str, kind: type[T], values: Mapping[str, object]) -> T:
    """Makes a dataclass from a JSON object. Raises ValueError, which names the field."""
    if issubclass(kind, OpenBlock):
        _read(f"{prefix}name", str, values.get("name"))
        return kind.from_dict(cast(Mapping[str, kinds.Value], values))
    if issubclass(kind, Block):
        return kind.from_dict(values, prefix)
    hints = typing.get_type_hints(kind)
    fields = {x.name: x for x in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}
    if not getattr(kind, "OPEN", False):
        for name in values:
            if name not in hints:
                raise ValueError(f"unknown field {brief(prefix + name)}; {nearest(name, hints)}")
    for name in fields or hints:
        if name not in values and (not fields or _is_required(fields[name])):
            raise ValueError(f"the field {prefix}{name} is missing")
    arguments: dict[str, object] = {}
    for name in values.keys() & (fields or hints):
        declared = fields[name].metadata.get(kinds.DECLARED) if fields else None
        if declared is not None:
            kinds.check_value(prefix + name, declared, values[name])
            arguments[name] = kinds.as_declared(declared, values[name])
        else:
            arguments[name] = _read(prefix + name, hints[name], values[name])
    return kind(**arguments)


def _read(name: str, hint: type, value: object) -> object:
    """Returns a JSON value converted to the type `hint`. Raises ValueError for another type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):  # of a type and None
        return None if value is None else _read(name, args[0], value)
    if origin is tuple:
        is_variadic = len(args) == 2 and args[1] is ...
        if not isinstance(value, list | tuple) or not (is_variadic or len(value) == len(args)):
            raise ValueError(f"{name}={brief(value)} must be a list")
        hints = args[:1] * len(value) if is_variadic else args
        pairs = enumerate(zip(hints, value, strict=True))
        return tuple(_read(f"{name}.{i}", kind, part) for i, (kind, part) in pairs)
    if origin is not None or dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
        if not isinstance(value, Mapping):
            raise ValueError(f"{name}={brief(value)} must be an object")
        if origin is None:
            return _read_object(f"{name}.", hint, value)
        return {key: _read(f"{name}.{key}", args[1], part) for key, part in value.items()}
    if hint is float and value in _NOT_FINITE:
        return float(cast(str, value))
    is_float = hint is float and isinstance(value, float)
    is_huge = hint is int and isinstance(value, int) and abs(value) >= 2**63
    if hint is not object and not is_float and (is_huge or not is_kind(value, hint)):
        raise ValueError(f"{name}={brief(value)} must be {_SHOWN[hint]}")
    return value
