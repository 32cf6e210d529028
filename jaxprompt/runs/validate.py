"""Checks a config with its data, without loading weights or training."""

import functools
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from jaxprompt import tree
from jaxprompt.build.check import check_config, check_packages
from jaxprompt.build.inheritance import init_notes
from jaxprompt.build.initial_params import check_prompt_init, count_tokens, split_params
from jaxprompt.build.optimizer import build_optimizer
from jaxprompt.build.placement import build_placement
from jaxprompt.build.task import (
    count_train_rows,
    longest_batch,
    open_checked_backbone,
    task_lines,
)
from jaxprompt.config.run import RunConfig
from jaxprompt.data.text.encoded import Encoded, Split
from jaxprompt.data.text.overview import length_message
from jaxprompt.layers.quantized import storage_of
from jaxprompt.models.model import backbone_shapes
from jaxprompt.models.scorer import Backbone, Scorer
from jaxprompt.runs import multitask
from jaxprompt.runs.grid.expand import is_grid, list_runs
from jaxprompt.runs.train import read_inputs
from jaxprompt.training.loop import Milestones
from jaxprompt.types import Batch


def validate(config: RunConfig) -> Iterator[str]:
    """Checks a tuning config with its data and its backbone. Yields the log lines of a run.

    Raises InputError for everything that a run refuses before it loads weights.
    """
    if multitask.is_shared(config):
        yield from _validate_shared(config)
        return
    if is_grid(config):
        runs = list_runs(config, "")
        yield f"{len(runs)} runs, the first of them:"
        config = runs[0].config
    check_config(config)
    check_packages(config)
    placement = build_placement(config)
    backbone = open_checked_backbone(config, placement)
    inputs = read_inputs(config, placement, backbone)
    scorer, splits, milestones = inputs.scorer, inputs.splits, inputs.milestones
    counts = count_tokens(config, splits["train"], lambda: None)
    trainable, frozen = _shapes(config, scorer, counts)
    # For its errors: a warmup as long as the run, a learning rate of a part that does not train.
    build_optimizer(config, trainable, milestones, inputs.steps_per_epoch)

    yield from _backbone_lines(config, backbone)
    yield from _task_lines(scorer, splits, inputs.notes)
    yield tree.parameter_table(trainable, frozen)
    if config.data.packed:
        num_rows = count_train_rows(config, scorer, splits["train"])
        yield f"{splits['train'].size} training examples are packed into {num_rows} rows"
    yield _plan_line(milestones, longest_batch(config, scorer, splits["train"]))


def _validate_shared(config: RunConfig) -> Iterator[str]:
    """Checks a config whose tasks share a prompt, as the run itself does."""
    multitask.SharedTrainStages(config, "").check()
    tasks = multitask.read_tasks(config)
    counts = tasks.count_tokens(config, lambda scorer: None)
    trainable, frozen = _shapes(config, tasks.joined_scorer(), counts)
    build_optimizer(config, trainable, tasks.milestones, tasks.mix.steps_per_epoch)
    batches = {}
    yield from _backbone_lines(config, tasks.backbone)
    for name, task in tasks.by_name.items():
        yield f"shared task {name}:"
        yield from _task_lines(task.scorer, task.splits, task.notes)
        longest = longest_batch(task.config, task.scorer, task.splits["train"])
        batches[longest.encoder.ids.size] = longest
    yield tree.parameter_table(trainable, frozen)
    yield _plan_line(tasks.milestones, batches[max(batches)])


def _shapes(
    config: RunConfig, scorer: Scorer, counts: np.ndarray | None
) -> tuple[tree.Flat, tree.Flat]:
    """Returns shapes of the trainable and frozen parameters. Raises InputError for a wrong init."""
    storage = storage_of(config.backbone.quantize, config.backbone.path)
    flat_shapes = backbone_shapes(scorer.model.backbone, storage)
    shapes = tree.unflatten(flat_shapes)["backbone"]
    init = functools.partial(scorer.model.init, choices=scorer.layout.num_rows)
    params = jax.eval_shape(init, jax.random.key(0), shapes)
    check_prompt_init(config, scorer, params, counts)
    return split_params(config, scorer, params)


def _backbone_lines(config: RunConfig, backbone: Backbone) -> Iterator[str]:
    yield f"backbone {config.backbone.path} ({backbone.family})"
    heads = sorted(backbone.module.cfg.model_heads)
    yield f"  heads in the checkpoint: {', '.join(heads) or 'none'}"
    yield from init_notes(config, backbone.module.dims)


def _task_lines(scorer: Scorer, splits: Mapping[str, Split], notes: Sequence[str]) -> Iterator[str]:
    yield from task_lines(scorer, splits, notes)
    yield f"  {length_message({name: split.by_example() for name, split in splits.items()})}"
    first = splits["train"].rows[0][0]
    yield f"  the first example: {format_tokens(scorer, first)}"
    if first.targets is not None:
        targets = scorer.tokenizer.convert_ids_to_tokens(first.targets[first.targets >= 0].tolist())
        yield f"  learned of it: {' '.join(targets)}"


def _plan_line(milestones: Milestones, longest: Batch) -> str:
    batch_size, length = longest.encoder.ids.shape
    steps = f"{milestones.total} steps of up to {batch_size} x {length} tokens"
    return f"{steps}, evaluated every {milestones.evaluate} steps"


def format_tokens(scorer: Scorer, encoded: Encoded) -> str:
    """Returns an encoded example as its tokens; a soft token is [soft]."""
    names = scorer.tokenizer.convert_ids_to_tokens(list(map(int, encoded.ids)))
    return " ".join(
        "[soft]" if slot >= 0 else name for name, slot in zip(names, encoded.slot, strict=True)
    )
