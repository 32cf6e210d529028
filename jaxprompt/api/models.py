"""A prompt on its backbone: it predicts, it writes, and it is a pure function of its numbers."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import jax

from jaxprompt.api.banks import BankedModel, attach_several, warn_unlabelled
from jaxprompt.api.choices import Choice, change_generation, check_choice, make_config
from jaxprompt.api.prompts import Prompt
from jaxprompt.api.rows import AnyRows, make_records
from jaxprompt.build.backbone import LoadedBackbone
from jaxprompt.build.demonstrations import with_encoder
from jaxprompt.build.prompt_artifact import join, scorer_from_metadata, with_base
from jaxprompt.config.run import GenerateConfig
from jaxprompt.convert.artifact import check_fingerprint
from jaxprompt.data.tasks.task import Example
from jaxprompt.errors import InputError, at_least, brief, check_type
from jaxprompt.models.scorer import Scorer
from jaxprompt.parallel.sharding import Placement
from jaxprompt.serving.adapters import Adopted, metadata_of_adopted, scale_slots
from jaxprompt.serving.answers import Answered, make_answers
from jaxprompt.types import Batch


@dataclass(frozen=True, eq=False)
class PromptedModel:
    """A backbone, a prompt and a head: what `attach` gives."""

    scorer: Scorer
    params: Mapping[str, Any]  # {"backbone", "prompt", "head"}, nested, on the devices
    prompt: Prompt  # with metadata
    placement: Placement

    def __repr__(self) -> str:
        """Says what it is in one line."""
        backbone = self.prompt.metadata.backbone
        return f"PromptedModel({self.prompt!r} on {backbone.family} {backbone.id})"

    @functools.cached_property
    def answer(self) -> Callable[[Mapping[str, Any], Sequence[Example]], Answered]:
        """Answers (params, examples); a later call of equal shape compiles nothing."""
        generation = self.prompt.metadata.generate
        return make_answers(self.scorer, generation=generation, placement=self.placement)

    @functools.cached_property
    def writers(self) -> dict[GenerateConfig, Any]:
        """The same of `generate`, by what it was asked for."""
        return {}

    def read(self, rows: AnyRows | Sequence[str]) -> list[Example]:
        """Reads texts or rows as examples of the task. Raises InputError for one that is none."""
        records = make_records(rows, self.scorer.task)
        return [record.example for record in records if record.example]

    def encode(self, rows: AnyRows | Sequence[str]) -> Batch:
        """Lays texts or rows into one batch, as `scores` takes it; labels come along.

        With demonstrations a text has a row for each sample of them, side by side.
        Raises InputError for a row that is no example of the task, and where there is none.
        """
        if not (examples := self.read(rows)):
            raise InputError("there are no rows to encode; give one or more")
        split = self.scorer.encode(examples)
        return self.scorer.one_batch(split.rows, split.labels)


@overload
def attach(
    backbone: LoadedBackbone, prompt: Prompt | None, *, task: str | Mapping[str, Any] | None = None,
    head: Choice | None = None, batch: int = 64, force: bool = False, sentence_encoder: str = "",
    pretrained: str = "", **fields: Any,
) -> PromptedModel: ...  # fmt: skip


@overload
def attach(
    backbone: LoadedBackbone, prompt: Sequence[Prompt] | Mapping[str, Prompt], *, batch: int = 64,
    force: bool = False, by: str = "prompt",
) -> BankedModel: ...  # fmt: skip


def attach(
    backbone: LoadedBackbone, prompt: Prompt | Sequence[Prompt] | Mapping[str, Prompt] | None, *,
    task: str | Mapping[str, Any] | None = None, head: Choice | None = None, batch: int = 64,
    force: bool = False, sentence_encoder: str = "", pretrained: str = "", by: str = "prompt",
    **fields: Any,
) -> PromptedModel | BankedModel:  # fmt: skip
    """Puts a prompt on a backbone, or several. -> PromptedModel, or BankedModel

    Args:
        backbone: what `load_backbone` gives. Several prompts may share it.
        prompt: what `train` or `load_prompt` gives. Several of them, each of its own task, answer
            rows in shared batches; a list names them by their folders, a dict by its keys. None is
            the backbone by itself, zero-shot.
        task, head, **fields: for a PEFT adapter, an .npy array or None, which say nothing of their
            task: as in `train`. An export says all.
        batch: how many examples are computed at once.
        force: takes a backbone of other weights than the prompt was learned on.
        sentence_encoder: what compares sentences to choose demonstrations, if not where the
            export says.
        pretrained: the export that the prompt depends on, if not where it says.
        by: of several prompts, the column of a row that names the one it takes.

    Raises InputError where the two do not fit.
    """
    check_type("backbone", backbone, LoadedBackbone, "jp.load_backbone(path)")
    check_choice("head", head)
    at_least("batch", batch, 1)
    if prompt is None:
        prompt = Prompt({}, {}, "a backbone by itself", Adopted({}, {"name": "none"}, {}))
        head = head or Choice("head", "verbalizer", {})
    if isinstance(prompt, Sequence | Mapping) and not isinstance(prompt, str):
        if task is not None or head is not None or fields or sentence_encoder or pretrained:
            raise InputError(
                "several prompts say their tasks and heads themselves; leave out task, head, "
                "sentence_encoder, pretrained and fields"
            )
        return attach_several(backbone, prompt, by, batch, force)
    check_type("prompt", prompt, Prompt, "what jp.load_prompt(path) gives, or run.prompt")
    if not prompt.card and prompt.adopted is None:
        raise InputError(f"{prompt.path} has no metadata; give what jp.load_prompt(path) gives")
    if by != "prompt":
        raise InputError(
            f"by={brief(by)} names the column of a row that picks one of several prompts, and one "
            "is given; leave it out, or give a list or a dict of prompts"
        )
    if prompt.adopted is not None:
        if task is None:
            raise InputError(
                f"{prompt.path} says nothing of its task; give task=, and head= if it needs one"
            )
        # A head that came along is taken, unless another is given.
        if prompt.adopted.head and head is None:
            name, fields_of_head = prompt.adopted.head["name"], dict(prompt.adopted.head)
            del fields_of_head["name"]
            head = Choice("head", name, fields_of_head)
        config = make_config(backbone, task=task, choices=[head], overrides=fields)
        made = metadata_of_adopted(config, prompt.path, prompt.adopted, backbone)
        tensors = scale_slots(prompt.tensors, made.backbone.rescale)
        prompt = Prompt(tensors, made.to_json(), prompt.path)
    elif task is not None or head is not None or fields:
        known = [name for name, x in {"task": task, "head": head}.items() if x is not None]
        shown = ", ".join([*known, *fields])
        raise InputError(f"{prompt.path} says its task and head itself; leave out {shown}")
    metadata = with_encoder(prompt.metadata, sentence_encoder)
    base = metadata.backbone
    check_fingerprint(base, backbone.loaded.report.fingerprint, force=force)
    # Soft tokens stand among the embeddings, which `rescale` divides.
    opened = backbone.backbone
    if opened.config.rescale != base.rescale:
        raise InputError(
            f"the prompt was learned with rescale={base.rescale}, the backbone has "
            f"{opened.config.rescale}; load_backbone(..., rescale={base.rescale})"
        )
    opened = opened._replace(config=dataclasses.replace(opened.config, sentinel=base.sentinel))
    scorer = scorer_from_metadata(opened, metadata, batch, force=force).with_backbone(opened)
    tensors = with_base(prompt.path, prompt.tensors, metadata.init, scorer, pretrained)
    params = join(prompt.path, tensors, scorer, backbone)
    return PromptedModel(scorer, params, prompt, backbone.placement)


def predict(
    model: PromptedModel | BankedModel, rows: AnyRows | Sequence[str]
) -> list[dict[str, Any]]:
    """Answers texts or rows. -> for each, in order, the columns that the command `predict` writes

    Of a class these are prediction, score and scores; of tags prediction and entities; of a span
    prediction, score, start and end; of a text generated. A row may have a label or none. Raises
    InputError for a row that is no example of the task.
    """
    if isinstance(model, BankedModel):
        return model.predict(rows)
    check_type("model", model, PromptedModel, "what jp.attach gives")
    examples = model.read(rows)
    return model.answer(model.params, examples).columns if examples else []


def evaluate(model: PromptedModel | BankedModel, rows: AnyRows) -> dict[str, Any]:
    """Measures the answers of `predict` to rows with labels.

    -> the task's metric first, last "examples", how many rows had a label that the task knows; of
    several prompts by the name of each, of one without such rows the count alone. Warns where some
    rows have no such label, and raises InputError where none has one.
    """
    if isinstance(model, BankedModel):
        return model.evaluate(rows)
    check_type("model", model, PromptedModel, "what jp.attach gives")
    # Texts by themselves have no labels: here a string is the path of a file, as in `train`.
    examples = model.read(Path(rows) if isinstance(rows, str) else rows)
    found = model.answer(model.params, examples) if examples else None
    if found is None or not found.known:
        labels = model.scorer.task.labels
        raise InputError(
            f"none of {len(examples)} rows has a label that the task knows; give rows with one"
            + (f" of {', '.join(labels)}" if labels else "")
        )
    warn_unlabelled(found.known, len(examples))
    return found.measured | {"examples": found.known}


def generate(model: PromptedModel, rows: AnyRows | Sequence[str], **how: Any) -> list[str]:
    """Writes a text for each of some texts or rows, whatever the task of the prompt is.

    `how` is max_new (tokens), beams, length_penalty or early_stopping; by default as the prompt
    says. Raises InputError for a backbone that does not write.
    """
    check_type("model", model, PromptedModel, "what attach gives of one prompt")
    generation = change_generation(model.prompt.metadata.generate, how)
    scorer = model.scorer.writing(generation.max_new)
    # Other lengths or beams are other programs; equal ones are compiled once.
    if generation not in model.writers:
        model.writers[generation] = make_answers(
            scorer, generation=generation, placement=model.placement
        )
    examples, (column,) = model.read(rows), scorer.head.COLUMNS
    if not examples:
        return []
    return [row[column] for row in model.writers[generation](model.params, examples).columns]


def scores(params: Mapping[str, Any], model: PromptedModel, batch: Batch) -> jax.Array:
    """Scores a batch. -> float32 [B, C]; of spans and tags [B, M, C]

    Pure: it may be compiled (`jax.jit(jp.scores, static_argnums=1)`), differentiated by `params`,
    mapped and exported. `params` are `model.params` or others of their form, `batch` is what
    `model.encode` gives.
    """
    check_type("model", model, PromptedModel, "what attach gives of one prompt")
    check_type("batch", batch, Batch, "what model.encode(rows) gives")
    check_type("params", params, Mapping, "model.params, or others of their form")
    if lost := model.params.keys() - params.keys():
        raise InputError(f"params lack {min(lost)!r}; give model.params, or others of their form")
    return model.scorer.model.forward(params, batch)
