"""prompt.json, the metadata of an export: what its tensors belong to."""

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from jaxprompt.config import kinds
from jaxprompt.config.block import Block, OpenBlock
from jaxprompt.config.run import BackboneConfig, DataConfig, DemosConfig, GenerateConfig, TaskConfig
from jaxprompt.data.tasks.checks import check_task
from jaxprompt.data.tasks.task import Task
from jaxprompt.data.text.demos import COUNTS
from jaxprompt.documents import Document
from jaxprompt.errors import InputError, brief, is_kind
from jaxprompt.types import Dims

Metrics = Mapping[str, Mapping[str, float | None] | None]  # by split; None = it was not scored
_SIZE = kinds.Field(int, 0, "a size of the backbone", "at least 0")


def _as_in(config: type[Block], name: str, default: Any = dataclasses.MISSING) -> Any:
    """Declares a field that is checked as that of a config."""
    return dataclasses.field(default=default, metadata={kinds.DECLARED: config.declared()[name]})


@dataclass(frozen=True, kw_only=True)
class BackboneMetadata:
    """The backbone that a prompt was learned on."""

    id: str = _as_in(BackboneConfig, "path")
    revision: str = _as_in(BackboneConfig, "revision")
    family: str
    sentinel: str = _as_in(BackboneConfig, "sentinel")
    rescale: float = _as_in(BackboneConfig, "rescale")
    # Exports from before there were codes have no such field.
    quantize: str = _as_in(BackboneConfig, "quantize", "none")
    fingerprint: str  # SHA-256 of its weights
    dims: Dims
    # Digests, see data/text/identity.py.
    tokenizer: str | None = None
    layers: str | None = None

    def identity(self) -> dict[str, str]:
        """Returns the digests that there are, as `data.text.identity.identity_of` makes them."""
        digests = {"tokenizer": self.tokenizer, "layers": self.layers}
        return {name: digest for name, digest in digests.items() if digest is not None}


@dataclass(frozen=True, kw_only=True)
class LayoutMetadata:
    """How examples are laid out."""

    max_len: int = _as_in(DataConfig, "max_len")
    max_target: int = _as_in(DataConfig, "max_target")
    multiple: int = _as_in(DataConfig, "multiple")
    side: str = _as_in(DataConfig, "side")
    choices: int = kinds.size(1, "of an example")
    form: str = _as_in(TaskConfig, "form")
    answer: str = _as_in(TaskConfig, "answer")
    eos: bool = _as_in(TaskConfig, "eos")


@dataclass(frozen=True)
class DemoMetadata:
    """A demonstration."""

    fields: Mapping[str, str]  # its texts
    label: int


@dataclass(frozen=True, kw_only=True)
class DemosMetadata:
    """The demonstrations of a prompt, and how those of an example are chosen."""

    per_class: int = _as_in(DemosConfig, "per_class")
    total: int = _as_in(DemosConfig, "total")
    exact: int = _as_in(DemosConfig, "exact")
    samples: int = _as_in(DemosConfig, "samples")
    similar: float = _as_in(DemosConfig, "similar")
    encoder: str = _as_in(DemosConfig, "encoder")
    limit: int = _as_in(DemosConfig, "limit")
    own_limit: int = _as_in(DemosConfig, "own_limit")
    seed: int = _as_in(DataConfig, "seed")
    fingerprint: str  # of the sentence encoder; "" = there is none
    examples: tuple[DemoMetadata, ...]

    def check(self, task: Task) -> None:
        """Raises InputError where these are no demonstrations of a task."""
        counts = {name: getattr(self, name) for name in COUNTS}
        if sum(count > 0 for count in counts.values()) != 1:
            raise InputError(f"demos has {counts}, of which one must be above 0")
        if not self.examples:
            raise InputError("demos.examples is empty")
        for example in self.examples:
            has_texts = example.fields.keys() >= set(task.fields)
            if not has_texts or not 0 <= example.label < len(task.labels):
                raise InputError(
                    f"demos.examples has {brief(_write(example))}, which is none of the task"
                )


@dataclass(frozen=True, kw_only=True)
class OriginMetadata(Document):
    """An export that a prompt was initialized from."""

    path: str
    method: str
    task: str  # its name
    seed: int
    metrics: Metrics
    created: str
    sha256: str
    pretrained: Mapping[str, object] | None = None
    init: "OriginMetadata | None" = None  # the export that this one was initialized from
    more: tuple["OriginMetadata", ...] = ()  # the other exports of the same run


