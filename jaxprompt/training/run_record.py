"""record.json: what a run was trained on, compared when the run is repeated."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from jaxprompt.config.documents import Document
from jaxprompt.convert.prompt_metadata import OriginMetadata
from jaxprompt.data.sources.digest import SplitRecord
from jaxprompt.data.tasks.checks import check_task
from jaxprompt.data.tasks.task import Task
from jaxprompt.errors import InputError


@dataclasses.dataclass(frozen=True)
class BackboneRecord(Document):
    """The frozen model of a run."""

    family: str
    fingerprint: str  # SHA-256 of the weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskData(Document):
    """A task, and the examples that a run was trained and evaluated on."""

    task: Task
    choices: int  # maximum number per example
    splits: Mapping[str, SplitRecord]
    sentence_encoder: str = ""  # fingerprint of the model that chose demonstrations
    seen: str = ""  # words of the examples that the method has vectors for
    identity: Mapping[str, str]  # of the tokenizer and the layers, see data.text.identity
    template: str

    def __post_init__(self) -> None:
        """Raises InputError if the parts of the task do not fit together."""
        check_task(self.task)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedTask(TaskData):
    """One of several tasks that share a prompt."""

    fields: Mapping[str, str]  # the config fields of this task


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusInfo(Document):
    """The corpus of a pre-training task, as in the metadata of its prompt."""

    task: str
    patterns: str
    options: tuple[int, int] | None = None  # minimum and maximum number per example
    corpus: str  # path
    documents: int
    tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainingData(Document):
    """The examples that a prompt is pre-trained on."""

    corpus: Mapping[str, object]  # fingerprint of the text, see corpus.check_unchanged
    store: Mapping[str, int]  # CRC-32 of each file of the indexed text
    labels: tuple[object, ...] | None  # what labels of cls depend on: annotator, counts, digests
    about: CorpusInfo
    identity: Mapping[str, str]
    template: str


# -- the kinds of record.json ---------------------------------------------------------------------


class RunRecord(Document):
    """What a run was trained on; base class of the records below."""

    FIX = "restore it, or train again in another workdir"

    identity: Mapping[str, str]
    backbone: BackboneRecord


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptRecord(RunRecord):
    """Record of a run that trains a prompt."""

    backbone: BackboneRecord
    init: OriginMetadata | None = None
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)  # SHA-256 of soft tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskRecord(TaskData, PromptRecord):
    """Record of a run that trains on a task."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedRecord(PromptRecord):
    """Record of a run in which several tasks share a prompt."""

    tasks: Mapping[str, SharedTask]
    seen: str = ""  # words of the examples of all tasks

    @property
    def identity(self) -> Mapping[str, str]:  # type: ignore[override]  # a field of other kinds
        """Identity of the backbone, which every task records."""
        return next(iter(self.tasks.values())).identity


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainingRecord(PretrainingData, PromptRecord):
    """Record of a run that pre-trains a prompt on a corpus."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptationRecord(RunRecord):
    """Record of a run that continues the pre-training of a backbone."""

    corpus: Mapping[str, object]
    store: Mapping[str, int]
    backbone: BackboneRecord
    identity: Mapping[str, str]


_KINDS: dict[str, type[RunRecord]] = {  # by a field that identifies them, in this order
    "task": TaskRecord,
    "tasks": SharedRecord,
    "about": PretrainingRecord,
    "corpus": AdaptationRecord,
}


def record_from_json(values: Mapping[str, object], path: Path) -> RunRecord:
    """Returns the record whose kind its fields determine. Raises InputError as `from_json` does."""
    kind = next((kind for field, kind in _KINDS.items() if field in values), None)
    if kind is None:
        raise InputError(f"{path} is not the record of a run; {RunRecord.FIX}")
    return kind.from_json(values, path)
