"""The task and the examples of a config."""

import dataclasses
import json
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxprompt.build.method import get_head
from jaxprompt.build.notes import (
    ineffective_field_notes,
    minus_one_notes,
    misplaced_answer_notes,
    moved_answer_notes,
    numbered_label_notes,
    odd_example_notes,
)
from jaxprompt.build.word_list import (
    WordList,
    choose_classes,
    drop_unlisted,
    read_words,
    use_word_list,
)
from jaxprompt.config.run import DataConfig, Fraction, HoldOut, KFold, RunConfig, TaskConfig
from jaxprompt.convert import folder
from jaxprompt.corpus.ppt import TASKS, get_pattern, to_pretraining_form
from jaxprompt.data.rows import Rows
from jaxprompt.data.sampling import fewshot
from jaxprompt.data.sources import splits as sources
from jaxprompt.data.tasks.checks import check_task
from jaxprompt.data.tasks.readers.dialogues import read_turns
from jaxprompt.data.tasks.readers.reading import has_label, read_all, read_example, with_labels
from jaxprompt.data.tasks.registry import custom_task, get_task
from jaxprompt.data.tasks.task import Example, Task
from jaxprompt.data.text.tokenizer import load_tokenizer
from jaxprompt.errors import InputError, brief
from jaxprompt.scoring.questions import METRICS as QUESTION_METRICS
from jaxprompt.training.run_record import TaskData

SPLITS = ("train", "dev", "test")
_DEV_SHARE = 0.2  # of the training examples, if there is no dev split
_MIN_BATCH, _MIN_BATCHES = 8, 8  # examples, and batches in an epoch, of small data
_NO_VOCABULARY = (
    "labels", "words", "choices", "target", "messages", "tags", "answers", "entities", "number",
)  # fmt: skip
_CUSTOM_FIELDS = (
    "label", "labels", "choices", "target", "messages", "answers", "number", "limits", "tags",
    "scheme", "predicate", "entities", "offsets", "negative", "question", "candidate", "candidates",
    "placeholder",
)  # fmt: skip
_CLASSLESS_PROTOCOLS = ("holdout", "fraction")  # protocols that need no classes


def read_task(config: TaskConfig) -> Task:
    """Returns the task of a config block; words and metric of the config replace the task's.

    Raises:
      InputError: if the fields of the task contradict each other.
    """
    label_words = tuple(tuple(part.strip() for part in entry.split("|")) for entry in config.words)
    _check_vocabulary(config)
    if config.name == "custom":
        names = (*_CUSTOM_FIELDS, "answer_pattern", "markers", "metric", "option", "positive")
        return custom_task(
            fields=config.fields,
            words=label_words,
            spaced=config.spaced != "false",
            **{name: getattr(config, name) for name in names},
        )
    task = get_task(config.name)
    _check_custom_fields(config, task)
    if label_words and len(label_words) != len(task.labels):
        raise InputError(
            f"task.words has {len(label_words)} entries for {len(task.labels)} classes of "
            f"{task.name}; give one per class, in the order {', '.join(task.labels)}"
        )
    if config.positive not in ("", task.positive) and task.positive:
        raise InputError(
            f"task.positive={brief(config.positive)}, but the positive class of {task.name} is "
            f"{task.positive!r}, as in its benchmark; leave task.positive out"
        )
    task = dataclasses.replace(
        task,
        metric=config.metric or task.metric,
        positive=config.positive or task.positive,
        answer_pattern=config.answer_pattern or task.answer_pattern,
        markers=config.markers or task.markers,
        labels=config.labels if task.kind == "tags" and config.labels else task.labels,
    )
    task = _apply_spelling(check_task(task), config)
    if not label_words:
        return task
    targets = tuple(entry[0] for entry in label_words)
    # The words of a config are used by every kind of backbone, instead of the task's causal words.
    return dataclasses.replace(task, words=label_words, causal_words=(), targets=targets)