@dataclass(frozen=True, kw_only=True)
class PromptMetadata:
    """All that is needed to answer with the tensors of an export, and where they come from."""

    method: str
    hyper: OpenBlock  # the method in the config of the run
    prompt: OpenBlock  # the method whose parameters the tensors are
    head: OpenBlock
    backbone: BackboneMetadata
    task: Task
    template: str
    label_words: tuple[tuple[str, ...], ...] | None  # of each class; None = no verbalizer
    layout: LayoutMetadata
    generate: GenerateConfig
    metrics: Metrics
    seed: int
    versions: Mapping[str, str]  # of the packages that made it, see `package_versions`
    created: str  # time, ISO 8601
    demos: DemosMetadata | None = None
    init: OriginMetadata | None = None
    pretrained: Mapping[str, object] | None = None  # of `pretrain`
    step: int | None = None  # of the run
    # Installed packages that the method, the head and the backbone are from: their versions.
    plugins: Mapping[str, str] | None = None
    sha256: str | None = None  # of the file of tensors, once that is written

    @classmethod
    def from_json(cls, values: object, path: object) -> Self:
        """Reads the metadata of an export, which may come from anyone.

        Args:
          values: what JSON holds; fields that are not known are left out.
          path: of the export, for messages.

        Raises:
          InputError: for a field that is missing, of another kind, or out of its range.
        """
        try:
            metadata = _read(cls, values, "")
            check_task(metadata.task)
            if metadata.demos is not None:
                metadata.demos.check(metadata.task)
        except InputError as error:
            message = str(error).removeprefix("config field ")
            raise InputError(f"{path}: {message}; export the prompt again") from error
        return metadata

    def to_json(self) -> dict[str, object]:
        """Returns the fields as JSON has them, without those that are absent."""
        return _write(self)


_hints = functools.cache(typing.get_type_hints)
_signature = functools.cache(inspect.signature)


@functools.cache
def _declared(kind: type) -> dict[str, kinds.Field]:
    """Returns what fields of a class may hold beyond their types."""
    if kind is Dims:
        return dict.fromkeys(Dims._fields, _SIZE)
    fields = {field.name: field.metadata.get(kinds.DECLARED) for field in dataclasses.fields(kind)}
    return {name: declared for name, declared in fields.items() if declared is not None}


def _read(hint: Any, value: Any, name: str) -> Any:
    """Returns a value of JSON as a field of a type holds it; `name` is that of the field."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is object:
        return value
    if origin in (types.UnionType, typing.Union):  # X | None
        return None if value is None else _read(args[0], value, name)
    if origin is tuple and isinstance(value, list) and (args[-1] is ... or len(value) == len(args)):
        hints = args[:1] * len(value) if args[-1] is ... else args
        return tuple(_read(*pair, name) for pair in zip(hints, value, strict=True))
    if origin is Mapping and isinstance(value, dict):
        return {key: _read(args[1], part, f"{name}.{key}") for key, part in value.items()}
    if hint in (bool, int, float, str):
        if is_kind(value, hint):
            return value
    elif origin is None and isinstance(value, dict):
        return _read_fields(hint, value, f"{name}." if name else "")
    raise InputError(f"{name or 'the metadata'} is {brief(value)}")


def _read_fields(kind: Any, values: dict[str, Any], prefix: str) -> Any:
    """Returns an instance of a class of blocks, dataclass or named tuple."""
    if kind is OpenBlock:
        _read(str, values.get("name"), f"{prefix}name")
        return OpenBlock.from_dict(values)
    if issubclass(kind, Block):
        return kind.from_dict(values, prefix)
    hints, declared, fields = _hints(kind), _declared(kind), {}
    if kind in (LayoutMetadata, Dims) and (unknown := values.keys() - hints):
        raise InputError(f"{prefix}{min(unknown)} is not known")
    for parameter in _signature(kind).parameters.values():
        name = parameter.name
        if name not in values:
            if parameter.default is parameter.empty:
                raise InputError(f"{prefix}{name} is missing")
        elif name in declared:
            kinds.check_value(prefix + name, declared[name], values[name])
            fields[name] = kinds.as_declared(declared[name], values[name])
        else:
            fields[name] = _read(hints[name], values[name], prefix + name)
    return kind(**fields)


def _write(value: Any) -> Any:
    """Returns a value as JSON has it; a field that is None by default is left out."""
    if isinstance(value, Document):
        return value.to_json()
    if isinstance(value, Block | OpenBlock):
        value = value.to_dict()
    elif isinstance(value, Dims):
        value = value._asdict()
    elif dataclasses.is_dataclass(value):
        values = {field: getattr(value, field.name) for field in dataclasses.fields(value)}
        absent = [field for field, x in values.items() if x is None and field.default is None]
        value = {field.name: x for field, x in values.items() if field not in absent}
    if isinstance(value, Mapping):
        return {key: _write(part) for key, part in value.items()}
    return [_write(part) for part in value] if isinstance(value, list | tuple) else value
