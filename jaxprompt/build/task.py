"""The task of a config: its examples, formatted for a backbone and encoded."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxprompt.build.backbone import open_backbone
from jaxprompt.build.demonstrations import encoder_fingerprint, make_demos
from jaxprompt.build.examples import Examples, read_examples
from jaxprompt.build.inheritance import check_init
from jaxprompt.build.method import get_head
from jaxprompt.build.placement import check_mesh
from jaxprompt.build.scorer import build_scorer, check_fit, choose_template, example_layout
from jaxprompt.config.run import RunConfig
from jaxprompt.data.batches.batching import EvalBatches, Layout, TrainBatches, count_units
from jaxprompt.data.rows import Rows
from jaxprompt.data.sources.digest import summarize
from jaxprompt.data.text.encoded import Split
from jaxprompt.data.text.identity import scorer_fingerprints
from jaxprompt.data.text.overview import (
    label_word_messages,
    truncation_message,
    unlearned_messages,
    unmarked_messages,
)
from jaxprompt.errors import InputError
from jaxprompt.models.generation import check_generation
from jaxprompt.models.model import Model
from jaxprompt.models.scorer import Backbone, Scorer, with_shared_prefix
from jaxprompt.parallel.sharding import Placement
from jaxprompt.training.evaluation import make_search
from jaxprompt.training.run_record import TaskData
from jaxprompt.types import Batch, Objective


def check_generation_length(config: RunConfig, scorer: Scorer, splits: Mapping[str, Split]) -> None:
    """Raises InputError if generated texts do not fit after the longest inputs."""
    if not scorer.generates:
        return
    layout = scorer.layout.single_host()  # the same result on every process
    for name in splits.keys() - {"train"}:
        check_generation(
            scorer.model,
            next(iter(EvalBatches(splits[name].rows, splits[name].labels, layout))),
            make_search(config.generate, scorer.layout),
        )


def open_checked_backbone(
    config: RunConfig, placement: Placement, *, restored: bool = False
) -> Backbone:
    """Opens the backbone of a checked config; method, head, length and mesh must fit it.

    The export that its prompt is initialised from must fit too, unless it is `restored` from a
    checkpoint.
    """
    backbone = open_backbone(config.backbone)
    check_fit(
        backbone,
        prompt=config.prompt,
        head=config.head,
        max_len=config.data.max_len,
    )
    if not restored:
        check_init(config, backbone.module.dims)
    check_mesh(placement, backbone)
    return backbone


def scorer_from_config(
    config: RunConfig, backbone: Backbone, examples: Examples, placement: Placement
) -> Scorer:
    """Builds the scorer of a config."""
    head = get_head(config)
    task = head.fit_task(examples.task, examples.choices)
    style, form = backbone.module.STYLE, config.task.form
    scorer = build_scorer(
        backbone,
        task,
        example_layout(config, examples.choices),
        prompt=config.prompt,
        head=config.head,
        template=choose_template(task, head, style, form, config.task.template),
        chat=config.task.chat,
        batch=config.data.eval_batch,
        placement=placement,
        demos=make_demos(config, task, examples.splits),
    )
    if config.data.packed:
        _check_packing(config, scorer, style)
    return scorer


def _check_packing(config: RunConfig, scorer: Scorer, style: str) -> None:
    """Raises InputError if several examples cannot be packed into one row."""
    method = scorer.model.prompt
    reasons = {
        f"head.name={config.head.name} reads one input per row": not scorer.head.WRITES,
        "this backbone does not read its input and the answer as one text": style != "causal",
        f"prompt.name={config.prompt.name} depends on the input": bool(
            method.reads or method.objectives()
        ),
        f"cache.location={config.cache.location} caches single inputs": config.cache.location != "",
    }
    for reason, holds in reasons.items():
        if holds:
            raise InputError(
                f"data.packed=True puts several examples into a row, but {reason}; set it to False"
            )


def make_task_data(examples: Examples, scorer: Scorer) -> TaskData:
    """Returns the data record of a run: its task and its examples."""
    labels = examples.task.labels
    return TaskData(
        task=examples.task,
        choices=examples.choices,
        splits={name: summarize(split, labels) for name, split in examples.splits.items()},
        sentence_encoder=encoder_fingerprint(scorer.demos),
        seen=scorer.model.prompt.seen,
        identity=scorer_fingerprints(scorer),
        template=scorer.template,
    )


def _train_layout(config: RunConfig, scorer: Scorer) -> Layout:
    """Returns the layout of training batches."""
    return dataclasses.replace(scorer.layout, batch=config.data.batch, packed=config.data.packed)


def count_train_rows(config: RunConfig, scorer: Scorer, split: Split) -> int:
    """Returns the number of rows of an epoch of training: examples, or packed ones."""
    return count_units(split.rows, _train_layout(config, scorer))


def longest_batch(config: RunConfig, scorer: Scorer, split: Split) -> Batch:
    """Returns a training batch of the maximum length."""
    return next(iter(EvalBatches(split.rows, split.labels, _train_layout(config, scorer))))


def train_batches(config: RunConfig, scorer: Scorer, split: Split) -> TrainBatches:
    """Returns the endless stream of training batches; full ones if features are cached."""
    layout = _train_layout(config, scorer)
    layout = layout.single_host() if config.cache.location else layout
    return TrainBatches(split.rows, split.labels, layout, seed=config.seed, group=config.data.group)


def encode_splits(scorer: Scorer, examples: Examples) -> dict[str, Split]:
    """Encodes every split; with the target texts to train on, or to score."""
    splits = {
        name: scorer.encode(split, targets=name == "train" or scorer.scores_targets)
        for name, split in examples.splits.items()
    }
    train = splits.get("train")
    if train and train.rows and all(row.is_unlearned for rows in train.rows for row in rows):
        raise InputError(
            f"data.max_len={scorer.layout.max_len} leaves no token to learn in any training "
            "example; raise it, or shorten the texts before the answers"
        )
    return splits


def example_notes(
    scorer: Scorer, splits: Mapping[str, Split], notes: Sequence[str] = ()
) -> list[str]:
    """Describes the labels and their counts, truncated texts, and entities that are not marked.

    `notes` are those from reading the examples.
    """
    rows = {name: part.by_example() for name, part in splits.items()}
    unsampled = {name: part.without_samples() for name, part in splits.items()}
    words = scorer.verbalizer.words if scorer.verbalizer else ()
    text_notes = [
        *label_word_messages(scorer.task.labels, words),
        truncation_message(scorer.layout.max_len, rows),
    ]
    text_notes += unlearned_messages(scorer.layout.max_len, rows.get("train", ()))
    text_notes += [] if scorer.demos is None else [scorer.demos.summary()]
    unmarked = {n: (p.metric_data.unmarked, p.size) for n, p in splits.items() if p.metric_data}
    head_notes = scorer.head.tell(scorer.task, scorer.classes, unsampled)
    positive_notes = [scorer.task.positive_message] if scorer.task.positive_message else []
    return [*notes, *head_notes, *positive_notes, *text_notes, *unmarked_messages(unmarked)]


def split_lines(
    scorer: Scorer, splits: Mapping[str, Split], notes: Sequence[str] = ()
) -> list[str]:
    """Returns log lines: the sizes of the splits, and `example_notes`."""
    sizes = ", ".join(f"{name} {split.size}" for name, split in splits.items())
    return [f"  {line}" for line in (sizes, *example_notes(scorer, splits, notes))]


def task_lines(scorer: Scorer, splits: Mapping[str, Split], notes: Sequence[str]) -> list[str]:
    """Returns log lines: the task, its template, and `split_lines`."""
    heading = f"task {scorer.task.name}, template {scorer.template!r}"
    return [heading, *split_lines(scorer, splits, notes)]


def eval_batches(scorer: Scorer, split: Split) -> EvalBatches:
    """Returns one pass over a split."""
    return EvalBatches(split.rows, split.labels, scorer.layout)


def build_objectives(config: RunConfig, model: Model) -> list[Objective]:
    """Returns the terms of the loss: the head's, and the method's."""
    return get_head(config).objectives(config.optim.label_smoothing) + model.prompt.objectives()


def cache_shared_prefix(config: RunConfig, scorer: Scorer) -> Scorer:
    """Lets the model compute the shared prefix of all inputs once, if the config asks for it."""
    # Cached features are those of whole sequences.
    if config.backbone.cache_shared_prefix and not config.cache.location:
        return with_shared_prefix(scorer)
    return scorer


class EncodedTask(NamedTuple):
    """The examples of a task, their scorer, and the splits."""

    examples: Examples
    scorer: Scorer
    splits: dict[str, Split]


def prepare_task(
    config: RunConfig,
    placement: Placement,
    backbone: Backbone,
    rows: Mapping[str, Rows] | None = None,
) -> EncodedTask:
    """Prepares the task of a checked config; `rows` by split replace its files.

    No weights are read.

    Raises:
      InputError: if the data are invalid or do not fit.
    """
    examples = read_examples(config, in_memory=rows)
    scorer = scorer_from_config(config, backbone, examples, placement)
    splits = encode_splits(scorer, examples)
    check_generation_length(config, scorer, splits)
    return EncodedTask(examples, scorer, splits)