def _check_vocabulary(config: TaskConfig) -> None:
    """Raises InputError if the classes of a task are given in two ways."""
    others = [name for name in _NO_VOCABULARY if getattr(config, name)]
    if config.vocabulary and (others or config.name != "custom"):
        field = others[0] if others else "name"
        raise InputError(
            f"task.vocabulary lists the classes of task.name=custom, but task.{field}="
            f"{brief(getattr(config, field))} defines others; leave one of the two out"
        )


def _check_custom_fields(config: TaskConfig, task: Task) -> None:
    """Raises InputError for a field that only a custom task uses."""
    allowed = {"fields"} if config.form in TASKS else set()
    allowed |= {"labels"} if task.kind == "tags" else set()
    for name in ("fields", *_CUSTOM_FIELDS):
        value = getattr(config, name)
        if name not in allowed and value not in (getattr(TaskConfig(), name), getattr(task, name)):
            raise InputError(
                f"task.{name}={brief(value)} is only valid with task.name=custom, but "
                f"task.name={task.name}; leave it out, or set task.name=custom with the columns of "
                "your file"
            )


def apply_form(config: RunConfig, task: Task) -> Task:
    """Formats the task as a pre-training task if task.form names one.

    Raises:
      InputError: if that is not possible.
    """
    block = config.task
    if block.form not in TASKS:
        if config.ppt.hard:
            raise InputError(
                f"ppt.hard=True adds the hard prompt of a pre-training task, but task.form="
                f"{block.form} has none; set task.form to nsp, nss or cls, or ppt.hard=False"
            )
        return task
    if not get_head(config).READS_WORDS:
        raise InputError(
            f"task.form={block.form} answers with label words, which head.name={config.head.name} "
            "does not use; set head.name=verbalizer"
        )
    if task.choices and block.words:
        raise InputError(
            f"task.words names the choices, but task.form={block.form} takes their names from "
            "ppt.patterns; leave task.words out, or use task.form=cloze"
        )
    pattern = get_pattern(block.form, config.ppt.patterns, hard=config.ppt.hard)
    texts = () if block.name == "custom" else block.fields
    ppt_task = to_pretraining_form(task, block.form, pattern, texts=texts, query=block.template)
    return _apply_spelling(ppt_task, block)


def _apply_spelling(task: Task, config: TaskConfig) -> Task:
    """Applies the format of options and label words of a config."""
    spaced = task.spaced if config.spaced == "" else config.spaced == "true"
    return dataclasses.replace(task, option=config.option or task.option, spaced=spaced)


def check_prompt_tuning(config: RunConfig) -> None:
    """Raises InputError if a config is for pre-training, or for several tasks."""
    if config.objective.name:
        raise InputError(
            f"objective.name={config.objective.name} pre-trains a backbone, which only the command "
            "adapt does; use another config, or set objective.name=''"
        )
    if config.ppt.task:
        raise InputError(
            f"ppt.task={config.ppt.task} pre-trains a prompt, which is only valid with the "
            "commands pretrain, plan and export; use another config, or set ppt.task=''"
        )
    if config.shared.tasks:
        raise InputError(
            "shared.tasks is only valid with the command train, which exports each task's prompt "
            "to WORKDIR/export/NAME; give that with --prompt, or leave shared.tasks empty"
        )


class Examples(NamedTuple):
    """The splits of a run, read and divided, not yet encoded."""

    task: Task  # with the labels of the training data
    choices: int  # the maximum number per example; 1 if the task has none
    splits: dict[str, list[Example]]
    notes: tuple[str, ...] = ()  # what was left out


class _DataSet:
    """The data set of a config, and what was left out of the splits that were read."""

    def __init__(self, config: RunConfig, in_memory: Mapping[str, Rows] | None):
        self.config, self.in_memory = config, in_memory
        self.files, self.cache_dir = config.data.files.paths(), config.data.cache_dir or None
        self.left_out: list[str] = []

    def has(self, task: Task, split: str) -> bool:
        """Returns whether it has a split of the run."""
        is_other = source_split(self.config, split, self.in_memory) != split
        return is_other or sources.has_split(
            task,
            split,
            source=self.config.data.source,
            files=self.files,
            cache_dir=self.cache_dir,
            in_memory=self.in_memory,
        )

    def read(self, task: Task, split: str) -> Rows:
        """Reads the rows of a split of the run whose labels are classes."""
        config, name = self.config, source_split(self.config, split, self.in_memory)
        rows = sources.read_split(
            task,
            name,
            source=config.data.source,
            files=self.files,
            cache_dir=self.cache_dir,
            in_memory=self.in_memory,
            only=config.data.only,
        )
        if rows.left_out:
            self.left_out.append(f"{split} {rows.left_out} of {len(rows) + rows.left_out}")
        if config.task.vocabulary:
            rows, count = drop_unlisted(task, rows)
            self.left_out.append(f"{split} {count}")
        return rows


