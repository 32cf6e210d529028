"""What every block of a config is: a frozen dataclass, read from a mapping and written as one."""

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any, Self

from jaxprompt.config import kinds
from jaxprompt.errors import InputError, brief, check_kind, nearest

Declared = kinds.Field | type["Block"] | kinds.Open


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
        for name in sorted(set(declared) - set(values)):
            if isinstance(declared[name], kinds.Open):  # which has no default
                raise InputError(
                    f"config field {prefix}{name} is missing; `train --help` lists them all"
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
          changes: values by dotted name, as "optim.lr".
        """
        values = self.to_dict()
        for name, value in changes.items():
            *blocks, last = name.split(".")
            block = values
            for part in blocks:
                block = block[part]
            block[last] = value
        return type(self).from_dict(values)


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
    if not isinstance(value, Mapping):
        raise InputError(f"config field {name}={brief(value)} must be a block of fields")
    if isinstance(declared, kinds.Open):
        check_kind(f"{name}.name", value.get("name"), str)
        return OpenBlock.from_dict(value)
    return declared.from_dict(value, f"{name}.")


def declared_leaves(block: type[Block], prefix: str = "") -> Iterator[tuple[str, kinds.Field]]:
    """Yields every field by dotted name, but for those of open blocks."""
    for name, declared in block.declared().items():
        if isinstance(declared, kinds.Field):
            yield prefix + name, declared
        elif not isinstance(declared, kinds.Open):
            yield from declared_leaves(declared, f"{prefix}{name}.")
