"""A prompt on its backbone: predictions, and scores as a function of parameters."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import jax

from jaxprompt.api.banks import BankedModel, attach_several, warn_unlabelled
from jaxprompt.api.choices import AnyChoice, Choice, as_choice, change_generation, make_config
from jaxprompt.api.prompts import Prompt
from jaxprompt.api.rows import AnyRows, make_records
from jaxprompt.build.backbone import LoadedBackbone
from jaxprompt.build.demonstrations import replace_sentence_encoder
from jaxprompt.build.prompt_artifact import join_params, scorer_from_metadata, with_base_params
from jaxprompt.config.run import GenerateConfig
from jaxprompt.convert.artifact import check_fingerprint
from jaxprompt.data.tasks.task import Example
from jaxprompt.errors import InputError, at_least, brief, check_type
from jaxprompt.models.scorer import Scorer
from jaxprompt.parallel.sharding import Placement
from jaxprompt.scoring.metrics import check_package
from jaxprompt.serving.adapters import (
    ImportedPrompt,
    make_imported_metadata,
    scale_slots,
    split_prefixes,
)
from jaxprompt.serving.answers import Answers, make_answers, stream_answer
from jaxprompt.types import Batch


@dataclass(frozen=True, eq=False)
class PromptedModel:
    """A backbone, a prompt and a head; `attach` returns it."""

    scorer: Scorer
    params: Mapping[str, Any]  # {"backbone", "prompt", "head"}, nested, on the devices
    prompt: Prompt  # with metadata
    placement: Placement

    def __repr__(self) -> str:
        """Returns a one-line description."""
        backbone = self.prompt.metadata.backbone
        return f"PromptedModel({self.prompt!r} on {backbone.family} {backbone.id})"

    @functools.cached_property
    def answer(self) -> Callable[[Mapping[str, Any], Sequence[Example]], Answers]:
        """The function (params, examples) -> answers; it compiles once per shape of a batch."""
        generation = self.prompt.metadata.generate
        return make_answers(self.scorer, generation=generation, placement=self.placement)

    @functools.cached_property
    def writers(self) -> dict[tuple[GenerateConfig, bool], Callable[..., Answers]]:
        """The functions of `writer`, by its arguments; each compiles once per shape of a batch."""
        return {}

    def generation(self, options: Mapping[str, Any]) -> GenerateConfig:
        """Returns the generation config of the prompt with some fields changed."""
        return change_generation(self.prompt.metadata.generate, options)

    def writer(
        self, generation: GenerateConfig, reads_chat: bool = False
    ) -> Callable[..., Answers]:
        """Returns (params, examples) -> generated texts; of conversations with `reads_chat`."""
        key = generation, reads_chat
        if key not in self.writers:
            scorer = self.scorer.writing(generation.max_new_tokens, reads_chat)
            self.writers[key] = make_answers(
                scorer, generation=generation, placement=self.placement
            )
        return self.writers[key]

    def stream(
        self, generation: GenerateConfig, example: Example, reads_chat: bool = False
    ) -> Iterator[str]:
        """Returns the pieces of the text of an example, see `jaxprompt.stream`."""
        scorer = self.scorer.writing(generation.max_new_tokens, reads_chat)
        return stream_answer(scorer, generation, self.placement, self.params, example)

    def answer_with(self, examples: Sequence[Example], options: Mapping[str, Any]) -> Answers:
        """Answers examples; `options` are fields of the generation config.

        Raises InputError for options of a head that generates no text.
        """
        if not options:
            return self.answer(self.params, examples)
        if not self.scorer.head.WRITES:
            raise InputError(
                f"{next(iter(options))} is an option of generated texts, but head "
                f"{self.scorer.head.name} predicts {self.scorer.head.OF}; remove it, or call "
                "jp.generate"
            )
        return self.writer(self.generation(options))(self.params, examples)

    def read(self, rows: AnyRows | Sequence[str]) -> list[Example]:
        """Reads texts or rows as examples of the task. Raises InputError for an invalid one."""
        return [record.example for record in make_records(rows, self.scorer.task) if record.example]

    def encode(self, rows: AnyRows | Sequence[str]) -> Batch:
        """Encodes texts or rows as one batch for `scores`, labels included.

        With demonstrations a text has one row for each sample of them, next to each other.

        Raises:
          InputError: for a row that is not an example of the task, or if there are no rows.
        """
        if not (examples := self.read(rows)):
            raise InputError("there are no rows to encode; give one or more")
        split = self.scorer.encode(examples)
        return self.scorer.one_batch(split.rows, split.labels)


@overload
def attach(
    backbone: LoadedBackbone,
    prompt: Prompt | None,
    *,
    task: str | Mapping[str, Any] | None = None,
    head: AnyChoice | None = None,
    batch: int = 64,
    force: bool = False,
    sentence_encoder: str = "",
    pretrained: str = "",
    **fields: Any,
) -> PromptedModel: ...


@overload
def attach(
    backbone: LoadedBackbone,
    prompt: Sequence[Prompt] | Mapping[str, Prompt],
    *,
    batch: int = 64,
    force: bool = False,
    by: str = "prompt",
    router: Prompt | None = None,
) -> BankedModel: ...


def attach(
    backbone: LoadedBackbone,
    prompt: Prompt | Sequence[Prompt] | Mapping[str, Prompt] | None,
    *,
    task: str | Mapping[str, Any] | None = None,
    head: AnyChoice | None = None,
    batch: int = 64,
    force: bool = False,
    sentence_encoder: str = "",
    pretrained: str = "",
    by: str = "prompt",
    router: Prompt | None = None,
    **fields: Any,
) -> PromptedModel | BankedModel:
    """Attaches one prompt or several to a backbone.

    Args:
        backbone: result of `load_backbone`. Several prompts may share it.
        prompt: a prompt from `train` or `load_prompt`. Several prompts, each with its own task,
            share batches; in a list they are named after their folders, in a dict by its keys.
            None is the backbone without a prompt, zero-shot.
        task, head: as in `train`, for a PEFT adapter, an .npy array or None. An export contains
            them.
        batch: number of examples per batch.
        force: accept a backbone with other weights than those that the prompt was trained on.
        sentence_encoder: path of the encoder that selects similar demonstrations, by default as in
            the export.
        pretrained: path of the export that the prompt depends on, by default as in the export.
        by: for several prompts, the column with the name of each row's prompt.
        router: for several prompts, chooses the prompts of rows that name none, by their texts;
            from `train_router` or `load_prompt`.
        **fields: config fields as in `train`, with `task` and `head`.

    Returns:
        A PromptedModel, or a BankedModel for several prompts.

    Raises:
        InputError: if backbone and prompt do not fit.
    """
    check_type("backbone", backbone, LoadedBackbone, "jp.load_backbone(path)")
    head = as_choice("head", head)
    at_least("batch", batch, 1)
    if prompt is None:
        prompt = Prompt({}, {}, "a backbone by itself", ImportedPrompt({}, {"name": "none"}, {}))
        head = head or Choice("head", "verbalizer", {})
    if isinstance(prompt, Sequence | Mapping) and not isinstance(prompt, str):
        if task is not None or head is not None or fields or sentence_encoder or pretrained:
            raise InputError(
                "several prompts must be exports, which contain their tasks and heads; remove "
                "task, head, sentence_encoder, pretrained and fields"
            )
        return attach_several(backbone, prompt, by, batch, force, router)
    check_type("prompt", prompt, Prompt, "the result of jp.load_prompt(path), or run.prompt")
    if by != "prompt" or router is not None:
        argument = f"by={brief(by)}" if by != "prompt" else "router"
        raise InputError(
            f"{argument} is only valid for several prompts, and one is given; remove it, or give "
            "a list or a dict of prompts"
        )
    if prompt.imported is not None:
        prompt = _add_metadata(prompt, prompt.imported, backbone, task, head, fields)
    elif task is not None or head is not None or fields:
        arguments = [name for name, x in {"task": task, "head": head}.items() if x is not None]
        names = ", ".join([*arguments, *fields])
        raise InputError(f"{prompt.path} contains its task and head; remove {names}")
    metadata = replace_sentence_encoder(prompt.metadata, sentence_encoder)
    base = metadata.backbone
    check_fingerprint(base, backbone.loaded.report.fingerprint, force=force)
    # Soft tokens are scaled like the embeddings, which `rescale` divides.
    opened = backbone.backbone
    if opened.config.rescale != base.rescale:
        raise InputError(
            f"the prompt was trained with rescale={base.rescale}, the backbone has "
            f"{opened.config.rescale}; use load_backbone(..., rescale={base.rescale})"
        )
    opened = opened._replace(config=dataclasses.replace(opened.config, sentinel=base.sentinel))
    scorer = scorer_from_metadata(opened, metadata, batch, backbone.placement, force=force)
    scorer = scorer.with_backbone(opened)
    tensors = with_base_params(prompt.path, prompt.tensors, metadata.init, scorer, pretrained)
    params = join_params(prompt.path, tensors, scorer, backbone)
    return PromptedModel(scorer, params, prompt, backbone.placement)


def _add_metadata(
    prompt: Prompt,
    imported: ImportedPrompt,
    backbone: LoadedBackbone,
    task: str | Mapping[str, Any] | None,
    head: Choice | None,
    fields: Mapping[str, Any],
) -> Prompt:
    """Returns an imported prompt with the metadata of its task."""
    if task is None:
        raise InputError(
            f"{prompt.path} has no metadata of its task; give task=, and head= if it needs one"
        )
    imported = imported._replace(tensors=dict(prompt.tensors))  # which the user may have changed
    imported = split_prefixes(prompt.path, imported, backbone.backbone)
    # The head of the adapter is used, unless another is given.
    if imported.head and head is None:
        head_fields = dict(imported.head)
        head = Choice("head", head_fields.pop("name"), head_fields)
    config, _ = make_config(backbone, task=task, choices=[head], overrides=fields)
    metadata = make_imported_metadata(config, prompt.path, imported, backbone)
    tensors = scale_slots(imported.tensors, metadata.backbone.rescale)
    if imported.head and config.head.name != imported.head["name"]:
        tensors = {name: x for name, x in tensors.items() if not name.startswith("head/")}
    return Prompt(tensors, metadata.to_json(), prompt.path)


def predict(
    model: PromptedModel | BankedModel, rows: AnyRows | Sequence[str], **options: Any
) -> list[dict[str, Any]]:
    """Predicts labels, tags, spans or texts for texts or rows, with or without labels.

    Args:
      model: result of `attach`.
      rows: texts or rows.
      **options: for generated texts, as for `generate`.

    Returns:
      For each row, in order, the columns that the command `predict` writes: prediction, score and
      scores for classes; prediction and entities for tags; prediction, score, start and end for
      spans; generated for texts, and with logprobs=True also tokens and logprobs. With several
      prompts, a generated text comes with the name of its prompt. A prompt that a router chose
      comes as route, with its probability as confidence; where it chose none, there is only error.

    Raises:
      InputError: for a row that is not an example of the task.
    """
    if isinstance(model, BankedModel):
        return model.predict(rows, options)
    check_type("model", model, PromptedModel, "the result of jp.attach")
    examples = model.read(rows)
    return model.answer_with(examples, options).columns if examples else []


def evaluate(model: PromptedModel | BankedModel, rows: AnyRows, **options: Any) -> dict[str, Any]:
    """Computes metrics of the predictions for rows with labels.

    Warns if some rows have no known label of the task; they are left out.

    Args:
      model: result of `attach`.
      rows: rows with labels.
      **options: for generated texts, as for `generate`. With n > 1 the metrics are means over the
        samples, and there are also maj@n and pass@n.

    Returns:
      The metrics by name, the task's metric first, and last "examples", the number of rows with a
      known label. For several prompts these by the name of each prompt; a prompt without such rows
      has only the count.

    Raises:
      InputError: if no row has a known label.
    """
    if isinstance(model, BankedModel):
        return model.evaluate(rows, options)
    check_type("model", model, PromptedModel, "the result of jp.attach")
    check_package(model.scorer.task.metric, model.scorer.task.kind)
    # Plain texts have no labels, so a string is the path of a file, as in `train`.
    examples = model.read(Path(rows) if isinstance(rows, str) else rows)
    parts = [model.answer_with(examples, options).labelled] if examples else []
    measured, num_labelled = model.scorer.measure_labelled(parts)
    if not num_labelled:
        labels = model.scorer.task.labels
        raise InputError(
            f"none of {len(examples)} rows has a known label of the task; give rows with "
            + (f"one of {', '.join(labels)}" if labels else "such labels")
        )
    warn_unlabelled(num_labelled, len(examples))
    return measured | {"examples": num_labelled}


def scores(params: Mapping[str, Any], model: PromptedModel, batch: Batch) -> jax.Array:
    """Scores a batch; a pure function.

    It can be compiled (`jax.jit(jp.scores, static_argnums=1)`), differentiated with respect to
    `params`, mapped and exported.

    Args:
      params: `model.params`, or other values in the same structure.
      model: result of `attach` with one prompt.
      batch: result of `model.encode`.

    Returns:
      Scores, float32 [B, C]; for spans and tags [B, M, C].
    """
    return model.scorer.model.forward(params, batch)