def hold_out_dev(
    config: RunConfig,
    set_fields: Collection[str] = (),
    in_memory: Mapping[str, Rows] | None = None,
) -> RunConfig:
    """Holds out a fifth of the training examples as dev if there is no dev split and no protocol.

    The batch of such a run is the largest power of two with at least 8 batches in an epoch, but at
    least 8 and at most the default, unless data.batch is set.

    Args:
      config: the config of a run.
      set_fields: fields that the user set, maybe to their defaults.
      in_memory: rows by split, in place of the files in the config.

    Returns:
      The config with the protocol and the batch, or the same config.
    """
    data, is_tuning = config.data, not (config.objective.name or config.shared.tasks)
    is_set = data.protocol.name or any(name.startswith("data.protocol") for name in set_fields)
    if is_set or config.ppt.task or config.task.vocabulary or not is_tuning:
        return config
    task, data_set = read_task(config.task), _DataSet(config, in_memory)
    if data_set.has(task, "dev") or not data_set.has(task, "train"):
        return config
    total, batch = len(data_set.read(task, "train")), data.batch
    size = max(1, round(total * _DEV_SHARE))
    if batch == DataConfig().batch and "data.batch" not in set_fields:
        while batch > _MIN_BATCH and batch * _MIN_BATCHES > total - size:
            batch //= 2
    protocol = {"name": "holdout", "size": size}
    return config.replace({"data.protocol": protocol, "data.batch": batch})


def read_examples(
    config: RunConfig,
    wanted: Sequence[str] = SPLITS,
    record: TaskData | None = None,
    in_memory: Mapping[str, Rows] | None = None,
) -> Examples:
    """Reads the available splits, and samples train and dev by the protocol.

    Args:
      config: the config of a run.
      wanted: the splits to read.
      record: the data record of a run; if given, the task is that of the run, and labels are not
        inferred from the training data.
      in_memory: rows by split, in place of the files in the config.

    Raises:
      InputError: if dev is wanted and there is none.
    """
    check_prompt_tuning(config)
    data, data_set = config.data, _DataSet(config, in_memory)
    if samples_dev(data) and data.files.dev and "dev" in wanted:
        raise InputError(
            f"data.protocol={data.protocol.name} splits dev off the training examples, so "
            f"data.files.dev={data.files.dev} would not be read; set one of them to ''"
        )
    task = read_task(config.task) if record is None else record.task
    splits: dict[str, list[Example]] = {}
    origins: dict[str, Callable[[int], str]] = {}
    notes = ineffective_field_notes(config)
    if config.task.vocabulary and record is None:
        vocabulary = _read_vocabulary(config, task)
        task, notes = use_word_list(task, vocabulary), [*notes, vocabulary.message()]
    is_labelled = task.kind == "classes" and (task.labels or task.choices)
    has_labels = record or is_labelled or task.kind in ("texts", "spans", "numbers")
    rows = None
    samples = data.protocol.name and "dev" in wanted
    if samples or "train" in wanted or not has_labels:
        # Dev and test use the labels of train.
        rows = data_set.read(task, "train")
        task = with_labels(task, rows, rows.origin, rows.classes)
    task = apply_form(config, task) if record is None else task
    if config.task.positive and not task.positive_message:
        notes.append(
            f"task.positive={brief(config.task.positive)} has no effect: task.metric is "
            f"{task.metric}"
        )
    if rows is not None:
        splits, origins, train_notes = _train_splits(config, task, rows)
        notes += train_notes
    for name in wanted:
        if name not in splits and data_set.has(task, name):
            rows = data_set.read(task, name)
            # Benchmarks hide the labels of their test files; `predict --format` writes submissions.
            is_of_run = name == "test" and {"train", "dev"} <= set(wanted)
            if is_of_run and not any(has_label(task, row) for row in rows):
                read_example(task, rows[0], rows.origin(0), need_label=False)  # checks the columns
                notes.append(f"test is not scored: no row of {rows.path} states a label")
                continue
            # In dev and test, answers are only compared by their words.
            examples = read_all(task, rows, rows.origin, need_place=name == "train")
            notes += misplaced_answer_notes(name, examples) if task.kind == "spans" else []
            splits[name], origins[name] = scored_examples(task, rows, examples), rows.origin
    if "dev" in wanted and not splits.get("dev"):
        raise InputError(_no_dev_message(config, task, len(splits.get("train", ())), in_memory))
    splits = {name: splits[name] for name in SPLITS if splits.get(name)}
    if task.metric != "f1c":  # whose examples are turns, not rows
        notes += odd_example_notes(splits, origins)
    choices = max((len(e.choices) for part in splits.values() for e in part), default=1) or 1
    if data_set.left_out:
        left_out = ", ".join(data_set.left_out)
        notes.append(f"examples left out, whose {task.label} is no class: {left_out}")
    return Examples(task, choices if record is None else record.choices, splits, tuple(notes))


