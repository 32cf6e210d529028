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
    # What is scored is still chosen by the protocol.
    full = read_examples(config.replace({"data.protocol": ""}), ["train"])
    task = full.task
    if task.kind != "classes" or not task.labels:
        raise InputError(
            f"--majority needs a task with classes, which task {task.name} is not; leave it out"
        )
    counts = np.bincount(
        [example.label for example in full.splits["train"]], minlength=len(task.labels)
    )
    best = int(counts.argmax())
    scored = read_examples(config, [split]).splits.get(split)
    if not scored:
        raise InputError(f"task {task.name} has no {split} split; give data.files.{split}")
    gold = np.array([example.label for example in scored])
    check_relations(task.metric, task.labels, task.negative)
    judged = collect_facts(task, scored)
    given = np.full_like(gold, best)
    measured = metrics.score_predictions(
        task.metric, gold, given, len(task.labels), judged,
        scores=np.broadcast_to(counts, (len(gold), len(task.labels))),
    )  # fmt: skip
    return {"split": split, "examples": len(scored), "majority": task.labels[best], **measured}
