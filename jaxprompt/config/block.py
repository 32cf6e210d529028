"""Base classes of config blocks: frozen dataclasses that are read from and written to mappings."""

import dataclasses
import functools
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias, TypeVar, cast, overload

from ml_collections import ConfigDict

from jaxprompt.config import kinds
from jaxprompt.errors import InputError, brief, check_kind, check_known, nearest

T = TypeVar("T")
Values: TypeAlias = "dict[str, kinds.Value | Values]"  # of a block, by field


class Open(NamedTuple):
    """A block with the fields of the class that its `name` selects."""

    kind: str  # "prompt" or "head"


class Choice(NamedTuple):
    """A block with the fields of the option that its `name` selects."""

    options: Mapping[str, type["Option"]]
    note: str


Declared: TypeAlias = "kinds.Field | type[Block] | Open | Choice"


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of fields, each declared by a function of `kinds`, and of nested blocks."""

    @classmethod
    @functools.cache
    def declared(cls) -> dict[str, Declared]:
        """Returns the declaration of each field, or the class of a nested block."""
        return {part.name: part.metadata[kinds.DECLARED] for part in dataclasses.fields(cls)}

    @classmethod
    def note(cls) -> str:
        """Returns a one-line description of the block."""
        text = " ".join((cls.__doc__ or "").split()).removesuffix(".")
        return text[:1].lower() + text[1:]

    @classmethod
    def from_dict(cls, values: Mapping[str, object], prefix: str = "") -> Self:
        """Makes a block from plain values; missing fields have their defaults.

        Args:
          values: by field; lists, as in JSON, become tuples.
          prefix: the dotted name of the block and a dot, for messages.

        Raises:
          InputError: for the first field that is unknown, or has a wrong type or value.
        """
        declared = cls.declared()
        for name in sorted(set(values) - set(declared)):
            raise InputError(
                f"unknown config field {brief(prefix + name)}; {nearest(name, declared)}"
            )
        for name in sorted(set(declared) - set(values)):
            if isinstance(declared[name], Open):  # which has no default
                raise InputError(
                    f"config field {prefix}{name} is missing; `train --help=all` lists them all"
                )
        return cls(**{name: _read(prefix + name, declared[name], x) for name, x in values.items()})

    def to_dict(self) -> Values:
        """Returns the values by field, with blocks as dicts; tuples stay tuples."""
        values = ((name, getattr(self, name)) for name in self.declared())
        return {name: x.to_dict() if isinstance(x, Block | OpenBlock) else x for name, x in values}

    def to_json(self) -> str:
        """Returns the values as JSON, which `from_dict` turns back into an equal block."""
        return json.dumps(self.to_dict())

    def leaves(self, prefix: str = "") -> dict[str, kinds.Value]:
        """Returns the values of all fields, those of nested blocks too, by dotted name."""
        return flatten_config(self.to_dict(), prefix)

    def replace(self, changes: Mapping[str, object]) -> Self:
        """Returns a copy with some fields changed; the new values are checked.

        Args:
          changes: values by dotted name, e.g. "optim.lr". For a block that is chosen by name the
            value is that name, and its fields may be among the changes.
        """
        values = self.to_dict()
        # Blocks are replaced before their fields.
        for name, value in sorted(changes.items(), key=lambda change: change[0].count(".")):
            *blocks, last = name.split(".")
            block = values
            for part in blocks:
                block = cast(Values, block[part])
            chosen = isinstance(block.get(last), dict) and isinstance(value, str)
            block[last] = {"name": str(value)} if chosen else kinds.plain(value)
        return type(self).from_dict(values)


@dataclasses.dataclass(frozen=True)
class Option(Block):
    """One of several blocks that a field selects by name."""

    name: ClassVar[str] = ""

    def to_dict(self) -> Values:
        """Returns the name and the values by field."""
        return {"name": self.name, **super().to_dict()}


@dataclasses.dataclass(frozen=True)
class OpenBlock:
    """The name of a method or a head, and the fields of its class."""

    name: str
    fields: Mapping[str, kinds.Value] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: Mapping[str, kinds.Value]) -> Self:
        """Makes a block from a name and values by field; lists, as in JSON, become tuples."""
        fields = {field: kinds.plain(value) for field, value in values.items()}
        return cls(str(fields.pop("name")), fields)

    def __hash__(self) -> int:
        """Hashes the same values as `__eq__`, so that blocks can be keys of caches."""
        return hash((self.name, tuple(sorted(self.fields.items()))))

    @overload
    def get(self, field: str) -> kinds.Value: ...
    @overload
    def get(self, field: str, default: T) -> T: ...
    def get(self, field: str, default: T | None = None) -> T | kinds.Value:
        """Returns the value of a field, or `default` if the class has no such field."""
        return self.fields.get(field, default)

    def to_dict(self) -> Values:
        """Returns the name and the values by field."""
        return {"name": self.name, **self.fields}


def nested(kind: type[T]) -> T:
    """Declares a nested block; by default all its fields have their defaults."""
    return dataclasses.field(default_factory=kind, metadata={kinds.DECLARED: kind})


def open_block(kind: str) -> OpenBlock:
    """Declares a block with the fields of the class that it names; it has no default."""
    return cast(OpenBlock, dataclasses.field(kw_only=True, metadata={kinds.DECLARED: Open(kind)}))


def choice(default: type[T], *others: type[Option], note: str) -> T:
    """Declares a block that is one of several options, each with different fields."""
    options = {option.name: option for option in (cast(type[Option], default), *others)}
    declared = {kinds.DECLARED: Choice(options, note)}
    return dataclasses.field(default_factory=default, metadata=declared)


def flatten_config(config: Mapping[str, Any] | ConfigDict, prefix: str = "") -> dict[str, Any]:
    """Lists the leaves of a ConfigDict, or of nested mappings, by dotted name."""
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping | ConfigDict):
            leaves |= flatten_config(value, f"{prefix}{key}.")
        else:
            leaves[prefix + key] = value
    return leaves


def _read(name: str, declared: Declared, value: object) -> object:
    """Returns the checked value of the field `name` in the form that its dataclass stores."""
    if isinstance(declared, kinds.Field):
        value = kinds.plain(value)
        kinds.check_value(name, declared, value)
        return kinds.as_declared(declared, value)
    if isinstance(declared, Choice) and isinstance(value, str | None):
        value = {"name": value or next(iter(declared.options))}  # with default fields
    if not isinstance(value, Mapping):
        raise InputError(
            f"config field {name}={brief(value)} must be a block; give a dict of its fields"
        )
    if isinstance(declared, Choice):
        return _read_option(name, declared, value)
    if isinstance(declared, Open):
        check_kind(f"{name}.name", value.get("name"), str)
        for field, part in value.items():
            if kinds.holds_block(part):
                raise InputError(
                    f"config field {name}.{field}={brief(part)} contains a block; give a value"
                )
        return OpenBlock.from_dict(value)
    return declared.from_dict(value, f"{name}.")


def _read_option(name: str, declared: Choice, value: Mapping[str, object]) -> Option:
    fields = dict(value)
    option = declared.options[check_known(f"{name}.name", fields.pop("name", ""), declared.options)]
    for field in sorted(set(fields) - set(option.declared())):
        options = {name: option.declared() for name, option in declared.options.items()}
        raise other_option(f"{name}.{field}", option.name, options)
    return option.from_dict(fields, f"{name}.")


def other_option(field: str, name: str, options: Mapping[str, Collection[str]]) -> InputError:
    """Returns the error for a field, by its dotted name, that the option `name` does not have.

    `options` has the fields of each option of the block.
    """
    block, _, last = field.rpartition(".")
    owners = [other for other, fields in options.items() if last in fields]
    has = f"{block}.name={name} has the fields: {', '.join(options.get(name, ())) or 'none'}"
    if not owners:
        return InputError(f"unknown config field {brief(field)}; {has}")
    return InputError(
        f"config field {field!r} is only valid with {block}.name={' or '.join(owners)}; {has}"
    )


def declared_leaves(block: type[Block], prefix: str = "") -> Iterator[tuple[str, kinds.Field]]:
    """Yields every field by dotted name, except those of open blocks and of single options."""
    for name, declared in block.declared().items():
        if isinstance(declared, kinds.Field):
            yield prefix + name, declared
        elif isinstance(declared, Choice):
            default = next(iter(declared.options))
            words = tuple(declared.options)
            yield f"{prefix}{name}.name", kinds.Field(str, default, declared.note, words)
        elif not isinstance(declared, Open):
            yield from declared_leaves(declared, f"{prefix}{name}.")
