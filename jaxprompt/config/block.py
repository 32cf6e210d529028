"""What every block of a config is: a frozen dataclass, read from a mapping and written as one."""

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from jaxprompt.config import kinds
from jaxprompt.errors import InputError, brief, check_kind, choose, nearest

Declared = kinds.Field | type["Block"] | kinds.Open | kinds.Choice


@dataclasses.dataclass(frozen=True)
class Block:
    """Fields, each declared by a function of `kinds`, and blocks of them."""

    @classmethod
    @functools.cache
    def declared(cls) -> dict[str, Declared]:
        """Returns what each field may hold, or the class of the block that it is."""
        return {part.name: part.metadata[kinds.DECLARED] for part in dataclasses.fields(cls)}

    @classmethod
    def note(cls) -> str:
        """Returns what the block is for, in a line."""
        text = " ".join((cls.__doc__ or "").split()).removesuffix(".")
        return text[:1].lower() + text[1:]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], prefix: str = "") -> Self:
        """Makes a block of plain values; a field that is missing has its default.

        Args:
          values: by field; a list is a tuple, as JSON has it.
          prefix: the dotted name of the block and a dot, for messages.

        Raises:
          InputError: for the first field that is unknown, or not of its kind and range.
        """
        declared = cls.declared()
        for name in sorted(set(values) - set(declared)):
            raise InputError(
                f"unknown config field {brief(prefix + name)}; {nearest(name, declared)}"
            )
        read = {name: _read(prefix + name, declared[name], x) for name, x in values.items()}
        return cls(**read)

    def to_dict(self) -> dict[str, Any]:
        """Returns the values by field, those of blocks as dicts; tuples stay."""
        values = ((name, getattr(self, name)) for name in self.declared())
        return {name: x.to_dict() if isinstance(x, Block | OpenBlock) else x for name, x in values}

    def to_json(self) -> str:
        """Returns the values as JSON, from which `from_dict` makes an equal block."""
        return json.dumps(self.to_dict())

    def leaves(self, prefix: str = "") -> dict[str, Any]:
        """Returns the values of all fields by dotted name, those of blocks inside."""
        found: dict[str, Any] = {}
        for name in self.declared():
            value = getattr(self, name)
            if isinstance(value, Block):
                found |= value.leaves(f"{prefix}{name}.")
            elif isinstance(value, OpenBlock):
                found |= {f"{prefix}{name}.{key}": x for key, x in value.to_dict().items()}
            else:
                found[prefix + name] = value
        return found

    def replace(self, changes: Mapping[str, Any]) -> Self:
        """Returns a copy with other values of some fields, which are checked.

        Args:
          changes: values by dotted name, as "optim.lr"; a name alone for a block that is chosen by
            name, whose fields may be among the changes.
        """
        values = self.to_dict()
        # A block comes before its fields.
        for name, value in sorted(changes.items(), key=lambda change: change[0].count(".")):
            *blocks, last = name.split(".")
            block = values
            for part in blocks:
                block = block[part]
            chosen = isinstance(block.get(last), dict) and isinstance(value, str)
            block[last] = {"name": value} if chosen else value
        return type(self).from_dict(values)


@dataclasses.dataclass(frozen=True)
class Option(Block):
    """One of several blocks that a field chooses from by name."""

    name: ClassVar[str] = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns the name and the values by field."""
        return {"name": self.name, **super().to_dict()}

    def leaves(self, prefix: str = "") -> dict[str, Any]:
        """Returns the name and the values of all fields by dotted name."""
        return {f"{prefix}name": self.name, **super().leaves(prefix)}


@dataclasses.dataclass(frozen=True)
class OpenBlock:
    """A name, and the fields of the class that it names: a method, or a head."""

    name: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Makes a block of a name and values by field; a list is a tuple, as JSON has it."""
        fields = {field: kinds.plain(value) for field, value in values.items()}
        return cls(fields.pop("name"), fields)

    def __hash__(self) -> int:
        """Hashes what `__eq__` compares, so that what is made of a block can be cached by it."""
        return hash((self.name, tuple(sorted(self.fields.items()))))

    def get(self, field: str, default: Any = None) -> Any:
        """Returns the value of a field, `default` where the class has no such field."""
        return self.fields.get(field, default)

    def to_dict(self) -> dict[str, Any]:
        """Returns the name and the values by field."""
        return {"name": self.name, **self.fields}


def _read(name: str, declared: Declared, value: Any) -> Any:
    """Returns a checked value of the field `name`, as its dataclass holds it."""
    if isinstance(declared, kinds.Field):
        kinds.check_value(name, declared, value)
        return kinds.as_declared(declared, value)
    if isinstance(declared, kinds.Choice) and isinstance(value, str):
        value = {"name": value}  # at its defaults
    if not isinstance(value, Mapping):
        raise InputError(f"config field {name}={brief(value)} must be a block of fields")
    if isinstance(declared, kinds.Choice):
        return _read_option(name, declared, value)
    if isinstance(declared, kinds.Open):
        check_kind(f"{name}.name", value.get("name"), str)
        return OpenBlock.from_dict(value)
    return declared.from_dict(value, f"{name}.")


def _read_option(name: str, declared: kinds.Choice, value: Mapping[str, Any]) -> Option:
    fields = dict(value)
    option = declared.options[choose(f"{name}.name", fields.pop("name", ""), declared.options)]
    for field in sorted(set(fields) - set(option.declared())):
        raise other_option(f"{name}.{field}", option.name, declared)
    return option.from_dict(fields, f"{name}.")


def other_option(field: str, name: str, declared: kinds.Choice) -> InputError:
    """Makes the error of a field, by its dotted name, that the option `name` does not have."""
    block, _, last = field.rpartition(".")
    owners = [other for other, option in declared.options.items() if last in option.declared()]
    fields = declared.options[name].declared()
    has = f"{block}.name={name} has {', '.join(fields) or 'no fields'}"
    if not owners:
        return InputError(f"unknown config field {brief(field)}; {has}")
    return InputError(f"config field {field!r} is of {block}.name={' or '.join(owners)}; {has}")


def declared_leaves(block: type[Block], prefix: str = "") -> Iterator[tuple[str, kinds.Field]]:
    """Yields every field by dotted name, but for those of open blocks and of single options."""
    for name, declared in block.declared().items():
        if isinstance(declared, kinds.Field):
            yield prefix + name, declared
        elif isinstance(declared, kinds.Choice):
            default = next(iter(declared.options))
            words = tuple(declared.options)
            yield f"{prefix}{name}.name", kinds.Field(str, default, declared.note, words)
        elif not isinstance(declared, kinds.Open):
            yield from declared_leaves(declared, f"{prefix}{name}.")
