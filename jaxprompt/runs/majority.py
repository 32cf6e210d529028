"""The majority baseline: predicts the most frequent class of the training set."""

import numpy as np

from jaxprompt.build.examples import read_examples
from jaxprompt.config.run import RunConfig
from jaxprompt.errors import InputError
from jaxprompt.scoring import metrics
from jaxprompt.scoring.relations import check_relations, collect_facts


def measure_majority(config: RunConfig, split: str) -> dict[str, str | float]:
    """Scores the most frequent class of the full training set on a split, with the task's metric.

    All training examples count, even if data.protocol uses only a few of them (Gao et al. 2021,
    section 5.1); ties are broken by class order. Ranking metrics rank the classes by frequency. No
    backbone is read. Raises InputError for a task without classes, and for a missing split.
    """
    # The protocol still selects the examples that are scored.
    train_examples = read_examples(config.replace({"data.protocol": ""}), ["train"])
    task = train_examples.task
    if task.kind != "classes" or not task.labels:
        raise InputError(
            f"--majority needs a task with classes, which task {task.name} is not; leave it out"
        )
    counts = np.bincount(
        [example.label for example in train_examples.splits["train"]], minlength=len(task.labels)
    )
    majority = int(counts.argmax())
    examples = read_examples(config, [split]).splits.get(split)
    if not examples:
        raise InputError(f"task {task.name} has no {split} split; give data.files.{split}")
    labels = np.array([example.label for example in examples])
    metrics.check_metric(task.metric, len(task.labels))
    check_relations(task.metric, task.labels, task.negative)
    scores = metrics.score_predictions(
        task.metric,
        labels,
        np.full_like(labels, majority),
        collect_facts(task, examples),
        scores=np.broadcast_to(counts, (len(labels), len(task.labels))),
    )
    return {"split": split, "examples": len(examples), "majority": task.labels[majority], **scores}
