"""The metadata of an export, prompt.json: what its tensors belong to."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxprompt.config import kinds
from jaxprompt.config.block import Block, OpenBlock
from jaxprompt.config.documents import Document
from jaxprompt.config.run import BackboneConfig, DataConfig, DemosConfig, GenerateConfig, TaskConfig
from jaxprompt.data.tasks.checks import check_task
from jaxprompt.data.tasks.task import Task
from jaxprompt.types import Dims

Metrics = Mapping[str, Mapping[str, float | None] | None]  # by split; None = it was not scored
_COUNT = kinds.Field(int, 1, "choices of an example", "at least 1")


def _as_in(config: type[Block], name: str) -> Any:
    """Returns a field that is validated like the field of a config block."""
    return dataclasses.field(metadata={kinds.DECLARED: config.declared()[name]})


@dataclass(frozen=True, kw_only=True)
class BackboneMetadata(Document):
    """The backbone that a prompt was trained on."""

    id: str = _as_in(BackboneConfig, "path")
    revision: str = _as_in(BackboneConfig, "revision")
    family: str
    sentinel: str = _as_in(BackboneConfig, "sentinel")
    rescale: float = _as_in(BackboneConfig, "rescale")
    quantize: str = _as_in(BackboneConfig, "quantize")
    fingerprint: str  # SHA-256 of its weights
    dims: Dims
    # Digests, see data/text/identity.py.
    tokenizer: str | None = None
    layers: str | None = None
    chat_template: str | None = None  # of a task of conversations

    def identity(self) -> dict[str, str]:
        """Returns the available digests, like `data.text.identity.scorer_fingerprints`."""
        digests = {x: getattr(self, x) for x in ("tokenizer", "layers", "chat_template")}
        return {name: digest for name, digest in digests.items() if digest is not None}


@dataclass(frozen=True, kw_only=True)
class ExampleLayout(Document):
    """How examples are formatted."""

    max_len: int = _as_in(DataConfig, "max_len")
    max_target: int = _as_in(DataConfig, "max_target")
    multiple: int = _as_in(DataConfig, "multiple")
    padding_side: str = _as_in(DataConfig, "padding_side")
    choices: int = dataclasses.field(metadata={kinds.DECLARED: _COUNT})  # the most of an example
    form: str = _as_in(TaskConfig, "form")
    answer: str = _as_in(TaskConfig, "answer")
    eos: bool = _as_in(TaskConfig, "eos")


@dataclass(frozen=True)
class DemoMetadata(Document):
    """A demonstration."""

    fields: Mapping[str, str]  # its texts
    label: int


@dataclass(frozen=True, kw_only=True)
class DemosMetadata(Document):
    """The demonstrations of a prompt, and how those of an example are chosen."""

    per_class: int = _as_in(DemosConfig, "per_class")
    total: int = _as_in(DemosConfig, "total")
    exact: int = _as_in(DemosConfig, "exact")
    samples: int = _as_in(DemosConfig, "samples")
    similar: float = _as_in(DemosConfig, "similar")
    encoder: str = _as_in(DemosConfig, "encoder")
    max_demo_tokens: int = _as_in(DemosConfig, "max_demo_tokens")
    max_example_tokens: int = _as_in(DemosConfig, "max_example_tokens")
    seed: int = _as_in(DataConfig, "seed")
    fingerprint: str  # of the sentence encoder; "" = there is none
    examples: tuple[DemoMetadata, ...]


@dataclass(frozen=True, kw_only=True)
class OriginMetadata(Document):
    """An export that a prompt was initialised from."""

    path: str
    method: str
    task: str  # its name
    seed: int
    metrics: Metrics
    created: str
    sha256: str
    pretrained: Mapping[str, object] | None = None
    init: "OriginMetadata | None" = None  # the export that this one was initialised from
    more: tuple["OriginMetadata", ...] = ()  # the other exports of the same run


@dataclass(frozen=True, kw_only=True)
class RouterMetadata(Document):
    """What a router needs beside its layer; the classes of its task are the names of prompts."""

    kind: str
    columns: tuple[str, ...]  # the input columns of all prompts, whose texts are joined
    threshold: float  # of the probability below which no prompt is chosen
    prompts: Mapping[str, str]  # by name the SHA-256 of their tensors
    # By prompt: how many of its held-out examples went to each prompt; "" = to none.
    held_out: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, kw_only=True)
class PromptMetadata(Document):
    """All that is needed to predict with the tensors of an export, and their origin."""

    method: str
    hyper: OpenBlock  # the method in the config of the run
    prompt: OpenBlock  # the method whose parameters the tensors are
    head: OpenBlock
    backbone: BackboneMetadata
    task: Task
    template: str
    label_words: tuple[tuple[str, ...], ...] | None  # of each class; None = no verbalizer
    layout: ExampleLayout
    generate: GenerateConfig
    metrics: Metrics
    seed: int
    versions: Mapping[str, str]  # of the packages that made it, see `package_versions`
    created: str  # time, ISO 8601
    demos: DemosMetadata | None = None
    init: OriginMetadata | None = None
    pretrained: Mapping[str, object] | None = None  # of `pretrain`
    step: int | None = None  # of the run
    router: RouterMetadata | None = None  # of a router, see serving/router.py
    # Installed packages that the method, the head and the backbone are from: their versions.
    plugins: Mapping[str, str] | None = None
    sha256: str | None = None  # of the file of tensors, once that is written

    FIX = "export the prompt again"
    OPEN = True  # those of later versions

    def __post_init__(self) -> None:
        """Raises InputError if the parts of the task do not fit together."""
        check_task(self.task)
