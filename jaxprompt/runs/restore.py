"""Restores a trained run from its directory."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxprompt import rng, tree
from jaxprompt.build.backbone import NO_INPUTS, InMemoryInputs
from jaxprompt.build.check import check_config
from jaxprompt.build.demonstrations import has_demos
from jaxprompt.build.examples import check_prompt_tuning, read_examples
from jaxprompt.build.initial_params import InitialParams, count_corpus, count_tokens, init_params
from jaxprompt.build.layers import separates_layers
from jaxprompt.build.method import get_head, get_method, prompt_starts
from jaxprompt.build.placement import build_placement
from jaxprompt.build.task import (
    encode_splits,
    make_task_data,
    open_checked_backbone,
    scorer_from_config,
)
from jaxprompt.config.run import (
    CHANGEABLE_AFTER_TRAINING,
    CHANGEABLE_FIELDS,
    DATA_FIELDS,
    RunConfig,
)
from jaxprompt.data.text.encoded import Split
from jaxprompt.data.text.words import FROM_TEXT
from jaxprompt.models.scorer import Scorer
from jaxprompt.parallel.sharding import Placement
from jaxprompt.runs.record import (
    changed_split_messages,
    check_backbone,
    check_demonstrations,
    check_origins,
    check_train_split,
    init_fields,
    read_trained,
)
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.progress import Evaluation
from jaxprompt.training.run_record import BackboneRecord, PretrainingRecord, TaskRecord


class RestoredRun(NamedTuple):
    """The best parameters of a run, with everything needed to score with them."""

    placement: Placement
    scorer: Scorer
    splits: dict[str, Split]
    weights: InitialParams
    best: Evaluation | None  # None where nothing trains
    family: str
    record: TaskRecord | PretrainingRecord
    changed_splits: tuple[str, ...] = ()  # a message for each split that differs from the run's


def is_zero_shot(config: RunConfig) -> bool:
    """Returns whether a config has nothing to train."""
    head = get_head(config)
    without_params = head.READS_WORDS or head.WRITES  # heads that only use the backbone's LM head
    return not get_method(config).LEARNS and not config.trainable and without_params


def _changeable_fields(config: RunConfig, from_text: bool) -> tuple[str, ...]:
    """Returns the fields that may differ from those of the run."""
    head_fields = [f"head.{name}" for name in get_head(config).CHANGEABLE]
    fixed = DATA_FIELDS if from_text else ()
    return (*CHANGEABLE_FIELDS, *({*CHANGEABLE_AFTER_TRAINING, *head_fields} - {*fixed}))


def restore_run(
    config: RunConfig,
    workdir: str,
    split_names: Sequence[str] = (),
    inputs: InMemoryInputs = NO_INPUTS,
) -> RestoredRun:
    """Restores the best prompt of a workdir and loads the splits `split_names`.

    If nothing trains (zero-shot), no checkpoint is read. Raises InputError for a workdir that is
    untrained or has a different config, and for a backbone with different weights.
    """
    check_config(config)
    check_prompt_tuning(config)
    # A frozen prompt that was initialised from text is computed again from that text.
    from_text = bool(config.trainable) and not set(FROM_TEXT).isdisjoint(prompt_starts(config))
    record, best_step = None, None
    if not is_zero_shot(config):
        changeable = _changeable_fields(config, from_text)
        record, best_step = read_trained(workdir, config, changeable, TaskRecord)
    placement = build_placement(config)
    backbone = open_checked_backbone(config, placement, restored=True)
    split_names = (*split_names, "train") if from_text else split_names
    demo_splits = ("train",) if has_demos(config) else ()
    examples = read_examples(config, (*split_names, *demo_splits), record, inputs.rows)
    scorer = scorer_from_config(config, backbone, examples, placement)
    if record is not None and record.seen:
        scorer = scorer.with_prompt(scorer.model.prompt.clone(seen=record.seen))
    data = make_task_data(examples, scorer)
    if demo_splits and record is not None:
        check_demonstrations(record, data, workdir)
    if demo_splits and "train" not in split_names:  # only for demonstrations, not to be scored
        del examples.splits["train"]
    splits = encode_splits(scorer, examples)
    is_separate = separates_layers(
        backbone, placement, writes=scorer.generates, trainable=config.trainable
    )
    backbone, loaded = inputs.load(backbone, placement, separate_layers=is_separate)
    scorer = scorer.with_backbone(backbone)
    if record is None:
        params = scorer.model.init(
            rng.key_for(config.seed, "init"), loaded.params, placement=placement
        )
        weights = InitialParams({}, tree.flatten(params), loaded.report)
        backbone_record = BackboneRecord(backbone.family, loaded.report.fingerprint)
        record = TaskRecord(**vars(data), backbone=backbone_record, **init_fields(config))
        return RestoredRun(placement, scorer, splits, weights, None, backbone.family, record)
    check_backbone(record, loaded.report.fingerprint, workdir, data.identity)
    counts = None
    if from_text:
        # A frozen prompt is not in the checkpoints, but is initialised again.
        if "task" in prompt_starts(config):
            use = "has a frozen prompt that was initialised from its training split"
            check_train_split(record, data, workdir, f"{use} (prompt.start=task)")
        counts = count_tokens(
            config, splits["train"], lambda: count_corpus(config, scorer, workdir)
        )
    weights = init_params(config, scorer, loaded, counts, placement, restored=True)
    if any(name.startswith("prompt/") for name in weights.frozen):  # not in the checkpoints
        check_origins(config, record, workdir)
    trainable, evaluation = Checkpoints(workdir).restore_best(
        weights.trainable, best_step, or_newer=True
    )
    best, changes = Evaluation(**evaluation), changed_split_messages(record, data)
    weights, scorer = weights._replace(trainable=trainable), scorer.fitted(best.dev)
    return RestoredRun(placement, scorer, splits, weights, best, backbone.family, record, changes)