def _train_splits(
    config: RunConfig, task: Task, rows: Rows
) -> tuple[dict[str, list[Example]], dict[str, Callable[[int], str]], list[str]]:
    """Divides training rows by the protocol.

    Returns train, and dev if it is made; where the examples of each are from; and notes.
    """
    examples = read_all(task, rows, rows.origin)
    notes = moved_answer_notes(examples) + numbered_label_notes(config, task, rows)
    if not (config.task.labels or task.hub):
        notes += minus_one_notes(task, examples)
    split = _sample_split(config.data, task, examples, rows)
    if split is None:
        return {"train": examples}, {"train": rows.origin}, notes
    splits = {"train": [examples[i] for i in split.train]}
    origins = {"train": lambda i: rows.origin(int(split.train[i]))}
    if split.dev is not None:
        dev, dev_rows = [examples[i] for i in split.dev], rows.select(split.dev.tolist())
        splits["dev"], origins["dev"] = scored_examples(task, dev_rows, dev), dev_rows.origin
        if isinstance(config.data.protocol, HoldOut):
            notes.append(
                f"{len(dev)} of {len(examples)} training examples become dev (data.protocol="
                f"holdout, data.protocol.size={config.data.protocol.size}), and data.batch is "
                f"{config.data.batch}"
            )
    return splits, origins, notes


def _no_dev_message(
    config: RunConfig, task: Task, num_train: int, in_memory: Mapping[str, Rows] | None
) -> str:
    """Returns why a run has no dev examples; `num_train` is the number of training examples."""
    if samples_dev(config.data):
        protocol = config.data.protocol
        share_fields = [f"data.protocol.{name}" for name in protocol.declared()]
        return (
            f"data.protocol={protocol.name} uses all {num_train} examples for train and leaves "
            f"none for dev; reduce the training share: {', '.join(share_fields)}"
        )
    source = "data.files.dev" if in_memory is None else "dev rows"
    return (
        f"task {task.name} has no dev split here; give {source}, or split one off train: "
        "data.protocol=holdout and data.protocol.size=N"
    )


def _read_vocabulary(config: RunConfig, task: Task) -> WordList:
    """Reads the list of words of a config by the tokenizer of its backbone."""
    words = read_words(config.task.vocabulary)
    tokenizer = load_tokenizer(
        folder.resolve(config.backbone.path, config.backbone.revision or None)
    )
    return choose_classes(words, tokenizer, spaced=task.spaced, path=config.task.vocabulary)


def scored_examples(task: Task, rows: Rows, examples: list[Example]) -> list[Example]:
    """Returns the examples that a split is scored by: for f1c, one per turn of a dialogue."""
    if task.metric != "f1c":
        return examples
    turns: list[Example] = []
    for index, example in enumerate(examples):
        turns += read_turns(task, rows[index], example, rows.origin(index), index)
    return turns


