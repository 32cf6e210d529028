"""The task of a config: its examples, formatted for a backbone and encoded."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxprompt.build.backbone import open_backbone
from jaxprompt.build.demonstrations import demos_of, fingerprint_of
from jaxprompt.build.examples import Examples, read_examples
from jaxprompt.build.inheritance import check_init
from jaxprompt.build.method import head_of
from jaxprompt.build.placement import check_mesh
from jaxprompt.build.scorer import build_scorer, check_fit, choose_template, layout_of
from jaxprompt.config.run import RunConfig
from jaxprompt.data.batches.batching import EvalBatches, TrainBatches
from jaxprompt.data.rows import Rows
from jaxprompt.data.sources.digest import summarize
from jaxprompt.data.text.encoded import Split
from jaxprompt.data.text.identity import identity_of
from jaxprompt.data.text.overview import tell_cut, tell_unmarked, tell_words
from jaxprompt.models.generation import check_generation
from jaxprompt.models.model import Model
from jaxprompt.models.scorer import Backbone, Scorer, with_shared_prefix
from jaxprompt.parallel.sharding import Placement
from jaxprompt.training.run_record import TaskData
from jaxprompt.types import Batch, Objective


def check_room(config: RunConfig, scorer: Scorer, splits: Mapping[str, Split]) -> None:
    """Raises InputError if generated texts do not fit after the longest inputs."""
    if not scorer.head.WRITES:
        return
    layout = scorer.layout.whole()  # every process finds the same
    for name in splits.keys() - {"train"}:
        batch = next(iter(EvalBatches(splits[name].rows, splits[name].labels, layout)))
        check_generation(
            scorer.model,
            batch,
            config.generate.max_new_tokens,
            config.generate.num_beams,
            ends=scorer.layout.ends,
        )


def open_fitting(config: RunConfig, placement: Placement, *, restored: bool = False) -> Backbone:
    """Opens the backbone of a checked config; method, head, length and mesh must fit it.

    So must the prompt that it is initialised from, unless it is `restored` from a checkpoint.
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
    head = head_of(config)
    task = head.fit_task(examples.task, examples.choices)
    style, form = backbone.module.STYLE, config.task.form
    return build_scorer(
        backbone,
        task,
        layout_of(config, examples.choices),
        prompt=config.prompt,
        head=config.head,
        template=choose_template(task, head, style, form, config.task.template),
        chat=config.task.chat,
        batch=config.data.eval_batch,
        share=placement.share(),
        demos=demos_of(config, task, examples.splits),
    )


def make_task_data(examples: Examples, scorer: Scorer) -> TaskData:
    """Returns the data record of a run: its task and its examples."""
    labels = examples.task.labels
    return TaskData(
        task=examples.task,
        choices=examples.choices,
        splits={name: summarize(part, labels) for name, part in examples.splits.items()},
        sentence_encoder=fingerprint_of(scorer.demos),
        seen=scorer.model.prompt.seen,
        identity=identity_of(scorer),
        template=scorer.template,
    )


def longest_batch(config: RunConfig, scorer: Scorer, split: Split) -> Batch:
    """Returns a training batch of the maximum length."""
    layout = dataclasses.replace(scorer.layout, batch=config.data.batch)
    return next(iter(EvalBatches(split.rows, split.labels, layout)))


def train_batches(config: RunConfig, scorer: Scorer, split: Split) -> TrainBatches:
    """Returns the endless stream of training batches; full ones if features are cached."""
    layout = dataclasses.replace(scorer.layout, batch=config.data.batch)
    layout = layout.whole() if config.cache.location else layout
    return TrainBatches(split.rows, split.labels, layout, seed=config.seed, group=config.data.group)


def encode_splits(scorer: Scorer, examples: Examples) -> dict[str, Split]:
    """Encodes every split; train with the target texts."""
    parts = examples.splits.items()
    return {name: scorer.encode(part, targets=name == "train") for name, part in parts}


def tell_examples(
    scorer: Scorer, splits: Mapping[str, Split], notes: Sequence[str] = ()
) -> list[str]:
    """Describes the labels and their counts, truncated texts, and entities that are not marked.

    `notes` are those from reading the examples.
    """
    rows = {name: part.by_example() for name, part in splits.items()}
    single = {name: part.without_samples() for name, part in splits.items()}
    words = scorer.verbalizer.words if scorer.verbalizer else ()
    lines = [*tell_words(scorer.task.labels, words), tell_cut(scorer.layout.max_len, rows)]
    lines += [] if scorer.demos is None else [scorer.demos.tell()]
    unmarked = {n: (p.judged.unmarked, p.size) for n, p in splits.items() if p.judged}
    own = scorer.head.tell(scorer.task, scorer.classes, single)
    positive = [scorer.task.positive_message] if scorer.task.positive_message else []
    return [*notes, *own, *positive, *lines, *tell_unmarked(unmarked)]


def eval_batches(scorer: Scorer, split: Split) -> EvalBatches:
    """Returns one pass over a split."""
    return EvalBatches(split.rows, split.labels, scorer.layout)


def build_objectives(config: RunConfig, model: Model) -> list[Objective]:
    """Returns the terms of the loss: the head's, and the method's."""
    return head_of(config).objectives(config.optim.label_smoothing) + model.prompt.objectives()


def share_front(config: RunConfig, scorer: Scorer) -> Scorer:
    """Lets the model compute the shared prefix of all inputs once, if the config asks for it."""
    # Cached states are of whole rows.
    return (
        with_shared_prefix(scorer)
        if config.backbone.cache_shared_prefix and not config.cache.location
        else scorer
    )


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
    examples = read_examples(config, given=rows)
    scorer = scorer_from_config(config, backbone, examples, placement)
    splits = encode_splits(scorer, examples)
    check_room(config, scorer, splits)
    return EncodedTask(examples, scorer, splits)
