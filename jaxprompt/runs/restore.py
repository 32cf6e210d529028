"""Restores a trained run from its directory."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxprompt import rng, tree
from jaxprompt.build.backbone import NOTHING, Given
from jaxprompt.build.check import check_config
from jaxprompt.build.demonstrations import shows_demos
from jaxprompt.build.examples import check_tunes, read_examples
from jaxprompt.build.initial_params import Weights, count_corpus, count_tokens, start
from jaxprompt.build.method import head_of, method_of, starts_of
from jaxprompt.build.placement import build_placement
from jaxprompt.build.task import encode_splits, make_task_data, open_fitting, scorer_from_config
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
    check_backbone,
    check_origins,
    check_shown,
    check_start,
    make_record,
    other_splits,
    read_trained,
)
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.progress import Evaluation
from jaxprompt.training.run_record import BackboneRecord, PretrainingRecord, TaskRecord


class Trained(NamedTuple):
    """The best parameters of a run, with everything needed to score with them."""

    placement: Placement
    scorer: Scorer
    splits: dict[str, Split]
    weights: Weights
    best: Evaluation | None  # None where nothing trains
    family: str
    record: TaskRecord | PretrainingRecord
    others: tuple[str, ...] = ()  # says which splits are not those of the run


def is_zero_shot(config: RunConfig) -> bool:
    """Returns whether a config has nothing to train."""
    return not method_of(config).LEARNS and not config.trainable and head_of(config).READS_WORDS


def restore(
    config: RunConfig, workdir: str, wanted: Sequence[str] = (), given: Given = NOTHING
) -> Trained:
    """Restores the best prompt of a workdir and loads the `wanted` splits.

    If nothing trains (zero-shot), no checkpoint is read. Raises InputError for a workdir that is
    untrained or has a different config, and for a backbone with different weights.
    """
    check_config(config)
    check_tunes(config)
    # A frozen prompt that started from text has its numbers from that text alone.
    from_text = bool(config.trainable) and not set(FROM_TEXT).isdisjoint(starts_of(config))
    record, best_step = None, None
    if not is_zero_shot(config):
        own = [f"head.{name}" for name in head_of(config).CHANGEABLE]
        free = [
            n for n in (*CHANGEABLE_AFTER_TRAINING, *own) if not (from_text and n in DATA_FIELDS)
        ]
        record, best_step = read_trained(workdir, config, (*CHANGEABLE_FIELDS, *free), TaskRecord)
    placement = build_placement(config)
    backbone = open_fitting(config, placement, restored=True)
    if from_text:
        wanted = (*wanted, "train")
    shown = ("train",) if shows_demos(config) else ()
    examples = read_examples(config, (*wanted, *shown), record, given.rows)
    scorer = scorer_from_config(config, backbone, examples, placement)
    if record is not None and record.seen:
        scorer = scorer.with_prompt(scorer.model.prompt.clone(seen=record.seen))
    data = make_task_data(examples, scorer)
    if shown and record is not None:
        check_shown(record, data, workdir)
    if shown and "train" not in wanted:  # it is shown, and not scored
        del examples.splits["train"]
    splits = encode_splits(scorer, examples)
    backbone, loaded = given.load(backbone, placement)
    scorer = scorer.with_backbone(backbone)
    if record is None:
        params = scorer.model.init(
            rng.key_for(config.seed, "init"), loaded.params, placement=placement
        )
        weights = Weights({}, tree.flatten(params), loaded.report)
        fingerprint = loaded.report.fingerprint
        record = make_record(config, data, BackboneRecord(backbone.family, fingerprint))
        return Trained(placement, scorer, splits, weights, None, backbone.family, record)
    check_backbone(record, loaded.report.fingerprint, workdir, data.identity)
    others = other_splits(record, data)
    counts = None
    if from_text:
        check_start(config, record, data, workdir)
        counts = count_tokens(
            config, splits["train"], lambda: count_corpus(config, scorer, workdir)
        )
    weights = start(config, scorer, loaded, counts, placement, restored=True)
    if any(name.startswith("prompt/") for name in weights.frozen):  # made again, in no checkpoint
        check_origins(config, record, workdir)
    checkpoints = Checkpoints(workdir)
    trainable, saved = checkpoints.restore_best(weights.trainable, best_step, or_newer=True)
    best = Evaluation(**saved)
    weights = weights._replace(trainable=trainable)
    scorer = scorer.fitted(best.dev)
    return Trained(placement, scorer, splits, weights, best, backbone.family, record, others)