def examples_key(config: RunConfig) -> str:
    """Returns a hash of everything that the examples of a run depend on."""
    return json.dumps(
        [block.to_dict() for block in (config.data, config.task, config.demos)], sort_keys=True
    )


def source_split(config: RunConfig, split: str, in_memory: Mapping[str, Rows] | None = None) -> str:
    """Returns the split of the data set that a split of the run is read from.

    Files and `in_memory` rows already have the names of the run's splits.

    Raises:
      InputError: if the same examples would both select the prompt and be reported as test.
    """
    data = config.data
    is_named = in_memory is not None or any(data.files.paths())
    if split != "test" or is_named or data.test_split == "test":
        return split
    if not samples_dev(data):
        raise InputError(
            f"data.test_split={data.test_split} would report the examples that select the best "
            "prompt; sample dev from train with data.protocol (for fraction: with "
            "data.protocol.holdout), or set data.test_split=test"
        )
    return data.test_split


def samples_dev(data: DataConfig) -> bool:
    """Returns whether the protocol takes dev from the training examples."""
    if isinstance(data.protocol, Fraction):
        return data.protocol.holdout > 0
    return data.protocol.name != ""


def data_files(config: RunConfig) -> dict[str, Path]:
    """Returns the user's files that a config reads, see `sources.local_files`."""
    return sources.local_files(config.data.source, config.data.files.paths())


def read_split_rows(
    config: RunConfig, task: Task, split: str
) -> list[tuple[str, dict[str, object], Example]]:
    """Reads one split in the order of `read_examples`, with the rows as they are in the source.

    `task` has its labels. Returns the origin (file and line) of each row, the row, and its example.
    """
    data_set = _DataSet(config, None)
    if config.data.protocol.name and split != "test":
        rows = data_set.read(task, "train")
        examples = _read_each(task, rows, "train")
        split_rows = _sample_split(config.data, task, [example for _, _, example in examples], rows)
        indices = getattr(split_rows, split)
        if indices is not None:
            return [examples[number] for number in indices]
    return _read_each(task, data_set.read(task, split), split)


def _read_each(task: Task, rows: Rows, split: str) -> list[tuple[str, dict[str, object], Example]]:
    """Reads each row of a split. Returns its origin, the row, its example."""
    examples = read_all(task, rows, rows.origin, need_place=split == "train")
    return [
        (rows.origin(index), dict(row), example)
        for index, (row, example) in enumerate(zip(rows, examples, strict=True))
    ]


def _sample_split(
    data: DataConfig, task: Task, examples: Sequence[Example], rows: Rows
) -> fewshot.SplitRows | None:
    protocol = data.protocol.name
    if not protocol:
        return None
    if task.kind != "classes" and protocol not in _CLASSLESS_PROTOCOLS:
        raise InputError(
            f"data.protocol={protocol} samples by class, but task {task.name} has {task.kind}; "
            "use holdout, fraction or none"
        )
    labels = [example.label for example in examples]
    if task.kind != "classes" or (protocol == "holdout" and task.choices):
        labels = [0] * len(labels)  # the position of the right choice is not a class
    groups: list[Hashable] | None = None
    keeps_groups = fewshot.keeps_groups(data.protocol)
    if task.question and (keeps_groups or task.metric in QUESTION_METRICS):
        if isinstance(data.protocol, KFold) and not keeps_groups:
            raise InputError(
                f"data.protocol=kfold with data.protocol.k={data.protocol.k} samples single "
                f"candidates, but {task.metric} needs whole questions; use data.protocol.k=0, or "
                "task.metric=accuracy"
            )
        groups = [example.question for example in examples]
    elif task.predicate and keeps_groups:  # a sentence is one example per predicate
        groups = [example.words for example in examples]
    return fewshot.sample_split(
        data.protocol,
        labels,
        data.seed,
        names=task.labels,
        groups=groups,
        rows=([rows.source_index(i) for i in range(len(rows))], rows.total),
    )
